"""Interprets a graph in float32 with the blocks' references: the meaning every program is held to.

Legend: T tokens of one sequence, D hidden, V vocabulary, L layers.
One sequence at a time, no cache, no mesh, one layer's weights at a time.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from moec.blocks.core.array_info import Source
from moec.blocks.core.batch import Batch, Sampling, index_rows
from moec.blocks.core.declare import NormFields, Weight
from moec.blocks.core.norm import rms_norm
from moec.blocks.embed.ref import lookup
from moec.blocks.head.ref import logits
from moec.blocks.registry import REFERENCES
from moec.runtime.checkpoint import Checkpoint
from moec.runtime.convert import FLOAT8, apply_ops, dequantize, squeeze
from moec.runtime.errors import CheckpointError

from ..graph.ir import BlockInst, Graph, Layer
from ..graph.sources import sources
from ..graph.weights import all_weights, block_weights

# (key as in graph/weights.py, absolute layer index or None) -> the weight as the model means it, float32.
WeightOf = Callable[[str, int | None], np.ndarray]


@dataclass(frozen=True)
class Meaning:
    """logits [T, V]. hidden [L+1, T, D]: embedding, then the input of layers 1 to L-1, then after the final norm."""

    logits: np.ndarray
    hidden: np.ndarray


def forward(graph: Graph, weight_of: WeightOf, ids: Sequence[int]) -> Meaning:
    """One sequence through the whole model."""
    batch = _one_row(len(ids))
    with jax.default_matmul_precision("highest"):
        table = jnp.asarray(weight_of("embed.table", None))
        x_TD = lookup(table, jnp.asarray(np.asarray(ids, np.int32)))
        hidden = []
        for index, layer in graph.layers():
            hidden.append(np.asarray(x_TD))
            x_TD = _layer(graph, layer, index, weight_of, x_TD, batch)
        x_TD = _norm(x_TD, weight_of("final_norm", None), graph.final_norm)
        head = table.T if graph.tied_head else jnp.asarray(weight_of("head.w", None))
        return Meaning(np.asarray(logits(x_TD, head)), np.stack([*hidden, np.asarray(x_TD)]))


def checkpoint_weights(graph: Graph, directory: Path) -> WeightOf:
    """Weights read through the graph's checkpoint table, without the program's loader."""
    checkpoint, declared = Checkpoint(directory), all_weights(graph)
    if checkpoint.problems:
        raise CheckpointError(list(checkpoint.problems))

    def weight_of(key: str, layer: int | None) -> np.ndarray:
        weight = declared[key]
        for source in sources(graph, key):
            names = _stored_names(source, layer, weight)
            if all(name in checkpoint.tensors for name in names):
                return _read(graph, checkpoint, source, names, weight)
        tried = ", ".join(source.tensor for source in sources(graph, key)) or "no checkpoint table"
        raise CheckpointError([f"{key}, layer {layer}: not in the checkpoint (tried {tried})"])

    return weight_of


def _layer(graph: Graph, layer: Layer, index: int, weight_of: WeightOf, x_TD: Array, batch: Batch) -> Array:
    """Two pre-norm residual slots."""
    for slot, inst, norm in (("mixer", layer.mixer, layer.mixer_norm), ("ffn", layer.ffn, layer.ffn_norm)):
        h_TD = _norm(x_TD, weight_of(f"layer.{slot}_norm", index), norm)
        x_TD = x_TD + _block(graph, inst, index, weight_of, h_TD, batch)
    return x_TD


def _block(graph: Graph, inst: BlockInst, index: int, weight_of: WeightOf, h_TD: Array, batch: Batch) -> Array:
    weights = {name: jnp.asarray(weight_of(f"{inst.name}.{name}", index)) for name in block_weights(graph, inst)}
    return REFERENCES[inst.kind]().apply(inst.fields, graph.dims, h_TD, weights, batch, index_rows(batch))


def _norm(x_TD: Array, gain: np.ndarray, norm: NormFields) -> Array:
    return rms_norm(x_TD, jnp.asarray(gain), eps=norm.eps, zero_centered=norm.zero_centered)


def _one_row(tokens: int) -> Batch:
    """A batch of one sequence that starts here. Its page and slot are 0: nothing is cached."""

    def of(value: list[int]) -> Array:
        return jnp.asarray(value, jnp.int32)

    sampling = Sampling(jnp.zeros(1), of([0]), jnp.ones(1), jnp.zeros(1, jnp.uint32))
    return Batch(
        tokens=of([0] * tokens),
        positions=of(list(range(tokens))),
        cu_q=of([0, tokens]),
        kv_len=of([tokens]),
        page_table=of([0]).reshape(1, 1),
        slot=of([0]),
        has_state=jnp.zeros(1, bool),
        distribution=of([0, 1, 1]),
        sampling=sampling,
    )


def _stored_names(source: Source, layer: int | None, weight: Weight) -> list[str]:
    """One tensor, or one per expert."""
    name = source.tensor.replace("{layer}", str(layer))
    if "{expert}" not in name:
        return [name]
    return [name.replace("{expert}", str(expert)) for expert in range(weight.shape[0])]


def _read(graph: Graph, checkpoint: Checkpoint, source: Source, names: list[str], weight: Weight) -> np.ndarray:
    per_expert = "{expert}" in source.tensor
    shape = weight.shape[1:] if per_expert else weight.shape
    parts = [apply_ops(_floats(graph, checkpoint, name, len(shape)), source.ops) for name in names]
    wrong = [
        f"{name}: gives {part.shape}, expected {shape}"
        for name, part in zip(names, parts, strict=True)
        if part.shape != shape
    ]
    if wrong:
        raise CheckpointError(wrong)
    return np.stack(parts) if per_expert else parts[0]


def _floats(graph: Graph, checkpoint: Checkpoint, name: str, rank: int) -> np.ndarray:
    """A stored tensor in float32, block scales applied."""
    values = checkpoint.read(name)
    values = values.reshape(squeeze(values.shape, rank))
    if values.dtype.name not in FLOAT8:
        return values.astype(np.float32)
    table = graph.checkpoint
    assert table is not None
    if table.scale_suffix is None or table.scale_block is None or name + table.scale_suffix not in checkpoint.tensors:
        raise CheckpointError([f"{name}: stored as {values.dtype.name} without block scales"])
    scales = checkpoint.read(name + table.scale_suffix)
    return dequantize(values, scales.reshape(squeeze(scales.shape, rank)), table.scale_block)
