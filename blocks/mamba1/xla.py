"""Mamba (arXiv:2312.00752) in plain XLA: recurrent step for decode rows, chunks for prefill rows.

Legend: T tokens, S rows, D hidden, I channels, N state size, r rank of dt, C tokens of a chunk.

Per token and channel, with time step dt > 0 and a = -exp(a_log):
    h <- e^(dt a) h + dt x B;  y = C h + d x
A chunk is one associative scan over (decay, write) pairs. State math is float32, elementwise,
and only values <= 0 are exponentiated. The projections follow the ambient precision.

The state pool is loop-carried and updated in place, one slot of one layer at a time.
"""

from typing import NamedTuple

import jax.numpy as jnp
from jax import Array, lax

from ..core.batch import Batch, Rows
from ..core.causal_conv import causal_conv
from ..core.norm import rms_norm


class _Mamba1Inputs(NamedTuple):
    """What the recurrence reads of every token: x [T, I], dt [T, I] and B, C [T, N] float32."""

    x: Array
    dt: Array
    b: Array
    c: Array


def mamba1(
    h_TD: Array,
    w: dict[str, Array],
    conv_pool: Array,
    state_pool: Array,
    batch: Batch,
    rows: Rows,
    *,
    pool_layer: Array | int,
    conv_kernel: int,
    chunk: int,
    max_q: int,
    conv_bias: bool = False,
    proj_bias: bool = False,
    norm_eps: float | None = None,
    norm_zero_centered: bool = False,
    sum_axes: tuple[str, ...] = (),
) -> tuple[Array, Array, Array]:
    """Selective scan of every row, from its slot's state (zeros without has_state) and back into it.

    conv_pool [L, slots, W*I] (oldest input first), state_pool [L, slots, N, I]; pool_layer may be
    traced. Channels are the local ones. chunk: tokens scanned together in the prefill path. max_q:
    the longest row this bucket may hold; 1 leaves the prefill path out of the program. norm_eps: RMS
    norms of dt, B and C; None = no norms. sum_axes: mesh axes over which the channels are cut, whose
    shares of dt, B and C are summed.
    Returns out [T, D] in h's dtype, partial over tensor parallelism and without b_o, and the two pools.
    """
    assert w["conv"].shape[1] == conv_kernel, (w["conv"].shape, conv_kernel)
    x_TI, z_TI = (_mamba1_linear(h_TD, w[name]) for name in ("w_x", "w_z"))
    if proj_bias:
        x_TI, z_TI = x_TI + w["b_x"].astype(x_TI.dtype), z_TI + w["b_z"].astype(z_TI.dtype)
    x_TI, conv_pool = causal_conv(
        x_TI, w["conv"], w["conv_bias"] if conv_bias else None, conv_pool, batch, rows,
        pool_layer=pool_layer, max_q=max_q,
    )  # fmt: skip
    x_TI = _mamba1_silu(x_TI).astype(h_TD.dtype)
    inputs = _mamba1_inputs(x_TI, w, norm_eps, norm_zero_centered, sum_axes)
    rate_NI = -jnp.exp(w["a_log"].astype(jnp.float32).T)

    y_TI, state_pool = _mamba1_decode(inputs, rate_NI, batch, rows, pool_layer, state_pool)
    if max_q > 1:
        y_TI, state_pool = _mamba1_prefill(inputs, rate_NI, batch, rows, pool_layer, y_TI, state_pool, chunk=chunk)
    y_TI = y_TI.astype(jnp.float32) + w["d"].astype(jnp.float32) * x_TI.astype(jnp.float32)
    y_TI = (y_TI * _mamba1_silu(z_TI.astype(jnp.float32))).astype(h_TD.dtype)
    return _mamba1_linear(y_TI, w["w_o"]), conv_pool, state_pool


def _mamba1_linear(x: Array, w: Array) -> Array:
    """x @ w accumulated in float32, rounded to x.dtype; precision is the ambient default."""
    return jnp.dot(x, w, preferred_element_type=jnp.float32).astype(x.dtype)


def _mamba1_silu(x: Array) -> Array:
    return x * lax.logistic(x)


def _mamba1_inputs(
    x_TI: Array, w: dict[str, Array], norm_eps: float | None, zero_centered: bool, sum_axes: tuple[str, ...]
) -> _Mamba1Inputs:
    """dt, B and C of the convolved channels: one product, one sum over the devices, norms, dt to all channels."""
    names = ("dt", "b", "c")
    mixed = jnp.dot(
        x_TI, jnp.concatenate([w[f"x_{name}"] for name in names], axis=1), preferred_element_type=jnp.float32
    )
    if sum_axes:
        mixed = lax.psum(mixed, sum_axes)
    rank, size = w["x_dt"].shape[1], w["x_b"].shape[1]
    parts = jnp.split(mixed, [rank, rank + size], axis=1)
    if norm_eps is not None:
        parts = [
            rms_norm(part, w[f"{name}_norm"], eps=norm_eps, zero_centered=zero_centered)
            for name, part in zip(names, parts, strict=True)
        ]
    dt_Tr, b_TN, c_TN = parts
    dt_TI = jnp.dot(dt_Tr.astype(x_TI.dtype), w["w_dt"], preferred_element_type=jnp.float32)
    return _Mamba1Inputs(x_TI, jnp.logaddexp(dt_TI + w["dt_bias"].astype(jnp.float32), 0.0), b_TN, c_TN)


def _mamba1_decode(
    inputs: _Mamba1Inputs, rate_NI: Array, batch: Batch, rows: Rows, pool_layer: Array | int, state_pool: Array
) -> tuple[Array, Array]:
    """The decode rows (token s belongs to row s); outputs are zeros for other tokens. [T, I] without d x.

    The states, S times N*I*4 bytes, go through a loop one row at a time, so that no second copy of them exists.
    """
    T = inputs.x.shape[0]
    S = min(T, batch.slot.shape[0])
    slot_S = jnp.where((jnp.arange(S) < batch.distribution[0]) & rows.valid[:S], batch.slot[:S], 0)
    x_SI, dt_SI, b_SN, c_SN = (part[:S].astype(jnp.float32) for part in inputs)

    def add_row(s: Array, carry: tuple[Array, Array]) -> tuple[Array, Array]:
        y_SI, state_pool = carry
        state_NI = _mamba1_read_state(state_pool, pool_layer, slot_S[s], batch.has_state[s])
        state_NI = jnp.exp(dt_SI[s] * rate_NI) * state_NI + b_SN[s][:, None] * (dt_SI[s] * x_SI[s])
        y_I = jnp.sum(c_SN[s][:, None] * state_NI, axis=0)
        return y_SI.at[s].set(y_I), _mamba1_write_state(state_pool, pool_layer, slot_S[s], state_NI)

    y_SI, state_pool = lax.fori_loop(0, batch.distribution[0], add_row, (jnp.zeros_like(x_SI), state_pool))
    return jnp.pad(y_SI.astype(inputs.x.dtype), ((0, T - S), (0, 0))), state_pool


def _mamba1_read_state(state_pool: Array, layer: Array | int, slot: Array, has_state: Array) -> Array:
    """One slot's state [N, I] in float32; zeros (whatever the slot holds) without has_state."""
    state = lax.dynamic_slice(state_pool, (layer, slot, 0, 0), (1, 1, *state_pool.shape[2:]))[0, 0]
    return jnp.where(has_state, state.astype(jnp.float32), 0)


def _mamba1_write_state(state_pool: Array, layer: Array | int, slot: Array, state_NI: Array) -> Array:
    return lax.dynamic_update_slice(state_pool, state_NI.astype(state_pool.dtype)[None, None], (layer, slot, 0, 0))


def _mamba1_prefill(
    inputs: _Mamba1Inputs,
    rate_NI: Array,
    batch: Batch,
    rows: Rows,
    pool_layer: Array | int,
    y_TI: Array,
    state_pool: Array,
    *,
    chunk: int,
) -> tuple[Array, Array]:
    """The prefill rows' tokens into y_TI; chunks start at row starts, work items run in a loop.

    All trip counts are dynamic. Within a row the state stays float32 from chunk to chunk; it
    takes the pool's dtype at the end of the row.
    """
    T = y_TI.shape[0]
    # `chunk` tokens of padding: the last chunk of the last row is then sliced whole.
    *padded, y_TI = (jnp.pad(x, ((0, chunk), (0, 0))) for x in (*inputs, y_TI))

    def add_row(s: Array, carry: tuple[Array, Array]) -> tuple[Array, Array]:
        y_TI, state_pool = carry
        slot, q_len = batch.slot[s], rows.q_len[s]

        def add_chunk(c: Array, carry: tuple[Array, Array]) -> tuple[Array, Array]:
            y_TI, state_NI = carry
            first = batch.cu_q[s] + c * chunk
            valid_C1 = (jnp.arange(chunk) < q_len - c * chunk)[:, None]
            # Other rows' tokens are zeros: with dt = 0 they leave the state as it is.
            items = (
                jnp.where(valid_C1, lax.dynamic_slice_in_dim(x, first, chunk).astype(jnp.float32), 0) for x in padded
            )  # fmt: skip
            new_CI, state_NI = _mamba1_chunk(_Mamba1Inputs(*items), rate_NI, state_NI)
            y_CI = jnp.where(valid_C1, new_CI.astype(y_TI.dtype), lax.dynamic_slice_in_dim(y_TI, first, chunk))
            return lax.dynamic_update_slice_in_dim(y_TI, y_CI, first, 0), state_NI

        state_NI = _mamba1_read_state(state_pool, pool_layer, slot, batch.has_state[s])
        y_TI, state_NI = lax.fori_loop(0, (q_len + chunk - 1) // chunk, add_chunk, (y_TI, state_NI))
        return y_TI, _mamba1_write_state(state_pool, pool_layer, slot, state_NI)

    y_TI, state_pool = lax.fori_loop(batch.distribution[0], batch.distribution[1], add_row, (y_TI, state_pool))
    return y_TI[:T], state_pool


def _mamba1_chunk(items: _Mamba1Inputs, rate_NI: Array, state_NI: Array) -> tuple[Array, Array]:
    """C tokens of one row at once: outputs [C, I] (without d x) and the state after them; float32."""
    decay_CNI = jnp.exp(items.dt[:, None, :] * rate_NI)
    write_CNI = items.b[:, :, None] * (items.dt * items.x)[:, None, :]
    # The old state is written before the first token; decays are then applied to it like to any write.
    write_CNI = write_CNI.at[0].add(decay_CNI[0] * state_NI)

    def join(early: tuple[Array, Array], late: tuple[Array, Array]) -> tuple[Array, Array]:
        return early[0] * late[0], late[0] * early[1] + late[1]

    _, state_CNI = lax.associative_scan(join, (decay_CNI, write_CNI))
    return jnp.sum(items.c[:, :, None] * state_CNI, axis=1), state_CNI[-1]


__all__ = ["mamba1"]
