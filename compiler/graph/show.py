"""The graph as text: `moec show graph`."""

from typing import Any

from moec.blocks.core.array_info import Op, Source
from moec.blocks.core.declare import NormFields, PagedState, SlotState, Weight

from .count import active_params, kv_values_per_token, num_values, params_by_role, slot_values, total_params
from .ir import Addition, BlockInst, Graph, Group, Head, Norm
from .sources import sources
from .weights import all_residual_weights, block_state, block_weights, model_weights


def show_graph(graph: Graph) -> str:
    """Sizes, layer groups, then every block's weights (shape, axes, dtype role, origin) and state."""
    lines = [*_head(graph), ""]
    for index, group in enumerate(graph.groups):
        lines += [*_group(index, group), ""]
    lines += ["model", *_weights(graph, "", model_weights(graph)), ""]
    lines += ["layers", *_weights(graph, "", all_residual_weights(graph)), ""]
    for inst in graph.blocks().values():
        lines += [*_block(graph, inst), ""]
    return "\n".join(lines)


def _head(graph: Graph) -> list[str]:
    dims = graph.dims
    roles = ", ".join(f"{role} {count:,}" for role, count in params_by_role(graph).items())
    return [
        f"graph {graph.name}: {graph.num_layers} layers, hidden {dims.hidden_size}, vocabulary {dims.vocab_size}, "
        f"at most {graph.max_context} positions",
        f"  parameters  {total_params(graph):,} in total, {active_params(graph):,} active per token",
        f"  by role     {roles}",
        f"  state       {kv_values_per_token(graph):,} values per token, {slot_values(graph):,} values per sequence",
        f"  layer norms {_norm(graph.dims.norm)}",
        f"  final norm  {_norm(graph.final_norm)}",
        f"  head        {_head_text(graph.head)}",
        *([f"  embed       times {graph.embed.scale:g}"] if graph.embed.scale != 1 else []),
    ]


def _head_text(head: Head) -> str:
    parts = ["tied to the embedding" if head.tied else "own matrix"]
    parts += ["bias"] * head.bias + [f"times {head.scale:g}"] * (head.scale != 1)
    return ", ".join([*parts, f"soft cap {head.softcap:g}"] if head.softcap else parts)


def _group(index: int, group: Group) -> list[str]:
    last = group.first_layer + group.repeat * len(group.layers) - 1
    lines = [f"group {index}: layers {group.first_layer}..{last} = {group.repeat} x {len(group.layers)}"]
    for position, layer in enumerate(group.layers):
        lines.append(f"  {position}: {layer.kind}")
        lines += [f"     {_addition(one)}" for one in layer.additions]
        lines += ["     x * layer.scale"] * layer.scaled
    return lines


def _addition(one: Addition) -> str:
    """The addition as a formula: x + gdn(mixer_norm(x))."""
    shared = _normed(one.norm, "x")
    branches = [_normed(b.post_norm, f"{b.inst.name}({_normed(b.norm, shared)})") for b in one.branches]
    added = _normed(one.post_norm, " + ".join(branches))
    if one.scale != 1:
        added = f"{one.scale:g} * {added}" if len(branches) == 1 or one.post_norm else f"{one.scale:g} * ({added})"
    kept = shared if one.keeps_normed else "x"
    return f"{kept if one.skip == 1 else f'{one.skip:g} * {kept}'} + {added}"


def _normed(norm: Norm | None, text: str) -> str:
    return f"{norm.name}({text})" if norm else text


def _block(graph: Graph, inst: BlockInst) -> list[str]:
    layers = graph.layers_of(inst.name)
    weights = block_weights(graph, inst)
    base = f", from {inst.base}" if inst.base not in ("", inst.name) else ""
    count = sum(num_values(weight) for weight in weights.values())
    head = f"block {inst.name} ({inst.kind}{base}): {len(layers)} layers ({_ranges(layers)}), {count:,} parameters each"
    fields = [f"  {text}" for text in _fields(inst.fields.model_dump())]
    state = [f"  state {_state(one)}" for one in block_state(graph, inst)]
    return [head, *fields, *_weights(graph, f"{inst.name}.", weights), *state]


def _fields(values: dict[str, Any]) -> list[str]:
    """One line per field; what is not set is left out."""
    told = ("kind", "like")  # in the line above
    return [f"{key} = {_value(value)}" for key, value in values.items() if key not in told and not _empty(value)]


def _empty(value: Any) -> bool:
    return value is None or (isinstance(value, dict) and all(_empty(one) for one in value.values()))


def _value(value: Any) -> str:
    if isinstance(value, dict):
        return f"{{{', '.join(f'{key}: {_value(one)}' for key, one in value.items() if not _empty(one))}}}"
    return str(value).lower() if isinstance(value, bool) else str(value)


def _weights(graph: Graph, prefix: str, weights: dict[str, Weight]) -> list[str]:
    width = max(map(len, weights))
    lines = []
    for name, weight in weights.items():
        shape = f"[{', '.join(_dim(size, axis) for size, axis in zip(weight.shape, weight.axes, strict=True))}]"
        stack = " stacked" if weight.stacked else ""
        lines.append(f"  {name:{width}} {shape} {weight.role}{stack}")
        lines += [f"  {'':{width}}   <- {_source(one)}" for one in sources(graph, prefix + name)]
    return lines


def _dim(size: int, axis: str | None) -> str:
    return f"{size} {axis}" if axis else str(size)


def _state(state: PagedState | SlotState) -> str:
    dims = ", ".join(_dim(size, axis) for size, axis in zip(state.shape, state.axes, strict=True))
    if isinstance(state, PagedState):
        return f"{state.role} [{dims}] per token"
    return f"{state.name} [{dims}] per sequence ({state.role})"


def _source(source: Source) -> str:
    return " ".join([source.tensor, *map(_op, source.ops)])


def _op(op: Op) -> str:
    name, *rest = op
    return f"{name}({', '.join(map(str, rest))})" if rest else str(name)


def _norm(norm: NormFields) -> str:
    marks = " zero-centred" * norm.zero_centered + " with bias" * norm.bias
    return f"{norm.kind} eps {norm.eps:g}{marks}"


def _ranges(numbers: tuple[int, ...]) -> str:
    """At most four numbers, then the count goes on."""
    shown = ", ".join(map(str, numbers[:4]))
    return f"{shown}, ..." if len(numbers) > 4 else shown
