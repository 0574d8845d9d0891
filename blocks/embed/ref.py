"""Token embedding: what lookup means, on a whole table. Numpy inside, so not jittable."""

import jax.numpy as jnp
import numpy as np
from jax import Array


def lookup(table_VD: Array, tokens_T: Array) -> Array:
    """Row of each token id (clipped to the vocabulary), float32 [T, D]."""
    table, last = np.asarray(table_VD), table_VD.shape[0] - 1
    rows = [table[min(max(int(token), 0), last)] for token in np.asarray(tokens_T)]
    return jnp.asarray(np.stack(rows).astype(np.float32))
