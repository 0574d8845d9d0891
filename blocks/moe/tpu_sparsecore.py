"""Gather of tokens and weighted sum of expert rows on the SparseCores, beside what the TensorCore does meanwhile.

Each subcore of each SparseCore takes one run of the work. Rows come by indirect copies: the list of row numbers is in
the subcore's memory, the copy engine follows it. Rows are row words (tpu_grouped_rows.py).

No interpreter runs these kernels on a CPU. What decides their result is in plain functions (sparsecore_share,
sparsecore_entries), which tpu_sparsecore_emulation.py calls too: the same runs, the same order of float32 sums.

Legend: T tokens, K top_k, P rows, D width, J memory rows of 128 words per row, W subcores, G tokens that leave
together (8: one memory tile of float32), A entries per token (K rounded up to a power of two, at
least 2: 8 tokens are whole vectors), R rows of one indirect copy, L lanes.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jax.experimental.pallas import tpu_sc as plsc

from ..core.chip import ChipLimits

SPARSECORE_TOKENS = 8


def gather_rows_sparsecore(h_TJ: Array, token_P: Array, num_rows: Array, *, chip: ChipLimits, copy_rows: int) -> Array:
    """Row words of the tokens that token_P names -> [P', J, 128], P' = P rounded up to whole copies of all subcores.

    Only the first num_rows (traced) are gathered, and those that complete the last copy of copy_rows (8 or 16 and
    so on); the rest is undefined.
    """
    workers = chip.sparse_cores * chip.sc_subcores
    per_worker = pl.cdiv(token_P.shape[0], workers * copy_rows) * copy_rows
    token_P = jnp.pad(token_P, (0, per_worker * workers - token_P.shape[0]))
    call: Any = pl.kernel(
        functools.partial(_sc_gather_kernel, copy_rows=copy_rows, chip=chip),
        out_type=jax.ShapeDtypeStruct((token_P.shape[0], *h_TJ.shape[1:]), h_TJ.dtype),
        mesh=_sc_mesh(chip),
        scratch_types=[
            pltpu.VMEM((chip.sc_lanes,), jnp.int32),
            pltpu.VMEM((per_worker,), jnp.int32),
            pltpu.VMEM((2, copy_rows, *h_TJ.shape[1:]), h_TJ.dtype),
            pltpu.SemaphoreType.DMA((2,)),
            pltpu.SemaphoreType.DMA((2,)),
        ],
        compiler_params=_sc_params(),
        name=f"gather_rows_sparsecore_{token_P.shape[0]}",
    )
    return call(h_TJ, token_P, jnp.broadcast_to(num_rows.astype(jnp.int32), (chip.sc_lanes,)))


def combine_sparsecore(
    out_PJ: Array, place_TK: Array, weight_TK: Array, *, width: int, chip: ChipLimits, copy_rows: int
) -> Array:
    """Sum over k of weight[t, k] * row[place[t, k]] -> [T, width] float32; place -1 adds nothing.

    As combine_rows: float32 sums, k rising; a row that no place names is never read.
    """
    num_tokens = place_TK.shape[0]
    place, weight = sparsecore_entries(place_TK, -1, chip), sparsecore_entries(weight_TK.astype(jnp.float32), 0, chip)
    groups = pl.cdiv(num_tokens, SPARSECORE_TOKENS)
    per_worker = place.shape[0] // (chip.sparse_cores * chip.sc_subcores)
    group = SPARSECORE_TOKENS * sparsecore_stride(place_TK.shape[1])
    call: Any = pl.kernel(
        functools.partial(_sc_combine_kernel, group=group, groups=groups, copy_rows=copy_rows, chip=chip),
        out_type=jax.ShapeDtypeStruct((groups * SPARSECORE_TOKENS, width), jnp.float32),
        mesh=_sc_mesh(chip),
        scratch_types=[
            pltpu.VMEM((per_worker,), jnp.int32),
            pltpu.VMEM((per_worker + chip.sc_lanes,), jnp.float32),
            pltpu.VMEM((per_worker + copy_rows + chip.sc_lanes,), jnp.int32),
            pltpu.VMEM((per_worker + chip.sc_lanes,), jnp.int32),
            pltpu.SMEM((per_worker // group + 1,), jnp.int32),
            pltpu.VMEM((2, copy_rows, *out_PJ.shape[1:]), out_PJ.dtype),
            pltpu.VMEM((SPARSECORE_TOKENS, width), jnp.float32),
            pltpu.SemaphoreType.DMA((2,)),
            pltpu.SemaphoreType.DMA,
        ],
        compiler_params=_sc_params(),
        name=f"combine_sparsecore_{num_tokens}x{place_TK.shape[1]}_{width}",
    )
    return call(out_PJ, place, weight)[:num_tokens]


def _sc_mesh(chip: ChipLimits) -> plsc.VectorSubcoreMesh:
    """Every subcore of the device's SparseCores."""
    return plsc.VectorSubcoreMesh(
        core_axis_name="sc_core",
        subcore_axis_name="sc_subcore",
        num_cores=chip.sparse_cores,
        num_subcores=chip.sc_subcores,
    )


def _sc_params() -> pltpu.CompilerParams:
    """The code is in vectors of all lanes already; the passes that would cut it refuse compressed stores."""
    return pltpu.CompilerParams(needs_layout_passes=False)


def _sc_worker(chip: ChipLimits) -> Array:
    """Number of this subcore among all of the device's."""
    return lax.axis_index("sc_core") * chip.sc_subcores + lax.axis_index("sc_subcore")


def sparsecore_share(worker: Any, items: Any, workers: int) -> tuple[Any, Any]:
    """Run of items of one worker -> (first, how many). Numbers may be traced; workers is a power of two."""
    shift = workers.bit_length() - 1
    assert workers == 1 << shift, f"{workers} subcores: a power of two"
    most = (items + workers - 1) >> shift
    first = worker * most
    left = items - first
    # min and max by arithmetic that holds for numbers as for traced values
    left = left * (left > 0)
    return first, most + (left - most) * (left < most)


def sparsecore_stride(top_k: int) -> int:
    """A: entries of one token, a power of two so that XLA lays them out cheaply."""
    return max(pl.next_power_of_2(top_k), 2)


def sparsecore_entries(x_TK: Array, fill: int, chip: ChipLimits) -> Array:
    """Values by entry, as many for every worker -> flat; what is no choice is `fill`."""
    num_tokens, top_k = x_TK.shape
    workers = chip.sparse_cores * chip.sc_subcores
    tokens = pl.cdiv(num_tokens, SPARSECORE_TOKENS * workers) * SPARSECORE_TOKENS * workers
    pad = ((0, tokens - num_tokens), (0, sparsecore_stride(top_k) - top_k))
    return jnp.pad(x_TK, pad, constant_values=fill).reshape(-1)


def _sc_gather_kernel(
    h_ref: jax.Ref,
    token_ref: jax.Ref,
    num_ref: jax.Ref,
    out_ref: jax.Ref,
    num_vec: jax.Ref,
    list_ref: jax.Ref,
    rows_ref: jax.Ref,
    in_sem: jax.Ref,
    out_sem: jax.Ref,
    *,
    copy_rows: int,
    chip: ChipLimits,
) -> None:
    """One subcore: its run of copies, each R rows in and out; the next one comes in while this one leaves."""
    pltpu.sync_copy(num_ref, num_vec)
    shift = copy_rows.bit_length() - 1
    copies = (num_vec[...][0] + (copy_rows - 1)) >> shift
    first, count = sparsecore_share(_sc_worker(chip), copies, chip.sparse_cores * chip.sc_subcores)
    pltpu.sync_copy(token_ref.at[pl.ds(pl.multiple_of(first * copy_rows, copy_rows), list_ref.shape[0])], list_ref)

    def come(step: Array) -> Any:
        rows = list_ref.at[pl.ds(pl.multiple_of(step * copy_rows, copy_rows), copy_rows)]
        return pltpu.make_async_copy(h_ref.at[rows], rows_ref.at[step & 1], in_sem.at[step & 1])

    def leave(step: Array) -> Any:
        where = pl.ds(pl.multiple_of((first + step) * copy_rows, copy_rows), copy_rows)
        return pltpu.make_async_copy(rows_ref.at[step & 1], out_ref.at[where], out_sem.at[step & 1])

    @pl.when(count > 0)
    def _() -> None:
        come(jnp.int32(0)).start()

    @pl.loop(0, count)
    def _(step: Array) -> None:
        come(step).wait()
        leave(step).start()

        @pl.when(step > 0)
        def _() -> None:
            leave(step - 1).wait()

        @pl.when(step + 1 < count)
        def _() -> None:
            come(step + 1).start()

    @pl.when(count > 0)
    def _() -> None:
        leave(count - 1).wait()


def _sc_combine_kernel(
    out_ref: jax.Ref,
    place_ref: jax.Ref,
    weight_ref: jax.Ref,
    y_ref: jax.Ref,
    place_mine: jax.Ref,
    weight_mine: jax.Ref,
    row_list: jax.Ref,
    entry_list: jax.Ref,
    bound_ref: jax.Ref,
    rows_ref: jax.Ref,
    sums_ref: jax.Ref,
    in_sem: jax.Ref,
    out_sem: jax.Ref,
    *,
    group: int,
    groups: int,
    copy_rows: int,
    chip: ChipLimits,
) -> None:
    """One subcore: its run of groups of tokens. All its rows are listed first, so that copies run on over groups."""
    worker, workers, lanes = _sc_worker(chip), chip.sparse_cores * chip.sc_subcores, chip.sc_lanes
    first, count = sparsecore_share(worker, groups, workers)
    mine = pl.ds(pl.multiple_of(first * group, 8), place_mine.shape[0])
    pltpu.sync_copy(place_ref.at[mine], place_mine)
    pltpu.sync_copy(weight_ref.at[mine], weight_mine.at[pl.ds(0, place_mine.shape[0])])
    found = _sc_list(place_mine, row_list, entry_list, bound_ref, count, group, copy_rows, lanes)

    def come(step: Array) -> Any:
        rows = row_list.at[pl.ds(pl.multiple_of(step * copy_rows, copy_rows), copy_rows)]
        listed = out_ref.at[plsc.Indices(rows, ignored_value=-1)]
        return pltpu.make_async_copy(listed, rows_ref.at[step & 1], in_sem.at[step & 1])

    def leave(index: Array) -> Any:
        where = pl.ds(pl.multiple_of((first + index) * SPARSECORE_TOKENS, SPARSECORE_TOKENS), SPARSECORE_TOKENS)
        return pltpu.make_async_copy(sums_ref, y_ref.at[where], out_sem)

    def one_row(row: Array, before: Array, index: Array) -> Array:
        step = row >> (copy_rows.bit_length() - 1)

        @pl.when((row & (copy_rows - 1)) == 0)
        def _() -> None:
            come(step).wait()

            @pl.when((step + 1) * copy_rows < found)
            def _() -> None:
                come(step + 1).start()

        entry = entry_list[pl.ds(row, lanes)][0]
        token = (entry - index * group) >> ((group // SPARSECORE_TOKENS).bit_length() - 1)
        weight = weight_mine[pl.ds(entry, lanes)][0]
        _sc_zero(sums_ref, before + 1, token, lanes)
        _sc_row(rows_ref.at[step & 1, row & (copy_rows - 1)], sums_ref, token, weight, token > before, lanes)
        return token

    @pl.when(found > 0)
    def _() -> None:
        come(jnp.int32(0)).start()

    @pl.loop(0, count)
    def _(index: Array) -> None:
        @pl.when(index > 0)
        def _() -> None:
            leave(index - 1).wait()

        body = functools.partial(one_row, index=index)
        last = lax.fori_loop(bound_ref[index], bound_ref[index + 1], body, jnp.int32(-1))
        _sc_zero(sums_ref, last + 1, jnp.int32(SPARSECORE_TOKENS), lanes)
        leave(index).start()

    @pl.when(count > 0)
    def _() -> None:
        leave(count - 1).wait()


def _sc_list(
    place_mine: jax.Ref,
    row_list: jax.Ref,
    entry_list: jax.Ref,
    bound_ref: jax.Ref,
    count: Array,
    group: int,
    copy_rows: int,
    lanes: int,
) -> Array:
    """Places that are there, and their entries, in order; bound[g] is where those of group g begin -> how many."""
    bound_ref[0] = jnp.int32(0)

    def one_group(index: Array, found: Array) -> Array:
        for vector in range(group // lanes):
            entry = index * group + vector * lanes
            place = place_mine[pl.ds(pl.multiple_of(entry, 8), lanes)]
            there = place >= 0
            plsc.store_compressed(row_list.at[pl.ds(found, lanes)], place, mask=there)
            plsc.store_compressed(entry_list.at[pl.ds(found, lanes)], entry + lax.iota(jnp.int32, lanes), mask=there)
            found += plsc.all_reduce_population_count(there)[0]
        bound_ref[index + 1] = found
        return found

    found = lax.fori_loop(0, count, one_group, jnp.int32(0))
    for vector in range(pl.cdiv(copy_rows, lanes)):
        row_list[pl.ds(found + vector * lanes, lanes)] = jnp.full((lanes,), -1, jnp.int32)
    return found


def _sc_zero(sums_ref: jax.Ref, first: Array, end: Array, lanes: int) -> None:
    """Tokens that no row belongs to."""

    @pl.loop(first, end)
    def _(token: Array) -> None:
        @plsc.parallel_loop(0, sums_ref.shape[1], lanes, unroll=8)
        def _(column: Array) -> None:
            sums_ref[token, pl.ds(column, lanes)] = jnp.zeros((lanes,), jnp.float32)


def _sc_row(row_ref: jax.Ref, sums_ref: jax.Ref, token: Array, weight: Array, is_first: Array, lanes: int) -> None:
    """weight * row into one token's sums: stored by its first row, added by the others."""
    half = row_ref.shape[0] * row_ref.shape[1]
    parts = sums_ref.shape[1] // half

    def all_columns(put: Any) -> None:
        @plsc.parallel_loop(0, half, lanes, unroll=8)
        def _(column: Array) -> None:
            words = row_ref[column >> 7, pl.ds(pl.multiple_of(column & 127, lanes), lanes)]
            values = (words,) if parts == 1 else _sc_halves(words)
            for part, value in enumerate(values):
                put(sums_ref.at[token, pl.ds(pl.multiple_of(part * half + column, lanes), lanes)], weight * value)

    @pl.when(is_first)
    def _() -> None:
        def store(ref: jax.Ref, value: Array) -> None:
            ref[...] = value

        all_columns(store)

    @pl.when(jnp.logical_not(is_first))
    def _() -> None:
        all_columns(plsc.addupdate)


def _sc_halves(words: Array) -> tuple[Array, Array]:
    """The two bfloat16 values of each word, as float32."""
    return lax.bitcast_convert_type(words << 16, jnp.float32), lax.bitcast_convert_type(words & -65536, jnp.float32)


__all__ = [
    "SPARSECORE_TOKENS",
    "combine_sparsecore",
    "gather_rows_sparsecore",
    "sparsecore_entries",
    "sparsecore_share",
    "sparsecore_stride",
]
