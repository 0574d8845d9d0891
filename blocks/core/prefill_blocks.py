"""Prefill rows in work items (row, block of its tokens), in a loop.

Legend: T tokens, B tokens of a block, P pages per row, C cached values per token; ... dims of one token.
"""

from collections.abc import Callable
from dataclasses import dataclass

import jax.numpy as jnp
from jax import Array, lax

from .batch import Batch, Rows


@dataclass(frozen=True)
class PrefillBlock:
    """Block `index` of one row, traced: the row's first token, tokens of this step, cached ones, and pages [P]."""

    index: Array
    first: Array
    q_len: Array
    start: Array
    pages_P: Array


def over_prefill_blocks(
    attend: Callable[[Array, Array, PrefillBlock], Array],
    out_T: Array,
    q_T: Array,
    new_TC: Array,
    pages_SP: Array,
    batch: Batch,
    rows: Rows,
    *,
    size: int,
) -> Array:
    """attend(q_B, new_TC, block) of every block of `size` tokens of the prefill rows, put into out_T [T, ...].

    attend's new_TC has `size` tokens of padding, so that every block can be sliced whole. All trip counts are
    dynamic: a step with few prefill tokens runs few iterations.
    """
    T, B = q_T.shape[0], size
    q_T, new_TC, out_T = (jnp.pad(x, ((0, B),) + ((0, 0),) * (x.ndim - 1)) for x in (q_T, new_TC, out_T))

    def add_row(s: Array, out_T: Array) -> Array:
        first, q_len, start = batch.cu_q[s], rows.q_len[s], rows.start[s]

        def add_block(b: Array, out_T: Array) -> Array:
            q_B = lax.dynamic_slice_in_dim(q_T, first + b * B, B)
            done_B = attend(q_B, new_TC, PrefillBlock(b, first, q_len, start, pages_SP[s]))
            mine_B = (b * B + jnp.arange(B) < q_len).reshape(B, *(1,) * (out_T.ndim - 1))
            old_B = lax.dynamic_slice_in_dim(out_T, first + b * B, B)
            return lax.dynamic_update_slice_in_dim(out_T, jnp.where(mine_B, done_B, old_B), first + b * B, 0)

        return lax.fori_loop(0, (q_len + B - 1) // B, add_block, out_T)

    return lax.fori_loop(batch.distribution[0], batch.distribution[1], add_row, out_T)[:T]


def own_rows(new_TC: Array, block: PrefillBlock, j: Array, size: int) -> tuple[Array, Array, Array]:
    """Block j of the same row as keys: cache rows [B, C], their index in the row [B], which a query sees [B, B].

    What follows the row's tokens is padding or another row's, and seen by none.
    """
    token_B = jnp.arange(size)
    kv_BC = lax.dynamic_slice_in_dim(new_TC, block.first + j * size, size)
    key_B, query_B = j * size + token_B, block.index * size + token_B
    return kv_BC, key_B, (key_B <= query_B[:, None]) & (key_B < block.q_len)


__all__ = ["PrefillBlock", "over_prefill_blocks", "own_rows"]
