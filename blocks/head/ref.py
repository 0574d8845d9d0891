"""Vocabulary projection: what logits means, on a whole matrix."""

import jax.numpy as jnp
from jax import Array


def logits(h_SD: Array, w_DV: Array) -> Array:
    """Inner product of each row with each vocabulary column, float32 [S, V]."""
    h, w = h_SD.astype(jnp.float32), w_DV.astype(jnp.float32)
    return jnp.stack([jnp.einsum("d,dv->v", row, w, precision="highest") for row in h])
