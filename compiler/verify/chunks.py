"""How sequences are cut into steps for verification: whole, ragged, or a prefill and single cached tokens."""

from collections.abc import Sequence

import numpy as np

from moec.runtime.program import Program
from moec.runtime.schedule import limits_of

from ..problems import Problem, ProblemsError


def largest_chunk(program: Program, num_sequences: int) -> int:
    """Tokens of one row that always fit a step when every rank runs its share of the sequences at once."""
    limits = limits_of(program.BUCKETS, program.PAGE_SIZE)
    rows_per_rank = -(-num_sequences // program.NUM_RANKS)
    if rows_per_rank > limits.rows:
        text = f"{program.NAME} serves {limits.rows} sequences per rank, this check runs {rows_per_rank} at once"
        raise ProblemsError([Problem("plan.max_seqs", text, hint=f"plan.max_seqs={rows_per_rank}")])
    return min(limits.max_q, limits.tokens // rows_per_rank)


def whole(lengths: Sequence[int], cap: int) -> list[list[int]]:
    """As few chunks as the largest bucket allows: one, where it takes the sequence."""
    return [[min(cap, n - start) for start in range(0, n, cap)] for n in lengths]


def ragged(lengths: Sequence[int], cap: int, seed: int) -> list[list[int]]:
    """Uneven chunks of 1 to cap tokens, at least three per sequence that has three tokens."""
    rng = np.random.default_rng(seed)
    return [_ragged_one(n, min(cap, max(1, n // 2)), rng) for n in lengths]


def steps(lengths: Sequence[int], cap: int, singles: int) -> list[list[int]]:
    """A prefill, then `singles` steps of one token."""
    heads = whole([n - min(singles, n - 1) for n in lengths], cap)
    return [head + [1] * (n - sum(head)) for head, n in zip(heads, lengths, strict=True)]


def _ragged_one(length: int, cap: int, rng: np.random.Generator) -> list[int]:
    cuts: list[int] = []
    while sum(cuts) < length:
        cuts.append(min(int(rng.integers(1, cap + 1)), length - sum(cuts)))
    return cuts
