"""float8 weights with wider blocks of scales than they are stored with, and what rounding to float8 moved. Numpy only.

Legend: D rows, I columns of one matrix; r, c: rows and columns of a stored block, R x C of them; W edge of a wide one.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from moec.blocks.core.array_info import E4M3

F8_E4M3 = np.dtype(E4M3)
LARGEST, SMALLEST_NORMAL = np.float32(448), np.float32(2.0**-6)
CODES = np.arange(256, dtype=np.uint8).view(F8_E4M3).astype(np.float32)
# A peak over its own scale may be 448 plus float32's rounding: no saturation.
_SATURATED = np.float32(448 * (1 + 2.0**-20))
_STRIP = 128  # rows whose errors are taken at once, so that temporaries stay small


@dataclass(frozen=True)
class RoundingError:
    """What a rounding to float8 did to values that were not 0, summed over as many as there are.

    relative: largest |error| / |value| of those that became normal numbers. error, value: sums of squares. subnormal:
    values that became smaller than the smallest normal; zeroed: those of them that became 0; saturated: values above
    the largest.
    """

    values: int = 0
    relative: float = 0.0
    error: float = 0.0
    value: float = 0.0
    subnormal: int = 0
    zeroed: int = 0
    saturated: int = 0

    def __add__(self, other: "RoundingError") -> "RoundingError":
        return RoundingError(
            self.values + other.values,
            float(np.maximum(self.relative, other.relative)),  # a NaN stays one
            self.error + other.error,
            self.value + other.value,
            self.subnormal + other.subnormal,
            self.zeroed + other.zeroed,
            self.saturated + other.saturated,
        )

    def __str__(self) -> str:
        rms = (self.error / self.value) ** 0.5 if self.value else 0.0
        small = f"{self.subnormal:,} below the smallest normal, {self.zeroed:,} of them 0, {self.saturated:,} saturated"
        return f"relative error at most {self.relative:.2%}, RMS {rms:.2%}; of {self.values:,} values {small}"


def requantise(
    q: np.ndarray, scale: np.ndarray, block: tuple[int, int], edge: int
) -> tuple[np.ndarray, np.ndarray, RoundingError]:
    """e4m3 values [D, I] with a float scale per `block` -> the same with a float32 one per edge x edge, and the error.

    As dequantising to float32 and quantising that (blocks.core.quant) would give, bit by bit. A block has at most 256
    distinct values: only those are computed, and the values are looked up.
    """
    (rows, columns), (r, c) = q.shape, block
    assert q.dtype == F8_E4M3 and not (edge % r or edge % c or rows % edge or columns % edge), (q.shape, block, edge)
    tall, wide = rows // r, columns // c
    counts = np.empty((tall, wide, 256), np.int64)
    for i, places in enumerate(_places(q, r, c)):
        counts[i] = np.bincount(places.reshape(-1), minlength=wide * 256).reshape(wide, 256)
    values_RC = CODES * scale.astype(np.float32)[..., None]
    peaks = np.where(counts > 0, np.abs(values_RC), 0).max(-1)
    peaks = peaks.reshape(rows // edge, edge // r, columns // edge, edge // c).max((1, 3))
    wider = (peaks / LARGEST).astype(np.float32)
    wider[wider == 0] = 1
    spread = wider.repeat(edge // r, 0).repeat(edge // c, 1)[..., None]
    quotient = values_RC / spread
    table = np.clip(quotient, -LARGEST, LARGEST).astype(F8_E4M3)
    out = np.empty((rows, columns), np.uint8)
    for i, places in enumerate(_places(q, r, c)):
        table[i].view(np.uint8).reshape(-1).take(places, out=out[i * r : (i + 1) * r])
    return out.view(F8_E4M3), wider, _error(values_RC, quotient, table, spread, counts)


def _places(q: np.ndarray, r: int, c: int) -> Iterator[np.ndarray]:
    """For each row of blocks, where in [C, 256] each of its values is."""
    columns = (np.arange(q.shape[1]) // c * 256).astype(np.intp)
    codes = q.view(np.uint8)
    for start in range(0, q.shape[0], r):
        yield codes[start : start + r] + columns


def rounding_error(w: np.ndarray, q: np.ndarray, scale: np.ndarray, edge: int) -> RoundingError:
    """What quantising the floats w [..., D, I] to e4m3 q with a scale per edge x edge did."""
    found = RoundingError()
    *_, rows, columns = w.shape
    for one, codes, scales in zip(
        w.reshape(-1, rows, columns),
        q.view(np.uint8).reshape(-1, rows, columns),
        scale.reshape(-1, *scale.shape[-2:]),
        strict=True,
    ):
        across = scales.repeat(edge, -1)[:, :columns]
        for start in range(0, rows, _STRIP):
            strip = slice(start, start + _STRIP)
            spread = across[np.arange(start, min(start + _STRIP, rows)) // edge]
            values = one[strip].astype(np.float32)
            found += _error(values, values / spread, codes[strip].view(F8_E4M3), spread, None)
    return found


def _error(
    values: np.ndarray, quotient: np.ndarray, q: np.ndarray, spread: np.ndarray, counts: np.ndarray | None
) -> RoundingError:
    """Of values that became q, each there `counts` times (None: once). quotient: values over their scale, unrounded."""
    there = values != 0 if counts is None else (values != 0) & (counts > 0)
    found = CODES.take(q.view(np.uint8))
    error = np.abs(found * spread - values)
    normal = there & ~(np.abs(quotient) < SMALLEST_NORMAL)
    relative = np.divide(error, np.abs(values), out=np.zeros_like(error), where=normal)

    def number(which: np.ndarray) -> int:
        return int(np.count_nonzero(which) if counts is None else counts[which].sum())

    def squares(x: np.ndarray) -> float:
        y = np.where(there, x, 0).astype(np.float64) ** 2
        return float(y.sum() if counts is None else (y * counts).sum())

    return RoundingError(
        values=number(there),
        relative=float(relative.max(initial=0.0)),
        error=squares(error),
        value=squares(values),
        subnormal=number(there & ~normal),
        zeroed=number(there & (found == 0)),
        saturated=number(there & (np.abs(quotient) > _SATURATED)),
    )
