"""Unpermute and reduce-scatter in chunks of tokens: a chunk is summed while the one before is on its way.

Legend: N shards over `axes`, A = N*T gathered tokens, T tokens of this shard, K top_k, D hidden,
C = A / num_chunks tokens of a chunk, of every shard's tokens the same share.
"""

from collections.abc import Callable

import jax.numpy as jnp
from jax import Array, lax
from jax.typing import DTypeLike


def _crs_chunk(x_AK: Array, index: int, num_chunks: int, shards: int) -> Array:
    """The index-th of num_chunks parts of every shard's tokens -> [C, K], shards in order."""
    return x_AK.reshape(shards, num_chunks, -1, x_AK.shape[1])[:, index].reshape(-1, x_AK.shape[1])


def combine_reduce_scatter(
    combine: Callable[[Array, Array], Array],
    place_AK: Array,
    weight_AK: Array,
    axes: tuple[str, ...],
    *,
    scatter: Callable[[Array, tuple[str, ...]], Array],
    num_chunks: int,
    dtype: DTypeLike,
) -> Array:
    """scatter(combine(place_AK, weight_AK), axes) -> [T, D], chunk by chunk.

    combine(place, weight) gives the partial sums of the tokens it is handed, [C, D]; they travel as `dtype`. The
    result is in order because a chunk takes the same share of every shard's tokens. The chunks depend on nothing of
    each other, so whatever runs the exchange beside the TensorCore hides it behind the next chunk's sums.
    """
    shards = 1
    for name in axes:
        shards *= lax.axis_size(name)
    assert place_AK.shape[0] % (shards * num_chunks) == 0, f"{place_AK.shape[0]} tokens, {shards} x {num_chunks} parts"
    parts = []
    for i in range(num_chunks):
        place, weight = (_crs_chunk(x, i, num_chunks, shards) for x in (place_AK, weight_AK))
        parts.append(scatter(combine(place, weight).astype(dtype), axes))
    return jnp.concatenate(parts)


__all__ = ["combine_reduce_scatter"]
