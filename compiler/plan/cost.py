"""Work to seconds: the only place where a block's work meets a chip's numbers.

An operator takes max(flops / (efficiency * peak), bytes / achieved bandwidth); efficiency and
bandwidth are interpolated in the target's published points. A collective takes
alpha + bytes / beta on the slowest link it uses. Operators, collectives and the fixed cost per
layer run one after the other; only what a block says is one operator overlaps: its collectives,
one after the other, run beside its other terms. All results are predictions.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cache, cached_property
from itertools import pairwise, product
from math import log
from statistics import mean

from moec.blocks.core.declare import Variant
from moec.blocks.core.work import Collective, Gemm, Load, Stream, Subcore, Term, Vector, itemsize
from moec.blocks.embed import cost as embed_cost
from moec.blocks.head import cost as head_cost
from moec.blocks.registry import cost
from moec.targets.target import Target

from ..graph.ir import Graph
from .plan import MeshPlan
from .variants import Place, places

# Passes over the residual stream per norm and per addition: read and write.
_RESIDUAL_PASSES = 2
# The fixed cost per layer was found on layers of this many blocks; it is taken as proportional.
_BLOCKS_PER_LAYER = 2


@dataclass(frozen=True)
class Span:
    """The devices of one collective: how many, on how many chips, and its groups per chip.

    Groups of one collective that share a chip share its links.
    """

    devices: int
    chips: int
    groups_per_chip: float


@dataclass(frozen=True)
class Machine:
    """A target with its curves made monotone, ready to price work."""

    target: Target
    bandwidth: tuple[tuple[float, float], ...]  # bytes, bytes/s
    efficiency: tuple[tuple[float, float], ...]  # m = n = k, share of peak

    @classmethod
    def of(cls, target: Target) -> "Machine":
        peak = target.peak_tflops[target.gemm_dtype].value
        shares = [(size, tflops / peak) for size, tflops in target.gemm.points]
        speeds = [(size, gbps * 1e9) for size, gbps in target.hbm_copy.points]
        return cls(target, monotone(speeds), monotone(shares))

    def memory_seconds(self, num_bytes: float, chunk_bytes: float) -> float:
        """HBM traffic in pieces; one below the smallest measured takes that one's latency and streams at full speed."""
        if not num_bytes:
            return 0.0
        (smallest, speed), (_, full_speed) = self.bandwidth[0], self.bandwidth[-1]
        if chunk_bytes >= smallest:
            return num_bytes / interpolate(self.bandwidth, chunk_bytes)
        latency = smallest / speed - smallest / full_speed
        return num_bytes / chunk_bytes * latency + num_bytes / full_speed

    def matrix_seconds(self, gemms: Iterable[Gemm]) -> float:
        """Matrix products of one operator, each as efficient as a cube of the same flops."""
        total = 0.0
        for gemm in gemms:
            size = (gemm.flops / 2) ** (1 / 3)
            peak = self.target.peak_tflops[gemm.dtype].value * 1e12
            total += gemm.flops / (peak * interpolate(self.efficiency, size)) if gemm.flops else 0.0
        return total

    def subcore_seconds(self, terms: Iterable[Subcore]) -> float:
        """The busiest subcore of kernels on the SparseCores: a bundle per cycle, and what starting them takes."""
        cores = self.target.sparse_cores
        assert cores is not None, "work for SparseCores on a chip without them"
        cycle = 1e-9 / cores.clock_ghz.value
        return sum(term.bundles * cycle + term.starts * cores.launch_us.value * 1e-6 for term in terms)

    def collective_seconds(self, collective: Collective, span: Span) -> tuple[float, str]:
        """(seconds, link) of one call. Devices of one chip take data in once and share it over their own link."""
        if collective.rounds:
            return self._rounds_seconds(collective)
        payload = collective.payload_bytes
        rounds = 2 if collective.kind == "all-reduce" else 1  # reduce-scatter, then all-gather
        if span.chips == 1:
            link = self.target.d2d
            assert link is not None, "several devices on one chip need a link between them"
            moved = rounds * payload * (span.devices - 1) / span.devices
            return link.alpha_us.value * 1e-6 + moved / (link.gbps.value * 1e9), "D2D"
        ici, links = self.target.ici, self._links(span)
        alpha = ici.alpha_us.value * 1e-6
        if collective.kind == "all-to-all":
            out = payload * self.target.cores * (span.chips - 1) / span.chips
            return alpha + out / (ici.all_to_all_gbps_per_link.value * links * 1e9), "ICI"
        taken_in = rounds * payload * span.groups_per_chip * (span.chips - 1) / span.chips
        return alpha + taken_in / (ici.gbps_per_link.value * links * 1e9), "ICI"

    def _rounds_seconds(self, collective: Collective) -> tuple[float, str]:
        """(seconds, link) of a kernel's exchange: rounds within chips beside those between chips, but for the first or
        last batch. Each is one hop. Alpha is that of the compiler's collective on the slower link: none was published
        for copies that a kernel sends."""
        ici, d2d = self.target.ici, self.target.d2d
        spent = {"D2D": 0.0, "ICI": 0.0}
        for one in collective.rounds:
            if one.link == "D2D":
                assert d2d is not None, "several devices on one chip need a link between them"
                spent["D2D"] += one.bytes * one.devices / (d2d.gbps.value * 1e9)
            else:
                spent["ICI"] += one.bytes * one.devices / (ici.gbps_per_link.value * 1e9)
        link = "ICI" if any(one.link == "ICI" for one in collective.rounds) else "D2D"
        alpha = ici.alpha_us if link == "ICI" or d2d is None else d2d.alpha_us
        return alpha.value * 1e-6 + max(spent.values()) + min(spent.values()) / collective.batches, link

    def _links(self, span: Span) -> float:
        """Links per chip a group uses: those of the dims it spans, dims counted by the log of their size."""
        topology = self.target.topology
        return max(1.0, topology.ici_links * log(span.chips) / log(topology.num_chips))


def monotone(points: Iterable[tuple[float, float]]) -> tuple[tuple[float, float], ...]:
    """The points with y made non-falling: neighbours that fall are pooled to their mean (isotonic regression)."""
    pools: list[list[float]] = []  # [sum of y, count]
    xs = []
    for x, y in points:
        xs.append(x)
        pools.append([y, 1])
        while len(pools) > 1 and pools[-2][0] / pools[-2][1] > pools[-1][0] / pools[-1][1]:
            total, count = pools.pop()
            pools[-1] = [pools[-1][0] + total, pools[-1][1] + count]
    ys = [total / count for total, count in pools for _ in range(int(count))]
    return tuple(zip(xs, ys, strict=True))


def interpolate(points: tuple[tuple[float, float], ...], x: float) -> float:
    """y at x, linear in log x; constant outside the points."""
    if x <= points[0][0]:
        return points[0][1]
    for (x0, y0), (x1, y1) in pairwise(points):
        if x <= x1:
            return y0 + (y1 - y0) * log(x / x0) / log(x1 / x0)
    return points[-1][1]


@cache
def span_of(axes: tuple[tuple[str, int], ...], used: tuple[str, ...], cores: int) -> Span:
    """The span of a collective over the axes `used`; devices are numbered row-major, `cores` neighbours per chip."""
    offsets = [0]
    stride = 1
    for name, size in reversed(axes):
        if name in used:
            offsets = [o + i * stride for o, i in product(offsets, range(size))]
        stride *= size
    chips = len({offset // cores for offset in offsets})
    return Span(len(offsets), chips, min(cores, stride) * chips / len(offsets))


@dataclass(frozen=True)
class Message:
    """One collective and its predicted seconds, whatever runs beside it."""

    call: Collective
    seconds: float


@dataclass(frozen=True)
class OpCost:
    """Predicted cost of one operator of one scope. layers: executions per step; seconds: one of them."""

    scope: str
    op: str
    layers: int
    seconds: float
    binding: str
    messages: tuple[Message, ...] = ()

    @property
    def total(self) -> float:
        return self.layers * self.seconds


@dataclass(frozen=True)
class StepCost:
    """Predicted cost of one step."""

    ops: tuple[OpCost, ...]

    @cached_property
    def seconds(self) -> float:
        return sum(op.total for op in self.ops)

    def by_scope(self) -> dict[str, float]:
        """Seconds per scope, in order of execution."""
        found: dict[str, float] = {}
        for op in self.ops:
            found[op.scope] = found.get(op.scope, 0.0) + op.total
        return found

    def collectives(self) -> tuple[tuple[OpCost, Message], ...]:
        """Every message with the operator it belongs to, in order of execution."""
        return tuple((op, message) for op in self.ops for message in op.messages)


def price_place(
    graph: Graph, machine: Machine, mesh: MeshPlan, place: Place, variant: Variant, load: Load, layers: int = 1
) -> list[OpCost]:
    """Every operator of one place on one device."""
    terms = cost(place.kind, variant).work(place.fields, graph.dims, load)
    return price(machine, mesh, place.owner, layers, terms)


def price_step(graph: Graph, machine: Machine, mesh: MeshPlan, load: Load, variants: Mapping[str, Variant]) -> StepCost:
    """Every operator of one step on one device. variants: of every place, by its name."""
    ops = [*price(machine, mesh, "embed", 1, embed_cost.work(graph.dims, load))]
    for place in places(graph):
        repeats = len(graph.layers_of(place.owner))
        ops += price_place(graph, machine, mesh, place, variants[place.name], load, repeats)
    stream = load.tokens * graph.dims.hidden_size * itemsize(load.dtypes.activation)
    layers = [layer for _, layer in graph.layers()]
    passes = _RESIDUAL_PASSES * mean(len(layer.norms) + len(layer.additions) for layer in layers)
    residual = (Stream("norms and additions", passes * stream, stream),)
    ops += price(machine, mesh, "residual", graph.num_layers, residual)
    ops += price(machine, mesh, "head", 1, head_cost.work(graph.dims, load))
    fixed = machine.target.layer_overhead_us.value * 1e-6 * mean(len(one.blocks) for one in layers) / _BLOCKS_PER_LAYER
    ops.append(OpCost("overhead", "fixed cost per layer", graph.num_layers, fixed, "fixed"))
    return StepCost(tuple(ops))


def price(machine: Machine, mesh: MeshPlan, scope: str, layers: int, terms: Iterable[Term]) -> list[OpCost]:
    """One OpCost per operator, in order of first appearance."""
    groups: dict[str, list[Term]] = {}
    for term in terms:
        groups.setdefault(term.op, []).append(term)
    return [_price_op(machine, mesh, scope, layers, op, found) for op, found in groups.items()]


def _price_op(machine: Machine, mesh: MeshPlan, scope: str, layers: int, op: str, terms: list[Term]) -> OpCost:
    found = [(term, *_exchange(machine, mesh, term)) for term in terms if isinstance(term, Collective)]
    times = {link: sum(seconds for _, seconds, _ in found) for _, _, link in found}
    times |= {
        "HBM": sum(_traffic_seconds(machine, term) for term in terms),
        "MXU": machine.matrix_seconds(term for term in terms if isinstance(term, Gemm)),
        "VPU": sum(term.flops for term in terms if isinstance(term, Vector)) / _vector_flops(machine),
    }
    if subcores := [term for term in terms if isinstance(term, Subcore)]:
        times["SparseCore"] = machine.subcore_seconds(subcores)
    binding = max(times, key=lambda name: times[name])
    return OpCost(scope, op, layers, times[binding], binding, tuple(Message(call, one) for call, one, _ in found))


def _exchange(machine: Machine, mesh: MeshPlan, call: Collective) -> tuple[float, str]:
    """(seconds, link) of one collective."""
    used = tuple(name for role in call.axes for name in getattr(mesh, role))
    return machine.collective_seconds(call, span_of(mesh.axes, used, machine.target.cores))


def _vector_flops(machine: Machine) -> float:
    return machine.target.vector_tflops.value * 1e12


def _traffic_seconds(machine: Machine, term: Term) -> float:
    """A weight matrix is one piece; activations of a product ride along at its size."""
    if isinstance(term, Stream):
        return machine.memory_seconds(term.bytes, term.chunk_bytes)
    if isinstance(term, Gemm) and term.weight_bytes:
        return machine.memory_seconds(term.weight_bytes + term.activation_bytes, term.weight_bytes / term.count)
    return 0.0


def floor_seconds(num_bytes: Mapping[str, float], target: Target) -> float:
    """Lower bound of a step that streams these bytes once at nameplate bandwidth, everything else free."""
    return sum(num_bytes.values()) / (target.hbm_gbps.value * 1e9)
