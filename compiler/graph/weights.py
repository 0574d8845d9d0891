"""The weights of a graph by key: `gdn.w_q` (block instance), `layer.mixer_norm`, `embed.table`, ..."""

from typing import cast

from moec.blocks.core.declare import Block, PagedState, SlotState, Weight
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
    """Weights outside the layers: embedding table [V, D], head [D, V] unless tied, final norm [D]."""
    hidden, vocab = graph.dims.hidden_size, graph.dims.vocab_size
    found = {"embed.table": Weight((vocab, hidden), ("embed_vocab", None), "embed")}
    if not graph.tied_head:
        found["head.w"] = Weight((hidden, vocab), (None, "head_vocab"), "head", linear=True)
    found["final_norm"] = Weight((hidden,), (None,), "gain", init="gain")
    return found


def residual_weights(graph: Graph) -> dict[str, Weight]:
    """The norms every layer has besides its blocks' own weights."""
    gain = Weight((graph.dims.hidden_size,), (None,), "gain", init="gain")
    return {"layer.mixer_norm": gain, "layer.ffn_norm": gain}


def layer_weights(graph: Graph, layer: Layer) -> dict[str, Weight]:
    """All weights of one layer."""
    found = residual_weights(graph)
    for inst in (layer.mixer, layer.ffn):
        found |= {f"{inst.name}.{name}": weight for name, weight in block_weights(graph, inst).items()}
    return found


def all_weights(graph: Graph) -> dict[str, Weight]:
    """Every key once (a layer weight stands for all layers that have it), in order of first use."""
    found = model_weights(graph) | residual_weights(graph)
    for inst in graph.blocks().values():
        found |= {f"{inst.name}.{name}": weight for name, weight in block_weights(graph, inst).items()}
    return found


def table_key(graph: Graph, key: str) -> str:
    """The key the checkpoint table uses: instances with overridden fields share their base's lines."""
    name, _, rest = key.partition(".")
    inst = graph.blocks().get(name)
    return f"{inst.base or inst.name}.{rest}" if inst else key
