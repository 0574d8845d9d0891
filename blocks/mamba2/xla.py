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

The state pool is loop-carried and updated in place, one slot of one layer at a time.
"""

from typing import NamedTuple

import jax.numpy as jnp
from jax import Array, lax

from ..core.batch import Batch, Rows
from ..core.causal_conv import causal_conv


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
    part = {name: _mamba2_linear(h_TD, w[f"w_{name}"]) for name in ("z", "x", "b", "c", "dt")}
    if proj_bias:
        part = {name: value + w[f"b_{name}"].astype(value.dtype) for name, value in part.items()}
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
    x_THP = _mamba2_silu(x_TI).astype(h_TD.dtype).reshape(-1, num_heads, head_dim)
    bc_TM = _mamba2_silu(bc_TM).astype(h_TD.dtype)
    b_TGN, c_TGN = (half.reshape(-1, num_groups, state_size) for half in jnp.split(bc_TM, 2, axis=1))
    inputs = _Mamba2Inputs(x_THP, b_TGN, c_TGN, dt_TH, dt_TH * -jnp.exp(w["a_log"].astype(jnp.float32)))

    y_THP, state_pool = _mamba2_decode(inputs, batch, rows, pool_layer, state_pool)
    if max_q > 1:
        y_THP, state_pool = _mamba2_prefill(inputs, batch, rows, pool_layer, y_THP, state_pool, chunk=chunk)
    y_THP = y_THP.astype(jnp.float32) + w["d"].astype(jnp.float32)[:, None] * x_THP.astype(jnp.float32)
    gated_TI = y_THP.reshape(x_TI.shape) * _mamba2_silu(part["z"].astype(jnp.float32))
    gated_TGi = gated_TI.reshape(-1, num_groups, x_TI.shape[1] // num_groups)
    normed_TGi = _mamba2_norm(gated_TGi, norm_eps, sum_axes, norm_groups)
    normed_TI = normed_TGi.reshape(x_TI.shape) * (w["out_norm"].astype(jnp.float32) + norm_zero_centered)
    return _mamba2_linear(normed_TI.astype(h_TD.dtype), w["w_o"]), conv_pool, conv_bc_pool, state_pool


def _mamba2_linear(x: Array, w: Array) -> Array:
    """x @ w accumulated in float32, rounded to x.dtype; precision is the ambient default."""
    return jnp.dot(x, w, preferred_element_type=jnp.float32).astype(x.dtype)


def _mamba2_einsum(subscripts: str, a: Array, b: Array) -> Array:
    """A float32 contraction of the state math (see the head of the file)."""
    return jnp.einsum(subscripts, a, b, precision=lax.Precision.HIGHEST)


def _mamba2_time_step(dt_TH: Array, bias_H: Array, least: float, most: float | None) -> Array:
    """softplus(dt + bias) within its limits, float32."""
    dt_TH = jnp.logaddexp(dt_TH.astype(jnp.float32) + bias_H.astype(jnp.float32), 0.0)
    return jnp.clip(dt_TH, least, most)


def _mamba2_silu(x: Array) -> Array:
    return x * lax.logistic(x)


def _mamba2_norm(gated_TGi: Array, eps: float, sum_axes: tuple[str, ...], norm_groups: int) -> Array:
    """x / sqrt(mean(x^2) + eps) over each group, which several neighbours along sum_axes may share.

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
    return gated_TGi * lax.rsqrt(square_TG1 / width + eps)


def _mamba2_decode(
    inputs: _Mamba2Inputs, batch: Batch, rows: Rows, pool_layer: Array | int, state_pool: Array
) -> tuple[Array, Array]:
    """The decode rows (token s belongs to row s); outputs are zeros for other tokens. [T, H, P] without d x.

    The states, S times H*P*N*4 bytes, go through a loop one row at a time, so that no second copy of
    them exists.
    """
    T, heads = inputs.x.shape[0], inputs.x.shape[1]
    S = min(T, batch.slot.shape[0])
    slot_S = jnp.where((jnp.arange(S) < batch.distribution[0]) & rows.valid[:S], batch.slot[:S], 0)
    x_SHP, b_SGN, c_SGN, dt_SH, log_decay_SH = (part[:S].astype(jnp.float32) for part in inputs)
    b_SHN, c_SHN = (jnp.repeat(part, heads // part.shape[1], axis=1) for part in (b_SGN, c_SGN))
    write_SHP = dt_SH[:, :, None] * x_SHP

    def add_row(s: Array, carry: tuple[Array, Array]) -> tuple[Array, Array]:
        y_SHP, state_pool = carry
        state_HPN = _mamba2_read_state(state_pool, pool_layer, slot_S[s], batch.has_state[s])
        decay_H11 = jnp.exp(log_decay_SH[s])[:, None, None]
        state_HPN = decay_H11 * state_HPN + write_SHP[s][:, :, None] * b_SHN[s][:, None, :]
        y_HP = jnp.sum(state_HPN * c_SHN[s][:, None, :], axis=2)
        return y_SHP.at[s].set(y_HP), _mamba2_write_state(state_pool, pool_layer, slot_S[s], state_HPN)

    y_SHP, state_pool = lax.fori_loop(0, batch.distribution[0], add_row, (jnp.zeros_like(x_SHP), state_pool))
    return jnp.pad(y_SHP.astype(inputs.x.dtype), ((0, T - S), (0, 0), (0, 0))), state_pool


def _mamba2_read_state(state_pool: Array, layer: Array | int, slot: Array, has_state: Array) -> Array:
    """One slot's state [H, P, N] in float32; zeros (whatever the slot holds) without has_state."""
    state = lax.dynamic_slice(state_pool, (layer, slot, 0, 0, 0), (1, 1, *state_pool.shape[2:]))[0, 0]
    return jnp.where(has_state, state.astype(jnp.float32), 0)


def _mamba2_write_state(state_pool: Array, layer: Array | int, slot: Array, state_HPN: Array) -> Array:
    update = state_HPN.astype(state_pool.dtype)[None, None]
    return lax.dynamic_update_slice(state_pool, update, (layer, slot, 0, 0, 0))


def _mamba2_prefill(
    inputs: _Mamba2Inputs,
    batch: Batch,
    rows: Rows,
    pool_layer: Array | int,
    y_THP: Array,
    state_pool: Array,
    *,
    chunk: int,
) -> tuple[Array, Array]:
    """The prefill rows' tokens into y_THP; chunks start at row starts, work items run in a loop.

    All trip counts are dynamic. Within a row the state stays float32 from chunk to chunk; it
    takes the pool's dtype at the end of the row.
    """
    T = y_THP.shape[0]
    # `chunk` tokens of padding: the last chunk of the last row is then sliced whole.
    *padded, y_THP = (jnp.pad(x, ((0, chunk),) + ((0, 0),) * (x.ndim - 1)) for x in (*inputs, y_THP))

    def add_row(s: Array, carry: tuple[Array, Array]) -> tuple[Array, Array]:
        y_THP, state_pool = carry
        slot, q_len = batch.slot[s], rows.q_len[s]

        def add_chunk(c: Array, carry: tuple[Array, Array]) -> tuple[Array, Array]:
            y_THP, state_HPN = carry
            first = batch.cu_q[s] + c * chunk
            valid_C = jnp.arange(chunk) < q_len - c * chunk
            items = _Mamba2Inputs(*(_mamba2_slice(x, first, valid_C) for x in padded))
            new_CHP, state_HPN = _mamba2_chunk(items, state_HPN)
            old_CHP = lax.dynamic_slice_in_dim(y_THP, first, chunk)
            y_CHP = jnp.where(valid_C[:, None, None], new_CHP.astype(y_THP.dtype), old_CHP)
            return lax.dynamic_update_slice_in_dim(y_THP, y_CHP, first, 0), state_HPN

        state_HPN = _mamba2_read_state(state_pool, pool_layer, slot, batch.has_state[s])
        y_THP, state_HPN = lax.fori_loop(0, (q_len + chunk - 1) // chunk, add_chunk, (y_THP, state_HPN))
        return y_THP, _mamba2_write_state(state_pool, pool_layer, slot, state_HPN)

    y_THP, state_pool = lax.fori_loop(batch.distribution[0], batch.distribution[1], add_row, (y_THP, state_pool))
    return y_THP[:T], state_pool


def _mamba2_slice(x: Array, first: Array, valid_C: Array) -> Array:
    """A chunk's tokens in float32. Other rows' tokens are zeros: with dt = 0 they leave the state as it is."""
    x_C = lax.dynamic_slice_in_dim(x, first, valid_C.shape[0]).astype(jnp.float32)
    return jnp.where(valid_C.reshape(-1, *(1,) * (x.ndim - 1)), x_C, 0)


def _mamba2_chunk(items: _Mamba2Inputs, state_HPN: Array) -> tuple[Array, Array]:
    """C tokens of one row at once: outputs [C, H, P] (without d x) and the state after them; float32."""
    (C, H, P), (_, G, N) = items.x.shape, items.b.shape
    R = H // G
    write_GRCP = (items.dt[:, :, None] * items.x).reshape(C, G, R, P).transpose(1, 2, 0, 3)
    b_GCN, c_GCN = items.b.swapaxes(0, 1), items.c.swapaxes(0, 1)
    between_Hij = _mamba2_between(items.log_decay.T)
    decay_GRij = jnp.exp(between_Hij).reshape(G, R, C, C)
    # From before the chunk to after token i, and from after token j to the chunk's end.
    since_GRC1 = jnp.exp(jnp.cumsum(items.log_decay, axis=0)).T.reshape(G, R, C, 1)
    until_GRC1 = decay_GRij[:, :, -1, :, None]

    state_GRPN = state_HPN.reshape(G, R, P, N)
    cb_Gij = _mamba2_einsum("gin,gjn->gij", c_GCN, b_GCN)
    y_GRCP = _mamba2_einsum("grij,grjp->grip", decay_GRij * cb_Gij[:, None], write_GRCP)
    y_GRCP = y_GRCP + since_GRC1 * _mamba2_einsum("gin,grpn->grip", c_GCN, state_GRPN)
    state_GRPN = since_GRC1[:, :, -1:] * state_GRPN + _mamba2_einsum("grjp,gjn->grpn", until_GRC1 * write_GRCP, b_GCN)
    return y_GRCP.transpose(2, 0, 1, 3).reshape(C, H, P), state_GRPN.reshape(H, P, N)


def _mamba2_between(log_decay_HC: Array) -> Array:
    """Sum over the tokens j+1 .. i for every pair, 0 at i = j, -inf above the diagonal. [H, C, C]."""
    C = log_decay_HC.shape[1]
    i, j = jnp.arange(C)[:, None], jnp.arange(C)[None]
    until_ik, after_kj = (i >= j).astype(jnp.float32), (i > j).astype(jnp.float32)
    sums_Hij = _mamba2_einsum("hik,kj->hij", until_ik * log_decay_HC[:, None, :], after_kj)
    return jnp.where(i >= j, sums_Hij, -jnp.inf)


__all__ = ["mamba2"]
