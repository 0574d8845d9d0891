"""Weighted sum of expert rows per token on the TensorCore, with nothing of size [tokens * top_k, width] in HBM.

Two orders of the same sum. combine_rows goes by token: rows are fetched one by one from where they are. combine_stream
goes by row: rows are read as they lie, many at a time, and sums are made in VMEM, of all tokens or of some at a time.

Expert rows travel as row words (tpu_grouped_rows.py): int32 [P, J, 128] holds bfloat16 columns c and c + D/2 in one
word, float32 [P, J, 128] holds float32 columns. A row is one contiguous piece, so a copy may start at any row.

Legend: T tokens, K top_k, P rows, D width of a row, J memory rows of 128 words per row, S that many rounded up to
whole tiles of 8, B tokens of a tile, A entries of one token in scalar memory (K rounded up to a power of two).
An entry token * A + k names a choice.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from ..core.chip import ChipLimits

# Rows per loop step where their number is known before: enough independent work to fill the latency of scalar loads.
_COMBINE_UNROLL = 8
# Copies of rows under way at a time, a power of two: adding a piece takes a tenth of the time a copy takes to arrive.
_COMBINE_DEPTH = 8


def combine_rows(
    out_PJ: Array, place_TK: Array, weight_TK: Array, *, width: int, chip: ChipLimits, tile_tokens: int
) -> Array:
    """Sum over k of weight[t, k] * row[place[t, k]] -> [T, width] float32; place -1 adds nothing.

    out_PJ: row words. Sums are float32, k rising. Rows that no place names are never read. Work follows the
    places that are there: each is one copy of one row from HBM to VMEM. tile_tokens: a multiple of 8.
    """
    num_tokens, top_k = place_TK.shape
    assert tile_tokens % 8 == 0 and top_k <= 32, f"tile_tokens {tile_tokens}: a multiple of 8; top_k {top_k}: up to 32"
    tiles = pl.cdiv(num_tokens, tile_tokens)
    place = _combine_entries(place_TK, tiles * tile_tokens, -1).reshape(tiles, 1, -1)
    weight = _combine_entries(weight_TK.astype(jnp.float32), tiles * tile_tokens, 0).reshape(tiles, 1, -1)
    entries = place.shape[-1]
    # One bit per entry that has a row, the first one highest: where they are is found by counting leading zeros.
    bit = jnp.int32(1) << (31 - jnp.arange(32, dtype=jnp.int32))
    bits = jnp.sum(jnp.where(place.reshape(tiles, -1, 32) >= 0, bit, 0), axis=-1, dtype=jnp.int32)[:, None]

    # Step i fetches tile i and sums tile i - 1.
    def ahead(size: int) -> pl.BlockSpec:
        return pl.BlockSpec((1, 1, size), lambda i: (jnp.minimum(i, tiles - 1), 0, 0), memory_space=pltpu.SMEM)

    behind = pl.BlockSpec((1, 1, entries), lambda i: (jnp.maximum(i - 1, 0), 0, 0), memory_space=pltpu.SMEM)
    most, sublanes = tile_tokens * top_k, _combine_sublanes(out_PJ)
    return pl.pallas_call(
        functools.partial(_combine_rows_kernel, sublanes=sublanes),
        grid=(tiles + 1,),
        in_specs=[ahead(entries // 32), ahead(entries), behind, pl.BlockSpec(memory_space=pl.ANY)],
        out_specs=pl.BlockSpec((tile_tokens, width), lambda i: (jnp.maximum(i - 1, 0), 0)),
        out_shape=jax.ShapeDtypeStruct((num_tokens, width), jnp.float32),
        scratch_shapes=[
            pltpu.SMEM((2 * most,), jnp.int32),
            pltpu.SMEM((2,), jnp.int32),
            pltpu.VMEM((2, most * sublanes, 128), out_PJ.dtype),
            pltpu.VMEM((_combine_parts(out_PJ), tile_tokens * sublanes, 128), jnp.float32),
            pltpu.SemaphoreType.DMA((2,)),
        ],
        compiler_params=_combine_params(chip),
        name=f"combine_rows_{num_tokens}x{top_k}_{width}",
    )(bits, place, weight, out_PJ)


def combine_stream(
    out_PJ: Array,
    token_P: Array,
    choice_P: Array,
    start_E: Array,
    weight_TK: Array,
    *,
    width: int,
    chip: ChipLimits,
    tile_tokens: int,
    tile_rows: int,
) -> Array:
    """The same sums by row -> [T, width] float32: row p is token_P[p]'s, and choice_P[p] is token * K + k.

    start_E [E+1]: rows of expert e are start_E[e] to start_E[e+1] - 1, and their tokens rise. Rows from start_E[E] on
    are never added. Sums are float32, rows rising. Rows arrive tile_rows at a time, sums leave tile_tokens at a time.
    Where the sums of all tokens do not fit, they are made for as many tokens at a time as do: those have one run of
    rows of each expert.
    """
    num_tokens, top_k = weight_TK.shape
    assert tile_tokens % 8 == 0, f"tile_tokens {tile_tokens}: a multiple of 8"
    held_tokens = _combine_held(out_PJ, num_tokens, tile_tokens, chip)
    helds, sublanes = pl.cdiv(num_tokens, held_tokens), _combine_sublanes(out_PJ)
    tile_rows, per_held = min(tile_rows, out_PJ.shape[0]), held_tokens // tile_tokens
    if helds == 1:  # where runs end does not matter: one run of all rows
        start_E = jnp.stack([jnp.zeros_like(start_E[-1]), start_E[-1]])
    weight = _combine_entries(weight_TK.astype(jnp.float32), helds * held_tokens, 0).reshape(helds, 1, -1)
    stride = weight.shape[-1] // held_tokens
    experts = start_E.shape[0] - 1
    pieces = experts + pl.cdiv(min(held_tokens * top_k, out_PJ.shape[0]), tile_rows)
    of_held = pl.BlockSpec(
        (1, 1, weight.shape[-1]), lambda i, *_: (lax.div(i, per_held), 0, 0), memory_space=pltpu.SMEM
    )
    return pl.pallas_call(
        functools.partial(_combine_stream_kernel, sublanes=sublanes, held_tokens=held_tokens, is_cut=helds > 1),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=2,
            grid=(pl.cdiv(num_tokens, tile_tokens),),
            in_specs=[of_held, pl.BlockSpec(memory_space=pl.ANY)],
            out_specs=pl.BlockSpec((tile_tokens, width), lambda i, *_: (i, 0)),
            scratch_shapes=[
                pltpu.SMEM((experts,), jnp.int32),
                pltpu.SMEM((3 * pieces,), jnp.int32),
                pltpu.VMEM((_COMBINE_DEPTH, tile_rows, *out_PJ.shape[1:]), out_PJ.dtype),
                pltpu.VMEM((_combine_parts(out_PJ), held_tokens * sublanes, 128), jnp.float32),
                pltpu.SemaphoreType.DMA((_COMBINE_DEPTH,)),
            ],
        ),
        out_shape=jax.ShapeDtypeStruct((num_tokens, width), jnp.float32),
        compiler_params=_combine_params(chip),
        name=f"combine_stream_{num_tokens}x{top_k}_{width}",
    )(start_E, choice_P + token_P * (stride - top_k), weight, out_PJ)


def _combine_entries(x_TK: Array, tokens: int, fill: int) -> Array:
    """Values by entry -> [tokens * A]; what is no choice is `fill`."""
    num_tokens, top_k = x_TK.shape
    # 8 tokens fill whole words of 32 bits. (XLA takes 20 s to compile [8192, 10] -> [81920], and 3 times the bundles.)
    stride = max(pl.next_power_of_2(top_k), 4)
    return jnp.pad(x_TK, ((0, tokens - num_tokens), (0, stride - top_k)), constant_values=fill).reshape(-1)


def _combine_sublanes(out_PJ: Array) -> int:
    """S."""
    return pl.cdiv(out_PJ.shape[1], 8) * 8


def _combine_held(out_PJ: Array, num_tokens: int, tile_tokens: int, chip: ChipLimits) -> int:
    """Tokens whose sums are in VMEM at a time: all, or whole tiles, a power of two of them, in a quarter of VMEM."""
    tiles = pl.cdiv(num_tokens, tile_tokens)
    fit = chip.vmem_bytes // 4 // (tile_tokens * _combine_sublanes(out_PJ) * _combine_parts(out_PJ) * 512)
    return tile_tokens * (tiles if tiles <= fit else 1 << max(fit.bit_length() - 1, 0))


def _combine_parts(out_PJ: Array) -> int:
    """Values per word."""
    return 1 if out_PJ.dtype == jnp.float32 else 2


def _combine_params(chip: ChipLimits) -> pltpu.CompilerParams:
    """Grid in order. Every copy's place is known to be in range: its check would be most of its issue slots."""
    return pltpu.CompilerParams(
        dimension_semantics=("arbitrary",), vmem_limit_bytes=chip.vmem_bytes, disable_bounds_checks=True
    )


def _combine_rows_kernel(
    bits_ref: jax.Ref,
    place_ref: jax.Ref,
    weight_ref: jax.Ref,
    out_ref: jax.Ref,
    y_ref: jax.Ref,
    list_ref: jax.Ref,
    count_ref: jax.Ref,
    rows_ref: jax.Ref,
    acc_ref: jax.Ref,
    sem_ref: jax.Ref,
    *,
    sublanes: int,
) -> None:
    """One tile of tokens: its rows are fetched while those of the tile before are summed."""
    step, last = pl.program_id(0), pl.num_programs(0) - 1
    ahead = step & 1
    slot = 1 - ahead
    most = list_ref.shape[0] // 2
    shift = (place_ref.shape[-1] // (acc_ref.shape[1] // sublanes)).bit_length() - 1

    @pl.when(step < last)
    def _() -> None:
        count_ref[ahead] = _combine_fetch(bits_ref, place_ref, list_ref, out_ref, rows_ref, sem_ref, ahead, sublanes)

    @pl.when(step > 0)
    def _() -> None:
        count = count_ref[slot]
        _combine_zero(acc_ref)
        _combine_wait(out_ref, rows_ref, sem_ref, slot, count, sublanes)

        def add(row: Array) -> None:
            entry = list_ref[slot * most + row]
            words = rows_ref[slot, pl.ds(pl.multiple_of(row * sublanes, 8), sublanes)]
            _combine_add(acc_ref, words, entry >> shift, weight_ref[0, 0, entry], sublanes)

        _combine_each(0, count, add)
        _combine_flush(acc_ref, y_ref, 0, sublanes)


def _combine_fetch(
    bits_ref: jax.Ref,
    place_ref: jax.Ref,
    list_ref: jax.Ref,
    out_ref: jax.Ref,
    rows_ref: jax.Ref,
    sem_ref: jax.Ref,
    slot: Array,
    sublanes: int,
) -> Array:
    """Start one copy per entry that has a row, one after the other in VMEM, and list the entries -> how many.

    Most choices are other ranks': looking at 32 of them at once is what makes the few that are here cheap.
    """
    base = slot * (list_ref.shape[0] // 2)
    per_row = out_ref.shape[1]

    def word(index: Array, count: Array) -> Array:
        def take(carry: tuple[Array, Array]) -> tuple[Array, Array]:
            bits, count = carry
            first = lax.clz(bits)
            entry = index * 32 + first
            list_ref[base + count] = entry
            pltpu.make_async_copy(
                out_ref.at[place_ref[0, 0, entry]],
                rows_ref.at[slot, pl.ds(pl.multiple_of(count * sublanes, 8), per_row)],
                sem_ref.at[slot],
            ).start()
            return bits ^ lax.shift_right_logical(jnp.int32(-(2**31)), first), count + 1

        return lax.while_loop(lambda carry: carry[0] != 0, take, (bits_ref[0, 0, index], count))[1]

    return lax.fori_loop(0, bits_ref.shape[-1], word, jnp.int32(0))


def _combine_wait(
    out_ref: jax.Ref, rows_ref: jax.Ref, sem_ref: jax.Ref, slot: Array, count: Array, sublanes: int
) -> None:
    """Wait for `count` rows. A semaphore counts bytes: one wait per binary digit of the count does for all."""
    most = min(rows_ref.shape[1] // sublanes, out_ref.shape[0])
    for digit in range(most.bit_length()):

        @pl.when((count >> digit) & 1 == 1)
        def _(rows: int = 1 << digit) -> None:
            there = out_ref.at[pl.ds(0, rows)]
            pltpu.make_async_copy(there, there, sem_ref.at[slot]).wait()


def _combine_stream_kernel(
    start_ref: jax.Ref,
    entry_ref: jax.Ref,
    weight_ref: jax.Ref,
    out_ref: jax.Ref,
    y_ref: jax.Ref,
    next_ref: jax.Ref,
    piece_ref: jax.Ref,
    rows_ref: jax.Ref,
    acc_ref: jax.Ref,
    sem_ref: jax.Ref,
    *,
    sublanes: int,
    held_tokens: int,
    is_cut: bool,
) -> None:
    """Every step: one tile of sums out, its copy to HBM behind the next one. First one of what is held: rows in."""
    step = pl.program_id(0)
    per_held = held_tokens // y_ref.shape[0]
    held = lax.div(step, per_held)
    within = step - held * per_held
    tile_rows, last_first = rows_ref.shape[1], out_ref.shape[0] - rows_ref.shape[1]
    stride = weight_ref.shape[-1] // held_tokens
    # Entries of tokens that are held.
    low, high = held * weight_ref.shape[-1], (held + 1) * weight_ref.shape[-1]

    def copy(piece: Array) -> Any:
        # The last rows of the array may be reached from further back.
        first = jnp.minimum(piece_ref[3 * piece], last_first)
        slot = piece & (_COMBINE_DEPTH - 1)
        return pltpu.make_async_copy(out_ref.at[pl.ds(first, tile_rows)], rows_ref.at[slot], sem_ref.at[slot])

    def add_piece(piece: Array, count: Array) -> Array:
        copy(piece).wait()
        first, end, expert = (piece_ref[3 * piece + i] for i in range(3))
        origin = jnp.minimum(first, last_first)
        slot = piece & (_COMBINE_DEPTH - 1)

        def add(row: Array) -> None:
            entry = entry_ref[row] - low
            token = entry >> (stride.bit_length() - 1)
            _combine_add(acc_ref, rows_ref[slot, row - origin], token, weight_ref[0, 0, entry], sublanes)

        if is_cut:
            next_ref[expert] = _combine_while(first, end, lambda row: entry_ref[row] < high, add)
        else:
            _combine_each(first, end, add)

        @pl.when(piece + _COMBINE_DEPTH < count)
        def _() -> None:
            copy(piece + _COMBINE_DEPTH).start()

        return count

    @pl.when(step == 0)
    def _() -> None:
        def begin(expert: Array, carry: int) -> int:
            next_ref[expert] = start_ref[expert]
            return carry

        lax.fori_loop(0, next_ref.shape[0], begin, 0)

    @pl.when(within == 0)
    def _() -> None:
        count = _combine_pieces(start_ref, next_ref, entry_ref, piece_ref, high, tile_rows)

        def begin(piece: Array, carry: int) -> int:
            copy(piece).start()
            return carry

        lax.fori_loop(0, jnp.minimum(count, _COMBINE_DEPTH), begin, 0)
        _combine_zero(acc_ref)
        lax.fori_loop(0, count, add_piece, count)

    _combine_flush(acc_ref, y_ref, within * y_ref.shape[0], sublanes)


def _combine_pieces(
    start_ref: jax.Ref, next_ref: jax.Ref, entry_ref: jax.Ref, piece_ref: jax.Ref, high: Array, tile_rows: int
) -> Array:
    """List what to copy: (first row, end, expert) of each piece of each expert's run below entry `high` -> how many.

    A piece is tile_rows rows but where the expert's rows end; where within it the run ends is seen when it is added.
    """

    def here(row: Array, end: Array) -> Array:
        return (row < end) & (entry_ref[jnp.minimum(row, entry_ref.shape[0] - 1)] < high)

    def of_expert(expert: Array, count: Array) -> Array:
        end = start_ref[expert + 1]

        def take(carry: tuple[Array, Array]) -> tuple[Array, Array]:
            row, count = carry
            last = jnp.minimum(row + tile_rows, end)
            for index, value in enumerate((row, last, expert)):
                piece_ref[3 * count + index] = value
            return jnp.where(here(last - 1, end), last, end), count + 1

        return lax.while_loop(lambda carry: here(carry[0], end), take, (next_ref[expert], count))[1]

    return lax.fori_loop(0, next_ref.shape[0], of_expert, jnp.int32(0))


def _combine_while(first: Array, end: Array, go_on: Callable[[Array], Array], body: Callable[[Array], None]) -> Array:
    """body(row) from first on while go_on(row), which once false stays so, and row < end -> the row it stopped at."""

    def some(row: Array) -> Array:
        for index in range(_COMBINE_UNROLL):
            body(row + index)
        return row + _COMBINE_UNROLL

    def one(row: Array) -> Array:
        body(row)
        return row + 1

    def more(row: Array, rows: int) -> Array:
        last = row + rows - 1
        return (last < end) & go_on(jnp.minimum(last, end - 1))

    row = lax.while_loop(lambda row: more(row, _COMBINE_UNROLL), some, first)
    return lax.while_loop(lambda row: more(row, 1), one, row)


def _combine_each(first: Array | int, end: Array, body: Callable[[Array], None]) -> None:
    """body(row) for first <= row < end, several of them per loop step."""

    def some(step: Array, carry: int) -> int:
        for row in range(_COMBINE_UNROLL):
            body(first + step * _COMBINE_UNROLL + row)
        return carry

    def one(row: Array, carry: int) -> int:
        body(row)
        return carry

    whole = lax.div(end - first, _COMBINE_UNROLL)
    lax.fori_loop(0, whole, some, 0)
    lax.fori_loop(first + whole * _COMBINE_UNROLL, end, one, 0)


def _combine_zero(acc_ref: jax.Ref) -> None:
    """Sums of no rows, 64 memory rows per loop step: the tile's tokens are a multiple of 8, their rows of 64."""
    parts, rows, lanes = acc_ref.shape

    def some(step: Array, carry: int) -> int:
        acc_ref[:, pl.ds(pl.multiple_of(step * 64, 64), 64)] = jnp.zeros((parts, 64, lanes), jnp.float32)
        return carry

    lax.fori_loop(0, rows // 64, some, 0)


def _combine_add(acc_ref: jax.Ref, words: Array, token: Array, weight: Array, sublanes: int) -> None:
    """Add weight * row, float32, to one token's sums.

    Each row waits for the one before, whose token may be the same: 9 bundles. Reading several tokens' sums first and
    selecting where tokens repeat took 13.
    """
    where = pl.ds(pl.multiple_of(token * sublanes, 8), words.shape[0])
    for part in range(acc_ref.shape[0]):
        acc_ref[part, where] += weight * _combine_values(words, part)


def _combine_values(words: Array, part: int) -> Array:
    """float32 values of a row's words: all of a float32 row, or one half of a bfloat16 row."""
    if words.dtype == jnp.float32:
        return words
    return lax.bitcast_convert_type(words & -65536 if part else words << 16, jnp.float32)


def _combine_flush(acc_ref: jax.Ref, y_ref: jax.Ref, first: Array | int, sublanes: int) -> None:
    """Sums from S memory rows per token to one per token: strided loads of eight tokens at a time."""
    chunks = y_ref.shape[1] // 128
    per_part = chunks // acc_ref.shape[0]

    def eight(step: Array, carry: int) -> int:
        token = step * 8
        for chunk in range(chunks):
            part, piece = divmod(chunk, per_part)
            row = (first + token) * sublanes + piece
            y_ref[pl.ds(pl.multiple_of(token, 8), 8), pl.ds(chunk * 128, 128)] = acc_ref[
                part, pl.ds(row, 8, stride=sublanes)
            ]
        return carry

    lax.fori_loop(0, y_ref.shape[0] // 8, eight, 0)


__all__ = ["combine_rows", "combine_stream"]
