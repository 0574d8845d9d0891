"""Mamba-2 (arXiv:2405.21060) in plain XLA: recurrent step for decode rows, chunks for prefill rows.

Legend: T tokens, S rows, D hidden, H heads, G groups, R = H/G heads of a group, P channels of a
head, N state size, I = H*P, M = 2*G*N (B | C), C tokens of a chunk (i, j: two of them).

Per token and head, with time step dt > 0 and a = -exp(a_log):
    S <- e^(dt a) S + dt x B^T;  y = S C + d x
The chunk form is the state space duality: inside a chunk y_i = sum_{j<=i} e^(a_(j+1..i)) (C_i.B_j) dt_j x_j.

State math is float32 whatever the pools' dtype, and its dot products are Precision.HIGHEST:
TPU's default multiplies float32 in bfloat16, and the recurrence would carry that error along.
The projections follow the ambient precision. Only values <= 0 are exponentiated, and they are
sums of the tokens between, never differences of running sums, which cancel after a long decay.
"""

from typing import NamedTuple

import jax.numpy as jnp
from jax import Array, lax

from ..activation.xla import activate
from ..core.batch import Batch, Rows
from ..core.causal_conv import causal_conv
from ..core.linear import einsum_f32, linear
from ..core.norm import rms_scaled
from ..core.recurrence import over_chunks, over_decode_rows


class _Mamba2Inputs(NamedTuple):
    """What the recurrence reads of every token: x [T, H, P], B and C [T, G, N], dt and dt*a [T, H] float32."""

    x: Array
    b: Array
    c: Array
    dt: Array
    log_decay: Array


def mamba2(
    h_TD: Array,
    w: dict[str, Array],
    conv_pool: Array,
    conv_bc_pool: Array,
    state_pool: Array,
    batch: Batch,
    rows: Rows,
    *,
    pool_layer: Array | int,
    num_heads: int,
    num_groups: int,
    head_dim: int,
    state_size: int,
    conv_kernel: int,
    norm_eps: float,
    chunk: int,
    max_q: int,
    norm_zero_centered: bool = False,
    time_step_min: float = 0.0,
    time_step_max: float | None = None,
    conv_bias: bool = False,
    proj_bias: bool = False,
    sum_axes: tuple[str, ...] = (),
    norm_groups: int = 1,
) -> tuple[Array, Array, Array, Array]:
    """State space recurrence of every row, from its slot's state (zeros without has_state) and back into it.

    conv_pool [L, slots, W*I], conv_bc_pool [L, slots, W*M] (oldest input first), state_pool
    [L, slots, H, P, N]; pool_layer may be traced. Heads and groups are the local ones. chunk:
    tokens solved together in the prefill path. max_q: the longest row this bucket may hold; 1
    leaves the prefill path out of the program. time_step_*: limits of dt after softplus, for every
    token alike. The output is gated, then RMS-normed group by group (norm_eps, norm_zero_centered).
    sum_axes: mesh axes whose devices share norm_groups groups, several devices each; () = none is shared.
    Returns out [T, D] in h's dtype, partial over tensor parallelism and without b_o, and the three pools.
    """
    assert w["conv_x"].shape[1] == conv_kernel, (w["conv_x"].shape, conv_kernel)
    part = {
        name: linear(h_TD, w[f"w_{name}"], w[f"b_{name}"] if proj_bias else None) for name in ("z", "x", "b", "c", "dt")
    }
    x_TI, conv_pool = causal_conv(
        part["x"], w["conv_x"], w["conv_x_bias"] if conv_bias else None, conv_pool, batch, rows,
        pool_layer=pool_layer, max_q=max_q,
    )  # fmt: skip
    bc_TM, conv_bc_pool = causal_conv(
        jnp.concatenate([part["b"], part["c"]], axis=1),
        jnp.concatenate([w["conv_b"], w["conv_c"]]),
        jnp.concatenate([w["conv_b_bias"], w["conv_c_bias"]]) if conv_bias else None,
        conv_bc_pool, batch, rows, pool_layer=pool_layer, max_q=max_q,
    )  # fmt: skip
    dt_TH = _mamba2_time_step(part["dt"], w["dt_bias"], time_step_min, time_step_max)
    x_THP = activate(x_TI, "silu").astype(h_TD.dtype).reshape(-1, num_heads, head_dim)
    bc_TM = activate(bc_TM, "silu").astype(h_TD.dtype)
    b_TGN, c_TGN = (half.reshape(-1, num_groups, state_size) for half in jnp.split(bc_TM, 2, axis=1))
    inputs = _Mamba2Inputs(x_THP, b_TGN, c_TGN, dt_TH, dt_TH * -jnp.exp(w["a_log"].astype(jnp.float32)))

    first = _mamba2_rows(inputs, batch.slot.shape[0])
    y_THP, state_pool = over_decode_rows(
        _mamba2_step, first, x_THP.shape, h_TD.dtype, state_pool, pool_layer, batch
    )  # fmt: skip
    if max_q > 1:
        y_THP, (state_pool,) = over_chunks(
            _mamba2_chunk, inputs, y_THP, (state_pool,), pool_layer, batch, rows, chunk=chunk
        )  # fmt: skip
    y_THP = y_THP.astype(jnp.float32) + w["d"].astype(jnp.float32)[:, None] * x_THP.astype(jnp.float32)
    gated_TI = y_THP.reshape(x_TI.shape) * activate(part["z"].astype(jnp.float32), "silu")
    gated_TGi = gated_TI.reshape(-1, num_groups, x_TI.shape[1] // num_groups)
    square_TG1, gain_Gi = _mamba2_mean_square(gated_TGi, sum_axes, norm_groups), w["out_norm"].reshape(num_groups, -1)
    normed_TGi = rms_scaled(gated_TGi, gain_Gi, square_TG1, eps=norm_eps, zero_centered=norm_zero_centered)
    return linear(normed_TGi.reshape(x_TI.shape).astype(h_TD.dtype), w["w_o"]), conv_pool, conv_bc_pool, state_pool


def _mamba2_time_step(dt_TH: Array, bias_H: Array, least: float, most: float | None) -> Array:
    """softplus(dt + bias) within its limits, float32."""
    return jnp.clip(activate(dt_TH.astype(jnp.float32) + bias_H.astype(jnp.float32), "softplus"), least, most)


def _mamba2_mean_square(gated_TGi: Array, sum_axes: tuple[str, ...], norm_groups: int) -> Array:
    """mean(x^2) over each group [T, G, 1], which several neighbours along sum_axes may share.

    Every device adds its sum of squares at its group's place, so that one small message serves all groups.
    """
    width, square_TG1 = gated_TGi.shape[2], jnp.sum(gated_TGi * gated_TGi, axis=2, keepdims=True)
    if sum_axes:
        assert gated_TGi.shape[1] == 1, gated_TGi.shape
        devices = lax.axis_size(sum_axes)
        mine_g = jnp.arange(norm_groups) == lax.axis_index(sum_axes) * norm_groups // devices
        all_Tg = lax.psum(jnp.where(mine_g, square_TG1[:, 0], 0), sum_axes)
        square_TG1 = jnp.sum(jnp.where(mine_g, all_Tg, 0), axis=1)[:, None, None]
        width = width * devices // norm_groups
    return square_TG1 / width


def _mamba2_rows(inputs: _Mamba2Inputs, num_rows: int) -> tuple[Array, ...]:
    """What _mamba2_step reads of the first tokens, float32: writes [S, H, P], B and C [S, H, N], log decays [S, H]."""
    x_SHP, b_SGN, c_SGN, dt_SH, log_decay_SH = (part[:num_rows].astype(jnp.float32) for part in inputs)
    b_SHN, c_SHN = (jnp.repeat(part, x_SHP.shape[1] // part.shape[1], axis=1) for part in (b_SGN, c_SGN))
    return dt_SH[:, :, None] * x_SHP, b_SHN, c_SHN, log_decay_SH


def _mamba2_step(
    write_HP: Array, b_HN: Array, c_HN: Array, log_decay_H: Array, state_HPN: Array
) -> tuple[Array, Array]:
    """One token: its output [H, P] without d x, and the state after it."""
    state_HPN = jnp.exp(log_decay_H)[:, None, None] * state_HPN + write_HP[:, :, None] * b_HN[:, None, :]
    return jnp.sum(state_HPN * c_HN[:, None, :], axis=2), state_HPN


def _mamba2_chunk(
    x_CHP: Array, b_CGN: Array, c_CGN: Array, dt_CH: Array, log_decay_CH: Array, num_valid: Array, state_HPN: Array
) -> tuple[Array, tuple[Array]]:
    """C tokens of one row at once: outputs [C, H, P] (without d x) and the state after them; float32.

    Of tokens past num_valid everything is 0: with dt = 0 they leave the state as it is.
    """
    (C, H, P), (_, G, N) = x_CHP.shape, b_CGN.shape
    R = H // G
    write_GRCP = (dt_CH[:, :, None] * x_CHP).reshape(C, G, R, P).transpose(1, 2, 0, 3)
    b_GCN, c_GCN = b_CGN.swapaxes(0, 1), c_CGN.swapaxes(0, 1)
    between_Hij = _mamba2_between(log_decay_CH.T)
    decay_GRij = jnp.exp(between_Hij).reshape(G, R, C, C)
    # From before the chunk to after token i, and from after token j to the chunk's end.
    since_GRC1 = jnp.exp(jnp.cumsum(log_decay_CH, axis=0)).T.reshape(G, R, C, 1)
    until_GRC1 = decay_GRij[:, :, -1, :, None]

    state_GRPN = state_HPN.reshape(G, R, P, N)
    cb_Gij = einsum_f32("gin,gjn->gij", c_GCN, b_GCN)
    y_GRCP = einsum_f32("grij,grjp->grip", decay_GRij * cb_Gij[:, None], write_GRCP)
    y_GRCP = y_GRCP + since_GRC1 * einsum_f32("gin,grpn->grip", c_GCN, state_GRPN)
    state_GRPN = since_GRC1[:, :, -1:] * state_GRPN + einsum_f32("grjp,gjn->grpn", until_GRC1 * write_GRCP, b_GCN)
    return y_GRCP.transpose(2, 0, 1, 3).reshape(C, H, P), (state_GRPN.reshape(H, P, N),)


def _mamba2_between(log_decay_HC: Array) -> Array:
    """Sum over the tokens j+1 .. i for every pair, 0 at i = j, -inf above the diagonal. [H, C, C]."""
    C = log_decay_HC.shape[1]
    i, j = jnp.arange(C)[:, None], jnp.arange(C)[None]
    until_ik, after_kj = (i >= j).astype(jnp.float32), (i > j).astype(jnp.float32)
    sums_Hij = einsum_f32("hik,kj->hij", until_ik * log_decay_HC[:, None, :], after_kj)
    return jnp.where(i >= j, sums_Hij, -jnp.inf)


__all__ = ["mamba2"]
