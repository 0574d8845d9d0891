"""Vocabulary projection, with the vocabulary whole or cut.

Legend: S rows of this attention-DP rank, R ranks (size of dp_axes), D hidden, V vocabulary.
"""

import jax.numpy as jnp
from jax import Array, lax


def logits(h_SD: Array, w_DV: Array) -> Array:
    """h . w, accumulated and returned in float32 -> [S, V]."""
    return jnp.dot(h_SD, w_DV, preferred_element_type=jnp.float32)


def logits_sharded(h_SD: Array, w_local: Array, dp_axes: tuple[str, ...], tp_axes: tuple[str, ...]) -> Array:
    """Logits over a vocabulary cut over tp_axes + dp_axes (tensor-major) -> own rows' [S, V].

    Each shard multiplies all ranks' rows by its piece [D, V/(R*tp)]; the rows then go
    home over dp_axes and the remaining tensor pieces are gathered.
    """
    assert dp_axes or tp_axes, "an uncut vocabulary takes logits"
    rows = lax.all_gather(h_SD, dp_axes, axis=0, tiled=True) if dp_axes else h_SD
    piece = logits(rows, w_local)
    if dp_axes:
        piece = lax.all_to_all(piece, dp_axes, split_axis=0, concat_axis=1, tiled=True)
    return lax.all_gather(piece, tp_axes, axis=1, tiled=True) if tp_axes else piece
