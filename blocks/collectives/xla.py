"""Collectives on the token dim, inside shard_map.

Legend: T tokens of this shard, N shards over `axes`, A = N*T, D hidden, K top_k. Packed rows [T, 2K] int32: K expert
indices, then the bits of K float32 weights; with float8 hidden states one more column, the bits of the row's scale.
`axes` names mesh axes, the first one major: shard order is that of P(axes).
A caller with nothing to exchange emits no call; empty `axes` is an error.
"""

import jax.numpy as jnp
from jax import Array, lax
from jax.typing import DTypeLike

_FLOAT8 = jnp.float8_e4m3fn
_FLOAT8_LARGEST = 448.0  # of OCP e4m3fn, which has no infinity: above it comes NaN


def gather_tokens(x_TD: Array, axes: tuple[str, ...]) -> Array:
    """The tokens of all shards, in shard order -> [N*T, D]."""
    assert axes, "no axis to gather over"
    return lax.all_gather(x_TD, axes, axis=0, tiled=True)


def pack_routing(index_TK: Array, weight_TK: Array) -> Array:
    """Indices and weights in one array that travels in one message -> [T, 2K] int32: indices, then the bits of the
    weights in float32, to which bfloat16 widens exactly."""
    assert index_TK.dtype == jnp.int32, index_TK.dtype
    bits_TK = lax.bitcast_convert_type(weight_TK.astype(jnp.float32), jnp.int32)
    return jnp.concatenate([index_TK, bits_TK], axis=1)


def gather_routing(index_TK: Array, weight_TK: Array, axes: tuple[str, ...]) -> tuple[Array, Array]:
    """Expert indices and weights of all shards' tokens, in one message -> ([N*T, K] int32, [N*T, K])."""
    index_AK, weight_AK = gather_routing_packed(pack_routing(index_TK, weight_TK), axes)
    return index_AK, weight_AK.astype(weight_TK.dtype)


def _gather_unpack(packed_AW: Array, top_k: int) -> tuple[Array, Array]:
    """Packed rows -> (index [A, K] int32, weight [A, K] float32)."""
    bits_AK = packed_AW[:, top_k : 2 * top_k]
    return packed_AW[:, :top_k], lax.bitcast_convert_type(bits_AK, jnp.float32)


def gather_routing_packed(packed_T2K: Array, axes: tuple[str, ...]) -> tuple[Array, Array]:
    """Expert indices and weights of all shards' tokens -> ([A, K] int32, [A, K] float32), from the router's packing."""
    assert axes, "no axis to gather over"
    assert packed_T2K.dtype == jnp.int32 and packed_T2K.shape[1] % 2 == 0, (packed_T2K.dtype, packed_T2K.shape)
    return _gather_unpack(lax.all_gather(packed_T2K, axes, axis=0, tiled=True), packed_T2K.shape[1] // 2)


def quantize_tokens(x_TD: Array) -> tuple[Array, Array]:
    """x -> (q [T, D] float8_e4m3fn, scale [T, 1] float32), each row's largest magnitude at the largest of the type.

    One scale per row: a product with the row is scaled after its sum, and e4m3 keeps its three bits of mantissa for
    values down to 1 / 28672 of the row's largest. Rows of zeros have scale 1; a NaN makes its whole row NaN.
    """
    x_TD = x_TD.astype(jnp.float32)
    scale_T1 = jnp.max(jnp.abs(x_TD), axis=1, keepdims=True) / _FLOAT8_LARGEST
    # Rows of zeros, or with a scale too small to divide by.
    scale_T1 = jnp.where(scale_T1 < jnp.finfo(jnp.float32).tiny, 1.0, scale_T1)
    # The quotient may come out one rounding above the largest value, which would become NaN.
    return jnp.clip(x_TD / scale_T1, -_FLOAT8_LARGEST, _FLOAT8_LARGEST).astype(_FLOAT8), scale_T1


def dequantize_tokens(q_TD: Array, scale_T1: Array, dtype: DTypeLike) -> Array:
    """q times its row's scale in float32, rounded once to `dtype`."""
    return (q_TD.astype(jnp.float32) * scale_T1).astype(dtype)


def gather_tokens_float8(x_TD: Array, packed_T2K: Array, axes: tuple[str, ...]) -> tuple[Array, Array, Array, Array]:
    """Hidden states and routing of all shards' tokens, in as many messages as without scales, half the bytes.

    -> q [A, D] float8_e4m3fn, scale [A, 1] float32, index [A, K] int32, weight [A, K] float32.
    """
    assert axes, "no axis to gather over"
    assert packed_T2K.dtype == jnp.int32 and packed_T2K.shape[1] % 2 == 0, (packed_T2K.dtype, packed_T2K.shape)
    q_TD, scale_T1 = quantize_tokens(x_TD)
    row_TW = jnp.concatenate([packed_T2K, lax.bitcast_convert_type(scale_T1, jnp.int32)], axis=1)
    q_AD = lax.all_gather(q_TD, axes, axis=0, tiled=True)
    row_AW = lax.all_gather(row_TW, axes, axis=0, tiled=True)
    scale_A1 = lax.bitcast_convert_type(row_AW[:, -1:], jnp.float32)
    return q_AD, scale_A1, *_gather_unpack(row_AW, packed_T2K.shape[1] // 2)


def reduce_scatter_tokens(y_TD: Array, axes: tuple[str, ...]) -> Array:
    """Sum the shards' partial y [N*T, D] and keep this shard's tokens -> [T, D]."""
    assert axes, "no axis to reduce over"
    return lax.psum_scatter(y_TD, axes, scatter_dimension=0, tiled=True)


def all_reduce(y: Array, axes: tuple[str, ...]) -> Array:
    """Sum the shards' partial y; every shard gets the sum."""
    assert axes, "no axis to reduce over"
    return lax.psum(y, axes)
