"""Body of the grouped expert kernel: tpu_grouped.py calls it and describes it.

Legend: R rows of a row block, D hidden, I intermediate of a unit, J words of a row, S = J rounded up to whole tiles,
KB blocks of 128 along a contraction, L rows of a matrix unit's left operand, N columns of a product, E experts.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

Ref = Any  # a Pallas reference

_GMM_LANES = 128
_GMM_TILE = 256  # columns and contraction depth of a matrix unit: one load of its weights
_GMM_LEFT = 32  # float8 rows it takes at once: fewer cost the same
_GMM_UNROLL_ROWS = 32  # up to so many rows the products are straight code, beyond them loops over columns


@dataclass(frozen=True)
class GmmScale:
    """Block scales of one matrix in a unit's scale words: ratios [blocks of K, blocks of N], peaks [blocks of N]."""

    ratios: int
    peaks: int
    block_k: int
    block_n: int
    blocks_n: int


@dataclass(frozen=True)
class GmmPlan:
    """What the kernel is specialised for.

    rows: R. inner: I of one unit; an expert has `units` of them, which add up. parts: float8 pieces of a row, 0
    where rows stay as they are. scales: of gate, up, down, empty without. Weights that have scales beside rows that
    stay are widened to bfloat16 once per unit.
    """

    experts: int
    rows: int
    hidden: int
    inner: int
    units: int
    parts: int
    words: int
    stride: int
    scales: tuple[GmmScale, ...]

    @property
    def widen(self) -> bool:
        return bool(self.scales) and not self.parts


class GmmRefs(NamedTuple):
    """Operands, result and scratch in the order of pallas_call."""

    layer: Ref
    start: Ref
    token: Ref
    h: Ref
    w_gate: Ref
    w_up: Ref
    w_down: Ref
    scale: Ref
    out: Ref
    gate: Ref
    up: Ref
    down: Ref
    wide: tuple[Ref, Ref, Ref]
    scale_words: Ref
    row_words: Ref
    out_words: Ref
    x: Ref
    x_unit: Ref
    gated: Ref
    act: Ref
    act_unit: Ref
    y: Ref
    weight_sem: Ref
    row_sem: Ref
    out_sem: Ref


def grouped_kernel(*refs: Any, plan: GmmPlan) -> None:
    """Every expert with rows, in order; its next unit of weights and the next rows arrive while this one computes."""
    r = GmmRefs(*refs)
    first_expert = _gmm_next(r, plan, jnp.int32(0))

    some = first_expert < plan.experts

    @pl.when(some)
    def _() -> None:
        _gmm_start_weights(r, plan, first_expert, jnp.int32(0), jnp.int32(0))
        _gmm_gather(r, plan, r.start[first_expert])
        # Results leave while the next row block computes; the first one sends what y happens to hold, later ones
        # overwrite it. So each finds one write to wait for.
        _gmm_start_out(r, plan, r.start[first_expert])
        _gmm_prepare(r, plan)

    def expert_step(carry: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
        expert, slot, before = carry
        begin, after = r.start[expert], _gmm_next(r, plan, expert + 1)
        blocks = _gmm_div(r.start[expert + 1] - begin + plan.rows - 1, plan.rows)
        # With one unit per expert its weights serve all row blocks; else each row block streams them again.
        passes, blocks_of_pass = (1, blocks) if plan.units == 1 else (blocks, 1)

        def unit_step(n: Array, carry: tuple[Array, Array]) -> tuple[Array, Array]:
            slot, before = carry
            row_pass = _gmm_div(n, plan.units)
            unit = n - row_pass * plan.units
            last = n + 1 == passes * plan.units
            follower = jnp.where(last, after, expert)

            @pl.when(follower < plan.experts)
            def _() -> None:
                _gmm_start_weights(r, plan, follower, jnp.where(last | (unit + 1 == plan.units), 0, unit + 1), 1 - slot)

            _gmm_wait_weights(r, plan, slot)
            if plan.widen:
                for which in range(3):
                    _gmm_widen(r, plan, which, slot)

            def block_step(b: Array, before: Array) -> Array:
                index = b if plan.units == 1 else row_pass
                first = begin + index * plan.rows
                following = jnp.where(index + 1 < blocks, first + plan.rows, r.start[after])
                _gmm_block(r, plan, slot, unit, before, following)
                return first

            before = lax.fori_loop(0, blocks_of_pass, block_step, before)
            return 1 - slot, before

        slot, before = lax.fori_loop(0, passes * plan.units, unit_step, (slot, before))
        return after, slot, before

    start = (first_expert, jnp.int32(0), r.start[jnp.minimum(first_expert, plan.experts)])
    before = lax.while_loop(lambda carry: carry[0] < plan.experts, expert_step, start)[2]

    @pl.when(some)
    def _() -> None:
        _gmm_write(r, plan, before)
        _gmm_wait_out(r, plan)


def _gmm_next(r: GmmRefs, plan: GmmPlan, expert: Array) -> Array:
    """First expert from this one on that has rows; E if none has."""

    def empty(e: Array) -> Array:
        return (e < plan.experts) & (r.start[jnp.minimum(e + 1, plan.experts)] == r.start[e])

    return lax.while_loop(empty, lambda e: e + 1, expert)


def _gmm_copies(r: GmmRefs, plan: GmmPlan, expert: Array, unit: Array, slot: Array) -> list[Any]:
    """Copies of one unit's weights and scales into a slot: one large piece each."""
    layer = r.layer[0]
    columns = pl.ds(0, plan.inner) if plan.units == 1 else pl.ds(pl.multiple_of(unit * plan.inner, 128), plan.inner)
    pairs = [
        (r.w_gate.at[layer, expert, :, columns], r.gate.at[slot]),
        (r.w_up.at[layer, expert, :, columns], r.up.at[slot]),
        (r.w_down.at[layer, expert, columns, :], r.down.at[slot]),
    ]
    if plan.scales:
        pairs.append((r.scale.at[expert, unit], r.scale_words.at[slot]))
    return [pltpu.make_async_copy(*pair, r.weight_sem.at[slot]) for pair in pairs]


def _gmm_start_weights(r: GmmRefs, plan: GmmPlan, expert: Array, unit: Array, slot: Array) -> None:
    for copy in _gmm_copies(r, plan, expert, unit, slot):
        copy.start()


def _gmm_wait_weights(r: GmmRefs, plan: GmmPlan, slot: Array) -> None:
    for copy in _gmm_copies(r, plan, jnp.int32(0), jnp.int32(0), slot):
        copy.wait()


def _gmm_widen(r: GmmRefs, plan: GmmPlan, which: int, slot: Array) -> None:
    """Weights times their scales, rounded to bfloat16: for many rows cheaper than rows times scales."""
    weight, scale, wide = (r.gate, r.up, r.down)[which], plan.scales[which], r.wide[which]

    @pl.loop(0, wide.shape[0] // 128)
    def _(kb: Array) -> None:
        rows = pl.ds(pl.multiple_of(kb * 128, 128), 128)
        for n in range(0, wide.shape[1], 128):
            nb = n // scale.block_n
            ratio = _gmm_word(r, slot, scale.ratios + _gmm_div(kb * 128, scale.block_k) * scale.blocks_n + nb)
            value = weight[slot, rows, n : n + 128].astype(jnp.float32)
            # A ratio times its power of two is the scale itself.
            wide[rows, n : n + 128] = (value * (ratio * _gmm_word(r, slot, scale.peaks + nb))).astype(wide.dtype)


def _gmm_word(r: GmmRefs, slot: Array, index: Array | int) -> Array:
    row = _gmm_div(index, 128)
    return r.scale_words[slot, row, index - row * 128]


def _gmm_gather(r: GmmRefs, plan: GmmPlan, first: Array) -> None:
    """Start the copies of R token rows. Past the expert's last come others, of which nobody reads what they become."""
    last = r.token.shape[0] - 1

    def row(i: Array | int) -> None:
        source = r.h.at[r.token[jnp.minimum(first + i, last)]]
        begin = i * plan.stride
        begin = begin if isinstance(begin, int) else pl.multiple_of(begin, 8)
        pltpu.make_async_copy(source, r.row_words.at[pl.ds(begin, plan.words)], r.row_sem.at[0]).start()

    if plan.rows <= _GMM_UNROLL_ROWS:
        for i in range(plan.rows):
            row(i)
    else:
        pl.loop(0, plan.rows, unroll=8)(row)


def _gmm_wait_rows(r: GmmRefs, plan: GmmPlan) -> None:
    """All R rows at once: a wait counts bytes."""
    whole = r.row_words.at[pl.ds(0, plan.rows * plan.words)]
    pltpu.make_async_copy(whole, whole, r.row_sem.at[0]).wait()


def _gmm_prepare(r: GmmRefs, plan: GmmPlan) -> None:
    """Rows as they came -> x, scaled for float8 where weights have scales."""
    _gmm_wait_rows(r, plan)
    parts = []
    for j in range(plan.words):
        word = r.row_words[pl.ds(j, plan.rows, stride=plan.stride), :]
        parts.append((j, word))
    if r.row_words.dtype == jnp.float32:
        blocks = dict(parts)
    else:
        # bfloat16 is the upper half of float32.
        low = {j: pltpu.bitcast(word << 16, jnp.float32) for j, word in parts}
        high = {j + plan.words: pltpu.bitcast(word & jnp.int32(-65536), jnp.float32) for j, word in parts}
        blocks = low | high
    if not plan.parts:
        for kb, block in blocks.items():
            r.x[:, kb * 128 : kb * 128 + 128] = block.astype(r.x.dtype)
        return
    factor, unit = _gmm_row_scale(list(blocks.values()))
    for kb, block in blocks.items():
        r.x[kb] = block * factor
    r.x_unit[...] = unit


def _gmm_row_scale(blocks: Sequence[Array]) -> tuple[Array, Array]:
    """(factor, its inverse) [R, 128] that bring each row's peak into [64, 128): powers of two, nothing is rounded."""
    peak = jnp.abs(blocks[0])
    for block in blocks[1:]:
        peak = jnp.maximum(peak, jnp.abs(block))
    peak = jnp.broadcast_to(jnp.max(peak, axis=1, keepdims=True), peak.shape)
    # Exponents in place, bias 127; rows of zeros or next to it count as 2**-100, so that the factor is finite.
    exponent = jnp.maximum(pltpu.bitcast(peak, jnp.int32) & jnp.int32(0x7F800000), jnp.int32((127 - 100) << 23))
    factor = pltpu.bitcast(jnp.int32((127 + 6) << 23) - (exponent - jnp.int32(127 << 23)), jnp.float32)
    return factor, pltpu.bitcast(exponent - jnp.int32(6 << 23), jnp.float32)


def _gmm_block(r: GmmRefs, plan: GmmPlan, slot: Array, unit: Array, before: Array, following: Array) -> None:
    """One row block through one unit of its expert.

    Between its products: the rows of the block before leave to `before`, those of the following one arrive.
    """
    one = plan.units == 1

    def when(condition: Array, body: Callable[[], None]) -> None:
        body() if one else pl.when(condition)(body)

    def between() -> None:
        if plan.parts:
            _gmm_scale_act(r, plan)
        when(unit == 0, lambda: _gmm_write(r, plan, before))
        # x serves all units, so the following rows come with the last one.
        when(unit + 1 == plan.units, lambda: _gmm_gather(r, plan, following))
        if not one:

            @pl.when(unit == 0)
            def _() -> None:
                r.y[...] = jnp.zeros_like(r.y)

    _gmm_phase(slot, 1, lambda: _gmm_gate(r, plan, slot))
    _gmm_phase(slot, 2, lambda: _gmm_up(r, plan, slot))
    _gmm_phase(slot, 3, between)
    _gmm_phase(slot, 4, lambda: _gmm_down(r, plan, slot))
    when(unit + 1 == plan.units, lambda: _gmm_prepare(r, plan))


def _gmm_phase(slot: Array, number: int, body: Callable[[], None]) -> None:
    """A region of its own, under a condition that always holds: slots are 0 and 1.

    The compiler schedules a product alone at 24 bundles per pair of weight tiles, several in one region at 30.
    Regions under the same condition would be one, so each phase has its own.
    """
    pl.when(slot > -number)(body)


def _gmm_gate(r: GmmRefs, plan: GmmPlan, slot: Array) -> None:
    """gated = silu(x gate)."""

    def columns(n: Array | int, width: int) -> None:
        for i, gate in enumerate(_gmm_products(r, plan, 0, slot, n, width)):
            r.gated[_gmm_div(n, 128) + i] = gate * jax.nn.sigmoid(gate)

    _gmm_columns(plan, plan.inner, columns)


def _gmm_up(r: GmmRefs, plan: GmmPlan, slot: Array) -> None:
    """gated times x up, rounded where weights have no scales."""

    def columns(n: Array | int, width: int) -> None:
        for i, up in enumerate(_gmm_products(r, plan, 1, slot, n, width)):
            block = _gmm_div(n, 128) + i
            act = r.gated[block] * up
            if plan.parts:
                r.gated[block] = act
            else:
                r.act[:, pl.ds(_gmm_aligned(n + i * 128), 128)] = act.astype(r.act.dtype)

    _gmm_columns(plan, plan.inner, columns)


def _gmm_scale_act(r: GmmRefs, plan: GmmPlan) -> None:
    """gated scaled for float8, as x is."""
    blocks = range(plan.inner // 128)
    factor, unit = _gmm_row_scale([r.gated[kb] for kb in blocks])
    for kb in blocks:
        r.gated[kb] = r.gated[kb] * factor
    r.act_unit[...] = unit


def _gmm_down(r: GmmRefs, plan: GmmPlan, slot: Array) -> None:
    """y = act down, or y plus it where several units add up."""

    def columns(n: Array | int, width: int) -> None:
        for i, product in enumerate(_gmm_products(r, plan, 2, slot, n, width)):
            block = _gmm_div(n, 128) + i
            r.y[block] = product if plan.units == 1 else r.y[block] + product

    _gmm_columns(plan, plan.hidden, columns)


def _gmm_columns(plan: GmmPlan, total: int, body: Callable[[Any, int], None]) -> None:
    """body(first column, columns) for two tiles at a time, one per matrix unit; straight code for few rows."""
    step = 2 * _GMM_TILE
    whole = total // step
    if plan.rows <= _GMM_UNROLL_ROWS:
        for i in range(whole):
            body(i * step, step)
    elif whole:
        pl.loop(0, whole)(lambda i: body(i * step, step))
    if total % step:
        body(whole * step, total % step)


def _gmm_products(r: GmmRefs, plan: GmmPlan, which: int, slot: Array, n: Array | int, width: int) -> list[Array]:
    """x or act times `width` columns from n of gate (0), up (1) or down (2) -> [R, 128] float32 per 128 columns."""
    weight = (r.gate, r.up, r.down)[which]
    left = r.act if which == 2 else r.x
    if not plan.parts:
        precision = lax.Precision.HIGHEST if weight.dtype == jnp.float32 else None
        columns = pl.ds(_gmm_aligned(n), width)
        right = r.wide[which][:, columns] if plan.widen else weight[slot, :, columns]
        product = jnp.dot(left[...], right, preferred_element_type=jnp.float32, precision=precision)
        return [product[:, i : i + 128] for i in range(0, width, 128)]
    found = []
    for tile in range(0, width, _GMM_TILE):
        found += _gmm_scaled_tile(r, plan, which, slot, n + tile, min(_GMM_TILE, width - tile))
    return found


def _gmm_scaled_tile(r: GmmRefs, plan: GmmPlan, which: int, slot: Array, n: Array | int, width: int) -> list[Array]:
    """As _gmm_products, of at most 256 columns of float8 weights with block scales."""
    weight, scale = (r.gate, r.up, r.down)[which], plan.scales[which]
    lanes = width // 128
    # Columns of one block of N share a left operand: 128-wide blocks need two per tile, one below the other.
    blocks = [_gmm_div(n, scale.block_n) + i for i in range(lanes if scale.block_n == 128 else 1)]

    def ratio(kb: int, nb: Array | int) -> Array:
        return _gmm_word(r, slot, scale.ratios + kb * 128 // scale.block_k * scale.blocks_n + nb)

    x, unit = (r.gated, r.act_unit) if which == 2 else (r.x, r.x_unit)
    left = jnp.concatenate([_gmm_left(plan, x[kb], [ratio(kb, nb) for nb in blocks]) for kb in range(x.shape[0])], 1)
    product = jnp.dot(left, weight[slot, :, pl.ds(_gmm_aligned(n), width)], preferred_element_type=jnp.float32)
    rows = plan.rows * len(blocks)
    whole = product[:rows] if plan.parts == 1 else product[:rows] + product[rows : 2 * rows]
    found = []
    for i in range(lanes):
        own = i if len(blocks) > 1 else 0
        peak = _gmm_word(r, slot, scale.peaks + blocks[own]) * unit[...]
        found.append(whole[own * plan.rows : (own + 1) * plan.rows, i * 128 : i * 128 + 128] * peak)
    return found


def _gmm_left(plan: GmmPlan, x: Array, ratios: Sequence[Array]) -> Array:
    """[R, 128] of a block of K -> float8 [L, 128]: x times each ratio; with two parts what float8 left of it below."""
    scaled = jnp.concatenate([x * ratio for ratio in ratios], 0)
    parts = [scaled]
    if plan.parts == 2:
        high = scaled.astype(jnp.float8_e4m3fn).astype(jnp.float32)
        parts = [high, scaled - high]
    rows = len(parts) * scaled.shape[0]
    if rows % _GMM_LEFT:
        parts.append(jnp.zeros((_GMM_LEFT - rows % _GMM_LEFT, 128), jnp.float32))
    return jnp.concatenate(parts, 0).astype(jnp.float8_e4m3fn)


def _gmm_write(r: GmmRefs, plan: GmmPlan, first: Array) -> None:
    """y as row words to the R rows from `first` on. Past the expert's last they are the next one's, which come later.

    Two writes may overlap in those rows, so one follows the other; a block's time lies between.
    """
    _gmm_wait_out(r, plan)
    for j in range(plan.words):
        if r.out_words.dtype == jnp.float32:
            word = r.y[j]
        else:
            low, high = (_gmm_rounded(r.y[i]) for i in (j, j + plan.words))
            word = lax.shift_right_logical(low, 16) | high
        r.out_words[pl.ds(j, plan.rows, stride=plan.stride), :] = word
    _gmm_start_out(r, plan, first)


def _gmm_start_out(r: GmmRefs, plan: GmmPlan, first: Array) -> None:
    """One copy where rows are whole tiles, else one per row."""
    if plan.words == plan.stride:
        target = r.out.at[pl.ds(pl.multiple_of(first * plan.words, 8), plan.rows * plan.words)]
        pltpu.make_async_copy(r.out_words, target, r.out_sem.at[0]).start()
        return

    @pl.loop(0, plan.rows)
    def _(i: Array) -> None:
        source = r.out_words.at[pl.ds(pl.multiple_of(i * plan.stride, 8), plan.words)]
        pltpu.make_async_copy(source, r.out.at[first + i], r.out_sem.at[0]).start()


def _gmm_rounded(y: Array) -> Array:
    """Bits of float32 values rounded to bfloat16: the lower half is zero."""
    return pltpu.bitcast(y.astype(jnp.bfloat16).astype(jnp.float32), jnp.int32) & jnp.int32(-65536)


def _gmm_wait_out(r: GmmRefs, plan: GmmPlan) -> None:
    """The write before: as many bytes."""
    whole = r.out_words.at[pl.ds(0, plan.rows * plan.words)]
    pltpu.make_async_copy(whole, whole, r.out_sem.at[0]).wait()


def _gmm_div(n: Array | int, by: int) -> Array | int:
    """n // by of numbers that are not negative: a shift where `by` allows."""
    return n // by if isinstance(n, int) else lax.div(n, jnp.int32(by))


def _gmm_aligned(n: Array | int) -> Array | int:
    """A column offset that is a multiple of a tile's lanes, told to the compiler."""
    return n if isinstance(n, int) else pl.multiple_of(n, _GMM_LANES)
