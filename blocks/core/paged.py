"""Paged pools: the write that ends a step.

Legend: L layers of a block, T tokens, C cached values per token.

A block reads its pool and returns its new rows; the program writes the rows of all layers once,
after the layer scan. Writing inside the scan makes XLA keep a second pool.
"""

import jax.numpy as jnp
from jax import Array

from .batch import Batch, Rows


def write_kv(kv_pool: Array, kv_new_LTC: Array, batch: Batch, rows: Rows) -> Array:
    """All layers' new rows into their pages, in one scatter; padding tokens go to the sink, page 0.

    kv_pool [L*num_pages, page_size, C], kv_new_LTC [L, T, C]. In place when the pool is donated.
    """
    num_layers = kv_new_LTC.shape[0]
    num_pages, page_size = kv_pool.shape[0] // num_layers, kv_pool.shape[1]
    position_T = jnp.where(rows.valid, rows.start[rows.row] + rows.offset, 0)
    page_T = jnp.where(rows.valid, batch.page_table[rows.row, position_T // page_size], 0)
    page_LT = page_T + jnp.arange(num_layers, dtype=jnp.int32)[:, None] * num_pages
    offset_LT = jnp.broadcast_to(position_T % page_size, page_LT.shape)
    return kv_pool.at[page_LT, offset_LT].set(kv_new_LTC.astype(kv_pool.dtype), mode="promise_in_bounds")


__all__ = ["write_kv"]
