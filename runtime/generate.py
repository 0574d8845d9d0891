"""A small batch engine: any number of prompts of any length through an emitted program.

One step serves decode rows and prefill chunks together; prompts that find no free row wait.
The loop is synchronous: every step's tokens come to the host before the next is planned.
"""

from collections import deque
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from jax.sharding import Mesh

from .cache import PageAllocator, SlotAllocator, allocate_state
from .errors import RequestError
from .program import Program
from .sampling import GREEDY, SamplingParams, check_sampling
from .schedule import Limits, Rank, Running, admit, limits_of, pages_needed, plan_rank, release
from .step import Stepper

OnToken = Callable[[int, int], None]  # (index of the prompt, token id), as soon as it is sampled


@dataclass(frozen=True)
class Completion:
    """What one prompt gave.

    tokens: sampled ids, the stop id included. logprobs: their natural-log probabilities.
    finish: "stop" (a stop id), "length" (max_tokens) or "context" (the program's max_context).
    """

    tokens: tuple[int, ...]
    logprobs: tuple[float, ...]
    finish: str


def generate(
    program: Program,
    mesh: Mesh,
    weights: Any,
    prompts: Sequence[Sequence[int]],
    *,
    max_tokens: int,
    sampling: SamplingParams = GREEDY,
    stop_ids: Collection[int] = (),
    on_token: OnToken | None = None,
    num_pages: int | None = None,
    num_slots: int | None = None,
) -> list[Completion]:
    """Complete every prompt. Prompt i draws with seed sampling.seed + i, whatever runs beside it.

    Everything is compiled before the first token.
    num_pages, num_slots: per rank, sinks included; what the plan budgets when None.
    """
    pages = program.NUM_PAGES if num_pages is None else num_pages
    slots = program.NUM_SLOTS if num_slots is None else num_slots
    limits = limits_of(program.BUCKETS, program.PAGE_SIZE)
    problems = [*check_sampling(sampling, max_tokens), *check_prompts(program, prompts)]
    waiting = deque(_start(program, i, ids, max_tokens, sampling) for i, ids in enumerate(prompts))
    problems += _too_large(waiting, pages, limits) if not problems else []
    if problems:
        raise RequestError(problems)
    ranks = [Rank(PageAllocator(pages), SlotAllocator(slots)) for _ in range(program.NUM_RANKS)]
    state = allocate_state(program, mesh, pages, slots)
    stepper = Stepper(program, mesh, program.STEPS, _buckets_for(program, prompts), weights, state)
    engine = _Engine(stepper, weights, ranks, limits, frozenset(stop_ids), on_token)
    while waiting or any(rank.running for rank in ranks):
        admit(waiting, ranks, limits)
        state = engine.step(state)
    return [engine.completion(i, len(ids), max_tokens) for i, ids in enumerate(prompts)]


class _Engine:
    """Runs steps and keeps what each prompt has given so far."""

    def __init__(
        self,
        stepper: Stepper,
        weights: Any,
        ranks: Sequence[Rank],
        limits: Limits,
        stop_ids: frozenset[int],
        on_token: OnToken | None,
    ):
        self._stepper, self._weights, self._ranks, self._limits = stepper, weights, ranks, limits
        self._stop_ids, self._on_token = stop_ids, on_token
        self._sequences: dict[int, Running] = {}
        self._logprobs: dict[int, list[float]] = {}

    def step(self, state: Any) -> Any:
        """One step of all ranks; the new state."""
        plans = [plan_rank(rank, self._limits) for rank in self._ranks]
        assert any(plans), "nothing to run: every admitted row must make progress"
        rows = [[sequence.row(count) for sequence, count in plan] for plan in plans]
        state, out = self._stepper(self._weights, state, rows)
        tokens, logprobs = np.asarray(out["tokens"]), np.asarray(out["logprobs"])
        for r, plan in enumerate(plans):
            for s, (sequence, count) in enumerate(plan):
                sequence.cached += count
                if sequence.pending == 0:
                    self._take(self._ranks[r], sequence, int(tokens[r, s]), float(logprobs[r, s]))
        return state

    def _take(self, rank: Rank, sequence: Running, token: int, logprob: float) -> None:
        """A row that reached its last token sampled a new one."""
        sequence.tokens.append(token)
        self._sequences[sequence.index] = sequence
        self._logprobs.setdefault(sequence.index, []).append(logprob)
        if self._on_token:
            self._on_token(sequence.index, token)
        if token in self._stop_ids or len(sequence.tokens) >= sequence.limit:
            release(rank, sequence)

    def completion(self, index: int, prompt_length: int, max_tokens: int) -> Completion:
        tokens = tuple(self._sequences[index].tokens[prompt_length:])
        reason = "stop" if tokens[-1] in self._stop_ids else "length" if len(tokens) == max_tokens else "context"
        return Completion(tokens, tuple(self._logprobs[index]), reason)


def _start(program: Program, index: int, ids: Sequence[int], max_tokens: int, sampling: SamplingParams) -> Running:
    seeded = SamplingParams(sampling.temperature, sampling.top_k, sampling.top_p, (sampling.seed + index) % 2**32)
    limit = min(len(ids) + max_tokens, program.MAX_CONTEXT)
    return Running(index, [int(token) for token in ids], limit, seeded)


def _buckets_for(program: Program, prompts: Sequence[Sequence[int]]) -> list[str]:
    """Buckets that may run: without a prompt of two tokens every row is a decode row."""
    single = all(len(ids) == 1 for ids in prompts)
    return [name for name, bucket in program.BUCKETS.items() if bucket.max_q == 1 or not single]


def check_prompts(program: Program, prompts: Sequence[Sequence[int]]) -> list[str]:
    """What is wrong with each prompt."""
    return [text for i, ids in enumerate(prompts) if (text := _prompt_problem(program, f"prompt {i}", ids))]


def _prompt_problem(program: Program, name: str, ids: Sequence[int]) -> str | None:
    if not len(ids):
        return f"{name} is empty: at least one token is needed"
    if len(ids) >= program.MAX_CONTEXT:
        return f"{name} has {len(ids)} tokens: with one to generate it exceeds max_context {program.MAX_CONTEXT}"
    strange = [int(token) for token in ids if not 0 <= token < program.VOCAB]
    return f"{name} holds token {strange[0]}: valid ids are 0 to {program.VOCAB - 1}" if strange else None


def _too_large(waiting: Sequence[Running], pages: int, limits: Limits) -> list[str]:
    """Prompts that would wait for ever because the whole pool is too small for them."""
    return [
        f"prompt {s.index} may grow to {s.limit} tokens: {need} pages of {limits.page_size}, the cache has {pages - 1}"
        for s in waiting
        if (need := pages_needed(s.limit, limits.page_size)) > pages - 1
    ]
