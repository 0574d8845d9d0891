"""What Gated DeltaNet does to single tokens: input projections, gates, convolved inputs to heads, output norm and gate.

Legend: T tokens, D hidden, Q query/key heads, V value heads, k = dk and d = dv their dims, F = 2*Q*dk + V*dv conv
channels (q | k | v), K conv taps, R decay rates of a token.
"""

from typing import Literal, NamedTuple

import jax.numpy as jnp
from jax import Array, lax

from ..activation.xla import activate
from ..core.linear import linear
from ..core.norm import rms_norm

# Inside the root of the sum of squares, as in Hugging Face transformers 5.24.
GDN_L2_EPS = 1e-6


class GdnHeads(NamedTuple):
    """Local head counts and dims."""

    qk: int
    v: int
    dk: int
    dv: int


def gdn_inputs(
    h_TD: Array,
    w: dict[str, Array],
    heads: GdnHeads,
    *,
    channel_decay: bool,
    decay_lower_bound: float | None,
    negative_eigenvalues: bool,
) -> tuple[Array, Array, Array, Array]:
    """What the recurrence takes, before the convolution: inputs [T, F] in h's dtype; float32: write strengths [T, V],
    log decays [T, V] or [T, V, k], taps [K, F]. Options: see xla.py."""
    in_TF = jnp.concatenate([linear(h_TD, w[name]) for name in ("w_q", "w_k", "w_v")], axis=1)
    taps_KF = jnp.concatenate([w[name] for name in ("conv_q", "conv_k", "conv_v")]).astype(jnp.float32).T
    beta_TV = activate(linear(h_TD, w["w_b"]).astype(jnp.float32), "sigmoid")
    beta_TV = 2 * beta_TV if negative_eigenvalues else beta_TV
    rates = (heads.v, heads.dk) if channel_decay else (heads.v,)
    g_T = _gdn_log_decay(_gdn_project(h_TD, w, "w_a", "f"), w["a_log"], w["dt_bias"], rates, decay_lower_bound)
    return in_TF, beta_TV, g_T, taps_KF


def gdn_output(
    o_TVd: Array,
    h_TD: Array,
    w: dict[str, Array],
    *,
    norm_eps: float,
    norm_zero_centered: bool,
    gate_activation: Literal["silu", "sigmoid"],
) -> Array:
    """Outputs of the recurrence, normed per head, gated and projected -> [T, D] in h's dtype."""
    z_TVd = _gdn_project(h_TD, w, "w_z", "g").reshape(o_TVd.shape).astype(jnp.float32)
    normed_TVd = rms_norm(o_TVd, w["out_norm"], eps=norm_eps, zero_centered=norm_zero_centered).astype(jnp.float32)
    y_TVd = (normed_TVd * z_TVd if gate_activation == "silu" else normed_TVd) * activate(z_TVd, "sigmoid")
    y_TVd = y_TVd.astype(h_TD.dtype)
    return linear(y_TVd.reshape(h_TD.shape[0], -1), w["w_o"])


def gdn_split(conv_TF: Array, heads: GdnHeads) -> tuple[Array, Array, Array]:
    """Convolved inputs -> silu -> unit queries (times dk^-1/2) and keys [T, Q, k], values [T, V, d]."""
    x_TF = activate(conv_TF, "silu")
    width = heads.qk * heads.dk
    q_TQk, k_TQk = (
        _gdn_unit(x.reshape(-1, heads.qk, heads.dk)) for x in (x_TF[:, :width], x_TF[:, width : 2 * width])
    )  # fmt: skip
    return q_TQk * heads.dk**-0.5, k_TQk, x_TF[:, 2 * width :].reshape(-1, heads.v, heads.dv)


def _gdn_project(h_TD: Array, w: dict[str, Array], whole: str, halves: str) -> Array:
    """h through one matrix, or through the two of a low-rank one."""
    if whole in w:
        return linear(h_TD, w[whole])
    return linear(linear(h_TD, w[f"{halves}_a"]), w[f"{halves}_b"])


def _gdn_log_decay(
    a_TR: Array, a_log_V: Array, dt_bias_R: Array, rates: tuple[int, ...], lower_bound: float | None
) -> Array:
    """-exp(a_log) * softplus(a + dt_bias), or lower_bound * sigmoid(exp(a_log) * (a + dt_bias)).

    R: the rates of one token, [V] or [V, k] flat. Returns [T, *rates] float32, <= 0.
    """
    shifted = (a_TR.astype(jnp.float32) + dt_bias_R.astype(jnp.float32)).reshape(-1, *rates)
    speed = jnp.exp(a_log_V.astype(jnp.float32)).reshape(-1, *(1,) * (len(rates) - 1))
    if lower_bound is not None:
        return lower_bound * activate(speed * shifted, "sigmoid")
    return -speed * activate(shifted, "softplus")


def _gdn_unit(x: Array) -> Array:
    return x * lax.rsqrt(jnp.sum(x * x, axis=-1, keepdims=True) + GDN_L2_EPS)


__all__ = ["GDN_L2_EPS", "GdnHeads", "gdn_inputs", "gdn_output", "gdn_split"]
