"""Pins of variants against the model and the backend: what is pinned exists, and has the variant."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, get_args

from moec.blocks.core.declare import Variant
from moec.blocks.core.work import Unpermute
from moec.blocks.registry import COLLECTIVES, PARTS

from ..graph.ir import Graph
from ..graph.weights import block_of
from .suggest import closest
from .validate import Finding, shown

# How partial sums return to their rank, in all blocks.
WAY_BACK = "collectives"
# Which cores sum a token's expert rows, in all blocks whose variants leave it open.
UNPERMUTE = "unpermute"
CORES: tuple[Unpermute, ...] = get_args(Unpermute)


@dataclass(frozen=True)
class _Kind:
    """What a pin may name. what: for messages; variants: of all backends, for the cores those that leave them open."""

    what: str
    variants: tuple[Variant, ...]


def check_variant_pins(pins: Any, graph: Graph | None, platform: str | None) -> list[Finding]:
    """pins: plan.variants as composed; entries that are no text are others' findings. platform None: any backend."""
    if graph is None or not pins or not isinstance(pins, Mapping):
        return []
    known = dict(_pinnable(graph))
    found = []
    for name, value in pins.items():
        path = ("plan", "variants", name)
        if name not in known:
            found.append(Finding(path, f"the model has no block '{name}'", closest(name, sorted(known))))
        elif isinstance(value, str):
            check = _check_cores if name == UNPERMUTE else _check_variant
            found += check(path, value, known[name], platform)
    return found


def _pinnable(graph: Graph) -> Iterator[tuple[str, _Kind]]:
    """Keys of plan.variants and what they pin; a part goes by what it is, in all blocks."""
    able: dict[str, list[Variant]] = {}
    for inst in graph.blocks().values():
        variants = block_of(inst).VARIANTS
        able |= {inst.kind: open_} if (open_ := [one for one in variants if one.unpermutes]) else {}
        yield from ((part, _Kind(part, PARTS[part]().VARIANTS)) for part in variants[0].parts)
        yield inst.name, _Kind(inst.kind, variants)
    yield WAY_BACK, _Kind(WAY_BACK, COLLECTIVES().VARIANTS)
    if able:
        names = ", ".join(f"{kind}.{variant.name}" for kind, variants in able.items() for variant in variants)
        yield UNPERMUTE, _Kind(names, tuple(variant for variants in able.values() for variant in variants))


def _check_variant(path: tuple[str, ...], value: str, kind: _Kind, platform: str | None) -> list[Finding]:
    names = [variant.name for variant in kind.variants if platform is None or platform in variant.backends]
    if value in names:
        return []
    where = f" for {platform}" if platform else ""
    return [Finding(path, f"UNSUPPORTED: {kind.what} has no variant {shown(value)}{where}", closest(value, names))]


def _check_cores(path: tuple[str, ...], value: str, kind: _Kind, platform: str | None) -> list[Finding]:
    """The cores that sum experts' rows must exist, on a backend with kernels that leave it open."""
    if platform and not any(platform in variant.backends for variant in kind.variants):
        text = f"UNSUPPORTED: got {shown(value)}, only {kind.what} has the choice, not for {platform}"
        return [Finding(path, text, "leave it out")]
    return [] if value in CORES else [Finding(path, f"no cores {shown(value)}", closest(value, CORES))]


def not_one_pin(path: tuple[Any, ...]) -> tuple[str, str] | None:
    """(text, hint) when a path leads on below a pin, as the names in a plan do: `moe.router`, `unpermute.decode`."""
    if path[:2] != ("plan", "variants") or len(path) < 4:
        return None
    part = next((str(name) for name in path[3:] if name in PARTS), str(path[2]))
    text = f"a pin has one name, got '{'.'.join(map(str, path[2:]))}'"
    return f"{text}: parts and buckets are pinned in all blocks at once", f"the pin is plan.variants.{part}"
