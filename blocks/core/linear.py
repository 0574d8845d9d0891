"""Products of activations with weights, and the float32 contractions of state math."""

import jax.numpy as jnp
from jax import Array, lax


def linear(x: Array, w: Array, bias: Array | None = None) -> Array:
    """x @ w + bias accumulated in float32, rounded once to x.dtype; precision is the ambient default.

    x [..., in], w [in, out], bias [out] in any dtype. torch.nn.functional.linear rounds once too.
    """
    y32 = jnp.dot(x, w, preferred_element_type=jnp.float32)
    return (y32 if bias is None else y32 + bias.astype(jnp.float32)).astype(x.dtype)


def einsum_f32(subscripts: str, *operands: Array) -> Array:
    """A contraction of float32 values that loses nothing: TPU's default would multiply them in bfloat16."""
    return jnp.einsum(subscripts, *operands, precision=lax.Precision.HIGHEST)


__all__ = ["einsum_f32", "linear"]
