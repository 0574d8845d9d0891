"""Which implementation of each block a program uses: of those that take every bucket's load, the fastest predicted.

A variant that cannot take a load says why (refuse of its cost module); the reasons stand in the plan. What a plan pins
is taken if it can be.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from math import inf
from typing import Any, Literal

from moec.blocks.collectives.returning import Returning
from moec.blocks.core.declare import Variant
from moec.blocks.core.work import Load
from moec.blocks.registry import COLLECTIVES, PARTS, cost
from moec.targets.target import Target

from ..graph.ir import BlockInst, Graph
from ..graph.weights import block_of
from ..problems import Problem
from ..spec.schema import PlanPins
from ..spec.suggest import closest
from .plan import VariantChoice

# How partial sums return to their rank, in all blocks.
WAY_BACK = "collectives"
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
    refuse = getattr(cost(place.kind, variant), "refuse", None)
    if refuse is None:
        return ()
    found = [(name, reason) for name, load in loads.items() for reason in refuse(place.fields, graph.dims, load)]
    common = [reason for _, reason in found]
    everywhere = [reason for reason in dict.fromkeys(common) if common.count(reason) == len(loads)]
    return (*everywhere, *(f"{reason} (bucket {name})" for name, reason in found if reason not in everywhere))


def check_variants(graph: Graph, target: Target, pins: PlanPins) -> list[Problem]:
    """Every block needs a variant for the backend, and pins must name one."""
    found = [way_back(graph), *places(graph)]
    known = {key for place in found for key in place.keys}
    problems = [
        Problem(f"plan.variants.{name}", f"the model has no block '{name}'", closest(name, sorted(known)))
        for name in pins.variants
        if name not in known
    ]
    for place in found:
        names, pin = [variant.name for variant in usable(place, target)], pinned(place, pins)
        if not names:
            text = f"UNSUPPORTED: block kind {place.kind} has no variant for {target.platform}"
            problems.append(Problem(f"model.blocks.{place.owner}", text))
        elif pin and pins.variants[pin] not in names:
            text = f"UNSUPPORTED: {place.kind} has no variant '{pins.variants[pin]}' for {target.platform}"
            problems.append(Problem(f"plan.variants.{pin}", text, f"valid: {', '.join(names)}"))
    return list(dict.fromkeys(problems))


def pinned(place: Place, pins: PlanPins) -> str | None:
    """The key of the pin that names this place's variant: the block's name, or what part it is."""
    return next((key for key in place.keys if key in pins.variants), None)


@dataclass(frozen=True)
class Chosen:
    """The variants of one sharding by place, and what became of the others. broken: the pin that cannot be kept."""

    variants: Mapping[str, Variant]
    choices: tuple[VariantChoice, ...]
    broken: str = ""

    def names(self) -> dict[str, str]:
        """Block instance name, then `<block>.<part>`, then WAY_BACK and OTHERS -> variant name."""
        order = sorted(self.variants, key=lambda name: (name == WAY_BACK, "." in name))
        return {name: self.variants[name].name for name in order} | dict.fromkeys(OTHERS, "xla")


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

    The way back is chosen first: what it is, the blocks' loads say.
    """
    variants: dict[str, Variant] = {}
    choices: list[VariantChoice] = []
    broken = ""
    for place in (way_back(graph), *places(graph)):
        found = [_judge(place, variant, graph, loads, price) for variant in usable(place, target)]
        pin = pinned(place, pins)
        allowed = [one for one in found if not one.refused]
        kept = [one for one in allowed if pin is None or one.variant.name == pins.variants[pin]]
        if pin and not kept:
            (wanted,) = (one for one in found if one.variant.name == pins.variants[pin])
            broken = broken or f"plan.variants.{pin}={wanted.variant.name}: {'; '.join(wanted.refused)}"
        if not allowed:
            reasons = (f"{one.variant.name}: {'; '.join(one.refused)}" for one in found)
            broken = broken or f"no variant of {place.name} takes this load: {'; '.join(reasons)}"
        best = min(kept or allowed or found, key=lambda one: one.seconds)
        variants[place.name] = best.variant
        if place.name == WAY_BACK:
            loads = returned(variants, loads)
        choices += [_choice(place, one, best, pin) for one in found]
    return Chosen(variants, tuple(choices), broken)


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
    verdict, why = _verdict(one, best, pin)
    return VariantChoice(
        scope=place.name, variant=one.variant.name, verdict=verdict, why=why, us=us, vmem_bytes=one.vmem_bytes
    )


def _verdict(one: _Judged, best: _Judged, pin: str | None) -> tuple[Literal["CHOSEN", "PINNED", "SLOWER"], str]:
    if one is best:
        return "CHOSEN", f"plan.variants.{pin}" if pin else "fastest predicted of those that take the load"
    if pin:
        return "PINNED", f"excluded by plan.variants.{pin}"
    return "SLOWER", f"{one.seconds / best.seconds:.2f} times the predicted time of {best.variant.name}"
