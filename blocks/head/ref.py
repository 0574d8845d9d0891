"""Vocabulary projection: what logits means, on a whole matrix. Numpy inside, so not jittable."""

import jax.numpy as jnp
import numpy as np
from jax import Array


def logits(h_SD: Array, w_DV: Array) -> Array:
    """Inner product of each row with each vocabulary column, float32 [S, V]."""
    return jnp.asarray(np.asarray(h_SD).astype(np.float32) @ np.asarray(w_DV).astype(np.float32))
