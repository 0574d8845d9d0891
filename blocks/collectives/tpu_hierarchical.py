"""Reduce-scatter of tokens as one kernel of remote copies: first within a chip, then between the chips.

Legend: N shards over `axes`, C chips, P shards of a chip (2: its cores first add up over their own link; 1: none do),
A = N*T gathered tokens, T tokens of this shard, B tokens of a micro-batch, D hidden.

Shard n is core n % P of chip n // P. Partial sums for shard n are the n-th run of T rows of y_AD.

Round 0 (P = 2): a core gives its partner the rows of all shards that are the partner's place on some chip. Each core
then owns half of the chip's sum, so the slower links between chips carry every row once per chip, not per core.
Rounds 1.. log2(C) halve what is left: in each a core sends one chip half of its rows and adds what comes back.
The chips differ by the masks of `_hrs_masks`, which are neighbours in the order make_mesh gives a 2x2 of chips; the
second core takes the masks in rotated order, so both directions of the chip's links are busy in every round.

Rounds of different micro-batches overlap: batch b is in round r while batch b + 1 is in round r - 1. Buffers are
double, and a core tells its partner of a round when the one it wrote two batches ago is free.

Sums are float32. Only what travels, and the result, is rounded to y's dtype: a value is rounded log2(C) times on its
way and once at the end (of P * C summands), the core's own share never before the end.
"""

from functools import partial
from math import gcd, prod
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from ..core.chip import ChipLimits

_HRS_SLOTS = 2  # micro-batches a buffer holds; a power of two
_HRS_ROWS = 16  # rows added at a time: whole tiles of 16-bit values
_HRS_SPARE_BYTES = 1 << 20  # vector memory beside the buffers


class _HrsGroup(NamedTuple):
    """Static shape of one call: mesh axes (name, size), chips, shards per chip, rows per micro-batch, batches."""

    axes: tuple[tuple[str, int], ...]
    chips: int
    cores: int
    rows: int
    batches: int

    @property
    def halvings(self) -> int:
        return self.chips.bit_length() - 1


class _HrsPlace(NamedTuple):
    """Where this device is: traced scalars."""

    chip: Array
    core: Array


def _hrs_masks(chips: int) -> tuple[int, ...]:
    """What to xor a chip's number with to find its partner of each round: 1, 3, then 4, 8, ...

    make_mesh walks a 2x2 of chips in a circle, 0 1 3 2 by coordinates, so 1 and 3 are one hop away and 2 is two.
    """
    return tuple(3 if bit == 1 else 1 << bit for bit in range(chips.bit_length() - 1))


def _hrs_mask(group: _HrsGroup, core: Array, halving: int) -> Array | int:
    """The mask of a halving for a core: the second core starts with the second mask."""
    masks = _hrs_masks(group.chips)
    first, second = masks[halving], masks[(halving + 1) % len(masks)]
    return first if group.cores == 1 else jnp.where(core == 0, first, second)


def _hrs_chip(group: _HrsGroup, chip: Array, core: Array, path: int) -> Array:
    """The chip that differs from `chip` by the masks of the halvings whose bit is set in `path`."""
    for halving in range(group.halvings):
        if path >> halving & 1:
            chip = chip ^ _hrs_mask(group, core, halving)
    return chip


def _hrs_device(group: _HrsGroup, chip: Array, core: Array) -> dict[Any, int | Array]:
    """Mesh coordinates of a shard on the axes of the group; on other axes it is where this device is."""
    shard, found = chip * group.cores + core, dict[Any, int | Array]()
    for name, size in reversed(group.axes):
        # Not % and //: their signs would make the lowering ask for the chip, which a traced program does not know.
        found[name], shard = lax.rem(shard, size), lax.div(shard, size)
    return found


def _hrs_partner(group: _HrsGroup, me: _HrsPlace, step: int) -> dict[Any, int | Array]:
    """The device this one exchanges with in a round."""
    if step == 0:
        return _hrs_device(group, me.chip, 1 - me.core)
    return _hrs_device(group, _hrs_chip(group, me.chip, me.core, 1 << (step - 1)), me.core)


def _hrs_rounds(group: _HrsGroup) -> range:
    """The rounds that exchange something: round 0 needs two cores."""
    return range(0 if group.cores == 2 else 1, group.halvings + 1)


def _hrs_enter(group: _HrsGroup, me: _HrsPlace) -> None:
    """Wait until every partner runs this kernel, so that its buffers and semaphores are there.

    A partner cannot be a call ahead: to end a call it needs rows that are sent after this.
    """
    barrier = pltpu.get_barrier_semaphore()
    for step in _hrs_rounds(group):
        pl.semaphore_signal(barrier, 1, device_id=_hrs_partner(group, me, step))
    pl.semaphore_wait(barrier, len(_hrs_rounds(group)))


def _hrs_await_buffer(free: Any, step: int, batch: Array) -> None:
    """Before writing a partner's buffer again: it has read what was written two batches ago."""

    @pl.when(batch >= _HRS_SLOTS)
    def _() -> None:
        pl.semaphore_wait(free.at[step], 1)


def _hrs_free_buffer(group: _HrsGroup, me: _HrsPlace, free: Any, step: int, batch: Array) -> None:
    """Tell the partner that its rows are read; only as often as it asks, so that the semaphore ends at 0."""

    @pl.when(batch + _HRS_SLOTS < group.batches)
    def _() -> None:
        pl.semaphore_signal(free.at[step], 1, device_id=_hrs_partner(group, me, step))


def _hrs_loads(group: _HrsGroup, me: _HrsPlace, batch: Array, y: Any, mine: Any, sem: Any) -> list[Any]:
    """Copies of this device's own rows, by the path from this chip to theirs."""
    slot, rows = batch & (_HRS_SLOTS - 1), pl.ds(batch * group.rows, group.rows)
    chips = [_hrs_chip(group, me.chip, me.core, path) for path in range(group.chips)]
    return [
        pltpu.make_async_copy(y.at[chip, me.core, rows], mine.at[slot, path], sem.at[slot])
        for path, chip in enumerate(chips)
    ]


def _hrs_sends(group: _HrsGroup, me: _HrsPlace, batch: Array, y: Any, got: Any, sems: tuple[Any, Any]) -> list[Any]:
    """Round 0: copies of the partner's rows into its buffer, in the order of its own paths."""
    slot, rows, other = batch & (_HRS_SLOTS - 1), pl.ds(batch * group.rows, group.rows), 1 - me.core
    chips = [_hrs_chip(group, me.chip, other, path) for path in range(group.chips)]
    sent, received = sems
    return [
        pltpu.make_async_remote_copy(
            y.at[chip, other, rows],
            got.at[slot, path],
            sent.at[0, slot],
            received.at[0, slot],
            device_id=_hrs_device(group, me.chip, other),
        )
        for path, chip in enumerate(chips)
    ]


def _hrs_half(
    group: _HrsGroup, me: _HrsPlace, step: int, batch: Array, send: Any, got: Any, sems: tuple[Any, Any]
) -> Any:
    """Round `step` > 0: one copy of half of the rows that are left."""
    slot = batch & (_HRS_SLOTS - 1)
    return pltpu.make_async_remote_copy(
        send.at[slot],
        got.at[slot],
        sems[0].at[step, slot],
        sems[1].at[step, slot],
        device_id=_hrs_partner(group, me, step),
    )


def _hrs_add(slot: Array, terms: list[Any], index: int, target: Any, target_index: tuple[Any, ...]) -> None:
    """target = sum of terms[slot, index] in float32, a few rows at a time."""
    rows = terms[0].shape[2]
    step = gcd(_HRS_ROWS, rows)

    def some(i: Array, _: None) -> None:
        here = pl.ds(pl.multiple_of(i * step, step), step)
        total = terms[0][slot, index, here, :].astype(jnp.float32)
        for term in terms[1:]:
            total = total + term[slot, index, here, :].astype(jnp.float32)
        target[(*target_index, here, slice(None))] = total.astype(target.dtype)

    lax.fori_loop(0, rows // step, some, None)


def _hrs_kernel(y: Any, out: Any, *scratch: Any, group: _HrsGroup) -> None:
    """y [C, P, T, D] and out [T, D] in HBM. All rounds of all micro-batches, one round apart."""
    halvings = group.halvings
    mine, total, free, local, stored, sent, received, *buffers = scratch
    # got[r]: what round r brings. send[r], keep[r]: the two halves before round r, the second in float32.
    got = dict(zip(_hrs_rounds(group), buffers, strict=False))
    send, keep = ({r: buffers[len(got) + r - 1 + k * halvings] for r in range(1, halvings + 1)} for k in (0, 1))
    shard = lax.axis_index(tuple(name for name, _ in group.axes))
    me = _HrsPlace(shard >> (group.cores - 1), shard & (group.cores - 1))
    sems = (sent, received)

    def copies(step: int, batch: Array) -> list[Any]:
        if step:
            return [_hrs_half(group, me, step, batch, send[step], got[step], sems)]
        sends = _hrs_sends(group, me, batch, y, got[0], sems) if group.cores == 2 else []
        return [*_hrs_loads(group, me, batch, y, mine, local), *sends]

    def store(batch: Array) -> Any:
        rows, slot = pl.ds(batch * group.rows, group.rows), batch & (_HRS_SLOTS - 1)
        return pltpu.make_async_copy(total.at[slot], out.at[rows], stored.at[slot])

    def begin(step: int, batch: Array) -> None:
        if step in got:
            _hrs_await_buffer(free, step, batch)
        for copy in copies(step, batch):
            copy.start()

    def finish(step: int, batch: Array) -> None:
        """Add what round `step` brought; what leaves with the next round goes first."""
        for copy in copies(step, batch):
            copy.wait()
        slot = batch & (_HRS_SLOTS - 1)
        terms = [keep[step] if step else mine, *([got[step]] if step in got else [])]
        if step == halvings:

            @pl.when(batch >= _HRS_SLOTS)
            def _() -> None:
                store(batch - _HRS_SLOTS).wait()

            _hrs_add(slot, terms, 0, total, (slot,))
            store(batch).start()
        else:
            for half in range(group.chips >> (step + 1)):
                _hrs_add(slot, terms, 2 * half + 1, send[step + 1], (slot, half))
            begin(step + 1, batch)
            for half in range(group.chips >> (step + 1)):
                _hrs_add(slot, terms, 2 * half, keep[step + 1], (slot, half))
        if step in got:
            _hrs_free_buffer(group, me, free, step, batch)

    def tick(i: Array, _: None) -> None:
        pl.when(i < group.batches)(partial(begin, 0, i))
        for step in range(halvings + 1):
            batch = i - 1 - step
            pl.when((batch >= 0) & (batch < group.batches))(partial(finish, step, batch))

    _hrs_enter(group, me)
    lax.fori_loop(0, group.batches + halvings + 1, tick, None)
    for batch in range(max(0, group.batches - _HRS_SLOTS), group.batches):
        store(jnp.int32(batch)).wait()


def _hrs_scratch(group: _HrsGroup, hidden: int, dtype: Any) -> list[Any]:
    """Buffers and semaphores in the order _hrs_kernel takes them."""

    def buffer(runs: int, kind: Any) -> Any:
        return pltpu.VMEM((_HRS_SLOTS, runs, group.rows, hidden), kind)

    rounds = group.halvings + 1
    halves = [group.chips >> step for step in range(1, rounds)]
    return [
        buffer(group.chips, dtype),
        pltpu.VMEM((_HRS_SLOTS, group.rows, hidden), dtype),
        pltpu.SemaphoreType.REGULAR((rounds,)),
        pltpu.SemaphoreType.DMA((_HRS_SLOTS,)),
        pltpu.SemaphoreType.DMA((_HRS_SLOTS,)),
        pltpu.SemaphoreType.DMA((rounds, _HRS_SLOTS)),
        pltpu.SemaphoreType.DMA((rounds, _HRS_SLOTS)),
        *(buffer(group.chips >> step, dtype) for step in _hrs_rounds(group)),
        *(buffer(runs, dtype) for runs in halves),
        *(buffer(runs, jnp.float32) for runs in halves),
    ]


def _hrs_vmem_bytes(scratch: list[Any]) -> int:
    """Vector memory the kernel asks for: no more than it needs, as XLA keeps other arrays in the rest."""
    buffers = [s for s in scratch if s.memory_space == pltpu.VMEM]
    return sum(prod(s.shape) * jnp.dtype(s.dtype).itemsize for s in buffers) + _HRS_SPARE_BYTES


def reduce_scatter_hierarchical(
    y_AD: Array,
    axes: tuple[str, ...],
    *,
    chip: ChipLimits,
    shards_per_chip: int,
    micro_batches: int,
    collective_id: int = 0,
) -> Array:
    """Sum the shards' partial y [N*T, D] and keep this shard's tokens -> [T, D].

    Inside shard_map over the whole mesh. shards_per_chip: how many consecutive shards of `axes` share a chip, 1 or 2.
    micro_batches divide T into whole tiles of rows. collective_id: calls whose groups differ need different ones.
    """
    assert axes, "no axis to reduce over"
    sizes = tuple((name, lax.axis_size(name)) for name in axes)
    shards = prod(size for _, size in sizes)
    chips, rest = divmod(shards, shards_per_chip)
    assert shards_per_chip in (1, 2) and not rest, f"{shards} shards are not whole chips of {shards_per_chip}"
    assert chips & (chips - 1) == 0 and shards > 1, f"{chips} chips: halving needs a power of two"
    tokens, hidden = y_AD.shape[0] // shards, y_AD.shape[1]
    assert tokens % (micro_batches * chip.sublanes) == 0, f"{tokens} tokens in {micro_batches} batches of whole tiles"
    group = _HrsGroup(sizes, chips, shards_per_chip, tokens // micro_batches, micro_batches)
    scratch = _hrs_scratch(group, hidden, y_AD.dtype)
    needed = _hrs_vmem_bytes(scratch)
    assert needed <= chip.vmem_bytes, f"{needed} bytes of vector memory: more micro_batches need less"
    return pl.pallas_call(
        partial(_hrs_kernel, group=group),
        out_shape=jax.ShapeDtypeStruct((tokens, hidden), y_AD.dtype),
        in_specs=[pl.BlockSpec(memory_space=pl.ANY)],
        out_specs=pl.BlockSpec(memory_space=pl.ANY),
        scratch_shapes=scratch,
        compiler_params=pltpu.CompilerParams(
            collective_id=collective_id, has_side_effects=True, vmem_limit_bytes=needed
        ),
        name="reduce_scatter_hierarchical",
        # Its messages are no collectives of the compiler's: what it exchanges is read from here.
        metadata={"collective": "reduce-scatter", "axes": ",".join(axes)},
    )(y_AD.reshape(chips, shards_per_chip, tokens, hidden))


__all__ = ["reduce_scatter_hierarchical"]
