"""Tiles of a variant: its own account, over which tuned entries of the target win where their shape is this load's."""

from collections.abc import Mapping
from dataclasses import dataclass

from moec.blocks.core.declare import ModelDims, Variant
from moec.blocks.core.work import Load
from moec.blocks.registry import cost
from moec.targets.target import Target, read_tuned

from .variants import Place

ANALYTIC = "analytic: the variant's own account of vector memory and work"


@dataclass(frozen=True)
class Tiles:
    """values: tile argument, or `argument.<bucket>` -> its value. origin: where they are from."""

    values: dict[str, int]
    origin: str


def tiles(target: Target, place: Place, variant: Variant, dims: ModelDims, loads: Mapping[str, Load]) -> Tiles:
    """The tiles of one place; a tuned one must be an argument the variant has."""
    module = cost(place.kind, variant)
    values = dict(module.tuning(place.fields, dims, loads))
    entries = read_tuned(target.chip, f"{place.kind}.{variant.name}") if variant.kernel else {}
    used = []
    for bucket, load in loads.items():
        entry = entries.get(module.shape_key(place.fields, dims, load)) if entries else None
        if entry is None:
            continue
        for name, value in entry["tiles"].items():
            own = f"{name}.{bucket}" if f"{name}.{bucket}" in values else name
            assert own in values, f"tuned tile {name} of {place.kind}.{variant.name} is no argument of it"
            values[own] = value
        used.append(f"{entry['provenance']['kind']}: {entry['provenance']['case']} ({bucket})")
    return Tiles(values, "; ".join(used) or ANALYTIC)
