"""Chunks of paged attention as one Pallas kernel: a row's new keys and values into its pages, then its queries.

Legend: T tokens, S rows, P pages per row, B tokens of a work item, G kv heads, M queries per kv head (padded to whole
tiles), H head_dim, C = 2*G*H, K keys at hand, L lanes, A new tokens, each row's as they lie in its pages' tiles.

A row's tokens lie anywhere in the batch and anywhere in a page, and a narrow row of a tile cannot be addressed. So the
new cache rows are laid out by tiles first (by XLA, they are few); the kernel copies whole tiles into the pages and then
reads all keys, new ones included, from the pages.
"""

from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from ..core.batch import Batch, Rows
from ..core.chip import ChipLimits
from ..core.online_softmax import product_dtype
from .tpu_ragged_kernel import (
    RPA_MASKED,
    RpaShape,
    rpa_cdiv,
    rpa_clear_before,
    rpa_clear_tiles,
    rpa_copy,
    rpa_operand,
    rpa_precision,
    rpa_repeat,
    rpa_without,
    rpa_word_masks,
    rpa_words,
)

# Query rows (tokens x heads) multiplied at a time: enough to pay for loading a key tile, few enough for the registers.
_RPA_ROWS = 256


@dataclass(frozen=True)
class _RpaChunk:
    """One work item, traced: its first token, its first and last position, and the page its keys start in."""

    token: Any
    first: Any
    last: Any
    page: Any


@dataclass(frozen=True)
class _RpaChunkState:
    """References of a work item: queries and outputs [B, G, M, H], and sums [G, B*M, L], [G, B*M, L], [G, B*M, H]."""

    q: Any
    out: Any
    top: Any
    total: Any
    acc: Any


def _rpa_prefill_kernel(
    dist_ref: Any, cu_ref: Any, len_ref: Any, page_ref: Any, base_ref: Any, q_ref: Any, new_ref: Any, sink_ref: Any,
    _: Any, out_ref: Any, pool_ref: Any, buf_ref: Any, wide_ref: Any, q_vmem: Any, out_vmem: Any, top_ref: Any,
    total_ref: Any, acc_ref: Any, tile_ref: Any, sem_ref: Any, q_sem: Any, out_sem: Any, new_sem: Any, *,
    shape: RpaShape, factor: float,
) -> None:  # fmt: skip
    """Rows dist[0] .. dist[1]-1, block of queries by block of queries, block of keys by block of keys."""
    B, page_size, whole = q_vmem.shape[0], shape.page_size, shape.block // shape.page_size
    state = _RpaChunkState(q_vmem, out_vmem, top_ref, total_ref, acc_ref)

    def add_row(s: Any, items: Any) -> Any:
        token, q_len = cu_ref[s], cu_ref[s + 1] - cu_ref[s]
        start = len_ref[s] - q_len
        entry = s * shape.pages_per_seq
        _rpa_write_row(start, q_len, base_ref[s], entry, page_ref, new_ref, pool_ref, tile_ref, new_sem, shape)

        def add_item(b: Any, items: Any) -> Any:
            first = start + b * B
            last = jnp.minimum(first + B, len_ref[s]) - 1
            item = _RpaChunk(token + b * B, first, last, shape.first_page(first))
            queries = pltpu.make_async_copy(q_ref.at[pl.ds(item.token, B)], q_vmem, q_sem)
            queries.start()
            keys = last + 1 - item.page * page_size

            def copies(j: Any, slot: Any, act: Any) -> None:
                def one(i: Any, _: Any) -> None:
                    page = page_ref[entry + item.page + j * whole + i]
                    act(rpa_copy(page, i, slot, pool_ref, buf_ref, sem_ref, shape))

                lax.fori_loop(0, jnp.minimum(rpa_cdiv(keys, page_size) - j * whole, whole), one, None)

            blocks = rpa_cdiv(keys, shape.block)
            copies(0, 0, lambda copy: copy.start())
            _rpa_start_item(sink_ref, state)
            queries.wait()

            def add_block(j: Any, _: Any) -> None:
                slot = j & 1
                copies(j, slot, lambda copy: copy.wait())
                pl.when(j + 1 < blocks)(lambda: copies(j + 1, 1 - slot, lambda copy: copy.start()))
                _rpa_clear_unseen(item, j, keys, buf_ref.at[slot], shape)
                _rpa_add_block(item, j, buf_ref.at[slot], wide_ref, state, shape, factor)

            lax.fori_loop(0, blocks, add_block, None)
            # One output at a time: a row's last item covers tokens of the next row, whose own item must come later.
            done = pltpu.make_async_copy(out_vmem, out_ref.at[pl.ds(item.token, B)], out_sem)
            pl.when(items > 0)(done.wait)
            _rpa_finish_item(state, shape)
            done.start()
            return items + 1

        return lax.fori_loop(0, rpa_cdiv(q_len, B), add_item, items)

    items = lax.fori_loop(dist_ref[0], dist_ref[1], add_row, 0)
    pl.when(items > 0)(pltpu.make_async_copy(out_vmem, out_ref.at[pl.ds(0, B)], out_sem).wait)


def _rpa_write_row(
    start: Any,
    q_len: Any,
    base: Any,
    entry: Any,
    page_ref: Any,
    new_ref: Any,
    pool_ref: Any,
    tile_ref: Any,
    sem: Any,
    shape: RpaShape,
) -> None:
    """A row's new tiles into its pages; the first one is merged with the older tokens it holds."""
    rows = shape.tile_rows
    first_tile, old = lax.div(start, rows), lax.rem(start, rows)

    def place(i: Any) -> Any:
        position = (first_tile + i) * rows
        page = page_ref[entry + lax.div(position, shape.page_size)]
        return pool_ref.at[page, pl.ds(pl.multiple_of(lax.rem(position, shape.page_size), rows), rows)]

    def source(i: Any) -> Any:
        return new_ref.at[pl.ds(pl.multiple_of(base + i * rows, rows), rows)]

    halves = [pltpu.make_async_copy(ref, tile_ref.at[i], sem) for i, ref in enumerate((place(0), source(0)))]
    for copy in halves:
        copy.start()
    tiles = rpa_cdiv(old + q_len, rows)
    lax.fori_loop(1, tiles, lambda i, _: pltpu.make_async_copy(source(i), place(i), sem).start(), None)
    # The semaphore counts bytes, whichever copy they are of: only when all have arrived have these two.
    lax.fori_loop(0, tiles + 1, lambda i, _: halves[0].wait(), None)
    before, _ = rpa_word_masks(old, shape)
    words = [rpa_words(0, tile_ref.at[i], shape)[2] for i in range(2)]
    tile_ref[0] = pltpu.bitcast((words[0] & before) | (words[1] & ~before), tile_ref.dtype)
    merged = pltpu.make_async_copy(tile_ref.at[0], place(0), sem)
    merged.start()
    merged.wait()


def _rpa_clear_unseen(item: _RpaChunk, j: Any, keys: Any, block_ref: Any, shape: RpaShape) -> None:
    """Zeros in a block's rows behind the last key, and before the oldest one that is seen."""
    end = keys - j * shape.block

    @pl.when(end < shape.block)
    def _() -> None:
        start, index, words = rpa_words(end, block_ref, shape)
        before, _ = rpa_word_masks(index, shape)
        block_ref[pl.ds(start, shape.tile_rows)] = pltpu.bitcast(words & before, block_ref.dtype)
        rpa_clear_tiles(lax.div(start, shape.tile_rows) + 1, shape.block, block_ref, shape)

    if shape.limited:
        low = shape.oldest(item.first) - item.page * shape.page_size
        pl.when(j == 0)(lambda: rpa_clear_before(low, block_ref, shape))


def _rpa_start_item(sink_ref: Any, state: _RpaChunkState) -> None:
    """The softmax of no keys, or of a sink: a key without value whose score is the sink."""
    state.acc[...] = jnp.zeros(state.acc.shape, jnp.float32)
    if sink_ref is None:
        state.top[...] = jnp.full(state.top.shape, RPA_MASKED, jnp.float32)
        state.total[...] = jnp.zeros(state.total.shape, jnp.float32)
        return
    G, M, _ = sink_ref.shape
    tokens = state.top.shape[1] // M
    for g in range(G):
        state.top[g] = jnp.concatenate([sink_ref[g]] * tokens, axis=0)
    state.total[...] = jnp.where(lax.broadcasted_iota(jnp.int32, state.total.shape, 2) == 0, 1.0, 0.0)


def _rpa_add_block(
    item: _RpaChunk, j: Any, block_ref: Any, wide_ref: Any, state: _RpaChunkState, shape: RpaShape, factor: float
) -> None:
    """Fold a block of keys into the online softmax of every query; only where the diagonal runs are keys masked."""
    if wide_ref is not None:
        wide_ref[...] = rpa_operand(block_ref[...], wide_ref.dtype)
        block_ref = wide_ref
    key = item.page * shape.page_size + j * shape.block  # the block's first
    add = partial(_rpa_add_tile, item.first, key, block_ref, state, shape, factor)
    tiles = state.top.shape[1] // _rpa_tile_rows(shape) // shape.group

    def all_tiles(masked: bool) -> None:
        lax.fori_loop(0, tiles, lambda r, _: add(r, masked), None)

    if shape.limited:
        all_tiles(masked=True)
        return
    diagonal = key + shape.block > item.first + 1
    pl.when(diagonal)(partial(all_tiles, masked=True))
    pl.when(jnp.logical_not(diagonal))(partial(all_tiles, masked=False))


def _rpa_tile_rows(shape: RpaShape) -> int:
    """Tokens whose queries are multiplied at a time."""
    return max(_RPA_ROWS // shape.group, 1)


def _rpa_add_tile(
    first: Any, key: Any, block_ref: Any, state: _RpaChunkState, shape: RpaShape, factor: float, r: Any, masked: bool
) -> None:
    """The queries of tile r of the item with one block of keys."""
    G, M, H, tokens = shape.num_kv_heads, shape.group, shape.head_dim, _rpa_tile_rows(shape)
    rows = pl.ds(pl.multiple_of(r * tokens * M, tokens * M), tokens * M)
    for g in range(G):
        q_RH = state.q[pl.ds(r * tokens, tokens), g].reshape(tokens * M, H)
        k_KH, v_KH = block_ref[:, g * H : (g + 1) * H], block_ref[:, (G + g) * H : (G + g + 1) * H]
        precision = rpa_precision(q_RH.dtype)
        score = factor * lax.dot_general(
            q_RH, k_KH, (((1,), (1,)), ((), ())), precision=precision, preferred_element_type=jnp.float32
        )
        if shape.softcap is not None:
            score = shape.softcap * jnp.tanh(score)
        if masked:
            score = jnp.where(_rpa_seen(first + r * tokens, tokens, key, score.shape, shape), score, RPA_MASKED)
        old = state.top[g, rows]
        top = jnp.maximum(old, jnp.max(score, axis=1, keepdims=True))
        p, keep = jnp.exp2(score - rpa_repeat(top, shape.block)), jnp.exp2(old - top)
        state.top[g, rows] = top
        lanes = top.shape[1]
        sums = sum(p[:, i : i + lanes] for i in range(0, shape.block, lanes))
        state.total[g, rows] = state.total[g, rows] * keep + sums
        values = jnp.dot(p.astype(v_KH.dtype), v_KH, precision=precision, preferred_element_type=jnp.float32)
        state.acc[g, rows] = state.acc[g, rows] * rpa_repeat(keep, H) + values


def _rpa_seen(position: Any, tokens: int, key: Any, size: tuple[int, ...], shape: RpaShape) -> Array:
    """Which keys of a block the queries of `tokens` tokens from `position` on see [R, K]."""
    dims = (tokens, size[0] // tokens, size[1])
    query = (position + lax.broadcasted_iota(jnp.int32, dims, 0)).reshape(size)
    keys = key + lax.broadcasted_iota(jnp.int32, size, 1)
    seen = keys <= query
    if shape.window is not None:
        seen &= keys > query - shape.window
    if shape.chunk is not None:
        # Chunks begin at most every `chunk` tokens; comparing with each beginning needs no division of vectors.
        begin = shape.oldest(position)
        oldest = sum(
            (jnp.where(query >= begin + i * shape.chunk, shape.chunk, 0) for i in range(1, tokens // shape.chunk + 2)),
            begin,
        )
        seen &= keys >= oldest
    return seen


def _rpa_finish_item(state: _RpaChunkState, shape: RpaShape) -> None:
    """The weighted means of the values."""
    tokens, M = _rpa_tile_rows(shape), shape.group

    def finish(r: Any, _: Any) -> None:
        rows = pl.ds(pl.multiple_of(r * tokens * M, tokens * M), tokens * M)
        for g in range(shape.num_kv_heads):
            mean = state.acc[g, rows] / jnp.sum(state.total[g, rows], axis=1, keepdims=True)
            state.out[pl.ds(r * tokens, tokens), g] = mean.astype(state.out.dtype).reshape(tokens, M, -1)

    lax.fori_loop(0, state.out.shape[0] // tokens, finish, None)


def rpa_prefill(
    q_TGMH: Array,
    new_TC: Array,
    sink_GM: Array | None,
    kv_pool: Array,
    pages_SP: Array,
    batch: Batch,
    rows: Rows,
    factor: float,
    *,
    shape: RpaShape,
    q_block: int,
    chip: ChipLimits,
) -> tuple[Array, Array]:
    """The prefill rows over their pages, which get their new keys and values. Out [T, G, M, H], and the pool.

    Tokens of other rows are undefined in the output. q_block: tokens of a work item, whole tiles of 256 // M.
    factor: what makes a product a score in base 2, or the softcap's argument; sink_GM: in base 2.
    """
    (T, G, M, H), C = q_TGMH.shape, kv_pool.shape[2]
    operand = product_dtype(q_TGMH, kv_pool)
    tokens, group = _rpa_tile_rows(shape), shape.group
    B = q_block
    assert B % tokens == 0 < B, f"{B} tokens in tiles of {tokens}"
    q_TGMH = jnp.pad(q_TGMH.astype(operand), ((0, B), (0, 0), (0, group - M), (0, 0)))
    if sink_GM is not None:
        sink_GM = jnp.pad(sink_GM, ((0, 0), (0, group - M)))
    sinks = () if sink_GM is None else (jnp.broadcast_to(sink_GM[..., None], (G, group, chip.lanes)),)
    new_AC, base_S = _rpa_by_tiles(new_TC, batch, rows, shape.tile_rows)
    wide = () if operand == kv_pool.dtype else (pltpu.VMEM((shape.block, C), operand),)
    kernel = partial(_rpa_prefill_kernel, shape=shape, factor=factor)
    kernel = kernel if sinks else rpa_without(7, kernel)
    # sink_ref, the pool's input and both outputs stand before wide_ref: 12 references and the ring.
    kernel = kernel if wide else rpa_without(11 + len(sinks), kernel)
    vmem, hbm = (pl.BlockSpec(memory_space=space) for space in (pltpu.VMEM, pl.ANY))
    operands = (
        batch.distribution, batch.cu_q, batch.kv_len, pages_SP.reshape(-1), base_S, q_TGMH, new_AC, *sinks, kv_pool
    )  # fmt: skip
    out_TGMH, kv_pool = pl.pallas_call(
        kernel,
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=5,
            grid=(1,),
            in_specs=[hbm, hbm, *(vmem for _ in sinks), hbm],
            out_specs=[hbm, hbm],
            scratch_shapes=[
                pltpu.VMEM((2, shape.block, C), kv_pool.dtype),
                *wide,
                pltpu.VMEM((B, G, group, H), operand),
                pltpu.VMEM((B, G, group, H), q_TGMH.dtype),
                pltpu.VMEM((G, B * group, chip.lanes), jnp.float32),
                pltpu.VMEM((G, B * group, chip.lanes), jnp.float32),
                pltpu.VMEM((G, B * group, H), jnp.float32),
                pltpu.VMEM((2, shape.tile_rows, C), kv_pool.dtype),
                pltpu.SemaphoreType.DMA((2,)),
                *[pltpu.SemaphoreType.DMA] * 3,
            ],
        ),
        out_shape=[
            jax.ShapeDtypeStruct(q_TGMH.shape, q_TGMH.dtype),
            jax.ShapeDtypeStruct(kv_pool.shape, kv_pool.dtype),
        ],
        input_output_aliases={len(operands) - 1: 1},
        compiler_params=pltpu.CompilerParams(vmem_limit_bytes=chip.vmem_bytes, disable_bounds_checks=True),
        name="rpa_prefill",
    )(*operands)
    return out_TGMH[:T, :, :M], kv_pool


def _rpa_by_tiles(new_TC: Array, batch: Batch, rows: Rows, tile_rows: int) -> tuple[Array, Array]:
    """New cache rows with each prefill row's as they lie in its tiles [A, C], and where each row's begin [S]."""
    T, S = new_TC.shape[0], rows.q_len.shape[0]
    s = jnp.arange(S)
    is_chunk_S = (s >= batch.distribution[0]) & (s < batch.distribution[1])
    old_S = rows.start % tile_rows
    size_S = jnp.where(is_chunk_S, -(-(old_S + rows.q_len) // tile_rows) * tile_rows, 0)
    end_S = jnp.cumsum(size_S)
    # Each row that has tokens takes at most tile_rows - 1 places before and behind them.
    A = -(-(T + 2 * (tile_rows - 1) * min(S, T)) // tile_rows) * tile_rows
    place_A = jnp.arange(A)
    row_A = jnp.minimum(jnp.sum(place_A[:, None] >= end_S, axis=1), S - 1)
    index_A = place_A - (end_S - size_S + old_S)[row_A]
    token_A = batch.cu_q[row_A] + index_A
    mine_A = (index_A >= 0) & (index_A < rows.q_len[row_A]) & is_chunk_S[row_A]
    new_AC = jnp.where(mine_A[:, None], new_TC[jnp.clip(token_A, 0, T - 1)], 0)
    return new_AC, (end_S - size_S).astype(jnp.int32)


__all__ = ["rpa_prefill"]
