"""Rows of 32-bit words: how tokens and expert outputs lie in device memory where kernels move single rows.

A bfloat16 array [N, D] holds two rows in each word of its tiles, so one row of it is no piece a DMA can move. As
words [N, J, 128] a row is contiguous: bfloat16 has J = D/256, its word (n, j, l) holds column 128*j + l in the low
half and column D/2 + 128*j + l in the high half; float32 has J = D/128, word (n, j, l) is column 128*j + l.

Legend: N rows, D width, J words of a row over the lanes.
"""

import jax.numpy as jnp
from jax import Array, lax

_ROWS_LANES = 128


def row_words(width: int, dtype: str) -> int:
    """J of rows of that width; asserts that it holds whole words over all lanes."""
    values = 2 * _ROWS_LANES if dtype == "bfloat16" else _ROWS_LANES
    assert dtype in ("bfloat16", "float32") and width % values == 0, (width, dtype)
    return width // values


def pack_rows(x_ND: Array) -> Array:
    """Rows of bfloat16 or float32 -> words [N, J, 128], int32 or float32."""
    rows, width = x_ND.shape
    words = row_words(width, x_ND.dtype.name)
    if x_ND.dtype == jnp.float32:
        return x_ND.reshape(rows, words, _ROWS_LANES)
    bits = lax.bitcast_convert_type(x_ND, jnp.uint16).astype(jnp.uint32)
    packed = bits[:, : width // 2] | (bits[:, width // 2 :] << 16)
    return lax.bitcast_convert_type(packed, jnp.int32).reshape(rows, words, _ROWS_LANES)


def unpack_rows(words_NJ: Array) -> Array:
    """Words [N, J, 128] -> rows [N, D]: float32 words as they are, int32 words as bfloat16."""
    rows, words, lanes = words_NJ.shape
    flat = words_NJ.reshape(rows, words * lanes)
    if flat.dtype == jnp.float32:
        return flat
    bits = lax.bitcast_convert_type(flat, jnp.uint32)
    halves = [(bits & 0xFFFF).astype(jnp.uint16), (bits >> 16).astype(jnp.uint16)]
    return lax.bitcast_convert_type(jnp.concatenate(halves, axis=1), jnp.bfloat16)
