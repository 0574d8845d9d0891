"""Rotary position embedding (arXiv:2104.09864), on all or the first dims of each head."""

from typing import Literal

import jax.numpy as jnp
import numpy as np
from jax import Array


def rope(x_TNH: Array, positions_T: Array, *, dim: int, theta: float, pairing: Literal["half", "interleaved"]) -> Array:
    """Rotate the first `dim` dims of every head by position * theta^(-2i/dim); the rest passes.

    pairing: "half" rotates (i, i + dim/2), "interleaved" rotates (2i, 2i + 1), both in place.
    dim 0 = no rotation. float32 inside, returns x.dtype.
    """
    assert dim % 2 == 0 and 0 <= dim <= x_TNH.shape[-1], (dim, x_TNH.shape)
    if dim == 0:
        return x_TNH
    # Frequencies in float64 on the host: the angle error at long positions is then the product's alone.
    frequency = (float(theta) ** (-np.arange(0, dim, 2, dtype=np.float64) / dim)).astype(np.float32)
    angle_T1F = positions_T.astype(jnp.float32)[:, None, None] * frequency
    cos, sin = jnp.cos(angle_T1F), jnp.sin(angle_T1F)
    rotated = x_TNH[..., :dim].astype(jnp.float32)
    if pairing == "half":
        a, b = rotated[..., : dim // 2], rotated[..., dim // 2 :]
        out = jnp.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1)
    else:
        a, b = rotated[..., 0::2], rotated[..., 1::2]
        out = jnp.stack([a * cos - b * sin, b * cos + a * sin], axis=-1).reshape(rotated.shape)
    return jnp.concatenate([out.astype(x_TNH.dtype), x_TNH[..., dim:]], axis=-1)


__all__ = ["rope"]
