"""Logits of given tokens through the emitted step, for verification: full prefill, ragged chunks, single steps."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from jax.sharding import Mesh

from .cache import PageAllocator, SlotAllocator, allocate_state
from .errors import RequestError
from .packing import Row, choose_bucket
from .program import Program
from .schedule import Limits, limits_of, pages_needed
from .step import Stepper

Chunks = Sequence[Sequence[int]]  # per sequence: how many tokens each step runs


@dataclass(frozen=True)
class _Placed:
    """A sequence, its rank and what it owns there."""

    ids: tuple[int, ...]
    rank: int
    pages: tuple[int, ...]
    slot: int


@dataclass(frozen=True)
class Trace:
    """One sequence of n tokens: logits [n, V] and hidden states [L + 1, n, D], float32.

    hidden[0] is the embedding output, hidden[i] the input of layer i, hidden[L] follows the final norm.
    """

    logits: np.ndarray
    hidden: np.ndarray


def score(
    program: Program, mesh: Mesh, weights: Any, ids: Sequence[Sequence[int]], chunks: Chunks | None = None
) -> list[np.ndarray]:
    """Logits [n, V] float32 of every token of every sequence, through STEPS_LOGITS.

    chunks[i] cuts sequence i: [n] (the default) is one full prefill, [20, 1, 1, ...] a prefill
    and cached single steps. Step k runs chunk k of all sequences together, sequence i on rank i % R.
    """
    parts: list[list[np.ndarray]] = [[] for _ in ids]

    def collect(i: int, rank: int, tokens: slice, logits: np.ndarray) -> None:
        parts[i].append(logits[rank, tokens])

    _run(program, mesh, weights, program.STEPS_LOGITS, ids, chunks, collect)
    return [np.concatenate(part) for part in parts]


def trace(
    program: Program, mesh: Mesh, weights: Any, ids: Sequence[Sequence[int]], chunks: Chunks | None = None
) -> list[Trace]:
    """As score, through STEPS_TAPPED: with the hidden states of every layer."""
    parts: list[list[tuple[np.ndarray, np.ndarray]]] = [[] for _ in ids]

    def collect(i: int, rank: int, tokens: slice, logits: np.ndarray, hidden: np.ndarray) -> None:
        parts[i].append((logits[rank, tokens], hidden[:, rank, tokens].astype(np.float32)))

    _run(program, mesh, weights, program.STEPS_TAPPED, ids, chunks, collect)
    return [
        Trace(np.concatenate([logits for logits, _ in part]), np.concatenate([hidden for _, hidden in part], axis=1))
        for part in parts
    ]


def _run(
    program: Program,
    mesh: Mesh,
    weights: Any,
    steps: dict[str, Callable[..., Any]],
    ids: Sequence[Sequence[int]],
    chunks: Chunks | None,
    collect: Callable[..., None],
) -> None:
    """Run all chunks; collect(sequence, rank, its tokens in the step, *outputs) for each."""
    cuts = [list(cut) for cut in chunks] if chunks is not None else [[len(tokens)] for tokens in ids]
    _check(program, ids, cuts, limits_of(program.BUCKETS, program.PAGE_SIZE))
    placed = _place(program, ids)
    orders = [_order(program, placed, cuts, k) for k in range(max(map(len, cuts)))]
    plans = [[[_row(placed[i], cuts[i], k) for i in rank] for rank in order] for k, order in enumerate(orders)]
    names = _buckets_for(program, plans)
    state = allocate_state(program, mesh, program.NUM_PAGES, program.NUM_SLOTS)
    stepper = Stepper(program, mesh, steps, names, weights, state)
    for k, (order, rows) in enumerate(zip(orders, plans, strict=True)):
        state, *outputs = stepper(weights, state, rows)
        arrays = [np.asarray(output) for output in outputs]
        for r, rank in enumerate(order):
            ends = np.cumsum([cuts[i][k] for i in rank])
            for i, end in zip(rank, ends, strict=True):
                collect(i, r, slice(end - cuts[i][k], end), *arrays)


def _buckets_for(program: Program, plans: Sequence[Sequence[Sequence[Row]]]) -> set[str]:
    """The buckets of all steps; rows that no bucket takes are refused before anything runs."""
    chosen = [choose_bucket(program.BUCKETS, ranks) for ranks in plans]
    if None in chosen:
        k = chosen.index(None)
        raise RequestError([f"step {k}: its chunks are more tokens or rows than any bucket takes on one rank"])
    return {name for name in chosen if name is not None}


def _check(program: Program, ids: Sequence[Sequence[int]], cuts: list[list[int]], limits: Limits) -> None:
    """Every sequence must fit the context and the cache, every chunk a bucket."""
    problems = [
        f"sequence {i}: chunks {cut} do not add up to its {len(tokens)} tokens"
        for i, (tokens, cut) in enumerate(zip(ids, cuts, strict=True))
        if sum(cut) != len(tokens) or not cut or min(cut) < 1
    ]
    problems += [
        f"sequence {i} has {len(tokens)} tokens: max_context is {program.MAX_CONTEXT}"
        for i, tokens in enumerate(ids)
        if len(tokens) > program.MAX_CONTEXT
    ]
    problems += [
        f"sequence {i}: a chunk of {max(cut)} tokens exceeds the largest bucket's {limits.max_q}"
        for i, cut in enumerate(cuts)
        if cut and max(cut) > limits.max_q
    ]
    if problems:
        raise RequestError(problems)


def _place(program: Program, ids: Sequence[Sequence[int]]) -> list[_Placed]:
    """Sequence i goes to rank i % R."""
    pages = [PageAllocator(program.NUM_PAGES) for _ in range(program.NUM_RANKS)]
    slots = [SlotAllocator(program.NUM_SLOTS) for _ in range(program.NUM_RANKS)]
    placed = []
    for i, tokens in enumerate(ids):
        rank, need = i % program.NUM_RANKS, pages_needed(len(tokens), program.PAGE_SIZE)
        if need > pages[rank].available or not slots[rank].available:
            raise RequestError([f"{len(ids)} sequences do not fit the program's cache at once"])
        taken = pages[rank].allocate(need)
        placed.append(_Placed(tuple(int(t) for t in tokens), rank, taken, slots[rank].allocate()))
    return placed


def _order(program: Program, placed: list[_Placed], cuts: list[list[int]], k: int) -> list[list[int]]:
    """Sequences of step k by rank, single tokens first."""
    live = [i for i in range(len(placed)) if k < len(cuts[i])]
    live.sort(key=lambda i: cuts[i][k] > 1)
    return [[i for i in live if placed[i].rank == r] for r in range(program.NUM_RANKS)]


def _row(sequence: _Placed, cut: list[int], k: int) -> Row:
    start = sum(cut[:k])
    return Row(sequence.ids[start : start + cut[k]], start, sequence.pages, sequence.slot, start > 0)
