"""What attention blocks may do to whole heads: queries that grow with their position, gated outputs.

Legend: T tokens, N heads, H dims of a query, V dims of a value, X gate values per head (V or 1).
"""

from typing import Literal

import jax.numpy as jnp
from jax import Array

from ..activation.xla import activate


def warmed(q_TNH: Array, positions_T: Array, floor: int, scale: float, offset: int) -> Array:
    """Queries times 1 + scale * ln(1 + floor((position + offset) / floor)); float32 inside, returns q's dtype."""
    steps_T = (positions_T.astype(jnp.int32) + offset) // floor
    factor_T = 1.0 + scale * jnp.log1p(steps_T.astype(jnp.float32))
    return (q_TNH.astype(jnp.float32) * factor_T[:, None, None]).astype(q_TNH.dtype)


def gated(out_TNV: Array, gate_TNX: Array, activation: Literal["sigmoid", "softplus"]) -> Array:
    """Every head's output times its activated gate, in float32; returns out's dtype."""
    return (out_TNV.astype(jnp.float32) * activate(gate_TNX.astype(jnp.float32), activation)).astype(out_TNV.dtype)


__all__ = ["gated", "warmed"]
