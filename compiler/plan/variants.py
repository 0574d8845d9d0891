"""Which implementation of each block a program uses: of those that take every bucket's load, the fastest predicted.

A variant that cannot take a load says why (refuse of its cost module); the reasons stand in the plan. What a plan pins
is taken if it can be. Which cores sum experts' rows (UNPERMUTE) is chosen the same way, for each bucket on its own.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from math import inf
from typing import Any, Literal

from moec.blocks.collectives.returning import Returning
from moec.blocks.core.declare import Variant
from moec.blocks.core.work import Load, Unpermute
from moec.blocks.registry import COLLECTIVES, PARTS, cost
from moec.targets.target import Target

from ..graph.ir import BlockInst, Graph
from ..graph.weights import block_of
from ..problems import Problem
from ..spec.pins import CORES, UNPERMUTE, WAY_BACK
from ..spec.schema import PlanPins
from .plan import VariantChoice
from .tuned import refused as refused_by

# What is no declared block and exists in plain XLA only.
OTHERS = ("embed", "head", "sampling")


@dataclass(frozen=True)
class Place:
    """Where a variant is chosen: a block, a part that its variants call, or the program's way back.

    kind: whose variants; fields: declared; inst: the block, None = of the whole program.
    """

    name: str
    kind: str
    inst: BlockInst | None
    fields: Any
    variants: tuple[Variant, ...]

    @property
    def owner(self) -> str:
        """Whose tiles and time it counts among: the block's name, or its own."""
        return self.inst.name if self.inst else self.name

    @property
    def keys(self) -> tuple[str, ...]:
        """What a pin may call it; a part goes by what it is, in all blocks."""
        return (self.kind if "." in self.name else self.name,)


def places(graph: Graph) -> Iterator[Place]:
    """Every block instance, each preceded by its parts, in the graph's order."""
    for inst in graph.blocks().values():
        variants = block_of(inst).VARIANTS
        assert len({variant.parts for variant in variants}) == 1, f"variants of {inst.kind} call different parts"
        for part in variants[0].parts:
            found = PARTS[part]().VARIANTS
            yield Place(f"{inst.name}.{part}", part, inst, getattr(inst.fields, part), found)
        yield Place(inst.name, inst.kind, inst, inst.fields, variants)


def way_back(graph: Graph) -> Place:
    """The place that all blocks return tokens through; what they return is that of their first variants."""
    insts = graph.blocks().values()
    blocks = tuple((cost(inst.kind, block_of(inst).VARIANTS[0]).work, inst.fields) for inst in insts)
    return Place(WAY_BACK, WAY_BACK, None, Returning(blocks), COLLECTIVES().VARIANTS)


def returned(variants: Mapping[str, Variant], loads: Mapping[str, Load]) -> dict[str, Load]:
    """The loads as blocks see them once the way back is chosen."""
    return {name: replace(load, kernel_returns=variants[WAY_BACK].kernel) for name, load in loads.items()}


def usable(place: Place, target: Target) -> tuple[Variant, ...]:
    """Variants that run on the target's backend."""
    return tuple(variant for variant in place.variants if target.platform in variant.backends)


def refusals(place: Place, variant: Variant, graph: Graph, loads: Mapping[str, Load]) -> tuple[str, ...]:
    """Why a variant cannot take the loads of some buckets; () when it can, as plain XLA nearly always does."""
    module = cost(place.kind, variant)
    if not hasattr(module, "refuse"):
        return ()
    about = module, f"{place.kind}.{variant.name}", place.fields, graph.dims
    found = [(name, reason) for name, load in loads.items() for reason in refused_by(*about, load)]
    common = [reason for _, reason in found]
    everywhere = [reason for reason in dict.fromkeys(common) if common.count(reason) == len(loads)]
    return (*everywhere, *(f"{reason} (bucket {name})" for name, reason in found if reason not in everywhere))


def check_variants(graph: Graph, target: Target) -> list[Problem]:
    """Every block needs a variant for the backend; pins were checked with the spec (spec/pins.py)."""
    text = "UNSUPPORTED: block kind {} has no variant for {}"
    lacking = [place for place in (way_back(graph), *places(graph)) if not usable(place, target)]
    found = [Problem(f"model.blocks.{one.owner}", text.format(one.kind, target.platform)) for one in lacking]
    return list(dict.fromkeys(found))


def pinned(place: Place, pins: PlanPins) -> str | None:
    """The key of the pin that names this place's variant: the block's name, or what part it is."""
    return next((key for key in place.keys if key in pins.variants), None)


@dataclass(frozen=True)
class Broken:
    """A place without a variant that keeps the pins and takes the load.

    pin: the key of plan.variants that decides about it, "" = none; lead: what cannot be kept; reasons: all of them.
    """

    place: str
    pin: str
    lead: str
    reasons: tuple[str, ...]

    def __str__(self) -> str:
        return f"{self.lead}: {'; '.join(self.reasons)}"


@dataclass(frozen=True)
class Chosen:
    """The variants of one sharding by place, and what became of the others. broken: places without one.

    cores: bucket -> which sum experts' rows; {} where no chosen variant leaves it open.
    """

    variants: Mapping[str, Variant]
    choices: tuple[VariantChoice, ...]
    broken: tuple[Broken, ...] = ()
    cores: Mapping[str, Unpermute] = field(default_factory=dict)

    def names(self) -> dict[str, str]:
        """Block instance name, `<block>.<part>`, WAY_BACK, `unpermute.<bucket>`, OTHERS -> variant name."""
        order = sorted(self.variants, key=lambda name: (name == WAY_BACK, "." in name))
        cores = {f"{UNPERMUTE}.{bucket}": core for bucket, core in self.cores.items()}
        return {name: self.variants[name].name for name in order} | cores | dict.fromkeys(OTHERS, "xla")

    def loads(self, plain: Mapping[str, Load]) -> dict[str, Load]:
        """The loads as blocks see them once all is chosen."""
        return _summed(returned(self.variants, plain), self.cores)


@dataclass(frozen=True)
class _Judged:
    """One variant of one place. seconds: by which variants are compared; us: predicted, by bucket."""

    variant: Variant
    refused: tuple[str, ...]
    seconds: float
    us: dict[str, float]
    vmem_bytes: int


Price = Callable[[Place, Variant, Mapping[str, Load]], tuple[float, dict[str, float]]]


def choose(graph: Graph, target: Target, pins: PlanPins, loads: Mapping[str, Load], price: Price) -> Chosen:
    """The variants of one sharding: of those that take its loads and keep the pins, the fastest of each place.

    The way back is chosen first, then the cores that sum experts' rows: what they are, the blocks' loads say.
    """
    variants: dict[str, Variant] = {}
    choices: list[VariantChoice] = []
    broken: list[Broken] = []
    cores = Cores()
    for place in (way_back(graph), *places(graph)):
        found = [_judge(place, variant, graph, loads, price) for variant in usable(place, target)]
        pin = _deciding_pin(place, pins)
        allowed = [one for one in found if not one.refused]
        kept = [one for one in allowed if _keeps(one.variant, place, pins)]
        broken += _broken(place, found, pins)
        best = min(kept or allowed or found, key=lambda one: one.seconds)
        variants[place.name] = best.variant
        if place.name == WAY_BACK:
            loads = returned(variants, loads)
            cores = _choose_cores(graph, target, pins, loads, price)
            broken, loads = [*broken, *cores.broken], _summed(loads, cores.chosen)
        choices += [_choice(place, one, best, pin) for one in found]
    if any(variant.unpermutes for variant in variants.values()):
        return Chosen(variants, (*choices, *cores.choices), tuple(broken), cores.chosen)
    return Chosen(variants, tuple(choices), tuple(broken))


def _deciding_pin(place: Place, pins: PlanPins) -> str | None:
    """The pin that decides about this place: its own, or that of cores which only some of its variants use."""
    own = pinned(place, pins)
    summed = any(variant.unpermutes for variant in place.variants) and pins.variants.get(UNPERMUTE) == "sparsecore"
    return own or (UNPERMUTE if summed else None)


def _keeps(variant: Variant, place: Place, pins: PlanPins) -> bool:
    pin = _deciding_pin(place, pins)
    if pin in place.keys and variant.name != pins.variants[pin]:
        return False
    others = any(one.unpermutes for one in place.variants) and not variant.unpermutes
    return not (others and pins.variants.get(UNPERMUTE) == "sparsecore")


def _broken(place: Place, found: list[_Judged], pins: PlanPins) -> list[Broken]:
    """Why no variant of this place may run; [] when one may."""
    if any(not one.refused and _keeps(one.variant, place, pins) for one in found):
        return []
    pin = _deciding_pin(place, pins)
    wanted = [one for one in found if pin is None or _keeps(one.variant, place, pins)]
    reasons = tuple(f"{one.variant.name}: {'; '.join(one.refused)}" for one in wanted)
    if pin is None:
        return [Broken(place.name, "", f"no variant of {place.name} takes this load", reasons)]
    lead = f"plan.variants.{pin}={pins.variants[pin]}"
    if not wanted:
        why = f"{place.name} {pins.variants[pin]} has no sums on the SparseCores"
        return [Broken(place.name, pin, f"plan.variants.{UNPERMUTE}=sparsecore", (why,))]
    if pin == UNPERMUTE:
        return [Broken(place.name, pin, lead, tuple(f"{place.name} {reason}" for reason in reasons))]
    return [Broken(place.name, pin, lead, wanted[0].refused)]


@dataclass(frozen=True)
class Cores:
    """Which cores sum experts' rows by bucket, every verdict, and the pin that cannot be kept, by bucket."""

    chosen: Mapping[str, Unpermute] = field(default_factory=dict)
    choices: tuple[VariantChoice, ...] = ()
    broken: tuple[Broken, ...] = ()


def _summed(loads: Mapping[str, Load], cores: Mapping[str, Unpermute]) -> dict[str, Load]:
    """The loads with the cores that sum experts' rows in them."""
    return {name: replace(load, unpermute=cores.get(name, CORES[0])) for name, load in loads.items()}


def _choose_cores(graph: Graph, target: Target, pins: PlanPins, loads: Mapping[str, Load], price: Price) -> Cores:
    """For each bucket the cores with which blocks that leave it open are predicted fastest, collectives included."""
    able = [
        (place, variant)
        for place in places(graph)
        for variant in usable(place, target)
        if variant.unpermutes and not refusals(place, variant, graph, loads)
    ]
    if not able:
        return Cores()
    asked: dict[Unpermute, dict[str, Load]] = {core: _summed(loads, dict.fromkeys(loads, core)) for core in CORES}
    refused = {
        (core, name): tuple(
            dict.fromkeys(why for place, one in able for why in refusals(place, one, graph, {name: asked[core][name]}))
        )
        for core in CORES
        for name in loads
    }
    pin: Unpermute | None = next((core for core in CORES if core == pins.variants.get(UNPERMUTE)), None)
    chosen, choices, broken = dict[str, Unpermute](), list[VariantChoice](), list[Broken]()
    # A bucket that refuses has no price; its loads are left as they are, so that the others' can be asked for.
    taken = {
        core: {name: loads[name] if refused[core, name] else load for name, load in asked[core].items()}
        for core in CORES
    }
    us: dict[Unpermute, dict[str, float]] = {core: _mean_us(graph, able, taken[core], price) for core in CORES}
    for name in loads:
        allowed: list[Unpermute] = [core for core in CORES if not refused[core, name]]
        kept: list[Unpermute] = [core for core in allowed if pin in (None, core)]
        if pin and not kept:
            reasons = tuple(f"{reason} (bucket {name})" for reason in refused[pin, name])
            broken.append(Broken(f"{UNPERMUTE}.{name}", UNPERMUTE, f"plan.variants.{UNPERMUTE}={pin}", reasons))
        best: Unpermute = min(kept or allowed, key=lambda core: us[core][name])
        chosen[name] = best
        choices += [_cores_choice(core, best, name, refused[core, name], us, pin, target) for core in CORES]
    return Cores(chosen, tuple(choices), tuple(broken))


def _mean_us(
    graph: Graph, able: list[tuple[Place, Variant]], loads: Mapping[str, Load], price: Price
) -> dict[str, float]:
    """Predicted time of one layer by bucket, the mean of all layers with such blocks."""
    layers = {place.name: len(graph.layers_of(place.owner)) for place, _ in able}
    priced = [(layers[place.name], price(place, variant, loads)[1]) for place, variant in able]
    return {name: sum(n * us[name] for n, us in priced) / sum(layers.values()) for name in loads}


def _cores_choice(
    core: Unpermute,
    best: Unpermute,
    bucket: str,
    refused: tuple[str, ...],
    us: Mapping[Unpermute, Mapping[str, float]],
    pin: str | None,
    target: Target,
) -> VariantChoice:
    scope = f"{UNPERMUTE}.{bucket}"
    if refused:
        return VariantChoice(scope=scope, variant=core, verdict="REFUSED", why="; ".join(refused))
    times = us[core][bucket], us[best][bucket]
    verdict, why = _compared(core == best, times, best, UNPERMUTE if pin else None)
    if core == "sparsecore":
        why += f"; {sparsecore_assumptions(target)}"
    found = {bucket: float(f"{us[core][bucket]:.6g}")}
    return VariantChoice(scope=scope, variant=core, verdict=verdict, why=why, us=found)


def sparsecore_assumptions(target: Target) -> str:
    """What of a SparseCore's predicted time nobody published."""
    cores = target.sparse_cores
    assert cores is not None
    numbers = {"clock (GHz)": cores.clock_ghz, "start (us)": cores.launch_us}
    found = [f"{name} {one.value:g}" for name, one in numbers.items() if one.kind == "assumption"]
    return f"of the SparseCores assumed: {', '.join([*found, 'HBM at the rate of the TensorCore'])}"


def _judge(place: Place, variant: Variant, graph: Graph, loads: Mapping[str, Load], price: Price) -> _Judged:
    refused = refusals(place, variant, graph, loads)
    if refused:
        return _Judged(variant, refused, inf, {}, 0)
    module = cost(place.kind, variant)
    vmem = max(module.vmem_bytes(place.fields, graph.dims, load) for load in loads.values()) if variant.kernel else 0
    return _Judged(variant, (), *price(place, variant, loads), vmem)


def _choice(place: Place, one: _Judged, best: _Judged, pin: str | None) -> VariantChoice:
    us = {bucket: float(f"{value:.6g}") for bucket, value in one.us.items()}
    if one.refused:
        return VariantChoice(scope=place.name, variant=one.variant.name, verdict="REFUSED", why="; ".join(one.refused))
    verdict, why = _compared(one is best, (one.seconds, best.seconds), best.variant.name, pin)
    return VariantChoice(
        scope=place.name, variant=one.variant.name, verdict=verdict, why=why, us=us, vmem_bytes=one.vmem_bytes
    )


def _compared(
    is_best: bool, times: tuple[float, float], best: str, pin: str | None
) -> tuple[Literal["CHOSEN", "PINNED", "SLOWER"], str]:
    if is_best:
        return "CHOSEN", f"plan.variants.{pin}" if pin else "fastest predicted of those that take the load"
    if pin:
        return "PINNED", f"excluded by plan.variants.{pin}"
    return "SLOWER", f"{times[0] / times[1]:.2f} times the predicted time of {best}"
