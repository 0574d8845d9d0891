"""From a workload to step shapes: rows, tokens and pages per rank, and the load of each bucket."""

from dataclasses import dataclass

from moec.blocks.core.work import Dtypes, Load
from moec.targets.target import Target

from ..spec.schema import PlanPins, Workload
from .chip import chip_limits
from .plan import BucketPlan
from .space import Option

DECODE, MIXED = "decode", "mixed"


@dataclass(frozen=True)
class Steps:
    """Sizes per attention-DP rank. served: sequences at once on all ranks."""

    seqs: int
    mixed_tokens: int
    page_size: int
    pages_per_seq: int
    served: int

    @property
    def num_pages(self) -> int:
        """All sequences at full length, and page 0, the sink."""
        return self.seqs * self.pages_per_seq + 1

    @property
    def num_slots(self) -> int:
        """One per sequence, and slot 0, the sink."""
        return self.seqs + 1

    def buckets(self) -> tuple[BucketPlan, ...]:
        """A decode-only bucket and one that serves decode rows and prefill chunks together."""
        shared = {"seqs_per_rank": self.seqs, "pages_per_seq": self.pages_per_seq}
        return (
            BucketPlan(name=DECODE, tokens_per_rank=self.seqs, max_q=1, **shared),
            BucketPlan(name=MIXED, tokens_per_rank=self.mixed_tokens, max_q=self.mixed_tokens, **shared),
        )


def rows_per_rank(option: Option, workload: Workload, pins: PlanPins) -> int:
    """Sequences of one rank: all of them spread evenly, unless pinned."""
    return pins.max_seqs or -(-workload.concurrency // option.dp)


def plan_steps(option: Option, workload: Workload, pins: PlanPins, target: Target, seqs: int) -> Steps:
    """Step sizes for `seqs` sequences per rank."""
    page_size = pins.page_size or _page_size(workload, pins, target, seqs)
    # A mixed step never needs more than every row's whole context, and must have room beside the decode rows.
    budget = min(target.serving.batched_tokens_per_device * option.tp, seqs * workload.max_context)
    return Steps(
        seqs=seqs,
        mixed_tokens=pins.max_batched_tokens or max(budget, 2 * seqs, least_tokens(page_size, seqs)),
        page_size=page_size,
        pages_per_seq=-(-workload.max_context // page_size),
        served=min(workload.concurrency, seqs * option.dp),
    )


def least_tokens(page_size: int, seqs: int) -> int:
    """Tokens of a mixed step in which prefill moves on: one whole page, and a token of every other row.

    Prefill chunks end at page borders, except where a prompt ends.
    """
    return page_size + seqs - 1


def _page_size(workload: Workload, pins: PlanPins, target: Target, seqs: int) -> int:
    """The target's page size, halved until one page is not twice a whole context and fits a pinned step."""
    size = target.serving.page_size
    while size > 1 and (
        size >= 2 * workload.max_context
        or (pins.max_batched_tokens and pins.max_batched_tokens < least_tokens(size, seqs))
    ):
        size //= 2
    return size


def step_loads(option: Option, steps: Steps, workload: Workload, dtypes: Dtypes, target: Target) -> dict[str, Load]:
    """The load of each bucket in the steady state, when all rows decode and the mixed step is full."""
    decode = Load(
        tokens=steps.seqs,
        seqs=steps.seqs,
        decode_rows=steps.served / option.dp,
        decode_context=workload.isl + workload.osl / 2,
        decode_longest=workload.isl + workload.osl,
        prefill_tokens=0,
        prefill_context=workload.isl / 2,
        page_size=steps.page_size,
        degrees=option.degrees,
        dtypes=dtypes,
        row_tile=target.row_tile(dtypes.activation),
        row_full=int(target.rows.full.value),
        lanes=target.tiling.lanes,
        chip=chip_limits(target),
        pages_per_seq=steps.pages_per_seq,
    )
    # Steps without room for prefill are refused, but what they would hold is asked before.
    room = max(steps.mixed_tokens - steps.seqs, 0)
    mixed = Load(**{**vars(decode), "tokens": steps.mixed_tokens, "prefill_tokens": room})
    return {DECODE: decode, MIXED: mixed}


def mixed_share(option: Option, steps: Steps, workload: Workload) -> float:
    """Mixed steps per output token of every sequence.

    Each output token goes with isl/osl prompt tokens, spread over the ranks. Above 1 the
    engine is prefill-bound: sequences wait for more than one mixed step per token.
    """
    prefill = steps.served * workload.isl / workload.osl / option.dp
    return prefill / (steps.mixed_tokens - steps.seqs)


def token_seconds(decode: float, mixed: float, share: float) -> float:
    """Seconds per output token of a sequence when `share` mixed steps serve its prefill."""
    return max(0.0, 1.0 - share) * decode + share * mixed
