"""What attention does to single tokens: projections, norms, rope and scales.

Legend: T tokens, D hidden, N q heads, G kv heads, H head_dim, V v_head_dim, X gate values per head.
"""

from dataclasses import dataclass
from typing import Literal

import jax.numpy as jnp
from jax import Array, lax

from ..core.heads import warmed
from ..core.linear import linear
from ..core.norm import mean_square, rms_norm, rms_scaled
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
        v_TGV = rms_norm(v_TGV, None, eps=rules.norm_eps, zero_centered=False)
    if rules.clip_qkv is not None:
        q_TNH, k_TGH, v_TGV = (jnp.clip(x, -rules.clip_qkv, rules.clip_qkv) for x in (q_TNH, k_TGH, v_TGV))
    q_TNH, k_TGH = rope(q_TNH, positions_T, rules.rope), rope(k_TGH, positions_T, rules.rope)
    if rules.qk_norm_place == "after_rope":
        q_TNH, k_TGH = _attn_qk_norm(q_TNH, k_TGH, w, rules)
    if rules.temperature is not None:
        q_TNH = warmed(q_TNH, positions_T, *rules.temperature)
    if rules.value_scale != 1:
        v_TGV = v_TGV * rules.value_scale
    return q_TNH, k_TGH.reshape(T, -1), v_TGV.reshape(T, -1), _attn_gate(h_TD, w, q_TNX, rules)


def _attn_heads(h_TD: Array, w: dict[str, Array], name: str, number: int, bias: bool) -> Array:
    return linear(h_TD, w[f"w_{name}"], w[f"b_{name}"] if bias else None).reshape(h_TD.shape[0], number, -1)


def _attn_gate(h_TD: Array, w: dict[str, Array], q_TNX: Array, rules: AttnTokenRules) -> Array | None:
    if rules.output_gate is None:
        return None
    if rules.gate_stored == "fused":
        return q_TNX[..., rules.head_dim :]
    return _attn_heads(h_TD, w, "g", rules.num_q_heads, bias=False)


def _attn_qk_norm(q_TNH: Array, k_TGH: Array, w: dict[str, Array], rules: AttnTokenRules) -> tuple[Array, Array]:
    match rules.qk_norm:
        case "none":
            return q_TNH, k_TGH
        case "full":
            return _attn_full_norm(q_TNH, k_TGH, w, rules)
    q_gain, k_gain = (w["q_norm"], w["k_norm"]) if rules.qk_norm == "head" else (None, None)
    eps, zero_centered = rules.norm_eps, rules.norm_zero_centered
    return (
        rms_norm(q_TNH, q_gain, eps=eps, zero_centered=zero_centered),
        rms_norm(k_TGH, k_gain, eps=eps, zero_centered=zero_centered),
    )


def _attn_full_norm(q_TNH: Array, k_TGH: Array, w: dict[str, Array], rules: AttnTokenRules) -> tuple[Array, Array]:
    """RMS norm over all heads together, those of other devices included; gains [N*H], [G*H]. One message for both.

    The mean over devices of their means is the mean over all heads: every device has equally many, and a
    key head given to several devices is so to equally many as every other.
    """
    q_TF, k_TF = (x.reshape(x.shape[0], -1) for x in (q_TNH, k_TGH))
    square_T2 = jnp.concatenate([mean_square(q_TF), mean_square(k_TF)], axis=1)
    if rules.sum_axes:
        square_T2 = lax.pmean(square_T2, rules.sum_axes)
    eps, zero_centered = rules.norm_eps, rules.norm_zero_centered
    q_TF = rms_scaled(q_TF, w["q_norm"], square_T2[:, :1], eps=eps, zero_centered=zero_centered)
    k_TF = rms_scaled(k_TF, w["k_norm"], square_T2[:, 1:], eps=eps, zero_centered=zero_centered)
    return q_TF.reshape(q_TNH.shape), k_TF.reshape(k_TGH.shape)


__all__ = ["AttnTokenRules", "attn_project"]
