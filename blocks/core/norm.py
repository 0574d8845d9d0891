"""RMS norm (arXiv:1910.07467) with the two gain conventions checkpoints use, and LayerNorm (arXiv:1607.06450)."""

import jax.numpy as jnp
from jax import Array, lax


def rms_norm(x: Array, w: Array | None, *, eps: float, zero_centered: bool, sum_axes: tuple[str, ...] = ()) -> Array:
    """x / sqrt(mean(x^2) + eps) over the last dim, times the gain; returns x.dtype.

    x [..., H], w [H] or None: no gain. sum_axes: mesh axes that cut the last dim into equal parts, one of which is x.
    Where the product with the gain is rounded: rms_scaled.
    """
    square = mean_square(x)
    return rms_scaled(x, w, lax.pmean(square, sum_axes) if sum_axes else square, eps=eps, zero_centered=zero_centered)


def mean_square(x: Array) -> Array:
    """mean(x^2) over the last dim [..., 1], float32."""
    x32 = x.astype(jnp.float32)
    return jnp.mean(x32 * x32, axis=-1, keepdims=True)


def rms_scaled(x: Array, w: Array | None, square: Array, *, eps: float, zero_centered: bool) -> Array:
    """x / sqrt(square + eps), times the gain w (None = none); square [..., 1] float32. Returns x.dtype.

    zero_centered: the stored gain is an offset from 1 and the product is taken in float32;
    otherwise the normalised value is rounded to x.dtype first. Both as in Hugging Face
    transformers 5.24, whose rounding points are kept on purpose.
    """
    normed = x.astype(jnp.float32) * lax.rsqrt(square + eps)
    if w is None:
        return normed.astype(x.dtype)
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


__all__ = ["layer_norm", "mean_square", "rms_norm", "rms_scaled"]
