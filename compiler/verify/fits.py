"""Whether a checkpoint fills a model: the loader's own resolution over the graph's weights, no plan needed."""

from collections.abc import Iterable, Iterator
from typing import Any

from moec.blocks.core.array_info import ArrayInfo, Op
from moec.blocks.core.declare import Weight
from moec.runtime.checkpoint import Checkpoint
from moec.runtime.resolve import Target, resolve

from ..graph.ir import Graph
from ..graph.sources import sources
from ..graph.weights import all_residual_weights, block_weights, layers_with, model_weights

_CUTS = ("slice", "group_slice", "stride")  # ops that leave the rest of a tensor to other weights


class _Whole:
    """The graph's weights as a program would hold them on one device in float32; a Loadable."""

    def __init__(self, graph: Graph):
        table = graph.checkpoint
        self.graph = graph
        self.IGNORE: tuple[str, ...] = table.ignore if table else ()
        self.SCALE_SUFFIX: str | None = table.scale_suffix if table else None
        self.SCALE_BLOCK: tuple[int, int] | None = table.scale_block if table else None

    def weights(self) -> dict[str, Any]:
        """One array per weight and layer: a tree as resolve walks it."""
        graph = self.graph
        tree: dict[str, Any] = {key: _info(graph, key, weight, ()) for key, weight in model_weights(graph).items()}
        tree |= {
            key: _info(graph, key, weight, layers_with(graph, key))
            for key, weight in all_residual_weights(graph).items()
        }
        for inst in graph.blocks().values():
            layers, found = graph.layers_of(inst.name), block_weights(graph, inst)
            tree[inst.name] = {key: _info(graph, f"{inst.name}.{key}", one, layers) for key, one in found.items()}
        return tree


def misfits(graph: Graph, checkpoint: Checkpoint) -> list[str]:
    """Everything that keeps the checkpoint from filling the weights, each message beginning with a tensor's name."""
    targets, problems = resolve(_Whole(graph), checkpoint)
    return problems + list(_used_twice(targets))


def _used_twice(targets: Iterable[Target]) -> Iterator[str]:
    """Tensors that two weights take the same part of."""
    first: dict[tuple[str, tuple[Op, ...]], str] = {}
    for target in targets:
        for piece in target.pieces:
            part = tuple(op for op in piece.ops if op[0] in _CUTS)
            for name in piece.tensors:
                before = first.setdefault((name, part), target.label)
                if before != target.label:
                    yield f"{name}: fills both {before} and {target.label}"


def _info(graph: Graph, key: str, weight: Weight, layers: tuple[int, ...]) -> ArrayInfo:
    shape, axes = weight.shape, weight.axes
    if layers:
        shape, axes = (len(layers), *shape), (None, *axes)
    return ArrayInfo(shape, "float32", axes, sources(graph, key), layers)
