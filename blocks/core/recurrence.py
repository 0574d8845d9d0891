"""The loops of mixers with a state per sequence: decode rows one by one, prefill rows chunk by chunk.

Legend: L layers, T tokens, S rows, C tokens of a chunk. A pool [L, slots, ...] holds the states of
all sequences. It is loop-carried and updated in place, one slot of one layer at a time, so that no
second copy of it exists. States are float32 in between, whatever the pool's dtype. The layer index
may be traced.
"""

from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
from jax import Array, lax

from .batch import Batch, Rows


def read_slot(pool: Array, layer: Array | int, slot: Array, has_state: Array) -> Array:
    """One slot's state in float32; zeros (whatever the slot holds) without has_state."""
    state = lax.dynamic_slice(pool, (layer, slot, *(0,) * (pool.ndim - 2)), (1, 1, *pool.shape[2:]))[0, 0]
    return jnp.where(has_state, state.astype(jnp.float32), 0)


def write_slot(pool: Array, layer: Array | int, slot: Array, state: Array) -> Array:
    """The pool with one slot's state replaced, rounded to the pool's dtype."""
    update = state.astype(pool.dtype)[None, None]
    return lax.dynamic_update_slice(pool, update, (layer, slot, *(0,) * (pool.ndim - 2)))


def over_decode_rows(
    step: Callable[..., tuple[Array, Array]],
    inputs: tuple[Array, ...],
    out: tuple[int, ...],
    dtype: Any,
    pool: Array,
    layer: Array | int,
    batch: Batch,
) -> tuple[Array, Array]:
    """step(*the row's inputs, state) -> (its output, the state after it), for every decode row.

    inputs: [S, ...] each; token s belongs to row s. Returns the outputs, of shape `out` = [T, ...] with
    zeros for all other tokens, and the pool.
    """
    S = inputs[0].shape[0]

    def add_row(s: Array, carry: tuple[Array, Array]) -> tuple[Array, Array]:
        out_S, pool = carry
        slot = batch.slot[s]
        one, state = step(*(x[s] for x in inputs), read_slot(pool, layer, slot, batch.has_state[s]))
        return out_S.at[s].set(one), write_slot(pool, layer, slot, state)

    zeros_S = jnp.zeros((S, *out[1:]), jnp.float32)
    out_S, pool = lax.fori_loop(0, batch.distribution[0], add_row, (zeros_S, pool))
    return jnp.pad(out_S.astype(dtype), ((0, out[0] - S),) + ((0, 0),) * (len(out) - 1)), pool


def over_chunks(
    solve: Callable[..., tuple[Array, tuple[Array, ...]]],
    inputs: tuple[Array, ...],
    out_T: Array,
    pools: tuple[Array, ...],
    layer: Array | int,
    batch: Batch,
    rows: Rows,
    *,
    chunk: int,
) -> tuple[Array, tuple[Array, ...]]:
    """The prefill rows' tokens into out_T; chunks start at row starts, work items run in a loop.

    solve(*inputs of C tokens, num_valid, *states) -> (their outputs, the states after them). Its inputs
    are float32; those past the first num_valid are zeros, and their outputs are dropped.
    inputs: [T, ...] each. All trip counts are dynamic. Within a row the states stay float32 from chunk
    to chunk; they take their pool's dtype at the end of the row.
    """
    T = out_T.shape[0]
    # `chunk` tokens of padding: the last chunk of the last row is then sliced whole.
    *inputs_T, out_T = (jnp.pad(x, ((0, chunk),) + ((0, 0),) * (x.ndim - 1)) for x in (*inputs, out_T))

    def add_row(s: Array, carry: tuple[Array, tuple[Array, ...]]) -> tuple[Array, tuple[Array, ...]]:
        out_T, pools = carry
        slot, q_len = batch.slot[s], rows.q_len[s]

        def add_chunk(c: Array, carry: tuple[Array, tuple[Array, ...]]) -> tuple[Array, tuple[Array, ...]]:
            out_T, states = carry
            first, num_valid = batch.cu_q[s] + c * chunk, jnp.minimum(q_len - c * chunk, chunk)
            valid_C = jnp.arange(chunk) < num_valid
            # Other rows' tokens are cleared, not only weighted by 0: they may hold NaN.
            items = [_recurrence_keep(valid_C, lax.dynamic_slice_in_dim(x, first, chunk), 0) for x in inputs_T]
            new_C, states = solve(*(x.astype(jnp.float32) for x in items), num_valid, *states)
            old_C = lax.dynamic_slice_in_dim(out_T, first, chunk)
            out_C = _recurrence_keep(valid_C, new_C.astype(out_T.dtype), old_C)
            return lax.dynamic_update_slice_in_dim(out_T, out_C, first, 0), states

        states = tuple(read_slot(pool, layer, slot, batch.has_state[s]) for pool in pools)
        out_T, states = lax.fori_loop(0, (q_len + chunk - 1) // chunk, add_chunk, (out_T, states))
        written = (write_slot(pool, layer, slot, state) for pool, state in zip(pools, states, strict=True))
        return out_T, tuple(written)

    out_T, pools = lax.fori_loop(batch.distribution[0], batch.distribution[1], add_row, (out_T, pools))
    return out_T[:T], pools


def _recurrence_keep(valid_C: Array, x_C: Array, other: Array | int) -> Array:
    """x [C, ...] for the valid tokens, `other` for the rest."""
    return jnp.where(valid_C.reshape(-1, *(1,) * (x_C.ndim - 1)), x_C, other)


__all__ = ["over_chunks", "over_decode_rows", "read_slot", "write_slot"]
