"""Relations between fields: heads, layer counts, block references, mesh products, context lengths."""

import math
import re
from collections.abc import Callable, Iterator
from typing import Any

from pydantic import ValidationError

from moec.blocks.core.declare import BlockFields, HeadCut, ModelDims, NormFields, divisors
from moec.blocks.registry import BLOCKS

from ..graph.build import override_fields
from ..graph.ir import Graph
from ..graph.weights import block_of
from .marks import KeyPath
from .schema import LayerEntry, LayerGroup, MeshPins, ModelSpec, PlanPins, Workload
from .suggest import closest, listing
from .validate import Finding, Parsed, error_findings

_MODEL = ("model",)
_BLOCK_NAME = re.compile(r"[a-z][a-z0-9]*(_[a-z0-9]+)*")
# Keys of a layer's weights, of the checkpoint table and prefixes of the program's own constants.
RESERVED = frozenset(
    {"collectives", "embed", "head", "layer", "ffn", "mixer", "norm", "post", "scale", "final", "max", "num", "page"}
)
RESERVED_ENDS = ("_norm", "_norm_bias")  # keys of a layer's norms
MAX_SIZE = 2**31 - 1
SMALLEST = 1e-30
MAX_LAYERS = 10_000  # far above any model; a slip of the pen must not fill the memory


def check_model(parsed: Parsed) -> list[Finding]:
    """Everything about one model file that needs more than one field."""
    spec = parsed.spec
    if spec is None:
        return []
    num_layers = None if "layers" in parsed.poisoned else sum(group.num_layers for group in spec.layers)
    dims = ModelDims(spec.hidden_size, spec.vocab_size, spec.defaults.norm, num_layers)
    findings: list[Finding] = []
    findings += _check_norm(spec.defaults.norm, (*_MODEL, "defaults", "norm"))
    findings += _check_norm(spec.final_norm.resolve(spec.defaults.norm), (*_MODEL, "final_norm"))
    findings += _check_block_names(parsed)
    for name, fields in _usable(spec).items():
        findings += _check_block(fields, dims, (*_MODEL, "blocks", name))
    if not {"layers", "blocks"} & parsed.poisoned:
        for path, group, entry in entries(spec):
            findings += _check_entry(parsed, spec, dims, path, group, entry)
        findings += _check_unused(parsed, spec)
        findings += _check_layer_names(spec)
        findings += _check_layer_count(spec)
    return findings


def entries(spec: ModelSpec) -> Iterator[tuple[KeyPath, LayerGroup, LayerEntry]]:
    """Every pattern entry with its path."""
    for i, group in enumerate(spec.layers):
        for j, entry in enumerate(group.pattern):
            yield (*_MODEL, "layers", i, "pattern", j), group, entry


def _names(group: LayerGroup, entry: LayerEntry) -> tuple[str, ...]:
    """The blocks an entry names, in order of execution."""
    return (*((entry.mixer,) if entry.mixer else ()), *(entry.ffn or group.ffn or ()))


def _kind(fields: BlockFields) -> str:
    return str(getattr(fields, "kind", ""))


def _usable(spec: ModelSpec) -> dict[str, BlockFields]:
    """The declared blocks without a stand-in for none at all."""
    return {name: fields for name, fields in spec.blocks.items() if _kind(fields) in BLOCKS}


def _check_block(fields: BlockFields, dims: ModelDims, path: KeyPath) -> list[Finding]:
    """Numbers a program can hold, then the block's own checks."""
    odd = [Finding((*path, *place), *wrong) for place, value in _numbers(fields.model_dump()) if (wrong := _odd(value))]
    if odd:
        return odd
    found = BLOCKS[_kind(fields)]().check(fields, dims)
    return [Finding((*path, *one.path), one.text, one.hint) for one in found]


def _numbers(value: Any, place: KeyPath = ()) -> Iterator[tuple[KeyPath, int | float]]:
    """Every number of plain data with its place."""
    parts = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list | tuple) else ()
    for key, part in parts:
        yield from _numbers(part, (*place, key))
    if isinstance(value, int | float) and not isinstance(value, bool):
        yield place, value


def _odd(value: int | float) -> tuple[str, str] | None:
    """(text, hint) when a program could not compute with the number: sizes are int32, values float32."""
    if isinstance(value, int) and abs(value) > MAX_SIZE:
        return f"{value} is too large", f"at most {MAX_SIZE}"
    if isinstance(value, float) and value and not SMALLEST <= abs(value) <= 1 / SMALLEST:
        return f"{value:g} is no number to compute with", f"0, or {SMALLEST:g} to {1 / SMALLEST:g}"
    return None


def _check_entry(
    parsed: Parsed, spec: ModelSpec, dims: ModelDims, path: KeyPath, group: LayerGroup, entry: LayerEntry
) -> list[Finding]:
    """Both slots of one pattern entry."""
    findings: list[Finding] = []
    ffn_path = (*path, "ffn") if entry.ffn else (*path[:3], "ffn")
    ffns: tuple[str, ...] = entry.ffn or group.ffn or ()
    if entry.mixer is None and not ffns:
        hint = _slot_names(spec, "mixer")
        findings.append(Finding(path, "no block: neither this entry nor its group names one", hint))
    if entry.mixer is not None:
        findings += _check_slot(parsed, spec, (*path, "mixer"), entry.mixer, "mixer")
    for index, ffn in enumerate(ffns):
        findings += _check_slot(parsed, spec, (*ffn_path, index) if len(ffns) > 1 else ffn_path, ffn, "ffn")
    if len(ffns) != len(set(ffns)):
        findings.append(Finding(ffn_path, "a block cannot run beside itself"))
    mixers = (entry.mixer,) if entry.mixer else ()
    findings += _check_overridden(spec, mixers, entry.override.mixer, dims, (*path, "override", "mixer"))
    findings += _check_overridden(spec, ffns, entry.override.ffn, dims, (*path, "override", "ffn"))
    return list(dict.fromkeys(findings + _check_residual(spec, path, entry, len(ffns))))


def _check_overridden(
    spec: ModelSpec, names: tuple[str, ...], changes: dict[str, Any], dims: ModelDims, path: KeyPath
) -> list[Finding]:
    """Changed fields belong to the one block of their slot."""
    if not changes:
        return []
    if len(names) != 1:
        text = f"which of {', '.join(names)} is meant?" if names else f"there is no {path[-1]} to be overridden"
        return [Finding(path, text, "declare a block of its own: {like: ...}" if names else "")]
    return _check_override(spec.blocks[names[0]], changes, dims, path) if names[0] in _usable(spec) else []


def _check_norm(norm: NormFields, path: KeyPath) -> list[Finding]:
    """What only one kind of norm has."""
    if norm.kind == "rms" and norm.bias:
        return [Finding((*path, "bias"), "an RMS norm has no bias", "kind: layer, or leave bias out")]
    if norm.kind == "layer" and norm.zero_centered:
        return [Finding((*path, "zero_centered"), "a LayerNorm's gain is no offset from 1", "leave zero_centered out")]
    return []


def _check_residual(spec: ModelSpec, path: KeyPath, entry: LayerEntry, num_ffns: int) -> list[Finding]:
    """Fields of the residual form that would have no effect in this entry."""
    residual, both = entry.residual or spec.defaults.residual, bool(entry.mixer and num_ffns)
    place = (*path, "residual") if entry.residual else (*_MODEL, "defaults", "residual")
    parallel, findings = residual.form == "parallel", []
    together = num_ffns > 1 or (parallel and both)
    given = [name for name in ("ffn_form", "ffn_scale", "ffn_skip") if getattr(residual, name) is not None]
    if parallel:
        text = "the blocks of form 'parallel' share one addition"
        findings += [Finding((*place, name), text, "scale and skip are those of all") for name in given]
    if together and residual.branch_norms and "normed_skip" in (residual.form, residual.ffn_form):
        text = "form 'normed_skip' keeps the input that all blocks share, which branch_norms do not have"
        findings.append(Finding((*place, "branch_norms"), text, "leave it out"))
    if entry.residual is None:
        return findings
    if residual.branch_norms and not together:
        findings.append(Finding((*place, "branch_norms"), "no blocks share an addition here", "leave it out"))
    if parallel and not both:
        findings.append(Finding((*place, "form"), "parallel needs a mixer and an ffn", "form: pre"))
    if given and not num_ffns:
        findings.append(Finding((*place, given[0]), "there is no ffn here", "leave it out"))
    return findings


def _check_slot(parsed: Parsed, spec: ModelSpec, path: KeyPath, name: str, slot: str) -> list[Finding]:
    """The name is a declared block of a kind that fits the slot."""
    if name not in parsed.declared:
        return [Finding(path, f"no block is called '{name}'", closest(name, parsed.declared))]
    if name not in _usable(spec):  # declared, but reported as invalid already
        return []
    kind = _kind(spec.blocks[name])
    fits = BLOCKS[kind]().SLOT
    if fits == slot:
        return []
    return [
        Finding(path, f"'{name}' (kind {kind}) fills the {fits} slot, not the {slot} slot", _slot_names(spec, slot))
    ]


def _slot_names(spec: ModelSpec, slot: str) -> str:
    slots = {name: BLOCKS[_kind(fields)]().SLOT for name, fields in _usable(spec).items()}
    return listing(name for name, fits in slots.items() if fits == slot)


def _check_override(fields: BlockFields, changes: dict, dims: ModelDims, path: KeyPath) -> list[Finding]:
    """A layer entry's changed fields, by the block's types and own checks."""
    if "like" in changes:
        return [Finding((*path, "like"), "what a block is like is said where it is declared", "leave it out", True)]
    try:
        changed = override_fields(fields, changes)
    except ValidationError as error:
        return error_findings(error, type(fields), {**fields.model_dump(), **changes}, path)
    return _check_block(changed, dims, path)


def _check_unused(parsed: Parsed, spec: ModelSpec) -> list[Finding]:
    """Nothing in a spec is without effect."""
    used = {name for _, group, entry in entries(spec) for name in _names(group, entry)}
    text = "block '{}' is declared but no layer uses it"
    paths = {name: (*_MODEL, "blocks", name) for name in parsed.declared if name not in used}
    findings = [
        Finding(path, text.format(name), "use it in layers, or remove it", True) for name, path in paths.items()
    ]
    for index, group in enumerate(spec.layers):
        if group.ffn and all(entry.ffn for entry in group.pattern):
            path = (*_MODEL, "layers", index, "ffn")
            findings.append(Finding(path, "every entry of the group names an ffn of its own", "leave it out"))
    return findings


def _check_block_names(parsed: Parsed) -> list[Finding]:
    """Block names become functions, constants and weight keys of the emitted program."""
    findings = []
    for name in parsed.declared:
        path = (*_MODEL, "blocks", name)
        if not _BLOCK_NAME.fullmatch(name):
            hint = f"lower-case words joined by one underscore, e.g. {_suggested(name)}"
            findings.append(Finding(path, f"'{name}' is no block name", hint, True))
        elif name in RESERVED or name.endswith(RESERVED_ENDS):
            hint = f"any name but {', '.join(sorted(RESERVED))}, and none that ends in _norm"
            findings.append(Finding(path, f"block name '{name}' is taken by the program around it", hint, True))
    return findings


def _suggested(name: str) -> str:
    words = re.findall("[a-z][a-z0-9]*", name.lower())
    return "_".join(words) or "attn"


def _check_layer_names(spec: ModelSpec) -> list[Finding]:
    """Two pairs of blocks must not run together into one layer name: a_b + c and a + b_c."""
    findings: list[Finding] = []
    first: dict[str, tuple[str, ...]] = {}
    for path, group, entry in entries(spec):
        names = _names(group, entry)
        other = first.setdefault("_".join(names), names)
        if other != names:
            text = f"layers {' + '.join(other)} and {' + '.join(names)} would both be called {'_'.join(names)}"
            findings.append(Finding(path, text, "rename one of the blocks"))
            first["_".join(names)] = names
    return findings


def _check_layer_count(spec: ModelSpec) -> list[Finding]:
    total = sum(group.num_layers for group in spec.layers)
    if total > MAX_LAYERS:
        return [Finding((*_MODEL, "layers"), f"the layers add up to {total}", f"at most {MAX_LAYERS}")]
    if spec.num_layers in (None, total):
        return []
    terms = " + ".join(_count_text(group) for group in spec.layers)
    text = f"num_layers is {spec.num_layers}, but the layers add up to {total} ({terms})"
    return [Finding((*_MODEL, "num_layers"), text, also=((*_MODEL, "layers"),))]


def _count_text(group: LayerGroup) -> str:
    inner = " + ".join(str(entry.repeat) for entry in group.pattern)
    return f"{group.repeat} x ({inner})"


def check_workload(workload: Workload, max_context: int | None) -> list[Finding]:
    """Lengths must fit the workload's context, and that the model's positions."""
    path = ("workload", "max_context")
    if workload.isl + workload.osl > workload.max_context:
        text = f"max_context {workload.max_context} is less than isl {workload.isl} + osl {workload.osl}"
        return [Finding(path, text, f"at least {workload.isl + workload.osl}")]
    if max_context is not None and workload.max_context > max_context:
        text = f"max_context {workload.max_context} exceeds the {max_context} positions of the model"
        return [Finding(path, text, f"at most {max_context}", also=(("model", "max_context"),))]
    return []


def merge_pins(spec: ModelSpec | None, plan: PlanPins) -> tuple[PlanPins, Callable[[str, str], KeyPath]]:
    """The model file's mesh under the plan's pins, and where each degree comes from."""
    mesh = spec.mesh if spec else MeshPins()
    attention = {**_given(mesh.attention), **_given(plan.attention)}
    experts = {**_given(mesh.experts), **_given(plan.experts)}
    pins = plan.model_copy(
        update={
            "attention": plan.attention.model_copy(update=attention),
            "experts": plan.experts.model_copy(update=experts),
        }
    )

    def origin(part: str, name: str) -> KeyPath:
        by_plan = getattr(getattr(plan, part), name) is not None
        return ("plan", part, name) if by_plan else ("model", "mesh", part, name)

    return pins, origin


def _given(pins: object) -> dict[str, int]:
    return {name: value for name, value in vars(pins).items() if value is not None}


def check_pins(
    pins: PlanPins, origin: Callable[[str, str], KeyPath], graph: Graph | None, num_devices: int | None
) -> list[Finding]:
    """Pinned mesh degrees: their products must be the device count, and they must cut the blocks evenly."""
    findings: list[Finding] = []
    degrees = {"attention": _given(pins.attention), "experts": _given(pins.experts)}
    for part, given in degrees.items():
        findings += _check_product(part, given, origin, num_devices)
    if num_devices is None and all(len(given) == 2 for given in degrees.values()):
        findings += _check_same_product(degrees, origin)
    if graph is not None:
        findings += _check_cuts(degrees, origin, graph)
    return findings


def _check_product(
    part: str, given: dict[str, int], origin: Callable[[str, str], KeyPath], num_devices: int | None
) -> list[Finding]:
    """All degrees of a part multiply to the device count; one alone must divide it."""
    product = math.prod(given.values())
    if num_devices is None or not given or (num_devices == product if len(given) == 2 else num_devices % product == 0):
        return []
    names = " * ".join(f"{part}.{name}={value}" for name, value in given.items())
    first, *rest = [origin(part, name) for name in given]
    if rest:
        text, hint = (
            f"{names} = {product}, but the target has {num_devices} devices",
            f"the product must be {num_devices}",
        )
    else:
        text, hint = f"{names} does not divide the target's {num_devices} devices", _divisors(num_devices)
    return [Finding(first, text, hint, also=tuple(rest))]


def _check_same_product(degrees: dict[str, dict[str, int]], origin: Callable[[str, str], KeyPath]) -> list[Finding]:
    """Without a target, both parts must at least agree: they use the same devices."""
    products = {part: math.prod(given.values()) for part, given in degrees.items()}
    if products["attention"] == products["experts"]:
        return []
    text = (
        f"attention uses {products['attention']} devices (dp * tp), "
        f"but experts use {products['experts']} (ep * tp): they share one mesh"
    )
    return [Finding(origin("experts", "ep"), text, also=(origin("attention", "dp"),))]


def _check_cuts(
    degrees: dict[str, dict[str, int]], origin: Callable[[str, str], KeyPath], graph: Graph
) -> list[Finding]:
    """Each pinned degree must cut the blocks' heads, experts and widths evenly."""
    by_axis = {"experts": ("experts", "ep"), "expert_intermediate": ("experts", "tp")}
    mixers = {name for name, inst in graph.blocks().items() if block_of(inst).SLOT == "mixer"}
    cuts: dict[tuple[str, str], list[tuple[str, HeadCut]]] = {}
    for name, inst in graph.blocks().items():
        for cut in block_of(inst).cuts(inst.fields):
            place = by_axis.get(cut.axis, ("attention", "tp") if name in mixers else None)
            if place and place[1] in degrees[place[0]]:
                cuts.setdefault(place, []).append((name, cut))
    return [one for place, found in cuts.items() for one in _check_degree(place, found, degrees, origin)]


def _check_degree(
    place: tuple[str, str],
    cuts: list[tuple[str, HeadCut]],
    degrees: dict[str, dict[str, int]],
    origin: Callable[[str, str], KeyPath],
) -> list[Finding]:
    """One degree against everything it cuts."""
    part, name = place
    degree = degrees[part][name]
    uneven = [f"the {cut.size} {cut.axis} of '{block}'" for block, cut in cuts if not _fits(cut, degree)]
    if not uneven:
        return []
    valid = [n for n in divisors(math.lcm(*(cut.size for _, cut in cuts))) if all(_fits(cut, n) for _, cut in cuts)]
    text = f"{part}.{name}={degree} does not cut evenly {', '.join(uneven)}"
    return [Finding(origin(part, name), text, listing(map(str, valid)))]


def _fits(cut: HeadCut, degree: int) -> bool:
    return cut.size % degree == 0 or (cut.replicate and degree % cut.size == 0)


def _divisors(number: int) -> str:
    return listing(map(str, divisors(number)))
