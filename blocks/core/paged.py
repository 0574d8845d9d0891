"""Paged pools: what attention reads of them, and the write that ends a step.

Legend: L layers of a block, T tokens, S rows, P pages per row, X pages of a row read at once, K keys of them, M
queries of a row, C cached values per token.

A block reads its pool and returns its new rows; the program writes the rows of all layers once,
after the layer scan. Writing inside the scan makes XLA keep a second pool.
"""

import jax.numpy as jnp
from jax import Array

from .batch import Batch, Rows


def to_cache(x: Array, dtype: jnp.dtype) -> Array:
    """Cast to the cache's dtype, clipped to its range: float8 overflow would be NaN."""
    limit = float(jnp.finfo(dtype).max)
    return jnp.clip(x, -limit, limit).astype(dtype)


def read_pages(kv_pool: Array, pages_SP: Array, cached_S: Array, step: Array, span: int) -> tuple[Array, Array, Array]:
    """Pages step*span ... of every row: cache rows [S, K, C], their indices [K], which hold cached tokens [S, K].

    Pages past a row's end are read from the pool's first page. S*span must be at least 2: XLA
    turns a gather of one page into a slice, and then lays the whole pool out as the matmul
    would like that page.
    """
    (S, P), (_, page_size, C) = pages_SP.shape, kv_pool.shape
    assert S * span > 1
    index_X = step * span + jnp.arange(span)
    pages_SX = jnp.where(index_X * page_size < cached_S[:, None], pages_SP[:, jnp.minimum(index_X, P - 1)], 0)
    kv_SKC = kv_pool[pages_SX].reshape(S, span * page_size, C)
    key_K = step * span * page_size + jnp.arange(span * page_size)
    return kv_SKC, key_K, key_K < cached_S[:, None]


def clear_unseen(kv_SKC: Array, seen_SMK: Array) -> Array:
    """Zeros in rows that no query sees: a weight of 0 is not enough, a reused page may hold another request's NaN."""
    return jnp.where(seen_SMK.any(axis=1)[..., None], kv_SKC, 0)


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


__all__ = ["clear_unseen", "read_pages", "to_cache", "write_kv"]
