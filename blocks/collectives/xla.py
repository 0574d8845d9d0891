"""Collectives on the token dim, inside shard_map.

Legend: T tokens of this shard, N shards over `axes`, D hidden, K top_k.
`axes` names mesh axes, the first one major: shard order is that of P(axes).
A caller with nothing to exchange emits no call; empty `axes` is an error.
"""

import jax.numpy as jnp
from jax import Array, lax


def gather_tokens(x_TD: Array, axes: tuple[str, ...]) -> Array:
    """The tokens of all shards, in shard order -> [N*T, D]."""
    assert axes, "no axis to gather over"
    return lax.all_gather(x_TD, axes, axis=0, tiled=True)


def gather_routing(index_TK: Array, weight_TK: Array, axes: tuple[str, ...]) -> tuple[Array, Array]:
    """Expert indices and weights of all shards' tokens -> ([N*T, K] int32, [N*T, K]).

    Both travel in one int32 array: one message instead of two. bfloat16 weights widen
    to float32 for the trip, which is exact.
    """
    assert axes, "no axis to gather over"
    assert index_TK.dtype == jnp.int32, index_TK.dtype
    bits_TK = lax.bitcast_convert_type(weight_TK.astype(jnp.float32), jnp.int32)
    packed = lax.all_gather(jnp.concatenate([index_TK, bits_TK], axis=1), axes, axis=0, tiled=True)
    index, bits = jnp.split(packed, 2, axis=1)
    return index, lax.bitcast_convert_type(bits, jnp.float32).astype(weight_TK.dtype)


def reduce_scatter_tokens(y_TD: Array, axes: tuple[str, ...]) -> Array:
    """Sum the shards' partial y [N*T, D] and keep this shard's tokens -> [T, D]."""
    assert axes, "no axis to reduce over"
    return lax.psum_scatter(y_TD, axes, scatter_dimension=0, tiled=True)


def all_reduce(y: Array, axes: tuple[str, ...]) -> Array:
    """Sum the shards' partial y; every shard gets the sum."""
    assert axes, "no axis to reduce over"
    return lax.psum(y, axes)
