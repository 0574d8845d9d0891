"""Which rows run in the next step: admission, ragged prefill chunks, decode. Host bookkeeping only, no jax.

A sequence gets a rank, a slot and all pages it can ever need when it is admitted, keeps them to
its end and never migrates, so that nothing is preempted.
"""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from moec.blocks.core.batch import Bucket

from .cache import PageAllocator, SlotAllocator
from .packing import Row
from .sampling import SamplingParams


@dataclass
class Running:
    """One prompt on its way. tokens: prompt, then output; cached: how many of them the state holds.

    limit: number of tokens at which it ends.
    """

    index: int
    tokens: list[int]
    limit: int
    sampling: SamplingParams
    pages: tuple[int, ...] = ()
    slot: int = 0
    cached: int = 0

    def row(self, count: int) -> Row:
        """The next `count` tokens as a row."""
        part = tuple(self.tokens[self.cached : self.cached + count])
        return Row(part, self.cached, self.pages, self.slot, self.cached > 0, self.sampling)

    @property
    def pending(self) -> int:
        """Tokens that have not been run: 1 when decoding."""
        return len(self.tokens) - self.cached


@dataclass
class Rank:
    """Sequences of one attention-DP rank and what they may still take."""

    pages: PageAllocator
    slots: SlotAllocator
    running: list[Running] = field(default_factory=list)


@dataclass(frozen=True)
class Limits:
    """Per rank and step: tokens, rows, tokens of one row; page_size in tokens."""

    tokens: int
    rows: int
    max_q: int
    page_size: int


def limits_of(buckets: dict[str, Bucket], page_size: int) -> Limits:
    """What the largest bucket takes; rows that any bucket may have to take."""
    largest = max(buckets.values(), key=lambda b: (b.max_q, b.tokens_per_rank))
    rows = min(bucket.seqs_per_rank for bucket in buckets.values())
    # Else a chunk could neither reach a page border nor leave room beside the decode rows.
    assert largest.max_q >= page_size, (largest, page_size)
    assert largest.tokens_per_rank >= rows, largest
    return Limits(largest.tokens_per_rank, rows, largest.max_q, page_size)


def pages_needed(tokens: int, page_size: int) -> int:
    return -(-tokens // page_size)


def admit(waiting: deque[Running], ranks: Sequence[Rank], limits: Limits) -> None:
    """Move prompts, first come first served, to the rank with the fewest rows that has room."""
    while waiting:
        need = pages_needed(waiting[0].limit, limits.page_size)
        open_ranks = [r for r in ranks if _has_room(r, need, limits)]
        if not open_ranks:
            return
        rank, sequence = min(open_ranks, key=lambda r: len(r.running)), waiting.popleft()
        sequence.pages, sequence.slot = rank.pages.allocate(need), rank.slots.allocate()
        rank.running.append(sequence)


def _has_room(rank: Rank, pages: int, limits: Limits) -> bool:
    return len(rank.running) < limits.rows and rank.slots.available > 0 and rank.pages.available >= pages


def plan_rank(rank: Rank, limits: Limits) -> list[tuple[Running, int]]:
    """(sequence, tokens to run) of one rank's next step: decode rows first, then prefill chunks."""
    single = [(s, 1) for s in rank.running if s.pending == 1]
    budget, chunks = limits.tokens - len(single), list[tuple[Running, int]]()
    for sequence in rank.running:
        count = _chunk(sequence, min(budget, limits.max_q), limits.page_size) if sequence.pending > 1 else 0
        if count:
            chunks.append((sequence, count))
            budget -= count
    # A chunk of one token is run as a decode row.
    return single + sorted(chunks, key=lambda chunk: chunk[1] > 1)


def _chunk(sequence: Running, room: int, page_size: int) -> int:
    """Tokens of the next chunk: all that is left, or as far as the last page border in reach."""
    if sequence.pending <= room:
        return sequence.pending
    end = sequence.cached + room
    return max(end - end % page_size - sequence.cached, 0)


def release(rank: Rank, sequence: Running) -> None:
    """A finished sequence gives its row, slot and pages back."""
    rank.running.remove(sequence)
    rank.pages.free(sequence.pages)
    rank.slots.free(sequence.slot)
