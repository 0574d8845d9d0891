"""What the collectives mean, on the stack of all shards' arrays.

Legend: N shards in `axes` order (dim 0 of every argument and result), T tokens, D hidden,
K top_k. xla.py sees one entry of dim 0 and returns one; here nothing is cut.
"""

import jax.numpy as jnp
from jax import Array


def gather_tokens(x_NTD: Array) -> Array:
    """Every shard gets the tokens of all shards -> [N, N*T, D]."""
    num, _, hidden = x_NTD.shape
    return jnp.broadcast_to(x_NTD.reshape(1, -1, hidden), (num, num * x_NTD.shape[1], hidden))


def gather_routing(index_NTK: Array, weight_NTK: Array) -> tuple[Array, Array]:
    """Every shard gets the routing of all shards -> ([N, N*T, K], [N, N*T, K])."""
    return gather_tokens(index_NTK), gather_tokens(weight_NTK)


def reduce_scatter_tokens(y_NTD: Array) -> Array:
    """Sum over shards; shard n keeps the n-th run of tokens. [N, N*T, D] -> [N, T, D]."""
    num, tokens, hidden = y_NTD.shape
    return y_NTD.sum(axis=0).reshape(num, tokens // num, hidden)


def all_reduce(y_N: Array) -> Array:
    """Sum over shards, given to every shard; same shape."""
    return jnp.broadcast_to(y_N.sum(axis=0), y_N.shape)
