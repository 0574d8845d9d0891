"""What latent attention does to single tokens: queries, the row to cache, the gate.

Legend: T tokens, D hidden, N heads, R latent (kv_lora_rank), E rope dims, C = R + E (one cached token), H nope dims,
V value dims, X = H + E (a query; [query | gate] where the gate is fused), Y gate values per head (V or 1).
"""

from dataclasses import dataclass
from typing import Literal

import jax.numpy as jnp
from jax import Array

from ..core.heads import gated, warmed
from ..core.linear import linear
from ..core.norm import rms_norm
from ..core.rope import Rope, rope


@dataclass(frozen=True)
class MlaTokenRules:
    """The options of xla.mla that concern single tokens; meaning: there."""

    num_heads: int
    kv_lora_rank: int
    qk_nope_head_dim: int
    norm_eps: float
    rope_spec: Rope | None
    norm_zero_centered: bool
    query_latent: bool
    temperature: tuple[int, float, int] | None
    output_gate: Literal["sigmoid", "softplus"] | None
    gate_stored: Literal["fused", "own"]
    bias: bool


def mla_project(
    h_TD: Array, w: dict[str, Array], positions_T: Array, rules: MlaTokenRules
) -> tuple[Array, Array, Array | None]:
    """Queries [T, N, H + E], rows to cache [T, C] before their rounding, the gate before its activation or None."""
    T, N, R, H = h_TD.shape[0], rules.num_heads, rules.kv_lora_rank, rules.qk_nope_head_dim
    X = H + w["w_kv_a"].shape[1] - R

    def norm(x: Array, name: str) -> Array:
        return rms_norm(x, w[name], eps=rules.norm_eps, zero_centered=rules.norm_zero_centered)

    if rules.query_latent:
        a_TF = norm(linear(h_TD, w["w_q_a"], w["b_q_a"] if rules.bias else None), "q_a_norm")
        made_TNF = linear(a_TF, w["w_q_b"]).reshape(T, N, -1)  # a fused gate: [query | gate] per head
    else:
        made_TNF = linear(h_TD, w["w_q"]).reshape(T, N, -1)
    q_TNX = jnp.concatenate([made_TNF[..., :H], rope(made_TNF[..., H:X], positions_T, rules.rope_spec)], axis=-1)
    if rules.temperature is not None:
        q_TNX = warmed(q_TNX, positions_T, *rules.temperature)
    a_TC = linear(h_TD, w["w_kv_a"], w["b_kv_a"] if rules.bias else None)
    shared_TE = rope(a_TC[:, None, R:], positions_T, rules.rope_spec)[:, 0]
    new_TC = jnp.concatenate([norm(a_TC[:, :R], "kv_a_norm"), shared_TE], axis=-1)
    if rules.output_gate is None:
        return q_TNX, new_TC, None
    gate_TNY = linear(h_TD, w["w_g"]).reshape(T, N, -1) if rules.gate_stored == "own" else made_TNF[..., X:]
    return q_TNX, new_TC, gate_TNY


def mla_output(
    out_TNV: Array, gate_TNY: Array | None, w: dict[str, Array], activation: Literal["sigmoid", "softplus"] | None
) -> Array:
    """Heads' outputs, gated and projected -> [T, D] without bias, partial over tensor parallelism."""
    if activation is not None and gate_TNY is not None:
        out_TNV = gated(out_TNV, gate_TNY, activation)
    return linear(out_TNV.reshape(out_TNV.shape[0], -1), w["w_o"])


__all__ = ["MlaTokenRules", "mla_output", "mla_project"]
