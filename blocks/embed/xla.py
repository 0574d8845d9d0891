"""Token embedding: a row gather, with the vocabulary whole or cut.

Legend: T tokens of this attention-DP rank, R ranks (size of dp_axes), V vocabulary, D hidden.
Ids are clipped to [0, V), so that padding tokens may hold anything.
"""

import jax.numpy as jnp
from jax import Array, lax


def lookup(table_VD: Array, tokens_T: Array) -> Array:
    """Rows of the whole table -> [T, D] in the table's dtype."""
    return jnp.take(table_VD, tokens_T, axis=0, mode="clip")


def lookup_sharded(table_local: Array, tokens_T: Array, dp_axes: tuple[str, ...], tp_axes: tuple[str, ...]) -> Array:
    """Rows of a table cut over tp_axes + dp_axes (tensor-major) -> own tokens' [T, D].

    Each shard looks up all ranks' tokens in its piece [V/(R*tp), D] and leaves zeros
    elsewhere; exactly one shard has each row, so the sums are exact in any dtype.
    """
    axes = (*tp_axes, *dp_axes)
    assert axes, "an uncut table takes lookup"
    piece = table_local.shape[0]
    tokens = lax.all_gather(tokens_T, dp_axes, axis=0, tiled=True) if dp_axes else tokens_T
    tokens = jnp.clip(tokens, 0, piece * lax.axis_size(axes) - 1)
    local = tokens - lax.axis_index(axes) * piece
    here = (local >= 0) & (local < piece)
    rows = jnp.where(here[:, None], jnp.take(table_local, local, axis=0, mode="clip"), 0)
    # Scatter over ranks first: the tensor reduction then moves only own tokens.
    own = lax.psum_scatter(rows, dp_axes, scatter_dimension=0, tiled=True) if dp_axes else rows
    return lax.psum(own, tp_axes) if tp_axes else own
