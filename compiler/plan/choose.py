"""The exact search: price every option, reject by hard constraints first, then by predicted time.

Every enumerated option ends in exactly one class with its numbers. Options whose predicted
times differ by less than the model's error are ties, and a fixed order decides: fewer
collectives per layer, then less HBM, then the simpler plan.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import cached_property

from moec.blocks.core.work import Degrees, Dtypes, Load
from moec.targets.target import Target

from ..graph.ir import Graph
from ..problems import Problem, ProblemsError
from ..spec.schema import PlanPins, Request, Workload
from .cost import BAND_PCT, Machine, StepCost, count_layers, price_step
from .dtypes import check_dtypes, resolve_dtypes
from .memory import BAND_PCT as MEMORY_BAND_PCT
from .memory import (
    SCALE_BLOCK,
    SCALED,
    TempModel,
    available_bytes,
    component_bytes,
    largest,
    memory_plan,
    needed_bytes,
    weight_arrays,
)
from .plan import Candidate, MemoryPlan, MeshPlan, Plan, Reason
from .space import Option, enumerate_options, indivisible, mesh_of
from .steps import DECODE, MIXED, Steps, mixed_share, plan_steps, rows_per_rank, step_loads, token_seconds

GIB = 2**30


@dataclass(frozen=True)
class Question:
    """What is to be planned; machine and weight bytes are computed once for all options."""

    graph: Graph
    target: Target
    workload: Workload
    pins: PlanPins
    dtypes: Dtypes
    temp_model: TempModel = TempModel()
    _weights: dict[Degrees, dict[str, int]] = field(default_factory=dict)

    @cached_property
    def machine(self) -> Machine:
        return Machine.of(self.target)

    @cached_property
    def layers(self) -> dict[str, int]:
        return count_layers(self.graph)

    def weight_bytes(self, degrees: Degrees) -> dict[str, int]:
        """Padded weight bytes per component on one device."""
        if degrees not in self._weights:
            arrays = weight_arrays(self.graph, degrees, self.dtypes)
            self._weights[degrees] = component_bytes(arrays, self.target.tiling)
        return self._weights[degrees]

    def steps(self, option: Option, seqs: int | None = None) -> Steps:
        seqs = seqs or rows_per_rank(option, self.workload, self.pins)
        return plan_steps(option, self.workload, self.pins, self.target, seqs)

    def loads(self, option: Option, steps: Steps) -> dict[str, Load]:
        return step_loads(option, steps, self.workload, self.dtypes)

    def memory(self, option: Option, steps: Steps) -> MemoryPlan:
        weights, loads = self.weight_bytes(option.degrees), self.loads(option, steps)
        return memory_plan(self.graph, self.target, steps, loads, weights, self.temp_model)

    def max_sequences(self, option: Option) -> int:
        """Sequences on all ranks that fit in HBM at full length."""

        def fits(seqs: int) -> bool:
            memory = self.memory(option, self.steps(option, seqs))
            return needed_bytes(memory) <= available_bytes(memory)

        return largest(fits, rows_per_rank(option, self.workload, self.pins)) * option.dp


@dataclass(frozen=True)
class Priced:
    """An option that satisfies every hard constraint, with what it is predicted to cost."""

    option: Option
    mesh: MeshPlan
    steps: Steps
    memory: MemoryPlan
    costs: dict[str, StepCost]
    share: float

    @property
    def token_seconds(self) -> float:
        """Seconds per output token of a sequence, its share of prefill included."""
        return token_seconds(self.costs[DECODE].seconds, self.costs[MIXED].seconds, self.share)

    @property
    def hbm_bytes(self) -> int:
        return needed_bytes(self.memory)

    @property
    def complexity(self) -> tuple[int, int, int]:
        """Cut placements, expert tensor parallelism, mesh axes: fewer is simpler."""
        return self.option.sharded, self.option.etp, len(self.mesh.axes)


def collectives_per_layer(priced: Priced, num_layers: int) -> float:
    """Message rounds per layer, averaged; an all-reduce is a reduce-scatter and an all-gather."""
    calls = [op for op in priced.costs[DECODE].collectives() if op.layers > 1 or op.scope not in ("embed", "head")]
    return sum(op.layers * _rounds(op.collective.kind if op.collective else "") for op in calls) / num_layers


def _rounds(kind: str) -> int:
    return 2 if kind == "all-reduce" else 1


@dataclass(frozen=True)
class Judged:
    """An option, its verdict and, where it got that far, its price."""

    option: Option
    verdict: Reason
    why: str
    numbers: dict[str, float]
    priced: Priced | None = None

    def candidate(self) -> Candidate:
        option = self.option
        return Candidate(
            attention=option.attention,
            experts=option.experts,
            embed=option.embed,
            head=option.head,
            shared_expert=option.shared_expert,
            kv_dtype=option.kv_dtype,
            verdict=self.verdict,
            why=self.why,
            numbers={key: significant(value) for key, value in self.numbers.items()},
        )


def significant(value: float) -> float:
    """Six significant digits, so that plan.json does not depend on the last bit of a logarithm."""
    return float(f"{value:.6g}")


def make_plan(request: Request) -> Plan:
    """The plan of a request; raises ProblemsError when the pins or the machine allow none."""
    from .build import build_plan

    question = ask(request)
    judged = judge(question)
    chosen = next((one for one in judged if one.verdict == "CHOSEN"), None)
    if chosen is None:
        raise ProblemsError(_infeasible(question, judged))
    return build_plan(request, question, judged, chosen)


def ask(request: Request) -> Question:
    """The question in a request."""
    if request.target is None or request.workload is None:
        missing = "target" if request.target is None else "workload"
        raise ProblemsError([Problem(missing, f"planning needs a {missing}", f"name one with --{missing}")])
    dtypes = resolve_dtypes(request.graph, request.target, request.pins)
    if problems := check_dtypes(request.graph, request.target, dtypes):
        raise ProblemsError(problems)
    return Question(request.graph, request.target, request.workload, request.pins, dtypes)


def judge(question: Question) -> tuple[Judged, ...]:
    """Every option with its verdict, in the order of enumeration."""
    options = tuple(enumerate_options(question.graph, question.target.num_devices, (question.dtypes.kv,)))
    first = [_hard_constraints(question, option) for option in options]
    feasible = [one.priced for one in first if one.priced and not one.why]
    winner = choose(feasible, question.graph.num_layers) if feasible else None
    judged = tuple(_compare(one, winner, question) if one.priced and not one.why else one for one in first)
    assert sum(one.verdict != "CHOSEN" for one in judged) + (winner is not None) == len(options)
    return judged


def _hard_constraints(question: Question, option: Option) -> Judged:
    """Divisibility, mesh, step sizes, HBM, pins, in this order; a survivor has no `why` yet."""
    scale_block = SCALE_BLOCK if question.dtypes.expert == SCALED else None
    if cut := indivisible(question.graph, option, scale_block):
        return Judged(option, "INDIVISIBLE", str(cut), {"size": cut.size, "degree": cut.degree})
    mesh = mesh_of(option)
    if mesh is None:
        why = f"no mesh has both {option.attention} and {option.experts}: neither of {option.dp} and {option.ep} divides the other"
        return Judged(option, "UNSUPPORTED", why, {"dp": option.dp, "ep": option.ep})
    steps = question.steps(option)
    if steps.mixed_tokens <= steps.seqs:
        why = f"max_batched_tokens {steps.mixed_tokens} leaves no room for prefill beside {steps.seqs} sequences per rank"
        return Judged(option, "UNSUPPORTED", why, {"max_batched_tokens": steps.mixed_tokens, "seqs": steps.seqs})
    memory = question.memory(option, steps)
    if needed_bytes(memory) > available_bytes(memory):
        return _out_of_memory(question, option, memory)
    loads = question.loads(option, steps)
    costs = {name: price_step(question.graph, question.machine, mesh, load) for name, load in loads.items()}
    priced = Priced(option, mesh, steps, memory, costs, mixed_share(option, steps, question.workload))
    pin = violated_pin(question.pins, option)
    return Judged(option, "PINNED", f"excluded by {pin}" if pin else "", _numbers(question, priced), priced)


def _out_of_memory(question: Question, option: Option, memory: MemoryPlan) -> Judged:
    needed, available = needed_bytes(memory) / GIB, available_bytes(memory) / GIB
    most = question.max_sequences(option)
    why = f"needs {needed:.1f} of {available:.2f} GiB per device; at most {most} sequences of {question.workload.max_context} tokens fit"
    return Judged(
        option, "HBM", why, {"needed_gib": needed, "available_gib": available, "max_concurrency": most}
    )  # fmt: skip


def violated_pin(pins: PlanPins, option: Option) -> str | None:
    """The first pin the option does not satisfy, as the user wrote it."""
    wanted = {
        "attention.dp": (pins.attention.dp, option.dp),
        "attention.tp": (pins.attention.tp, option.tp),
        "experts.ep": (pins.experts.ep, option.ep),
        "experts.tp": (pins.experts.tp, option.etp),
        "embed": (pins.embed, option.embed),
        "head": (pins.head, option.head),
        "shared_expert": (pins.shared_expert, option.shared_expert),
    }
    return next((f"plan.{key}={pin}" for key, (pin, got) in wanted.items() if pin not in (None, got)), None)


def choose(feasible: Iterable[Priced], num_layers: int) -> Priced:
    """The winner: among all within the band of the fastest, by the fixed order."""
    return tie_break(ties(feasible), num_layers)[-1][0]


def ties(feasible: Iterable[Priced]) -> list[Priced]:
    """Options the model cannot tell from the fastest."""
    options = list(feasible)
    best = min(one.token_seconds for one in options)
    return [one for one in options if one.token_seconds <= best * (1 + BAND_PCT / 100)]


def tie_break(tied: list[Priced], num_layers: int) -> list[list[Priced]]:
    """Survivors after each rule: collectives per layer, HBM (within its own band), simplicity, predicted time."""
    fewest = min(collectives_per_layer(one, num_layers) for one in tied)
    quiet = [one for one in tied if collectives_per_layer(one, num_layers) <= fewest + 1e-9]
    least = min(one.hbm_bytes for one in quiet)
    small = [one for one in quiet if one.hbm_bytes <= least * (1 + MEMORY_BAND_PCT / 100)]
    simplest = min(one.complexity for one in small)
    plain = [one for one in small if one.complexity == simplest]
    return [tied, quiet, small, plain, [min(plain, key=lambda one: one.token_seconds)]]


def _compare(one: Judged, winner: Priced | None, question: Question) -> Judged:
    """Chosen, a tie lost by a named rule, or dominated."""
    assert one.priced and winner
    return one


def _numbers(question: Question, priced: Priced) -> dict[str, float]:
    return {
        "tpot_ms": priced.token_seconds * 1e3,
        "decode_ms": priced.costs[DECODE].seconds * 1e3,
        "mixed_ms": priced.costs[MIXED].seconds * 1e3,
        "hbm_gib": priced.hbm_bytes / GIB,
        "collectives_per_layer": collectives_per_layer(priced, question.graph.num_layers),
    }


def _infeasible(question: Question, judged: tuple[Judged, ...]) -> list[Problem]:
    return []
