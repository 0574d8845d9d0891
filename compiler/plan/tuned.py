"""Tuned tiles of a target (targets/<chip>/tuned): what kernels' cost modules are given of them, and which a plan uses.

Loads carry them (Load.tuned), so that refusals, vector memory, work and the emitted tiles are those of one set.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from types import ModuleType
from typing import TYPE_CHECKING, Any

from moec.blocks.core.declare import ModelDims, Variant
from moec.blocks.core.work import Load
from moec.blocks.registry import BLOCKS, COLLECTIVES, PARTS, cost
from moec.targets.target import Target, read_tuned

from ..problems import Problem
from ..spec.suggest import closest

if TYPE_CHECKING:
    from .variants import Place

ANALYTIC = "analytic"
KINDS = ("compiler", "measured")
Values = Mapping[str, Mapping[str, Mapping[str, int]]]


@dataclass(frozen=True)
class Tiles:
    """values, origins: tile argument, or `argument.<bucket>` -> its value, and where that is from."""

    values: dict[str, int]
    origins: dict[str, str]


def kernels() -> dict[str, tuple[ModuleType, Variant]]:
    """Every kernel with tiles that a target may tune: `<block>.<variant>` -> its cost module and itself."""
    folders = {**BLOCKS, **PARTS, "collectives": COLLECTIVES}
    found = ((kind, variant) for kind, thunk in folders.items() for variant in thunk().VARIANTS if variant.kernel)
    modules = {f"{kind}.{variant.name}": (cost(kind, variant), variant) for kind, variant in found}
    return {name: entry for name, entry in modules.items() if hasattr(entry[0], "TUNED_BY")}


def tuned_values(target: Target) -> Values:
    """Kernel -> key -> tile -> value, for Load.tuned."""
    return {
        kernel: {key: {tile: one["value"] for tile, one in entry.items()} for key, entry in document["entries"].items()}
        for kernel, document in read_tuned(target.chip).items()
    }


def tiles(target: Target, place: "Place", variant: Variant, dims: ModelDims, loads: Mapping[str, Load]) -> Tiles:
    """The tiles of one place with the origin of each."""
    module, kernel = cost(place.kind, variant), f"{place.kind}.{variant.name}"
    values = dict(module.tuning(place.fields, dims, loads))
    origins = dict.fromkeys(values, ANALYTIC)
    entries = read_tuned(target.chip)[kernel]["entries"] if any(kernel in load.tuned for load in loads.values()) else {}
    for bucket, load in loads.items() if entries else ():
        for tile, one in entries.get(module.shape_key(place.fields, dims, load), {}).items():
            name = f"{tile}.{bucket}" if f"{tile}.{bucket}" in values else tile
            assert values[name] == one["value"], f"{kernel} does not take its tuned {name}, or buckets differ in it"
            origins[name] = f"{one['provenance']['kind']}: {one['provenance']['case']}"
    return Tiles(values, origins)


def refused(module: ModuleType, kernel: str, fields: Any, dims: ModelDims, load: Load) -> list[str]:
    """Why a kernel cannot take a load; what only its tuned tiles are to blame for says so."""
    reasons = module.refuse(fields, dims, load)
    if not reasons or kernel not in load.tuned:
        return reasons
    given = load.tuned_tiles(kernel, module.shape_key(fields, dims, load))
    named = ", ".join(f"{tile}={value}" for tile, value in given.items())
    own = module.refuse(fields, dims, replace(load, tuned={}))
    return [reason if reason in own else f"{reason}, with tuned {named} (tuned/{kernel}.json)" for reason in reasons]


def check_tuned(target: Target) -> list[Problem]:
    """What is wrong with the target's tuned files, each as one problem with its path."""
    known, problems = kernels(), []
    for kernel, document in read_tuned(target.chip).items():
        path = f"targets/{target.chip}/tuned/{kernel}.json"
        if kernel not in known:
            text = f"no kernel '{kernel}' takes tuned tiles"
            problems.append(Problem(path, text, closest(kernel, known)))
        elif not isinstance(document.get("entries"), dict):
            problems.append(Problem(path, "no entries", "see targets/tpu7x/tuned/README.md"))
        else:
            problems += [Problem(path, text, hint) for text, hint in _wrong(document["entries"], *known[kernel])]
    return problems


def _wrong(entries: Mapping[str, Mapping[str, Any]], module: ModuleType, variant: Variant) -> Iterator[tuple[str, str]]:
    names = dict(variant.tiles)
    for key, entry in entries.items():
        parts = tuple(part.partition("=") for part in key.split(","))
        if tuple(name for name, _, _ in parts) != module.TUNED_BY or not all(value for _, _, value in parts):
            yield f"no key of this kernel: '{key}'", f"keys are {'=...,'.join(module.TUNED_BY)}=..."
        for tile, one in entry.items():
            if tile not in names:
                yield f"{key}: no tile '{tile}'", closest(tile, names)
                continue
            value, provenance = one.get("value"), one.get("provenance", {})
            if type(value) is not int or value < (tile != "stream_rows"):
                yield f"{key}: {tile} is {value!r}", "tiles are positive whole numbers"
            if provenance.get("kind") not in KINDS or not provenance.get("case"):
                yield f"{key}: {tile} has no provenance", f"kind: {' or '.join(KINDS)}, case: what was compiled or run"


__all__ = ["ANALYTIC", "KINDS", "Tiles", "check_tuned", "kernels", "refused", "tiles", "tuned_values"]
