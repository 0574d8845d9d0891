"""A sequence of layers as the shortest list of groups, each a pattern repeated."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeVar

T = TypeVar("T")
GROUP_COST = 2  # written layers that one more group is worth


@dataclass(frozen=True)
class Run:
    """`repeat` times the layers [start, start + period) of the sequence."""

    start: int
    period: int
    repeat: int

    @property
    def stop(self) -> int:
        return self.start + self.period * self.repeat


def compress(sequence: Sequence[T]) -> list[Run]:
    """Runs that cover the sequence with as few written layers as can be, where a group counts as two more.

    A program unrolls the layers of a pattern and scans over its repeats, so fewer written layers are also a
    smaller program. Of equally short coverings the one with the fewest groups comes out, then the one that
    begins with the longest.
    """
    ids = _numbered(sequence)
    best: list[tuple[int, int]] = [(0, 0)] * (len(ids) + 1)  # from here to the end: (cost, groups)
    choice: list[Run | None] = [None] * len(ids)
    alike = [0] * (len(ids) + 1)
    for start in reversed(range(len(ids))):
        alike = _alike(ids, start, alike)
        options = [
            (best[run.stop][0] + run.period + GROUP_COST, best[run.stop][1] + 1, -run.stop, run)
            for run in _runs(alike, start)
        ]
        cost, groups, _, run = min(options, key=lambda option: option[:3])
        best[start], choice[start] = (cost, groups), run
    found: list[Run] = []
    start = 0
    while start < len(ids):
        chosen = choice[start]
        assert chosen is not None
        found.append(chosen)
        start = chosen.stop
    return found


def _numbered(sequence: Sequence[T]) -> list[int]:
    """Equal layers get equal numbers; layers need only be comparable."""
    kinds: list[T] = []
    ids = []
    for one in sequence:
        if one not in kinds:
            kinds.append(one)
        ids.append(kinds.index(one))
    return ids


def _alike(ids: list[int], start: int, after: list[int]) -> list[int]:
    """For every place j: how many layers from `start` on equal those from j on. after: the same for start + 1."""
    shared = [1 + more if one == ids[start] else 0 for one, more in zip(ids, after[1:], strict=True)]
    return [*shared, 0]


def _runs(alike: list[int], start: int) -> list[Run]:
    """Every run that begins here: each period with all repeats it has.

    A pattern that is itself a shorter one repeated is left out: the shorter one says the same.
    """
    most = len(alike) - 1 - start
    found, longer = [], set[int]()
    for period in range(1, most + 1):
        if period in longer:
            continue
        repeats = alike[start + period] // period + 1
        found += [Run(start, period, repeat) for repeat in range(1, repeats + 1)]
        longer.update(range(2 * period, repeats * period + 1, period))
    return found


def rows(items: Sequence[T]) -> list[tuple[T, int]]:
    """Equal neighbours once, with how many there are."""
    found: list[tuple[T, int]] = []
    for item in items:
        if found and found[-1][0] == item:
            found[-1] = (item, found[-1][1] + 1)
        else:
            found.append((item, 1))
    return found
