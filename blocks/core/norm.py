"""RMS norm (arXiv:1910.07467) with the two gain conventions checkpoints use, and LayerNorm (arXiv:1607.06450)."""

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


def layer_norm(x: Array, w: Array, bias: Array | None, *, eps: float) -> Array:
    """(x - mean) / sqrt(variance + eps) over the last dim, times the gain, plus the bias; returns x.dtype.

    x [..., H], w, bias [H]; float32 inside, rounded once as torch.nn.LayerNorm does.
    """
    x32 = x.astype(jnp.float32)
    centered = x32 - jnp.mean(x32, axis=-1, keepdims=True)
    normed = centered * lax.rsqrt(jnp.mean(centered * centered, axis=-1, keepdims=True) + eps)
    scaled = normed * w.astype(jnp.float32)
    return (scaled if bias is None else scaled + bias.astype(jnp.float32)).astype(x.dtype)


__all__ = ["layer_norm", "rms_norm"]
