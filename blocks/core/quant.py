"""e4m3 weights with block scales: value = q * scale of its 128 x 128 block.

Legend: D rows, I columns of one matrix; leading dims are free. A scale array has
ceil(D/128) x ceil(I/128) entries: the last block of a ragged dim is shorter.
Checkpoints in this layout: "quant_method": "fp8", "weight_block_size": [128, 128].
"""

import jax.numpy as jnp
import ml_dtypes
import numpy as np
from jax import Array
from jax.typing import DTypeLike

from .array_info import FP8_BLOCK

E4M3_MAX = 448.0  # largest finite value of OCP e4m3fn


def scale_shape(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Shape of the block scales of a weight [..., D, I]."""
    return (*shape[:-2], *(-(-size // FP8_BLOCK) for size in shape[-2:]))


def expand_scales(scale: Array, rows: int, columns: int) -> Array:
    """Repeat block scales [..., ceil(D/128), ceil(I/128)] to one per value [..., D, I]."""
    *lead, tall, wide = scale.shape
    assert (tall, wide) == scale_shape((rows, columns)), (scale.shape, rows, columns)
    # Broadcast and reshape instead of repeat: XLA fuses it into the multiply that follows.
    full = jnp.broadcast_to(scale[..., :, None, :, None], (*lead, tall, FP8_BLOCK, wide, FP8_BLOCK))
    return full.reshape(*lead, tall * FP8_BLOCK, wide * FP8_BLOCK)[..., :rows, :columns]


def dequantize_blocks(q: Array, scale: Array, dtype: DTypeLike) -> Array:
    """q [..., D, I] e4m3 times its block scales, multiplied in float32, rounded once to `dtype`.

    bfloat16 scales and product would have the same bits when the scales are exact there,
    but then XLA:TPU no longer fuses the broadcast.
    """
    return (q.astype(jnp.float32) * expand_scales(scale.astype(jnp.float32), *q.shape[-2:])).astype(dtype)


def dequantize_on_host(q: np.ndarray, scale: np.ndarray) -> np.ndarray:
    """q [..., D, I] e4m3 times its block scales, as float32 in numpy."""
    assert scale.shape == scale_shape(q.shape), (q.shape, scale.shape)
    rows, columns = q.shape[-2:]
    full = scale.astype(np.float32).repeat(FP8_BLOCK, -2)[..., :rows, :]
    return q.astype(np.float32) * full.repeat(FP8_BLOCK, -1)[..., :columns]


def quantize_on_host(w: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """w [..., D, I] -> (q e4m3, scale float32) with each block's largest magnitude at 448."""
    *lead, rows, columns = w.shape
    *_, tall, wide = scale_shape(w.shape)
    padded = np.zeros((*lead, tall * FP8_BLOCK, wide * FP8_BLOCK), np.float32)
    padded[..., :rows, :columns] = w
    blocks = padded.reshape(*lead, tall, FP8_BLOCK, wide, FP8_BLOCK)
    peak = np.abs(blocks).max(axis=(-3, -1))
    # An all-zero block has no peak; any scale keeps its zeros.
    scale = np.where(peak > 0, peak / E4M3_MAX, 1.0).astype(np.float32)
    # The division may round above 448, which e4m3fn would turn into NaN.
    q = np.clip(blocks / scale[..., :, None, :, None], -E4M3_MAX, E4M3_MAX)
    q = q.reshape(padded.shape)[..., :rows, :columns]
    return q.astype(ml_dtypes.float8_e4m3fn), scale
