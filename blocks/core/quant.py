"""Weights with block scales: value = q * scale of its block (array_info.SCALED; of float8 the scales' shape tells the
edge, of array_info.FLOAT8_EDGES).

Legend: D rows, I columns of one matrix [in, out]; leading dims are free. r, c: rows and columns of a block. A
scale array has ceil(D/r) x ceil(I/c) entries: the last block of a ragged dim is shorter.
"""

import jax.numpy as jnp
import ml_dtypes
import numpy as np
from jax import Array
from jax.typing import DTypeLike

from .array_info import FLOAT8_EDGES, SCALED, ScaleBlock, scaled_block

# Largest magnitude a block is scaled to: that of OCP e4m3fn and e2m1fn; int4 is used symmetrically, without -8.
LARGEST = {"float8_e4m3fn": 448.0, "float4_e2m1fn": 6.0, "int4": 7.0}


def scale_shape(shape: tuple[int, ...], dtype: str) -> tuple[int, ...]:
    """Shape of the block scales of a weight [..., D, I] in `dtype`."""
    return (*shape[:-2], *SCALED[dtype].count(*shape[-2:]))


def block_of_scales(shape: tuple[int, ...], scales: tuple[int, ...], dtype: str) -> ScaleBlock:
    """The block under one scale of a weight [..., D, I] in `dtype` that has scales of this shape."""
    blocks = [scaled_block(dtype, edge) for edge in FLOAT8_EDGES]
    found = [one for one in blocks if one.count(*shape[-2:]) == scales[-2:]]
    # Two edges fit where one block of either holds the whole matrix: the same values.
    assert found and scales[:-2] == shape[:-2], (shape, scales, dtype)
    return found[0]


def expand_scales(scale: Array, rows: int, columns: int, dtype: str) -> Array:
    """Repeat block scales [..., ceil(D/r), ceil(I/c)] to one per value [..., D, I] of a weight in `dtype`."""
    *lead, tall, wide = scale.shape
    block = block_of_scales((*lead, rows, columns), scale.shape, dtype)
    # Broadcast and reshape instead of repeat: XLA fuses it into the multiply that follows. Columns first, which are
    # few: both at once, and XLA:TPU re-lays out the weight (of experts the whole stack) unless 8 divides `wide`.
    across = jnp.broadcast_to(scale[..., None], (*lead, tall, wide, block.columns))
    across = across.reshape(*lead, tall, wide * block.columns)[..., :columns]
    full = jnp.broadcast_to(across[..., :, None, :], (*lead, tall, block.rows, columns))
    return full.reshape(*lead, tall * block.rows, columns)[..., :rows, :]


def dequantize_blocks(q: Array, scale: Array, dtype: DTypeLike) -> Array:
    """q [..., D, I] times its block scales, multiplied in float32, rounded once to `dtype`.

    bfloat16 scales and product would have the same bits when the scales are exact there,
    but then XLA:TPU no longer fuses the broadcast.
    """
    rows, columns = q.shape[-2:]
    full = expand_scales(scale.astype(jnp.float32), rows, columns, q.dtype.name)
    return (q.astype(jnp.float32) * full).astype(dtype)


def dequantize_on_host(q: np.ndarray, scale: np.ndarray) -> np.ndarray:
    """q [..., D, I] times its block scales, as float32 in numpy."""
    rows, columns = q.shape[-2:]
    block = block_of_scales(q.shape, scale.shape, q.dtype.name)
    full = scale.astype(np.float32).repeat(block.rows, -2)[..., :rows, :]
    return q.astype(np.float32) * full.repeat(block.columns, -1)[..., :columns]


def quantize_on_host(w: np.ndarray, dtype: str, block: ScaleBlock | None = None) -> tuple[np.ndarray, np.ndarray]:
    """w [..., D, I] -> (q in `dtype`, its block scales), each block's largest magnitude at the dtype's.

    Rounds to the nearest, ties to even. A NaN makes the scale of its block, and so the block, NaN. block: what shares
    one scale; None: as SCALED has it.
    """
    *lead, rows, columns = w.shape
    block, largest = block or SCALED[dtype], LARGEST[dtype]
    tall, wide = block.count(rows, columns)
    padded = np.zeros((*lead, tall * block.rows, wide * block.columns), np.float32)
    padded[..., :rows, :columns] = w
    blocks = padded.reshape(*lead, tall, block.rows, wide, block.columns)
    scale = (np.abs(blocks).max(axis=(-3, -1)) / largest).astype(np.dtype(block.dtype))
    # An all-zero block has no peak, and one of subnormals no scale: any scale keeps zeros.
    scale[scale == 0] = 1
    divided = blocks / scale.astype(np.float32)[..., :, None, :, None]
    # Rounded scales may leave the peak above the largest value, which e4m3fn would turn into NaN.
    q = np.clip(divided, -largest, largest).reshape(padded.shape)[..., :rows, :columns]
    return _round_to(q, dtype), scale


def _round_to(values: np.ndarray, dtype: str) -> np.ndarray:
    """float32 within the dtype's range, to the nearest value, ties to even."""
    if dtype != "int4":
        return values.astype(np.dtype(dtype))
    # NaN has no integer; its block's scale is NaN already.
    return np.rint(np.nan_to_num(values)).astype(np.int8).astype(ml_dtypes.int4)
