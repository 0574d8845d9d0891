"""Pallas kernels: those that a compiled program launches, and those that the variants of its plan imply.

A kernel goes by the name it was given, up to its sizes: combine_rows_2048x10_4096 is a combine_rows. Each block says
which its functions launch: `kernels` of the variant's cost module.
"""

import re
from collections import Counter
from collections.abc import Mapping

from moec.blocks.core.declare import Variant
from moec.blocks.registry import cost

from ..emit.constants import tuned
from ..graph.ir import Graph
from ..plan.plan import BucketPlan, Plan
from ..plan.variants import Place, places, way_back
from ..spec.pins import WAY_BACK
from .hlo import Instruction, Module, trip_count
from .report import Frozen

# Of a Pallas kernel, on a TensorCore or on SparseCores; everything else has targets of the compiler's own.
_TARGET = "tpu_custom_call"


class Kernel(Frozen):
    """A kernel of the program, on one device. count: launches per step, None when a loop's trips depend on data."""

    name: str
    count: int | None


def kernels(module: Module) -> tuple[Kernel, ...]:
    """Every kernel the entry computation reaches: one for each place it is launched from."""
    found: dict[str, tuple[Kernel, ...]] = {}
    return _inside(module, module.entry, found)


def _inside(module: Module, computation: str, found: dict[str, tuple[Kernel, ...]]) -> tuple[Kernel, ...]:
    """Of one computation and those it calls; each is looked at once."""
    if computation not in found:
        launches: list[Kernel] = []
        for inst in module.computations[computation]:
            if inst.opcode == "custom-call" and inst.attr("custom_call_target") == _TARGET:
                launches.append(Kernel(name=_named(inst), count=1))
            called = [name for name in inst.called if name in module.computations]
            inner = [one for name in called for one in _inside(module, name, found)]
            launches += _repeated(inner, trip_count(module, inst)) if inst.opcode == "while" else inner
        found[computation] = tuple(launches)
    return found[computation]


def _repeated(launches: list[Kernel], trips: int | None) -> list[Kernel]:
    return [
        Kernel(name=one.name, count=None if trips is None or one.count is None else one.count * trips)
        for one in launches
    ]


def _named(inst: Instruction) -> str:
    """The kernel's name without what the compiler appends and without sizes."""
    return re.split(r"_\d", inst.name.partition(".")[0])[0]


def planned_kernels(graph: Graph, plan: Plan) -> dict[str, dict[str, int]]:
    """Bucket -> kernel -> launches per step, by the plan's variants and tiles; {} for a bucket of plain XLA."""
    return {bucket.name: dict(_of_bucket(graph, plan, bucket)) for bucket in plan.buckets}


def _of_bucket(graph: Graph, plan: Plan, bucket: BucketPlan) -> Counter[str]:
    counts: Counter[str] = Counter()
    for place in (way_back(graph), *places(graph)):
        variant = next(one for one in place.variants if one.name == plan.variants[place.name])
        if variant.kernel:
            times = _times(place, graph, plan, bucket)
            for name, launches in _declared(place, variant, plan, bucket).items():
                counts[name] += launches * times
    return +counts


def _times(place: Place, graph: Graph, plan: Plan, bucket: BucketPlan) -> int:
    """How often a step passes a place: once per layer; the way back once per message that a block returns."""
    if place.name != WAY_BACK:
        return len(graph.layers_of(place.owner))
    scopes = [one.scope for one in plan.collectives if (one.bucket, one.op) == (bucket.name, "reduce-scatter")]
    return sum(len(graph.layers_of(scope)) for scope in scopes if scope in graph.blocks())


def _declared(place: Place, variant: Variant, plan: Plan, bucket: BucketPlan) -> Mapping[str, int]:
    """What the variant says it launches with the bucket's tiles."""
    tiles = {
        name: value[bucket.name] if isinstance(value, dict) else value
        for name, value in tuned(place.owner, plan).items()
    }
    found: Mapping[str, int] = cost(place.kind, variant).kernels(tiles, prefills=bucket.max_q > 1)
    return found


__all__ = ["Kernel", "kernels", "planned_kernels"]
