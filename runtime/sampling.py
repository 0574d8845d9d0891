"""How tokens are drawn, and what may be asked for; free of jax, so that it can be checked first."""

import math
from dataclasses import dataclass

MAX_TOP_K = 2**31 - 1  # the step takes int32
MAX_TEMPERATURE = 3e38  # and float32
MAX_SEED = 2**32 - 1  # and uint32


@dataclass(frozen=True)
class SamplingParams:
    """temperature 0 = greedy; top_k 0 and top_p 1 = off; the draw depends on seed and position only."""

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int = 0


GREEDY = SamplingParams()


def check_sampling(sampling: SamplingParams, max_tokens: int) -> list[str]:
    """What is wrong with the sampling parameters."""
    warm = math.isfinite(sampling.temperature) and 0 <= sampling.temperature <= MAX_TEMPERATURE
    rules = {
        f"temperature {sampling.temperature}: must be from 0 (greedy) to {MAX_TEMPERATURE:.0e}": warm,
        f"top_k {sampling.top_k}: must be from 0 (off) to {MAX_TOP_K}": 0 <= sampling.top_k <= MAX_TOP_K,
        f"top_p {sampling.top_p}: must be above 0 and at most 1 (off)": 0 < sampling.top_p <= 1,
        f"seed {sampling.seed}: must be from 0 to {MAX_SEED}": 0 <= sampling.seed <= MAX_SEED,
        f"max_tokens {max_tokens}: must be at least 1": max_tokens >= 1,
    }
    return [text for text, holds in rules.items() if not holds]
