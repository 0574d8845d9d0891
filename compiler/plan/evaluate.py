"""One option at a time: hard constraints first, then memory and predicted time."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property

from moec.blocks.core.declare import Variant
from moec.blocks.core.work import Degrees, Dtypes, Load
from moec.targets.target import Target

from ..graph.ir import Graph
from ..spec.schema import PlanPins, Workload
from .cost import Machine, StepCost, price_place, price_step
from .memory import (
    TempModel,
    available_bytes,
    component_bytes,
    largest,
    layer_arrays,
    memory_plan,
    needed_bytes,
    vocabulary_arrays,
)
from .plan import MemoryPlan, MeshPlan, Reason
from .space import Option, indivisible, mesh_of
from .steps import (
    DECODE,
    MIXED,
    Steps,
    least_tokens,
    mixed_share,
    plan_steps,
    rows_per_rank,
    step_loads,
    token_seconds,
)
from .tuned import Values, tuned_values
from .variants import Broken, Chosen, Place, choose

GIB = 2**30


@dataclass(frozen=True)
class Question:
    """What is to be planned; what all options share is computed once."""

    graph: Graph
    target: Target
    workload: Workload
    pins: PlanPins
    dtypes: Dtypes
    temp_model: TempModel = field(default_factory=TempModel)
    _weights: dict[Degrees, dict[str, int]] = field(default_factory=dict, repr=False)
    _variants: dict[tuple[Degrees, int], Chosen] = field(default_factory=dict, repr=False)

    @cached_property
    def machine(self) -> Machine:
        return Machine.of(self.target)

    @cached_property
    def tuned(self) -> Values:
        return tuned_values(self.target)

    def weight_bytes(self, degrees: Degrees) -> dict[str, int]:
        """Padded weight bytes per component on one device."""
        layers = replace(degrees, embed=1, head=1)
        if layers not in self._weights:
            arrays = layer_arrays(self.graph, layers, self.dtypes)
            self._weights[layers] = component_bytes(arrays, self.target.tiling)
        vocabulary = vocabulary_arrays(self.graph, degrees, self.dtypes, self.target.tiling)
        return component_bytes(vocabulary, self.target.tiling) | self._weights[layers]

    def rows(self, option: Option) -> int:
        """Sequences per rank."""
        return rows_per_rank(option, self.workload, self.pins)

    def steps(self, option: Option, seqs: int) -> Steps:
        return plan_steps(option, self.workload, self.pins, self.target, seqs)

    def loads(self, option: Option, steps: Steps) -> dict[str, Load]:
        return self.variants(option, steps.seqs).loads(self._plain_loads(option, steps))

    def _plain_loads(self, option: Option, steps: Steps) -> dict[str, Load]:
        loads = step_loads(option, steps, self.workload, self.dtypes, self.target)
        return {name: replace(load, tuned=self.tuned) for name, load in loads.items()}

    def variants(self, option: Option, seqs: int | None = None) -> Chosen:
        """The implementations a sharding uses with so many sequences per rank; None: its own number."""
        # Vocabulary placements are left out: no block knows of them.
        key = (replace(option.degrees, embed=1, head=1), seqs or self.rows(option))
        if key not in self._variants:
            steps, mesh = self.steps(option, key[1]), mesh_of(option)
            assert mesh is not None, option
            plain, share = self._plain_loads(option, steps), mixed_share(option, steps, self.workload)

            def price(place: Place, variant: Variant, loads: Mapping[str, Load]) -> tuple[float, dict[str, float]]:
                seconds = {
                    name: sum(op.seconds for op in price_place(self.graph, self.machine, mesh, place, variant, load))
                    for name, load in loads.items()
                }
                us = {name: one * 1e6 for name, one in seconds.items()}
                return token_seconds(seconds[DECODE], seconds[MIXED], share), us

            self._variants[key] = choose(self.graph, self.target, self.pins, plain, price)
        return self._variants[key]

    def memory(self, option: Option, steps: Steps, chosen_at: int | None = None) -> MemoryPlan:
        """Bytes of a step; chosen_at: the sequences per rank at which variants are chosen, None = the step's."""
        chosen = self.variants(option, chosen_at or steps.seqs)
        weights, loads = self.weight_bytes(option.degrees), chosen.loads(self._plain_loads(option, steps))
        return memory_plan(self.graph, self.target, steps, loads, weights, chosen.variants, self.temp_model)

    def max_sequences(self, option: Option) -> int:
        """Sequences on all ranks that fit in HBM at full length."""

        def fits(seqs: int, chosen_at: int | None = None) -> bool:
            memory = self.memory(option, self.steps(option, seqs), chosen_at)
            return needed_bytes(memory) <= available_bytes(memory)

        # Variants hang on the number too, but choosing them anew takes longer than the rest: only where it matters.
        usual = self.rows(option)
        most = largest(lambda seqs: fits(seqs, usual), usual)
        return (most if not most or fits(most) else largest(fits, most - 1)) * option.dp


@dataclass(frozen=True)
class Priced:
    """An option that satisfies every hard constraint, with what it is predicted to cost."""

    option: Option
    mesh: MeshPlan
    steps: Steps
    memory: MemoryPlan
    costs: dict[str, StepCost]
    share: float  # mixed steps per output token
    num_layers: int

    @cached_property
    def token_seconds(self) -> float:
        """Seconds per output token of a sequence, its share of prefill included."""
        return token_seconds(self.costs[DECODE].seconds, self.costs[MIXED].seconds, self.share)

    @property
    def hbm_bytes(self) -> int:
        return needed_bytes(self.memory)

    @property
    def collectives_per_layer(self) -> float:
        """Message rounds per layer, averaged; an all-reduce is a reduce-scatter and an all-gather."""
        calls = [(op, one) for op, one in self.costs[DECODE].collectives() if op.scope not in ("embed", "head")]
        rounds = sum(op.layers * (2 if one.call.kind == "all-reduce" else 1) for op, one in calls)
        return round(rounds / self.num_layers, 6)

    @property
    def complexity(self) -> tuple[int, int, int]:
        """Cut placements, expert tensor parallelism, mesh axes: fewer is simpler."""
        return self.option.sharded, self.option.etp, len(self.mesh.axes)

    def numbers(self) -> dict[str, float]:
        """What verdicts rest on."""
        return {
            "tpot_ms": self.token_seconds * 1e3,
            "decode_ms": self.costs[DECODE].seconds * 1e3,
            "mixed_ms": self.costs[MIXED].seconds * 1e3,
            "hbm_gib": self.hbm_bytes / GIB,
            "collectives_per_layer": self.collectives_per_layer,
        }


@dataclass(frozen=True)
class Rejected:
    """An option that breaks a hard constraint. broken: every place without a variant, where that is the constraint."""

    option: Option
    verdict: Reason
    why: str
    numbers: dict[str, float]
    broken: tuple[Broken, ...] = ()


@dataclass(frozen=True)
class Placed:
    """An option that the chips' number and the step sizes allow; whether it fits is another question."""

    mesh: MeshPlan
    steps: Steps
    memory: MemoryPlan

    @property
    def fits(self) -> bool:
        return needed_bytes(self.memory) <= available_bytes(self.memory)


def evaluate(question: Question, option: Option) -> Priced | Rejected:
    """Divisibility, mesh, step sizes, HBM, in this order; then the price."""
    placed = place(question, option)
    if isinstance(placed, Rejected):
        return placed
    if not placed.fits:
        return _out_of_memory(question, option, placed.memory)
    loads = question.loads(option, placed.steps)
    variants = question.variants(option).variants
    costs = {
        name: price_step(question.graph, question.machine, placed.mesh, load, variants) for name, load in loads.items()
    }
    share = mixed_share(option, placed.steps, question.workload)
    return Priced(option, placed.mesh, placed.steps, placed.memory, costs, share, question.graph.num_layers)


def place(question: Question, option: Option) -> Placed | Rejected:
    """All hard constraints but HBM, and the memory that HBM has to hold."""
    if cut := indivisible(question.graph, option, question.dtypes.expert, question.dtypes.scale_block):
        return Rejected(option, "INDIVISIBLE", str(cut), {"size": cut.size, "degree": cut.degree})
    mesh = mesh_of(option)
    if mesh is None:
        why = f"no common mesh axes: neither of dp {option.dp} and ep {option.ep} divides the other"
        return Rejected(option, "UNSUPPORTED", why, {"dp": option.dp, "ep": option.ep})
    steps = question.steps(option, question.rows(option))
    if why := _no_room(steps):
        return Rejected(
            option,
            "UNSUPPORTED",
            why,
            {"batched_tokens": steps.mixed_tokens, "seqs": steps.seqs, "page_size": steps.page_size},
        )
    if broken := question.variants(option).broken:
        numbers: dict[str, float] = {"dp": option.dp, "tp": option.tp, "ep": option.ep}
        return Rejected(option, "UNSUPPORTED", str(broken[0]), numbers, broken)
    return Placed(mesh, steps, question.memory(option, steps))


def _no_room(steps: Steps) -> str:
    """Why prefill would stand still in a mixed step, "" when it moves on."""
    tokens, seqs, page = steps.mixed_tokens, steps.seqs, steps.page_size
    if tokens <= seqs:
        return f"{tokens} batched tokens leave no room for prefill beside {seqs} sequences per rank"
    least = least_tokens(page, seqs)
    if tokens < least:
        return f"{tokens} batched tokens hold no page of {page} tokens beside {seqs - 1} decode rows, {least} would"
    return ""


def _out_of_memory(question: Question, option: Option, memory: MemoryPlan) -> Rejected:
    needed, available = needed_bytes(memory) / GIB, available_bytes(memory) / GIB
    most, context = question.max_sequences(option), question.workload.max_context
    weights = sum(question.weight_bytes(option.degrees).values()) / GIB
    room = f"at most {most} sequences of {context} tokens fit" if most else f"{weights:.1f} GiB are weights"
    numbers = {"needed_gib": needed, "available_gib": available, "max_concurrency": most, "weights_gib": weights}
    why = f"needs {needed:.1f} of {available:.2f} GiB per device, {needed - available:.1f} too much; {room}"
    return Rejected(option, "HBM", why, numbers)
