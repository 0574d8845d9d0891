"""Decode rows of paged attention as one Pallas kernel: each row walks its own pages and writes its own key and value.

Legend: S rows, P pages per row, G kv heads, M queries per kv head (padded to whole tiles), R rows of a query tile (M,
or 2M where a query is two float8 terms), H head_dim, C = 2*G*H, K keys at hand, L lanes.

Two float8 terms: a bfloat16 has 8 significant bits and float8_e4m3fn has 4, so x = high + low exactly, as long as
neither falls below float8's smallest value. A product with a float8 cache then needs no converted copy of the cache:
both terms are rows of one tile, and 32 rows of float8 cost one pass of the matrix unit as 16 rows of bfloat16 do.
"""

from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from ..core.chip import ChipLimits
from ..core.online_softmax import product_dtype

# Below any real score. Not -inf: (-inf) - (-inf) is NaN.
RPA_MASKED = -1e30
# Probabilities are at most 1 and become float8 terms: times 2^8 the largest still fits (448 does), and what both terms
# lose below float8's smallest value, 2^-9, is at most 2^-17 of the largest.
_RPA_P_BITS = 8


def rpa_cdiv(x: Array, y: int) -> Array:
    """Ceiling of x / y. Traced `//` asks jax for the chip while tracing, and there may be none."""
    return lax.div(x + (y - 1), y)


@dataclass(frozen=True)
class RpaShape:
    """What is static of the kernels over a paged cache.

    block: keys fetched and multiplied at a time, whole pages. slots: blocks on the chip, a power of two. tail: keys
    multiplied at a time in a row's last block, divides the block. tile_rows: cache rows of one memory tile. split:
    queries and probabilities are two float8 terms. Scores are in base 2: softcap is log2(e) times the model's.
    """

    num_kv_heads: int
    group: int
    head_dim: int
    page_size: int
    pages_per_seq: int
    block: int
    slots: int
    tail: int
    tile_rows: int
    split: bool
    window: int | None
    chunk: int | None
    softcap: float | None

    @property
    def terms(self) -> int:
        """Rows of a query tile per query."""
        return 2 if self.split else 1

    @property
    def limited(self) -> bool:
        """Whether a query sees a part of its history only."""
        return self.window is not None or self.chunk is not None

    def oldest(self, position: Array) -> Array:
        """The first position that a query at `position` sees."""
        if self.window is not None:
            return jnp.maximum(position - (self.window - 1), 0)
        if self.chunk is not None:
            return lax.div(position, self.chunk) * self.chunk
        return jnp.zeros_like(position)

    def first_page(self, position: Array) -> Array:
        """The first of a row's pages that a query at `position` sees."""
        return lax.div(self.oldest(position), self.page_size)

    def pages_of(self, length: Array, b: Array) -> Array:
        """Pages of block b of a row that has so many tokens."""
        whole = self.block // self.page_size
        return jnp.minimum(rpa_cdiv(length, self.page_size) - self.first_page(length - 1) - b * whole, whole)


@dataclass(frozen=True)
class _RpaState:
    """References to a row's queries and softmax: what one stage leaves for the next, and sums over the blocks so far.

    query [G, R, H], score [G, M, K], peak [G, M, L] (its maximum, in every lane), p [G, R, K], keep [G, R, L] (what
    older sums are worth under the new maximum); top [G, M, L], total [G, M, L] (to be summed over lanes),
    acc [G, R, H].
    """

    query: Any
    score: Any
    peak: Any
    p: Any
    keep: Any
    top: Any
    total: Any
    acc: Any


def rpa_split(x: Array) -> Array:
    """float32 [M, K] as two float8 terms, one above the other: [2M, K]."""
    bits = lax.bitcast_convert_type(x, jnp.int32)
    # Round to 4 significant bits by hand: a cast to float8 and back would be two conversions for this one mask.
    high = lax.bitcast_convert_type((bits + (1 << 19)) & ~((1 << 20) - 1), jnp.float32)
    return jnp.concatenate([high, x - high], axis=0).astype(jnp.float8_e4m3fn)


def rpa_precision(dtype: jnp.dtype) -> lax.Precision | None:
    """float32 operands are multiplied as such: TPU's default would narrow them to bfloat16."""
    return lax.Precision.HIGHEST if dtype == jnp.float32 else None


def _rpa_decode_kernel(
    count_ref: Any, len_ref: Any, page_ref: Any, factor_ref: Any, scale_ref: Any, q_ref: Any, new_ref: Any,
    sink_ref: Any, _: Any, out_ref: Any, pool_ref: Any, buf_ref: Any, tile_ref: Any, cursor_ref: Any, sem_ref: Any,
    write_sem: Any, *state_refs: Any, shape: RpaShape,
) -> None:  # fmt: skip
    """All decode rows, one after the other; blocks of pages stream through a ring ahead of the products.

    cursor_ref: row, block and ring slot of what is fetched next. A slot is filled again when its block's values have
    been added; three blocks are being worked on, so that slots - 3 are on their way.
    """
    block, count = shape.block, count_ref[0]
    fetch = partial(_rpa_fetch, count, len_ref, page_ref, pool_ref, buf_ref, cursor_ref, sem_ref, shape)
    state = _RpaState(*state_refs)
    for i in range(3):
        cursor_ref[i] = 0
    lax.fori_loop(0, shape.slots, lambda i, _: fetch(), None)

    def add_row(s: Any, first_slot: Any) -> Any:
        length = len_ref[s]
        base = shape.first_page(length - 1) * shape.page_size
        left, low = length - base, shape.oldest(length - 1) - base
        full, last = lax.div(left, block), lax.div(left - 1, block)
        page = page_ref[s * shape.pages_per_seq + lax.div(length - 1, shape.page_size)]

        def slot_of(t: Any) -> Any:
            return (first_slot + t) & (shape.slots - 1)

        write = _rpa_write(page, length, tile_ref, pool_ref, write_sem, shape)

        def take(t: Any) -> None:
            """Wait for block t, and put the new token in its place if that is here."""
            _rpa_arrive(shape.pages_of(length, t), slot_of(t), buf_ref, sem_ref, shape)

            @pl.when(t == last)
            def _() -> None:
                _rpa_put_row(s, left - t * block, buf_ref.at[slot_of(t)], new_ref, tile_ref, shape)
                write.start()

            if shape.limited:
                pl.when(t == 0)(lambda: rpa_clear_before(low, buf_ref.at[slot_of(t)], shape))

        def scores(t: Any, offset: Any = 0, size: Any = block, end: Any = None) -> None:
            bounds = (low - t * block, end) if shape.limited else (None, end)
            _rpa_scores(buf_ref.at[slot_of(t)], factor_ref[s], state, offset, size, bounds, shape)

        def values(t: Any, offset: Any = 0, size: Any = block) -> None:
            _rpa_values(buf_ref.at[slot_of(t)], state, offset, size, shape)

        softmax = partial(_rpa_softmax, state, shape=shape)
        _rpa_start(q_ref.at[s], scale_ref[s], sink_ref, state, shape)

        # Three blocks at a time: scores of one, probabilities of the one before, values of the one before that. They
        # do not depend on each other, so matrix unit, vector unit and loads overlap.
        @pl.when(full > 0)
        def _() -> None:
            take(0)
            scores(0)

        @pl.when(full > 1)
        def _() -> None:
            take(1)
            softmax(block)
            scores(1)

            def turn(t: Any, _: Any) -> None:
                take(t + 1)
                values(t - 1)
                softmax(block)
                scores(t + 1)
                fetch()

            lax.fori_loop(1, full - 1, turn, None)
            values(full - 2)
            fetch()

        @pl.when(full > 0)
        def _() -> None:
            softmax(block)
            values(full - 1)
            fetch()

        @pl.when(full == last)
        def _() -> None:
            take(full)

            def tail(i: Any, _: Any) -> None:
                at = pl.multiple_of(i * shape.tail, shape.tail)
                scores(full, at, shape.tail, left - full * block)
                softmax(shape.tail)
                values(full, at, shape.tail)

            lax.fori_loop(0, rpa_cdiv(left - full * block, shape.tail), tail, None)
            fetch()

        _rpa_finish(s, out_ref, state, shape)
        write.wait()
        return slot_of(last + 1)

    lax.fori_loop(0, count, add_row, 0)

    def clear(s: Any, _: Any) -> None:
        out_ref[s] = jnp.zeros(out_ref.shape[1:], out_ref.dtype)

    lax.fori_loop(count, q_ref.shape[0], clear, None)


def rpa_copy(page: Any, index: Any, slot: Any, pool_ref: Any, buf_ref: Any, sem_ref: Any, shape: RpaShape) -> Any:
    """The copy of one page into its place of a block."""
    start = index * shape.page_size
    if not isinstance(index, int):
        start = pl.multiple_of(start, shape.page_size)
    return pltpu.make_async_copy(pool_ref.at[page], buf_ref.at[slot, pl.ds(start, shape.page_size)], sem_ref.at[slot])


def _rpa_fetch(
    count: Any, len_ref: Any, page_ref: Any, pool_ref: Any, buf_ref: Any, cursor_ref: Any, sem_ref: Any, shape: RpaShape
) -> None:
    """Start the copies of the block under the cursor, if there is one, and move the cursor."""
    s, b, slot = cursor_ref[0], cursor_ref[1], cursor_ref[2]

    @pl.when(s < count)
    def _() -> None:
        length = len_ref[s]
        pages, whole = shape.pages_of(length, b), shape.block // shape.page_size
        first = shape.first_page(length - 1)
        entry = s * shape.pages_per_seq + first + b * whole

        def start(i: Any) -> None:
            rpa_copy(page_ref[entry + i], i, slot, pool_ref, buf_ref, sem_ref, shape).start()

        @pl.when(pages == whole)
        def _() -> None:
            for i in range(whole):  # straight-line: addresses of several copies are computed side by side
                start(i)

        @pl.when(pages < whole)
        def _() -> None:
            lax.fori_loop(0, pages, lambda i, _: start(i), None)

        done = (b + 1) * shape.block >= length - first * shape.page_size
        cursor_ref[0] = s + done.astype(jnp.int32)
        cursor_ref[1] = jnp.where(done, 0, b + 1)
        cursor_ref[2] = (slot + 1) & (shape.slots - 1)


def _rpa_arrive(pages: Any, slot: Any, buf_ref: Any, sem_ref: Any, shape: RpaShape) -> None:
    """Wait for a block of so many pages; a whole one is waited for at once."""
    whole = shape.block // shape.page_size

    @pl.when(pages == whole)
    def _() -> None:
        pltpu.make_async_copy(buf_ref.at[slot], buf_ref.at[slot], sem_ref.at[slot]).wait()

    @pl.when(pages < whole)
    def _() -> None:
        page = buf_ref.at[slot, pl.ds(0, shape.page_size)]
        one = pltpu.make_async_copy(page, page, sem_ref.at[slot])
        lax.fori_loop(0, pages, lambda i, _: one.wait(), None)


def _rpa_start(q_ref: Any, scale: Any, sink_ref: Any, state: _RpaState, shape: RpaShape) -> None:
    """A row's queries, and the softmax of no keys, or of a sink: a key without value whose score is the sink."""
    for g in range(shape.num_kv_heads):
        q_MH = q_ref[g]
        state.query[g] = rpa_split(q_MH.astype(jnp.float32) * scale) if shape.split else q_MH.astype(state.query.dtype)
    state.acc[...] = jnp.zeros(state.acc.shape, jnp.float32)
    if sink_ref is None:
        state.top[...] = jnp.full(state.top.shape, RPA_MASKED, jnp.float32)
        state.total[...] = jnp.zeros(state.total.shape, jnp.float32)
        return
    state.top[...] = sink_ref[...]
    lane = lax.broadcasted_iota(jnp.int32, state.total.shape, 2)
    state.total[...] = jnp.where(lane == 0, 2.0**_RPA_P_BITS if shape.split else 1.0, 0.0)


def _rpa_put_row(s: Any, left: Any, block_ref: Any, new_ref: Any, tile_ref: Any, shape: RpaShape) -> None:
    """The new token's row into the block as its row left - 1, zeros behind it up to the end of the last step.

    tile_ref gets a copy of the row's tile, from which it goes to its page: a window may clear rows of the block.
    """
    at = left - 1
    start, index, words = rpa_words(at, block_ref, shape)
    before, here = rpa_word_masks(index, shape)
    merged = (words & before) | (new_ref[pl.ds(s, 1)] & here)
    tile_ref[...] = pltpu.bitcast(merged, block_ref.dtype)
    block_ref[pl.ds(start, shape.tile_rows)] = tile_ref[...]
    rpa_clear_tiles(lax.div(at, shape.tile_rows) + 1, rpa_cdiv(left, shape.tail) * shape.tail, block_ref, shape)


def rpa_words(row: Any, block_ref: Any, shape: RpaShape) -> tuple[Array, Array, Array]:
    """The tile that holds a block's row: its first row, the row's index in it, and its 32-bit words."""
    start = pl.multiple_of(lax.div(row, shape.tile_rows) * shape.tile_rows, shape.tile_rows)
    return start, row - start, pltpu.bitcast(block_ref[pl.ds(start, shape.tile_rows)], jnp.uint32)


def rpa_word_masks(index: Any, shape: RpaShape) -> tuple[Array, Array]:
    """Masks [8, C] of a tile's words: what lies in rows before row `index`, and what lies in that row.

    A narrow row is a part of every word of one sublane: there is no addressing it, so tiles are merged word by word.
    """
    sublanes, width = 8, 2 * shape.num_kv_heads * shape.head_dim
    parts = shape.tile_rows // sublanes
    bits = 32 // parts
    part = index - parts * lax.broadcasted_iota(jnp.int32, (sublanes, width), 0)
    shift = (jnp.clip(part, 0, parts - 1) * bits).astype(jnp.uint32)
    low = lax.shift_left(jnp.full_like(shift, 1), shift) - jnp.uint32(1)
    one = lax.shift_left(jnp.full_like(shift, (1 << bits) - 1), shift)
    nothing, everything = jnp.zeros_like(shift), jnp.full_like(shift, 0xFFFFFFFF)
    inside = (part >= 0) & (part < parts)
    before = jnp.where(part >= parts, everything, jnp.where(inside, low, nothing))
    return before, jnp.where(inside, one, nothing)


def rpa_clear_tiles(first_tile: Any, end_row: Any, block_ref: Any, shape: RpaShape) -> None:
    """Zeros in whole tiles up to a row: what lies there may be another request's NaN, and 0 * NaN is NaN."""
    rows = shape.tile_rows
    zero = jnp.zeros((rows, block_ref.shape[1]), block_ref.dtype)

    def clear(i: Any, _: Any) -> None:
        block_ref[pl.ds(pl.multiple_of(i * rows, rows), rows)] = zero

    lax.fori_loop(first_tile, lax.div(end_row, rows), clear, None)


def rpa_clear_before(low: Any, block_ref: Any, shape: RpaShape) -> None:
    """Zeros in a block's rows before `low`."""
    start, index, words = rpa_words(low, block_ref, shape)
    before, _ = rpa_word_masks(index, shape)
    block_ref[pl.ds(start, shape.tile_rows)] = pltpu.bitcast(words & ~before, block_ref.dtype)
    rpa_clear_tiles(0, start, block_ref, shape)


def _rpa_write(page: Any, length: Any, tile_ref: Any, pool_ref: Any, sem: Any, shape: RpaShape) -> Any:
    """The copy of the new row's tile back into its page."""
    rows = shape.tile_rows
    start = pl.multiple_of(lax.div(lax.rem(length - 1, shape.page_size), rows) * rows, rows)
    return pltpu.make_async_copy(tile_ref, pool_ref.at[page, pl.ds(start, rows)], sem)


def _rpa_scores(
    block_ref: Any, factor: Any, state: _RpaState, offset: Any, size: Any, bounds: Any, shape: RpaShape
) -> None:
    """Scores of every head with `size` keys of the block, from `offset` on; only keys within bounds are seen."""
    G, M, H, lanes = shape.num_kv_heads, shape.group, shape.head_dim, state.peak.shape[2]
    for g in range(G):
        q_RH = state.query[g]
        k_KH = rpa_operand(block_ref[pl.ds(offset, size), g * H : (g + 1) * H], q_RH.dtype)
        score = lax.dot_general(
            q_RH, k_KH, (((1,), (1,)), ((), ())),
            precision=rpa_precision(q_RH.dtype), preferred_element_type=jnp.float32,
        )  # fmt: skip
        if shape.split:
            score = score[:M] + score[M:]
        score = score * factor
        if shape.softcap is not None:
            score = shape.softcap * jnp.tanh(score)
        score = _rpa_bounded(score, offset, *bounds)
        state.score[g, :, :size] = score
        # Here and not beside the exponentials: reductions over lanes would queue behind the transposed keys there.
        state.peak[g] = jnp.broadcast_to(jnp.max(score, axis=1, keepdims=True), (M, lanes))


def _rpa_bounded(score: Array, offset: Any, low: Any, end: Any) -> Array:
    """Scores of keys before `low` or from `end` on masked; None = no bound."""
    if low is None and end is None:
        return score
    key = offset + lax.broadcasted_iota(jnp.int32, score.shape, 1)
    seen = key >= low if end is None else key < end if low is None else (key >= low) & (key < end)
    return jnp.where(seen, score, RPA_MASKED)


def rpa_operand(cached: Array, dtype: jnp.dtype) -> Array:
    """Cached values as the products take them."""
    return cached if cached.dtype == dtype else cached.astype(dtype)


def _rpa_softmax(state: _RpaState, size: Any, shape: RpaShape) -> None:
    """Probabilities of `size` scores under the new maximum, and what the old sums are worth under it."""
    lanes = state.top.shape[2]
    for g in range(shape.num_kv_heads):
        score, old = state.score[g, :, :size], state.top[g]
        top = jnp.maximum(old, state.peak[g])
        keep = jnp.exp2(old - top)
        p = jnp.exp2(score - rpa_repeat(top - _RPA_P_BITS if shape.split else top, size))
        state.top[g] = top
        state.keep[g] = jnp.concatenate([keep] * shape.terms, axis=0)
        state.total[g] = state.total[g] * keep + _rpa_lane_sums(p, lanes)
        state.p[g, :, :size] = rpa_split(p) if shape.split else p.astype(state.p.dtype)


def _rpa_values(block_ref: Any, state: _RpaState, offset: Any, size: Any, shape: RpaShape) -> None:
    """Add the values of `size` keys under their probabilities."""
    G, H = shape.num_kv_heads, shape.head_dim
    for g in range(G):
        p = state.p[g, :, :size]
        v_KH = rpa_operand(block_ref[pl.ds(offset, size), (G + g) * H : (G + g + 1) * H], p.dtype)
        values = jnp.dot(p, v_KH, precision=rpa_precision(p.dtype), preferred_element_type=jnp.float32)
        state.acc[g] = state.acc[g] * rpa_repeat(state.keep[g], H) + values


def rpa_repeat(x: Array, width: int) -> Array:
    """[M, L], all lanes alike, as [M, width]: the registers again, where a broadcast would take the transpose unit."""
    return jnp.concatenate([x] * (width // x.shape[1]), axis=1)


def _rpa_lane_sums(x: Array, lanes: int) -> Array:
    """[M, K] as [M, L]: what lies L apart summed, as a tree."""
    parts = [x[:, i : i + lanes] for i in range(0, x.shape[1], lanes)]
    while len(parts) > 1:
        pairs = [parts[i : i + 2] for i in range(0, len(parts), 2)]
        parts = [pair[0] + pair[1] if len(pair) == 2 else pair[0] for pair in pairs]
    return parts[0]


def _rpa_finish(s: Any, out_ref: Any, state: _RpaState, shape: RpaShape) -> None:
    """The weighted mean of the values."""
    M = shape.group
    for g in range(shape.num_kv_heads):
        acc = state.acc[g]
        if shape.split:
            acc = acc[:M] + acc[M:]
        out_ref[s, g] = (acc / jnp.sum(state.total[g], axis=1, keepdims=True)).astype(out_ref.dtype)


def rpa_decode(
    count_1: Array,
    len_S: Array,
    page_SP: Array,
    factor_S: Array,
    scale_S: Array,
    q_SGMH: Array,
    new_SC: Array,
    sink_GML: Array | None,
    kv_pool: Array,
    *,
    shape: RpaShape,
    chip: ChipLimits,
) -> tuple[Array, Array]:
    """Rows 0 .. count-1 over their pages, the last of their len_S tokens being new. Out [S, G, M, H], and the pool.

    page_SP: pages of the whole pool. scale_S: a power of two that brings a row's queries into float8's range, where
    they are split. factor_S: what makes a product of scaled queries a score in base 2, or the softcap's argument.
    new_SC uint32: a row's cached value in every part of a word. sink_GML: in base 2.
    """
    _, G, M, H = q_SGMH.shape
    R, L = M * shape.terms, chip.lanes
    operand = kv_pool.dtype if shape.split else product_dtype(q_SGMH, kv_pool)
    vmem, smem, hbm = (pl.BlockSpec(memory_space=space) for space in (pltpu.VMEM, pltpu.SMEM, pl.ANY))
    kernel, sinks = partial(_rpa_decode_kernel, shape=shape), () if sink_GML is None else (sink_GML,)
    operands = (count_1, len_S, page_SP.reshape(-1), factor_S, scale_S, q_SGMH, new_SC, *sinks, kv_pool)
    return pl.pallas_call(
        kernel if sinks else rpa_without(7, kernel),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=3,
            grid=(1,),
            in_specs=[smem, smem, vmem, vmem, *(vmem for _ in sinks), hbm],
            out_specs=[vmem, hbm],
            scratch_shapes=[
                pltpu.VMEM((shape.slots, shape.block, kv_pool.shape[2]), kv_pool.dtype),
                pltpu.VMEM((shape.tile_rows, kv_pool.shape[2]), kv_pool.dtype),
                pltpu.SMEM((3,), jnp.int32),
                pltpu.SemaphoreType.DMA((shape.slots,)),
                pltpu.SemaphoreType.DMA,
                pltpu.VMEM((G, R, H), operand),  # from here on as in _RpaState
                pltpu.VMEM((G, M, shape.block), jnp.float32),
                pltpu.VMEM((G, M, L), jnp.float32),
                pltpu.VMEM((G, R, shape.block), operand),
                pltpu.VMEM((G, R, L), jnp.float32),
                pltpu.VMEM((G, M, L), jnp.float32),
                pltpu.VMEM((G, M, L), jnp.float32),
                pltpu.VMEM((G, R, H), jnp.float32),
            ],
        ),
        out_shape=[
            jax.ShapeDtypeStruct(q_SGMH.shape, q_SGMH.dtype),
            jax.ShapeDtypeStruct(kv_pool.shape, kv_pool.dtype),
        ],
        input_output_aliases={len(operands) - 1: 1},
        compiler_params=pltpu.CompilerParams(vmem_limit_bytes=chip.vmem_bytes, disable_bounds_checks=True),
        name="rpa_decode",
    )(*operands)


def rpa_without(index: int, kernel: Any) -> Any:
    """A kernel that takes None for the argument at `index`, as one that has no such argument."""
    return lambda *refs: kernel(*refs[:index], None, *refs[index:])


__all__ = [
    "RPA_MASKED",
    "RpaShape",
    "rpa_cdiv",
    "rpa_clear_before",
    "rpa_clear_tiles",
    "rpa_copy",
    "rpa_decode",
    "rpa_operand",
    "rpa_precision",
    "rpa_repeat",
    "rpa_split",
    "rpa_without",
    "rpa_word_masks",
    "rpa_words",
]
