"""What references share, in numpy: no emitted program has a line of it, so that an error in either side shows.

Legend: T tokens, N heads, H head dim, S rows.
"""

import math

import ml_dtypes
import numpy as np
from jax import Array

from .batch import Batch, Rows
from .rope_spec import Rope, rope_frequencies


def rms_of(x: np.ndarray, gain: np.ndarray | None = None, *, eps: float, zero_centered: bool = False) -> np.ndarray:
    """RMS norm over the last dim. zero_centered: the gain is an offset from 1; None: no gain."""
    unit = x / np.sqrt(np.mean(x * x, axis=-1, keepdims=True) + eps)
    if gain is None:
        return unit
    return unit * (1 + gain if zero_centered else gain)


def rotated(x_TNH: np.ndarray, positions_T: Array | np.ndarray, spec: Rope | None) -> np.ndarray:
    """The first spec.dim dims of every head turned by its position, pair by pair in float64; None = as they are."""
    if spec is None:
        return x_TNH
    out_TNH, half = x_TNH.astype(np.float64), spec.dim // 2
    for pair, frequency in enumerate(rope_frequencies(spec)):
        a, b = (pair, pair + half) if spec.pairing == "half" else (2 * pair, 2 * pair + 1)
        angle_T1 = np.asarray(positions_T, np.float64)[:, None] * frequency
        turn_T1 = spec.attention_factor * np.exp(1j * np.remainder(angle_T1, 2 * math.pi))
        turned_TN = (x_TNH[..., a] + 1j * x_TNH[..., b]) * turn_T1
        out_TNH[..., a], out_TNH[..., b] = turned_TN.real, turned_TN.imag
    return out_TNH.astype(x_TNH.dtype)


def temperature_of(positions_T: Array | np.ndarray, floor: int, scale: float, offset: int) -> np.ndarray:
    """What queries are multiplied with [T]: 1 + scale * ln(1 + floor((position + offset) / floor))."""
    steps_T = np.floor((np.asarray(positions_T, np.float64) + offset) / floor)
    return (1 + scale * np.log(1 + steps_T)).astype(np.float32)


def kept(x: np.ndarray, dtype: np.dtype) -> np.ndarray:
    """What a cache of `dtype` keeps of x: rounded, and clipped to its range (a float8 overflow would be NaN)."""
    limit = float(ml_dtypes.finfo(dtype).max)
    return np.clip(x, -limit, limit).astype(dtype)


def row_ranges(batch: Batch, rows: Rows) -> list[tuple[int, int, int, int]]:
    """(row, first token, last token, cached tokens) of every non-padding row."""
    cu_q, start = np.asarray(batch.cu_q).tolist(), np.asarray(rows.start).tolist()
    return [(s, cu_q[s], cu_q[s + 1], start[s]) for s in range(len(start)) if cu_q[s + 1] > cu_q[s]]


__all__ = ["kept", "rms_of", "rotated", "row_ranges", "temperature_of"]
