"""The weights of a graph by key: `gdn.w_q` (block instance), `layer.mixer_norm`, `embed.table`, ..."""

from typing import cast

from moec.blocks.core.declare import Block, NormFields, PagedState, SlotState, Weight
from moec.blocks.registry import BLOCKS

from .ir import BlockInst, Graph, Layer


def block_of(inst: BlockInst) -> Block:
    """The declarations of the instance's kind."""
    return cast(Block, BLOCKS[inst.kind]())


def block_weights(graph: Graph, inst: BlockInst) -> dict[str, Weight]:
    """Weights of one layer's block by bare name, e.g. "w_q"."""
    return block_of(inst).weights(inst.fields, graph.dims)


def block_state(graph: Graph, inst: BlockInst) -> tuple[PagedState | SlotState, ...]:
    """What one layer's block keeps per token or per sequence."""
    return block_of(inst).state(inst.fields, graph.dims)


def model_weights(graph: Graph) -> dict[str, Weight]:
    """Weights outside the layers: embedding table [V, D], head [D, V] unless tied, its bias [V], final norm [D]."""
    hidden, vocab = graph.dims.hidden_size, graph.dims.vocab_size
    found = {"embed.table": Weight((vocab, hidden), ("embed_vocab", None), "embed")}
    if not graph.head.tied:
        found["head.w"] = Weight((hidden, vocab), (None, "head_vocab"), "head", linear=True)
    if graph.head.bias:
        found["head.b"] = Weight((vocab,), (None,), "gain", init="bias")
    return found | _norm_weights("final_norm", graph.final_norm, hidden)


def _norm_weights(name: str, norm: NormFields, size: int) -> dict[str, Weight]:
    """Gain [size] of a norm, and its bias [size] when it has one."""
    found = {name: Weight((size,), (None,), "gain", init="gain")}
    if norm.bias:
        found[f"{name}_bias"] = Weight((size,), (None,), "gain", init="bias")
    return found


def residual_weights(graph: Graph, layer: Layer) -> dict[str, Weight]:
    """What a layer has besides its blocks' own weights: the parameters of its norms, and its scale [1]."""
    found: dict[str, Weight] = {}
    for norm in layer.norms:
        found |= _norm_weights(f"layer.{norm.name}", norm.fields, graph.dims.hidden_size)
    if layer.scaled:
        found["layer.scale"] = Weight((1,), (None,), "gain", init="gain")
    return found


def all_residual_weights(graph: Graph) -> dict[str, Weight]:
    """residual_weights of all layers, each key once."""
    found: dict[str, Weight] = {}
    for _, layer in graph.distinct_layers():
        found |= residual_weights(graph, layer)
    return found


def layer_weights(graph: Graph, layer: Layer) -> dict[str, Weight]:
    """All weights of one layer."""
    found = residual_weights(graph, layer)
    for inst in layer.blocks:
        found |= {f"{inst.name}.{name}": weight for name, weight in block_weights(graph, inst).items()}
    return found


def layers_with(graph: Graph, key: str) -> tuple[int, ...]:
    """Absolute indices of the layers that have the weight `key`, e.g. "layer.mixer_norm"."""
    return tuple(index for index, layer in graph.layers() if key in residual_weights(graph, layer))


def all_weights(graph: Graph) -> dict[str, Weight]:
    """Every key once (a layer weight stands for all layers that have it), in order of first use."""
    found = model_weights(graph) | all_residual_weights(graph)
    for inst in graph.blocks().values():
        found |= {f"{inst.name}.{name}": weight for name, weight in block_weights(graph, inst).items()}
    return found


def table_key(graph: Graph, key: str) -> str:
    """The key the checkpoint table uses: instances with overridden fields share their base's lines."""
    name, _, rest = key.partition(".")
    inst = graph.blocks().get(name)
    return f"{inst.base or inst.name}.{rest}" if inst else key
