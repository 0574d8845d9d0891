"""4-bit values as checkpoints pack them: shapes, and from words to numbers. Numpy only.

Legend: a packed matrix is [..., out, in]; its scales are [..., out, in / 32]. Formats: blocks.core.array_info.PACKED.
"""

import ml_dtypes
import numpy as np

from moec.blocks.core.array_info import PACKED, SCALED, PackedFormat

from .convert import FLOATS

# What a stored matrix of these values is exact in: e2m1 (2 bits) times a power of two; int4 times any scale.
EXACT_IN = {"mxfp4": "bfloat16", "int4": "float32"}


def scale_block(packed: str) -> tuple[int, int]:
    """(rows, columns) of the stored [out, in] under one scale."""
    block = SCALED[PACKED[packed].dtype]
    return block.columns, block.rows


def words_shape(shape: tuple[int, ...], packed: str) -> tuple[int, ...]:
    """Shape of the stored words of values [..., out, in]."""
    form, (_, columns) = PACKED[packed], scale_block(packed)
    split = (shape[-1] // columns, columns) if form.split else (shape[-1],)
    return (*shape[:-1], *split[:-1], split[-1] // form.word)


def scale_dtypes(packed: str) -> tuple[str, ...]:
    """Dtypes the stored scales may have: e8m0 exponents, or floats."""
    return ("uint8",) if PACKED[packed].split else FLOATS


def side_tensors(tensor: str, packed: str | None) -> dict[str, str]:
    """What lies beside a packed tensor: "scales" and, in formats that have it, "shape" -> stored name."""
    if packed is None:
        return {}
    form = PACKED[packed]
    found = {"scales": form.side(tensor, form.scales)}
    return found | ({"shape": form.side(tensor, form.shape)} if form.shape else {})


def unpack(words: np.ndarray, packed: str) -> np.ndarray:
    """Stored words -> values [..., out, in] in the format's dtype."""
    form = PACKED[packed]
    rows = words.shape[: -2 if form.split else -1]
    stored = words.reshape(*rows, -1).view(np.uint8)  # little-endian: byte by byte, the low half first
    return _pairs(form).take(stored).view(np.uint8).view(np.dtype(form.dtype))


def unpack_scales(scales: np.ndarray, packed: str) -> np.ndarray:
    """Stored scales -> floats.

    e8m0 is 2^(byte - 127) in bfloat16: exact down to byte 0, a subnormal that devices may flush to zero; 255 is NaN.
    """
    if not PACKED[packed].split:
        return scales
    return scales.view(ml_dtypes.float8_e8m0fnu).astype(ml_dtypes.bfloat16)


def _pairs(form: PackedFormat) -> np.ndarray:
    """Byte -> its two values, as the bytes that form.dtype has in numpy: [256] uint16."""
    halves = np.arange(16, dtype=np.uint8)
    # e2m1 codes are stored as they are; integers with 8 added.
    codes = halves.view(np.dtype(form.dtype)) if form.split else (halves.astype(np.int8) - 8).astype(form.dtype)
    byte = np.arange(256)
    low, high = (codes.view(np.uint8)[half].astype("<u2") for half in (byte & 15, byte >> 4))
    return (low | high << 8).astype("<u2")
