"""What attention blocks may do to whole heads, as a spec declares it; heads.py computes it. No jax."""

from typing import Literal

from pydantic import Field

from .declare import Declared


class Temperature(Declared):
    """Queries grow with their position: times 1 + scale * ln(1 + floor((position + offset) / floor))."""

    floor: int = Field(gt=0)
    scale: float = Field(gt=0)
    offset: int = Field(default=0, ge=0)


class OutputGate(Declared):
    """Each head's output times the activation of a gate: one value per element of it, or one per head.

    stored: fused = behind each head's columns of the matrix that makes queries; own = a matrix w_g.
    """

    activation: Literal["sigmoid", "softplus"]
    per: Literal["element", "head"] = "element"
    stored: Literal["fused", "own"] = "fused"


def gate_width(gate: OutputGate | None, value_dim: int) -> int:
    """Gate values per head; 0 without a gate."""
    if gate is None:
        return 0
    return 1 if gate.per == "head" else value_dim


def fused_width(gate: OutputGate | None, value_dim: int) -> int:
    """Those of them that come with the queries."""
    return gate_width(gate, value_dim) if gate and gate.stored == "fused" else 0


def temperature_text(heat: Temperature) -> tuple[str, str]:
    """Text and reason of the constant that programs have of it."""
    reason = "floor, scale, offset: queries times 1 + scale * ln(1 + (position + offset) // floor)"
    return f"({heat.floor}, {heat.scale!r}, {heat.offset})", reason


def gate_options(gate: OutputGate | None) -> dict[str, bool]:
    """Keywords of a kernel's call, and whether they are written: the function's defaults are off and fused."""
    if gate is None:
        return {}
    return {f'output_gate="{gate.activation}"': True, 'gate_stored="own"': gate.stored == "own"}
