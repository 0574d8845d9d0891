"""What attention does to single tokens: projections, norms, rope, scales, and the gate of its output.

Legend: T tokens, D hidden, N q heads, G kv heads, H head_dim, V v_head_dim, X gate values per head.
"""

from dataclasses import dataclass
from typing import Literal

import jax
import jax.numpy as jnp
from jax import Array, lax

from ..core.norm import rms_norm
from ..core.rope import rope
from ..core.rope_spec import Rope


@dataclass(frozen=True)
class AttnTokenRules:
    """The options of xla.attention that concern single tokens; meaning: there."""

    num_q_heads: int
    num_kv_heads: int
    head_dim: int
    rope: Rope | None
    qk_norm: Literal["none", "head", "full", "l2"]
    qk_norm_place: Literal["before_rope", "after_rope"]
    v_norm: bool
    norm_eps: float
    norm_zero_centered: bool
    qkv_bias: bool
    keys_as_values: bool
    clip_qkv: float | None
    value_scale: float
    temperature: tuple[int, float, int] | None
    output_gate: Literal["sigmoid", "softplus"] | None
    gate_stored: Literal["fused", "own"]
    sum_axes: tuple[str, ...]


def attn_project(
    h_TD: Array, w: dict[str, Array], positions_T: Array, rules: AttnTokenRules
) -> tuple[Array, Array, Array, Array | None]:
    """Queries [T, N, H], keys [T, G*H], values [T, G*V], and the gate before its activation [T, N, X] or None."""
    T, H = h_TD.shape[0], rules.head_dim
    q_TNX = _attn_heads(h_TD, w, "q", rules.num_q_heads, rules.qkv_bias)  # a fused gate: [query | gate] per head
    q_TNH, k_TGH = q_TNX[..., :H], _attn_heads(h_TD, w, "k", rules.num_kv_heads, rules.qkv_bias)
    v_TGV = k_TGH if rules.keys_as_values else _attn_heads(h_TD, w, "v", rules.num_kv_heads, rules.qkv_bias)
    if rules.qk_norm_place == "before_rope":
        q_TNH, k_TGH = _attn_qk_norm(q_TNH, k_TGH, w, rules)
    if rules.v_norm:
        v_TGV = _attn_unit(v_TGV, rules.norm_eps)
    if rules.clip_qkv is not None:
        q_TNH, k_TGH, v_TGV = (jnp.clip(x, -rules.clip_qkv, rules.clip_qkv) for x in (q_TNH, k_TGH, v_TGV))
    q_TNH, k_TGH = rope(q_TNH, positions_T, rules.rope), rope(k_TGH, positions_T, rules.rope)
    if rules.qk_norm_place == "after_rope":
        q_TNH, k_TGH = _attn_qk_norm(q_TNH, k_TGH, w, rules)
    if rules.temperature is not None:
        q_TNH = _attn_warm(q_TNH, positions_T, *rules.temperature)
    if rules.value_scale != 1:
        v_TGV = v_TGV * rules.value_scale
    return q_TNH, k_TGH.reshape(T, -1), v_TGV.reshape(T, -1), _attn_gate(h_TD, w, q_TNX, rules)


def attn_gated(out_TNV: Array, gate_TNX: Array, activation: Literal["sigmoid", "softplus"]) -> Array:
    """Every head's output times its activated gate, in float32; X is V or 1. Returns out's dtype."""
    act = {"sigmoid": lax.logistic, "softplus": jax.nn.softplus}[activation]
    return (out_TNV.astype(jnp.float32) * act(gate_TNX.astype(jnp.float32))).astype(out_TNV.dtype)


def attn_linear(x: Array, w: Array) -> Array:
    """x @ w accumulated in float32, rounded to x.dtype; precision is the ambient default."""
    return jnp.dot(x, w, preferred_element_type=jnp.float32).astype(x.dtype)


def _attn_heads(h_TD: Array, w: dict[str, Array], name: str, number: int, bias: bool) -> Array:
    out = attn_linear(h_TD, w[f"w_{name}"])
    if bias:
        out = out + w[f"b_{name}"].astype(out.dtype)
    return out.reshape(h_TD.shape[0], number, -1)


def _attn_gate(h_TD: Array, w: dict[str, Array], q_TNX: Array, rules: AttnTokenRules) -> Array | None:
    if rules.output_gate is None:
        return None
    if rules.gate_stored == "fused":
        return q_TNX[..., rules.head_dim :]
    return _attn_heads(h_TD, w, "g", rules.num_q_heads, bias=False)


def _attn_qk_norm(q_TNH: Array, k_TGH: Array, w: dict[str, Array], rules: AttnTokenRules) -> tuple[Array, Array]:
    eps, zero_centered = rules.norm_eps, rules.norm_zero_centered
    match rules.qk_norm:
        case "none":
            return q_TNH, k_TGH
        case "l2":
            return _attn_unit(q_TNH, eps), _attn_unit(k_TGH, eps)
        case "head":
            return (
                rms_norm(q_TNH, w["q_norm"], eps=eps, zero_centered=zero_centered),
                rms_norm(k_TGH, w["k_norm"], eps=eps, zero_centered=zero_centered),
            )
        case "full":
            return _attn_full_norm(q_TNH, k_TGH, w, rules)


def _attn_unit(x: Array, eps: float) -> Array:
    """RMS norm of each head without gain; returns x.dtype."""
    x32 = x.astype(jnp.float32)
    return (x32 * lax.rsqrt(jnp.mean(x32 * x32, axis=-1, keepdims=True) + eps)).astype(x.dtype)


def _attn_full_norm(q_TNH: Array, k_TGH: Array, w: dict[str, Array], rules: AttnTokenRules) -> tuple[Array, Array]:
    """RMS norm over all heads together, those of other devices included; gains [N*H], [G*H] and rounding as rms_norm.

    The mean over devices of their means is the mean over all heads: every device has equally many, and a
    key head given to several devices is so to equally many as every other.
    """
    square_T2 = jnp.stack([jnp.mean(jnp.square(x.astype(jnp.float32)), axis=(1, 2)) for x in (q_TNH, k_TGH)], axis=1)
    if rules.sum_axes:
        square_T2 = lax.pmean(square_T2, rules.sum_axes)
    inverse_T2 = lax.rsqrt(square_T2 + rules.norm_eps)

    def scaled(x: Array, gain: Array, inverse_T: Array) -> Array:
        normed, gain = x.astype(jnp.float32) * inverse_T[:, None, None], gain.reshape(x.shape[1:])
        if rules.norm_zero_centered:
            return (normed * (1.0 + gain.astype(jnp.float32))).astype(x.dtype)
        return normed.astype(x.dtype) * gain.astype(x.dtype)

    return scaled(q_TNH, w["q_norm"], inverse_T2[:, 0]), scaled(k_TGH, w["k_norm"], inverse_T2[:, 1])


def _attn_warm(q_TNH: Array, positions_T: Array, floor: int, scale: float, offset: int) -> Array:
    """Queries times 1 + scale * ln(1 + floor((position + offset) / floor)); float32 inside, returns q's dtype."""
    steps_T = (positions_T.astype(jnp.int32) + offset) // floor
    factor_T = 1.0 + scale * jnp.log1p(steps_T.astype(jnp.float32))
    return (q_TNH.astype(jnp.float32) * factor_T[:, None, None]).astype(q_TNH.dtype)


__all__ = ["AttnTokenRules", "attn_gated", "attn_linear", "attn_project"]
