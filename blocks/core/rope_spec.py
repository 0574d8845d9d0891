"""What a rotary embedding is, and its frequencies in float64: pure Python, so that plans can read it without jax.

Emitted programs write a Rope as a constant. Scaling rules: YaRN (arXiv:2309.00071), LongRoPE
(arXiv:2402.13753), and the others as in Hugging Face transformers 5.24 (modeling_rope_utils).
"""

import math
from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class LinearScaling:
    """Every frequency divided by factor."""

    factor: float


@dataclass(frozen=True)
class YarnScaling:
    """Slow pairs (under beta_slow turns in original_max_position) divided by factor, fast ones (over beta_fast) kept.

    Between them a ramp over the pair index; truncate: its ends are rounded outwards to whole pairs.
    """

    factor: float
    original_max_position: int
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True


@dataclass(frozen=True)
class WavelengthScaling:
    """As YaRN, with the ramp over original_max_position / wavelength, from low_freq_factor to high_freq_factor."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_position: int


@dataclass(frozen=True)
class ProportionalScaling:
    """Only the first `rotated` / 2 pairs turn, the other frequencies are 0; all divided by factor.

    Frequencies and pairs are those of the whole dim: half pairs are (i, i + dim/2).
    """

    rotated: int
    factor: float = 1.0


@dataclass(frozen=True)
class LongRopeScaling:
    """The frequency of each pair divided by its own factor; dim/2 of them."""

    factors: tuple[float, ...]


Scaling = LinearScaling | YarnScaling | WavelengthScaling | ProportionalScaling | LongRopeScaling


@dataclass(frozen=True)
class Rope:
    """Rotary embedding on the first `dim` dims of a head.

    Pair i turns by position * theta^(-2i/dim), scaled. pairing: half = (i, i + dim/2),
    interleaved = (2i, 2i + 1). attention_factor multiplies the rotated dims of queries and of keys.
    """

    dim: int
    theta: float
    pairing: Literal["half", "interleaved"] = "half"
    scaling: Scaling | None = None
    attention_factor: float = 1.0


def rope_frequencies(spec: Rope) -> tuple[float, ...]:
    """Radians per position of each of the dim/2 pairs."""
    plain = tuple(spec.theta ** (-2 * i / spec.dim) for i in range(spec.dim // 2))
    match spec.scaling:
        case None:
            return plain
        case LinearScaling(factor):
            return tuple(one / factor for one in plain)
        case LongRopeScaling(factors):
            return tuple(one / factor for one, factor in zip(plain, factors, strict=True))
        case ProportionalScaling(rotated, factor):
            return tuple(one / factor if 2 * i < rotated else 0.0 for i, one in enumerate(plain))
        case YarnScaling() as scaling:
            return tuple(
                _rope_mixed(one, scaling.factor, kept)
                for one, kept in zip(plain, _yarn_kept(spec, scaling), strict=True)
            )
        case WavelengthScaling() as scaling:
            return tuple(_rope_mixed(one, scaling.factor, _wavelength_kept(one, scaling)) for one in plain)


def _rope_mixed(frequency: float, factor: float, kept: float) -> float:
    """Between the scaled frequency (kept 0) and the plain one (kept 1)."""
    return frequency / factor * (1 - kept) + frequency * kept


def _yarn_kept(spec: Rope, scaling: YarnScaling) -> tuple[float, ...]:
    """How much of each pair's plain frequency stays."""

    def pair_of(turns: float) -> float:
        """The (fractional) pair that makes this many turns in the original context."""
        return spec.dim * math.log(scaling.original_max_position / (turns * 2 * math.pi)) / (2 * math.log(spec.theta))

    low, high = pair_of(scaling.beta_fast), pair_of(scaling.beta_slow)
    if scaling.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, spec.dim - 1)
    high += 0.001 * (low == high)  # a ramp of no width, as transformers has it
    return tuple(1 - min(max((i - low) / (high - low), 0), 1) for i in range(spec.dim // 2))


def _wavelength_kept(frequency: float, scaling: WavelengthScaling) -> float:
    """0 for wavelengths over original/low, 1 for those under original/high, linear in 1/wavelength between."""
    turns = scaling.original_max_position * frequency / (2 * math.pi)
    ramp = (turns - scaling.low_freq_factor) / (scaling.high_freq_factor - scaling.low_freq_factor)
    return min(max(ramp, 0.0), 1.0)


__all__ = [
    "LinearScaling",
    "LongRopeScaling",
    "ProportionalScaling",
    "Rope",
    "WavelengthScaling",
    "YarnScaling",
    "rope_frequencies",
]
