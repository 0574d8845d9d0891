"""Token embedding: what lookup means, on a whole table."""

import jax.numpy as jnp
from jax import Array


def lookup(table_VD: Array, tokens_T: Array) -> Array:
    """Row of each token id (clipped to the vocabulary), float32 [T, D]."""
    last = table_VD.shape[0] - 1
    return jnp.stack([table_VD[min(max(int(token), 0), last)] for token in tokens_T]).astype(jnp.float32)
