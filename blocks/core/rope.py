"""Rotary position embedding (arXiv:2104.09864), on all or the first dims of each head.

Legend: T tokens, N heads, H head dim, F pairs of dims.
"""

import math

import jax.numpy as jnp
import numpy as np
from jax import Array

from .rope_spec import Rope, rope_frequencies


def rope(x_TNH: Array, positions_T: Array, spec: Rope | None) -> Array:
    """Rotate the first spec.dim dims of every head by its position; the rest passes. None = no rotation.

    x [T, N, H] or [T, H] (one head), positions int32. float32 inside, returns x.dtype.
    """
    if spec is None:
        return x_TNH
    assert spec.dim % 2 == 0 and 0 < spec.dim <= x_TNH.shape[-1], (spec, x_TNH.shape)
    angle_TF = _rope_angle(positions_T, spec)
    angle = angle_TF.reshape(angle_TF.shape[0], *(1,) * (x_TNH.ndim - 2), angle_TF.shape[1])
    cos, sin = jnp.cos(angle), jnp.sin(angle)
    if spec.attention_factor != 1:
        cos, sin = cos * spec.attention_factor, sin * spec.attention_factor
    rotated = x_TNH[..., : spec.dim].astype(jnp.float32)
    if spec.pairing == "half":
        a, b = rotated[..., : spec.dim // 2], rotated[..., spec.dim // 2 :]
        out = jnp.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1)
    else:
        a, b = rotated[..., 0::2], rotated[..., 1::2]
        out = jnp.stack([a * cos - b * sin, b * cos + a * sin], axis=-1).reshape(rotated.shape)
    return jnp.concatenate([out.astype(x_TNH.dtype), x_TNH[..., spec.dim :]], axis=-1)


def _rope_angle(positions_T: Array, spec: Rope) -> Array:
    """position * frequency [T, F] in radians, less whole turns, within 1e-6 of it for every int32 position.

    A float32 product would be off by 0.06 rad at position 1e6. Instead a frequency is an integer
    number of 2^-32 turns, whose int32 product with the position drops whole turns by wrapping and
    is exact, and a rest below 2^-33 turns, whose float32 product stays below 1e-3 rad per 1e6 positions.
    """
    frequency_F = np.asarray(rope_frequencies(spec), np.float64)
    unit = 2 * math.pi / 2**32
    whole_F = np.rint(frequency_F / unit)
    rest_F = (frequency_F - whole_F * unit).astype(np.float32)
    turn_F = whole_F.astype(np.int64).astype(np.int32)  # wraps
    position_T1 = positions_T.astype(jnp.int32)[:, None]
    turned_TF = (position_T1 * turn_F).astype(jnp.float32) * np.float32(unit)
    return turned_TF + position_T1.astype(jnp.float32) * rest_F


__all__ = ["Rope", "rope"]
