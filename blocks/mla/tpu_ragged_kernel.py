"""The Mosaic kernel of latent attention over a paged cache: one loop over (row, query block, key block).

Legend: S rows, P pages per row, T tokens, B tokens of a query block, N heads, M = B*N score rows, R latent, E the rest
of a pool's row (rope dims, then unused lanes), C = R + E, K keys of a step, W new rows written as one group.

All heads attend to the same cached rows (absorbed form), so that the matrix unit holds a step's keys and streams
M query rows past them: decode has B = 1 and its M is the head count, prefill takes as many tokens as fill M.
Every row of the batch takes as many steps as its own keys fill; the next steps' pages are in flight meanwhile, across
the borders of rows, since one step's keys arrive in less time than one access to HBM takes.
"""

from dataclasses import dataclass
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

# Below any real score, and exp2(_MLA_MASKED - real) is exactly 0. Not -inf: (-inf) - (-inf) is NaN.
_MLA_MASKED = -1e30


@dataclass(frozen=True)
class MlaKernelShape:
    """What one kernel is specialised to. prefill: queries in blocks, new rows come in groups (`new_GWC`); else one
    query per row, and its new row is put in place while it is attended to. rope: dims of E that are used."""

    prefill: bool
    pages_per_seq: int
    page_size: int
    block_tokens: int
    tile_tokens: int
    num_heads: int
    latent: int
    rope: int
    row: int
    keys: int
    buffers: int
    group: int
    contraction: int
    exponent_scale: float


class _MlaStep(NamedTuple):
    """One step of the loop: row, query block of it, key block of that."""

    row: Array
    query: Array
    key: Array


class MlaRefs(NamedTuple):
    """The kernel's operands in order: scalars, inputs, outputs, scratch."""

    span: Any  # [3] first row, end of the rows, the layer's first page
    start: Any  # [S] cached tokens
    q_len: Any  # [S]
    first: Any  # [S] first token
    pages: Any  # [S*P]
    ql: Any  # [T, N, R] latent queries
    qe: Any  # [T, N, E]
    new: Any  # decode [S, C] float32, prefill [groups, W, C]
    old_pool: Any
    old_out: Any
    out: Any  # [T, N, R]
    pool: Any  # [L*pages, page_size, C]
    kv: Any  # [buffers, K, C]
    q_lat: Any  # [2, B, N, R]
    q_rope: Any  # [2, B, N, E]
    top: Any  # [M, lanes] running maximum, alike in all lanes
    total: Any  # [M, lanes] running sums per lane
    acc: Any  # [M, R]
    done: Any  # [2, B, N, R]
    stage: Any  # [2, W, C]
    counts: Any  # [2] tokens being written from `done`
    kv_sem: Any
    q_sem: Any
    out_sem: Any
    stage_sem: Any


def mla_ragged_kernel(*refs: Any, shape: MlaKernelShape) -> None:
    """All rows first .. end, one after the other."""
    r = MlaRefs(*refs)
    one, end = jnp.int32(0), r.span[1]
    begin = _MlaStep(r.span[0], one, one)

    @pl.when(begin.row < end)
    def _() -> None:
        if shape.prefill:
            _mla_write_groups(r, shape)
        # What a short step leaves of a buffer must be finite: a weight of 0 does not silence a NaN.
        r.kv[...] = jnp.zeros_like(r.kv)
        r.counts[0] = r.counts[1] = 0
        _mla_reset(r)
        ahead = lax.fori_loop(0, shape.buffers - 1, lambda i, ahead: _mla_fetch(r, shape, ahead, i), begin)
        _mla_queries(r, shape, begin, 0).start()
        _mla_queries_rope(r, shape, begin, 0).start()

        def step(carry: tuple[_MlaStep, _MlaStep, Array, Array]) -> tuple[_MlaStep, _MlaStep, Array, Array]:
            now, ahead, index, item = carry
            ahead = _mla_fetch(r, shape, ahead, lax.rem(index + shape.buffers - 1, shape.buffers))
            return _mla_step(r, shape, now, index, item), ahead, index + 1, item + (_mla_last(r, shape, now))

        carry = lax.while_loop(lambda carry: carry[0].row < end, step, (begin, ahead, one, one))
        for i in range(2):
            _mla_await_out(r, i)
        if not shape.prefill:
            pl.when(carry[3] > 0)(lambda: _mla_store_group(r, shape, begin, one, 0).wait())
            pl.when(carry[3] > 1)(lambda: _mla_store_group(r, shape, begin, one, 1).wait())


def _mla_step(r: MlaRefs, shape: MlaKernelShape, now: _MlaStep, index: Array, item: Array) -> _MlaStep:
    """Fold one step's keys into its queries' softmax; write the outputs after the last. Returns the step after it."""
    slot, half = lax.rem(index, shape.buffers), lax.rem(item, 2)
    after = _mla_next(r, shape, now)
    left = _mla_keys(r, shape, now) - now.key * shape.keys  # keys from this step's first on
    last = _mla_last(r, shape, now)

    @pl.when(now.key == 0)
    def _() -> None:
        _mla_queries(r, shape, now, half).wait()
        _mla_queries_rope(r, shape, now, half).wait()
        following = _mla_next(r, shape, now._replace(key=_mla_steps(r, shape, now) - 1))

        @pl.when(following.row < r.span[1])
        def _() -> None:
            _mla_queries(r, shape, following, 1 - half).start()
            _mla_queries_rope(r, shape, following, 1 - half).start()

    _mla_await_pages(r, shape, left, slot)
    pl.when(last == 1)(lambda: _mla_end_keys(r, shape, now, left, slot, half, item))
    tiles = shape.block_tokens // shape.tile_tokens
    if tiles == 1:
        _mla_attend(r, shape, now, slot, half, 0)
    else:

        def attend(tile: Array, none: int) -> int:
            _mla_attend(r, shape, now, slot, half, tile)
            return none

        lax.fori_loop(0, tiles, attend, 0)
    pl.when(last == 1)(lambda: _mla_finish(r, shape, now, half))
    return after


def _mla_attend(r: MlaRefs, shape: MlaKernelShape, now: _MlaStep, slot: Array, half: Array, tile: Array | int) -> None:
    """Online softmax of one tile of queries over a buffer's keys."""
    tokens, N, R, K = shape.tile_tokens, shape.num_heads, shape.latent, shape.keys
    at, rows = pl.ds(tile * tokens, tokens), _mla_rows(shape, tile)
    ql_MR = r.q_lat[half, at].reshape(tokens * N, R)
    qe_ME = r.q_rope[half, at].reshape(tokens * N, shape.row - R)
    dtype = ql_MR.dtype
    rest_KE = r.kv[slot, :, pl.ds(R, shape.row - R)].astype(dtype)
    if shape.rope < shape.row - R:
        # Nothing says that unused lanes are finite.
        used = lax.broadcasted_iota(jnp.int32, rest_KE.shape, 1) < shape.rope
        rest_KE = jnp.where(used, rest_KE, jnp.zeros_like(rest_KE))
    score_MK = _mla_dot(qe_ME, rest_KE, transposed=True)
    # The matrix unit takes keys of `contraction` values as they lie; wider ones pass the transpose unit first.
    for i in range(0, R, shape.contraction):
        part_KX = r.kv[slot, :, pl.ds(i, shape.contraction)].astype(dtype)
        score_MK += _mla_dot(ql_MR[:, i : i + shape.contraction], part_KX, transposed=True)
    position = lax.broadcasted_iota(jnp.int32, (tokens, N, K), 2).reshape(tokens * N, K) + now.key * K
    newest = _mla_newest(r, shape, now, tile * tokens)
    if shape.prefill:
        newest = newest + lax.broadcasted_iota(jnp.int32, (tokens, N, K), 0).reshape(tokens * N, K)
    score_MK = jnp.where(position <= newest, score_MK * shape.exponent_scale, _MLA_MASKED)
    old_ML = r.top[rows]
    top_ML = jnp.maximum(old_ML, jnp.max(score_MK, axis=1, keepdims=True))
    keep_ML = jnp.exp2(old_ML - top_ML)
    p_MK = jnp.exp2(score_MK - top_ML[:, :1])
    lanes = top_ML.shape[1]
    total_ML = r.total[rows] * keep_ML
    for i in range(0, K, lanes):
        total_ML += p_MK[:, i : i + lanes]
    r.top[rows] = top_ML
    r.total[rows] = total_ML
    value_KR = r.kv[slot, :, pl.ds(0, R)].astype(dtype)
    r.acc[rows] = r.acc[rows] * keep_ML[:, :1] + _mla_dot(p_MK.astype(dtype), value_KR, transposed=False)


def _mla_rows(shape: MlaKernelShape, tile: Array | int) -> Any:
    """Score rows of a tile of queries."""
    rows = shape.tile_tokens * shape.num_heads
    return pl.ds(tile * rows if isinstance(tile, int) else pl.multiple_of(tile * rows, rows), rows)


def _mla_dot(x: Array, y: Array, *, transposed: bool) -> Array:
    """x y or x y^T in float32; float32 operands keep all their bits."""
    precision = lax.Precision.HIGHEST if x.dtype == jnp.float32 else None
    dims = (((1,), (1 if transposed else 0,)), ((), ()))
    return lax.dot_general(x, y, dims, precision=precision, preferred_element_type=jnp.float32)


def _mla_finish(r: MlaRefs, shape: MlaKernelShape, now: _MlaStep, half: Array) -> None:
    """Outputs of a query block to HBM, token by token: a block's tokens may end anywhere."""
    _mla_await_out(r, half)
    tokens, N, R = shape.tile_tokens, shape.num_heads, shape.latent

    def divide(tile: Array, none: int) -> int:
        rows = _mla_rows(shape, tile)
        mean_MR = r.acc[rows] / jnp.sum(r.total[rows], axis=1, keepdims=True)
        r.done[half, pl.ds(tile * tokens, tokens)] = mean_MR.astype(r.done.dtype).reshape(tokens, N, R)
        return none

    lax.fori_loop(0, shape.block_tokens // tokens, divide, 0)
    _mla_reset(r)
    count, token = _mla_count(r, shape, now), _mla_token(r, shape, now)
    ahead = token - _mla_read_from(r, shape, now)

    def send(i: Array, _: int) -> int:
        pltpu.make_async_copy(r.done.at[half, ahead + i], r.out.at[token + i], r.out_sem.at[half]).start()
        return 0

    lax.fori_loop(0, count, send, 0)
    r.counts[half] = count


def _mla_await_out(r: MlaRefs, half: Array | int) -> None:
    def wait(_: Array, none: int) -> int:
        pltpu.make_async_copy(r.done.at[half, 0], r.out.at[0], r.out_sem.at[half]).wait()
        return none

    lax.fori_loop(0, r.counts[half], wait, 0)
    r.counts[half] = 0


def _mla_reset(r: MlaRefs) -> None:
    r.top[...] = jnp.full_like(r.top, _MLA_MASKED)
    r.total[...] = jnp.zeros_like(r.total)
    r.acc[...] = jnp.zeros_like(r.acc)


def _mla_ceil(x: Array, unit: int) -> Array:
    """x / unit rounded up; x >= 0 (Python's // would compile to a dozen scalar operations for its other half)."""
    return lax.div(x + (unit - 1), unit)


def _mla_floor(x: Array, unit: int) -> Array:
    """The multiple of unit at or below x >= 0."""
    return lax.div(x, unit) * unit


# Steps -------------------------------------------------------------------------------------------------------------


def _mla_keys(r: MlaRefs, shape: MlaKernelShape, at: _MlaStep) -> Array:
    """Keys that the queries of a step see in all: history and own tokens up to the block's end."""
    return r.start[at.row] + jnp.minimum((at.query + 1) * shape.block_tokens, r.q_len[at.row])


def _mla_steps(r: MlaRefs, shape: MlaKernelShape, at: _MlaStep) -> Array:
    return jnp.maximum(_mla_ceil(_mla_keys(r, shape, at), shape.keys), 1)


def _mla_last(r: MlaRefs, shape: MlaKernelShape, at: _MlaStep) -> Array:
    """1 in a query block's last step."""
    return (at.key + 1 == _mla_steps(r, shape, at)).astype(jnp.int32)


def _mla_next(r: MlaRefs, shape: MlaKernelShape, at: _MlaStep) -> _MlaStep:
    """The step after a step; an empty row has one step, and no outputs."""
    ends = _mla_last(r, shape, at)
    blocks = jnp.maximum(_mla_ceil(r.q_len[at.row], shape.block_tokens), 1)
    ends_row = ends * (at.query + 1 == blocks).astype(jnp.int32)
    key, query = jnp.where(ends == 1, 0, at.key + 1), jnp.where(ends_row == 1, 0, at.query + ends)
    return _MlaStep(at.row + ends_row, query, key)


def _mla_count(r: MlaRefs, shape: MlaKernelShape, at: _MlaStep) -> Array:
    """Tokens of a query block."""
    return jnp.minimum(r.q_len[at.row] - at.query * shape.block_tokens, shape.block_tokens)


def _mla_token(r: MlaRefs, shape: MlaKernelShape, at: _MlaStep) -> Array:
    """A query block's first token."""
    return r.first[at.row] + at.query * shape.block_tokens


def _mla_read_from(r: MlaRefs, shape: MlaKernelShape, at: _MlaStep) -> Array:
    """Where its queries are read from: a whole block must lie inside the batch, so a late one starts earlier."""
    return jnp.minimum(_mla_token(r, shape, at), r.ql.shape[0] - shape.block_tokens)


def _mla_newest(r: MlaRefs, shape: MlaKernelShape, at: _MlaStep, index: Array | int) -> Array:
    """The newest key that the query at `index` of a block as read sees: itself."""
    return r.start[at.row] + _mla_read_from(r, shape, at) - r.first[at.row] + index


# Copies ------------------------------------------------------------------------------------------------------------


def _mla_queries(r: MlaRefs, shape: MlaKernelShape, at: _MlaStep, half: Array | int) -> Any:
    tokens = pl.ds(_mla_read_from(r, shape, at), shape.block_tokens)
    return pltpu.make_async_copy(r.ql.at[tokens], r.q_lat.at[half], r.q_sem.at[half])


def _mla_queries_rope(r: MlaRefs, shape: MlaKernelShape, at: _MlaStep, half: Array | int) -> Any:
    tokens = pl.ds(_mla_read_from(r, shape, at), shape.block_tokens)
    return pltpu.make_async_copy(r.qe.at[tokens], r.q_rope.at[half], r.q_sem.at[half])


def _mla_page(r: MlaRefs, shape: MlaKernelShape, row: Array, index: Array) -> Array:
    return r.span[2] + r.pages[row * shape.pages_per_seq + index]


def _mla_fetch(r: MlaRefs, shape: MlaKernelShape, at: _MlaStep, slot: Array | int) -> _MlaStep:
    """Start reading a step's pages, as far as they hold keys; returns the step after it."""
    per_step = shape.keys // shape.page_size

    @pl.when(at.row < r.span[1])
    def _() -> None:
        def start(i: Array, _: int) -> int:
            page = _mla_page(r, shape, at.row, at.key * per_step + i)
            rows = pl.ds(pl.multiple_of(i * shape.page_size, shape.page_size), shape.page_size)
            pltpu.make_async_copy(r.pool.at[page], r.kv.at[slot, rows], r.kv_sem.at[slot]).start()
            return 0

        lax.fori_loop(0, _mla_pages(shape, _mla_keys(r, shape, at) - at.key * shape.keys), start, 0)

    row = jnp.minimum(at.row, r.span[1] - 1)
    after = _mla_next(r, shape, at._replace(row=row))
    past = (at.row >= r.span[1]).astype(jnp.int32)
    return _MlaStep(after.row + past * (r.span[1] - after.row), after.query, after.key)


def _mla_pages(shape: MlaKernelShape, left: Array) -> Array:
    """Pages of a step with `left` keys from its first on."""
    return jnp.minimum(_mla_ceil(left, shape.page_size), shape.keys // shape.page_size)


def _mla_await_pages(r: MlaRefs, shape: MlaKernelShape, left: Array, slot: Array) -> None:
    def wait(_: Array, none: int) -> int:
        rows = pl.ds(0, shape.page_size)
        pltpu.make_async_copy(r.pool.at[0], r.kv.at[slot, rows], r.kv_sem.at[slot]).wait()
        return none

    lax.fori_loop(0, _mla_pages(shape, left), wait, 0)


# New rows ----------------------------------------------------------------------------------------------------------


def _mla_end_keys(
    r: MlaRefs, shape: MlaKernelShape, now: _MlaStep, left: Array, slot: Array, half: Array, item: Array
) -> None:
    """Clear what the pages hold behind a query block's newest key, and put a decode row's new row there.

    Rows of 8 or 16 bit share a word with their neighbours, so that a row goes back to HBM with its group of W. Behind
    the newest key a group may hold anything: those are tokens to come.
    """
    W = shape.group
    newest = left - 1
    begin = pl.multiple_of(_mla_floor(newest, W), W)
    old_WC = r.kv[slot, pl.ds(begin, W), :].astype(jnp.float32)
    index_WC = lax.broadcasted_iota(jnp.int32, old_WC.shape, 0) + begin
    new_WC = jnp.where(index_WC <= newest, old_WC, 0.0)
    if not shape.prefill:
        new_WC = jnp.where(index_WC == newest, r.new[pl.ds(now.row - r.span[0], 1), :], new_WC)
    new_WC = new_WC.astype(r.kv.dtype)
    r.kv[slot, pl.ds(begin, W), :] = new_WC
    if not shape.prefill:
        # The group stored two rows ago has to be gone.
        pl.when(item > 1)(lambda: _mla_store_group(r, shape, now, left, half).wait())
        r.stage[half] = new_WC
        _mla_store_group(r, shape, now, left, half).start()

    def clear(i: Array, _: int) -> int:
        rows = pl.ds(pl.multiple_of(i * W, W), W)
        r.kv[slot, rows, :] = jnp.zeros((W, shape.row), r.kv.dtype)
        return 0

    lax.fori_loop(lax.div(begin, W) + 1, _mla_pages(shape, left) * (shape.page_size // W), clear, 0)


def _mla_store_group(r: MlaRefs, shape: MlaKernelShape, now: _MlaStep, left: Array, half: Array | int) -> Any:
    """The copy of a decode row's last group into its page."""
    W, newest = shape.group, now.key * shape.keys + left - 1
    page = _mla_page(r, shape, now.row, lax.div(newest, shape.page_size))
    rows = pl.ds(pl.multiple_of(_mla_floor(lax.rem(newest, shape.page_size), W), W), W)
    return pltpu.make_async_copy(r.stage.at[half], r.pool.at[page, rows], r.stage_sem.at[half])


def _mla_write_groups(r: MlaRefs, shape: MlaKernelShape) -> None:
    """All new rows of the prefill rows into their pages, before anything reads them."""
    W = shape.group

    def group_of(row: Array, index: Array) -> tuple[Array, Any]:
        position = _mla_floor(r.start[row], W) + index * W
        page = _mla_page(r, shape, row, lax.div(position, shape.page_size))
        return position, r.pool.at[page, pl.ds(pl.multiple_of(lax.rem(position, shape.page_size), W), W)]

    def write(row: Array, index: Array, source: Array) -> None:
        position, target = group_of(row, index)
        new = pltpu.make_async_copy(r.new.at[source], r.stage.at[0], r.stage_sem.at[0])
        old = pltpu.make_async_copy(target, r.stage.at[1], r.stage_sem.at[0])
        kept = r.start[row] - position  # rows of history in front

        @pl.when(kept > 0)
        def _() -> None:
            new.start()
            old.start()
            new.wait()
            old.wait()
            new_WC, old_WC = (r.stage[i].astype(jnp.float32) for i in range(2))
            index_WC = lax.broadcasted_iota(jnp.int32, new_WC.shape, 0)
            r.stage[0] = jnp.where(index_WC < kept, old_WC, new_WC).astype(r.stage.dtype)
            back = pltpu.make_async_copy(r.stage.at[0], target, r.stage_sem.at[0])
            back.start()
            back.wait()

        @pl.when(kept <= 0)
        def _() -> None:
            pltpu.make_async_copy(r.new.at[source], target, r.stage_sem.at[1]).start()

    def over_rows(row: Array, source: Array, visit: Any) -> Array:
        groups = jnp.where(
            r.q_len[row] > 0, lax.div(r.start[row] + r.q_len[row] - 1, W) - lax.div(r.start[row], W) + 1, 0
        )
        lax.fori_loop(0, groups, lambda i, _: (visit(row, i, source + i), 0)[1], 0)
        return source + groups

    def wait(row: Array, index: Array, source: Array) -> None:
        position, target = group_of(row, index)
        copy = pltpu.make_async_copy(r.new.at[source], target, r.stage_sem.at[1])
        pl.when(position >= r.start[row])(copy.wait)

    for visit in (write, wait):
        lax.fori_loop(
            r.span[0], r.span[1], lambda row, source, visit=visit: over_rows(row, source, visit), jnp.int32(0)
        )


__all__ = ["MlaKernelShape", "MlaRefs", "mla_ragged_kernel"]
