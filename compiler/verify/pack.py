"""Packs matrices as 4-bit releases do, for random checkpoints. Numpy; nothing here is shared with the loader.

Legend: a matrix is [..., out, in]; 32 values along `in` share a scale. Formats: blocks.core.array_info.PACKED.
"""

import ml_dtypes
import numpy as np

from moec.blocks.core.array_info import PACKED

BLOCK = 32
E8M0_BIAS, E2M1_TOP = 127, 2  # e8m0 is 2^(byte - 127); e2m1 ends at 1.5 * 2^2
INT4_TOP = 7


def packed_tensors(tensor: str, values: np.ndarray, packed: str) -> dict[str, np.ndarray]:
    """The stored tensors of one matrix or stack: words, scales and, where the format has it, the shape."""
    form = PACKED[packed]
    if packed == "mxfp4":
        blocks, scales = pack_mxfp4(values)
        return {tensor: blocks, form.side(tensor, form.scales): scales}
    words, scales = pack_int4(values)
    assert form.shape is not None
    shape = np.asarray(values.shape, np.int64)
    return {tensor: words, form.side(tensor, form.scales): scales, form.side(tensor, form.shape): shape}


def pack_mxfp4(values: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """(uint8 [..., out, in / 32, 16], e8m0 as uint8 [..., out, in / 32]); OCP MX v1.0, section 6.3."""
    blocks = values.reshape(*values.shape[:-1], -1, BLOCK)
    peak = np.abs(blocks).max(axis=-1)
    power = np.floor(np.log2(np.where(peak > 0, peak, 1))).astype(np.int32) - E2M1_TOP
    scaled = np.ldexp(blocks, -power[..., None])
    codes = np.clip(scaled, -6, 6).astype(ml_dtypes.float4_e2m1fn).view(np.uint8) & 15
    return codes[..., 0::2] | codes[..., 1::2] << 4, (power + E8M0_BIAS).astype(np.uint8)


def pack_int4(values: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """(int32 [..., out, in / 8], bfloat16 [..., out, in / 32]); eight values a word, the first in the lowest bits."""
    blocks = values.reshape(*values.shape[:-1], -1, BLOCK)
    scale = (np.abs(blocks).max(axis=-1) / INT4_TOP).astype(ml_dtypes.bfloat16)
    steps = np.where(scale > 0, scale, 1).astype(np.float32)
    codes = np.clip(np.rint(blocks / steps[..., None]), -8, 7).astype(np.int64) + 8
    nibbles = codes.reshape(*values.shape[:-1], -1, 8)
    words = (nibbles << 4 * np.arange(8)).sum(axis=-1)
    return words.astype(np.uint32).view(np.int32), scale
