"""The view of an emitted weights.py: one function per block, a tree of groups, checkpoint sources as data."""

from dataclasses import dataclass

from moec.blocks.core.array_info import ArrayInfo, Source

from ..graph.ir import Graph, Group
from ..graph.weights import all_residual_weights, layers_with, residual_weights
from ..plan.plan import Plan
from .arrays import dense_arrays, expert_arrays, residual_array, top_arrays
from .constants import text

WIDTH = 110


@dataclass(frozen=True)
class TableView:
    """One function of weights.py: name, doc, and the lines of the dict it returns."""

    name: str
    doc: str
    lines: tuple[str, ...]


@dataclass(frozen=True)
class WeightsView:
    """Everything weights.py.j2 places."""

    header: tuple[str, ...]
    title: str
    tables: tuple[TableView, ...]
    tree: tuple[str, ...]
    ignore: tuple[str, ...]
    scale_suffix: str
    scale_block: str


def weights_view(graph: Graph, plan: Plan, header: tuple[str, ...]) -> WeightsView:
    """Compute the whole view of one weights.py."""
    spec = graph.checkpoint
    return WeightsView(
        header=header,
        title=f"Weights of {graph.name} as the program holds them, and where a checkpoint keeps them.",
        tables=tuple(_tables(graph, plan)),
        tree=tuple(_tree(graph, plan)),
        ignore=tuple(text(pattern) for pattern in (spec.ignore if spec else ())),
        scale_suffix=text(spec.scale_suffix if spec else None),
        scale_block=repr(spec.scale_block if spec else None),
    )


def _tables(graph: Graph, plan: Plan) -> list[TableView]:
    found = []
    for inst in graph.blocks().values():
        layers = graph.layers_of(inst.name)
        dense = dense_arrays(graph, inst, plan, layers)
        doc = f"{inst.name} weights of the given layers."
        found.append(TableView(f"{inst.name}_weights", doc, _lines(dense, "layers")))
        stacks = expert_arrays(graph, inst, plan)
        if stacks:
            doc = f"{inst.name} weights of all its layers in one stack, which no loop slices."
            found.append(TableView(f"{inst.name}_stack", doc, _lines(stacks, "layers")))
    for key in all_residual_weights(graph):
        name = key.removeprefix("layer.")
        info = residual_array(graph, key, plan, layers_with(graph, key))
        what = "The factor of the result" if name == "scale" else "A parameter of a norm"
        doc = f"{what} of the given layers."
        found.append(TableView(f"{name}_weights", doc, tuple(info_lines("", info, "layers"))))
    return found


def _lines(arrays: dict[str, ArrayInfo], layers: str) -> tuple[str, ...]:
    """Lines of `{name: ArrayInfo(...)}`, indented for the body of a return statement."""
    lines = ["{"]
    for name, info in arrays.items():
        lines += ["    " + line for line in info_lines(f'"{name}": ', info, layers)]
    return (*lines, "}")


def info_lines(prefix: str, info: ArrayInfo, layers: str) -> list[str]:
    """One ArrayInfo as Python text; the leading dim of a stacked array is len(layers)."""
    shape = ", ".join(["len(layers)"] * bool(info.layers) + [str(d) for d in info.shape[bool(info.layers) :]])
    shape = f"({shape},)" if len(info.shape) == 1 else f"({shape})"
    args = [f'{shape}, "{info.dtype}", {text(info.axes)}']
    if info.sources:
        args.append("sources=(" + ", ".join(source_text(s) for s in info.sources) + ",)")
    if info.layers:
        args.append(f"layers={layers}")
    if info.init != "normal":
        args.append(f'init="{info.init}"')
    if info.scale_of:
        args.append(f'scale_of="{info.scale_of}"')
    if info.block:
        args.append(f"block={info.block}")
    if info.row_major:
        args.append("row_major=True")
    end = "," if prefix else ""
    one_line = f"{prefix}ArrayInfo({', '.join(args)}){end}"
    if len(one_line) <= WIDTH:
        return [one_line]
    lines = [f"{prefix}ArrayInfo("]
    for arg in args:
        lines += _argument(arg, info.sources)
    return [*lines, f"){end}"]


def _argument(arg: str, sources: tuple[Source, ...]) -> list[str]:
    if not arg.startswith("sources=") or len(arg) + 4 <= WIDTH:
        return [f"    {arg},"]
    return ["    sources=(", *(f"        {source_text(s)}," for s in sources), "    ),"]


def source_text(source: Source) -> str:
    """Source("name", ops, packed="mxfp4") as Python text, without what is empty."""
    ops = f", {text(source.ops)}" if source.ops else ""
    packed = f', packed="{source.packed}"' if source.packed else ""
    return f'Source("{source.tensor}"{ops}{packed})'


def _tree(graph: Graph, plan: Plan) -> list[str]:
    """Lines of the dict that `weights()` returns."""
    top = top_arrays(graph, plan)
    lines = ['"embed": {', *("    " + x for x in info_lines('"table": ', top["embed.table"], "")), "},"]
    for index, group in enumerate(graph.groups):
        lines += [f'"group{index}": {{', *("    " + x for x in _group(graph, group)), "},"]
    stacked = [inst for inst in graph.blocks().values() if expert_arrays(graph, inst, plan)]
    inner = [f'    "{inst.name}": {inst.name}_stack({_range(graph.layers_of(inst.name))}),' for inst in stacked]
    lines += ['"stacks": {', *inner, "},"] if inner else []
    for key in ("final_norm", "final_norm_bias"):
        lines += info_lines(f'"{key}": ', top[key], "") if key in top else []
    head = [key for key in ("head.w", "head.b") if key in top]
    inner = [line for key in head for line in info_lines(f'"{key.removeprefix("head.")}": ', top[key], "")]
    return [*lines, '"head": {', *("    " + x for x in inner), "},"] if head else lines


def _group(graph: Graph, group: Group) -> list[str]:
    lines = []
    for position, layer in enumerate(group.layers):
        layers = _range(group.layer_indices(position))
        lines.append(f'"layer{position}": {{')
        names = [key.removeprefix("layer.") for key in residual_weights(graph, layer)] + [b.name for b in layer.blocks]
        lines += [f'    "{name}": {name}_weights({layers}),' for name in names]
        lines.append("},")
    return lines


def _range(layers: tuple[int, ...]) -> str:
    """Layer indices as `layer_range(start, stop, step)` when they are evenly spaced, else a tuple."""
    if len(layers) == 1:
        return f"({layers[0]},)"
    step = layers[1] - layers[0]
    if layers == tuple(range(layers[0], layers[-1] + 1, step)):
        return f"tuple(range({layers[0]}, {layers[-1] + 1}, {step}))"
    return repr(layers)
