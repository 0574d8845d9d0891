"""Mamba (arXiv:2312.00752) in plain XLA: recurrent step for decode rows, chunks for prefill rows.

Legend: T tokens, S rows, D hidden, I channels, N state size, r rank of dt, C tokens of a chunk.

Per token and channel, with time step dt > 0 and a = -exp(a_log):
    h <- e^(dt a) h + dt x B;  y = C h + d x
A chunk is one associative scan over (decay, write) pairs. State math is float32, elementwise,
and only values <= 0 are exponentiated. The projections follow the ambient precision.
"""

from functools import partial
from typing import NamedTuple

import jax.numpy as jnp
from jax import Array, lax

from ..activation.xla import activate
from ..core.batch import Batch, Rows
from ..core.causal_conv import causal_conv
from ..core.linear import linear
from ..core.norm import rms_norm
from ..core.recurrence import over_chunks, over_decode_rows


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
    x_TI, z_TI = (linear(h_TD, w[f"w_{name}"], w[f"b_{name}"] if proj_bias else None) for name in ("x", "z"))
    x_TI, conv_pool = causal_conv(
        x_TI, w["conv"], w["conv_bias"] if conv_bias else None, conv_pool, batch, rows,
        pool_layer=pool_layer, max_q=max_q,
    )  # fmt: skip
    x_TI = activate(x_TI, "silu").astype(h_TD.dtype)
    inputs = _mamba1_inputs(x_TI, w, norm_eps, norm_zero_centered, sum_axes)
    rate_NI = -jnp.exp(w["a_log"].astype(jnp.float32).T)

    step, solve = partial(_mamba1_step, rate_NI), partial(_mamba1_chunk, rate_NI)
    first = tuple(part[: batch.slot.shape[0]].astype(jnp.float32) for part in inputs)
    y_TI, state_pool = over_decode_rows(step, first, x_TI.shape, h_TD.dtype, state_pool, pool_layer, batch)
    if max_q > 1:
        y_TI, (state_pool,) = over_chunks(solve, inputs, y_TI, (state_pool,), pool_layer, batch, rows, chunk=chunk)
    y_TI = y_TI.astype(jnp.float32) + w["d"].astype(jnp.float32) * x_TI.astype(jnp.float32)
    y_TI = (y_TI * activate(z_TI.astype(jnp.float32), "silu")).astype(h_TD.dtype)
    return linear(y_TI, w["w_o"]), conv_pool, state_pool


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
    return _Mamba1Inputs(x_TI, activate(dt_TI + w["dt_bias"].astype(jnp.float32), "softplus"), b_TN, c_TN)


def _mamba1_step(
    rate_NI: Array, x_I: Array, dt_I: Array, b_N: Array, c_N: Array, state_NI: Array
) -> tuple[Array, Array]:
    """One token: its output [I] without d x, and the state after it."""
    state_NI = jnp.exp(dt_I * rate_NI) * state_NI + b_N[:, None] * (dt_I * x_I)
    return jnp.sum(c_N[:, None] * state_NI, axis=0), state_NI


def _mamba1_chunk(
    rate_NI: Array, x_CI: Array, dt_CI: Array, b_CN: Array, c_CN: Array, num_valid: Array, state_NI: Array
) -> tuple[Array, tuple[Array]]:
    """C tokens of one row at once: outputs [C, I] without d x, and the state after them; float32.

    Of tokens past num_valid everything is 0: with dt = 0 they leave the state as it is.
    """
    decay_CNI = jnp.exp(dt_CI[:, None, :] * rate_NI)
    write_CNI = b_CN[:, :, None] * (dt_CI * x_CI)[:, None, :]
    # The old state is written before the first token; decays are then applied to it like to any write.
    write_CNI = write_CNI.at[0].add(decay_CNI[0] * state_NI)

    def join(early: tuple[Array, Array], late: tuple[Array, Array]) -> tuple[Array, Array]:
        return early[0] * late[0], late[0] * early[1] + late[1]

    _, state_CNI = lax.associative_scan(join, (decay_CNI, write_CNI))
    return jnp.sum(c_CN[:, :, None] * state_CNI, axis=1), (state_CNI[-1],)


__all__ = ["mamba1"]
