"""RMS norm (arXiv:1910.07467) with the two gain conventions checkpoints use."""

import jax.numpy as jnp
from jax import Array, lax


def rms_norm(x: Array, w: Array, *, eps: float, zero_centered: bool) -> Array:
    """x / sqrt(mean(x^2) + eps) over the last dim, times the gain; returns x.dtype.

    x [..., H], w [H]. zero_centered: the stored gain is an offset from 1 and the product is
    taken in float32; otherwise the normalised value is rounded to x.dtype first. Both as in
    Hugging Face transformers 5.24, whose rounding points are kept on purpose.
    """
    x32 = x.astype(jnp.float32)
    normed = x32 * lax.rsqrt(jnp.mean(x32 * x32, axis=-1, keepdims=True) + eps)
    if zero_centered:
        return (normed * (1.0 + w.astype(jnp.float32))).astype(x.dtype)
    return normed.astype(x.dtype) * w.astype(x.dtype)


__all__ = ["rms_norm"]
