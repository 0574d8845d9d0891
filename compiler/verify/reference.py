"""Interprets a graph in float32 with the blocks' references: the meaning every program is held to.

Legend: T tokens of one sequence, D hidden, V vocabulary, L layers.
One sequence at a time, no cache, no mesh, one layer's weights at a time.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from moec.blocks.core.array_info import Source
from moec.blocks.core.batch import Batch, Sampling, index_rows
from moec.blocks.core.declare import NormFields, Weight
from moec.blocks.core.norm import layer_norm, rms_norm
from moec.blocks.embed.ref import lookup
from moec.blocks.head.ref import logits
from moec.blocks.registry import REFERENCES
from moec.runtime.checkpoint import Checkpoint
from moec.runtime.convert import FLOAT8, apply_ops, dequantize, squeeze, stored_rank
from moec.runtime.errors import CheckpointError
from moec.runtime.packed import scale_block, side_tensors, unpack, unpack_scales

from ..graph.ir import Addition, BlockInst, Graph, Layer, Norm
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
        x_TD = graph.embed.scale * lookup(table, jnp.asarray(np.asarray(ids, np.int32)))
        hidden = []
        for index, layer in graph.layers():
            hidden.append(np.asarray(x_TD))
            x_TD = _layer(_Site(graph, index, weight_of, batch), layer, x_TD)
        x_TD = _norm(x_TD, "final_norm", graph.final_norm, lambda key: weight_of(key, None))
        found = _logits(graph, weight_of, table, x_TD)
        return Meaning(np.asarray(found), np.stack([*hidden, np.asarray(x_TD)]))


def _logits(graph: Graph, weight_of: WeightOf, table: Array, x_TD: Array) -> Array:
    head = graph.head
    found = logits(x_TD, table.T if head.tied else jnp.asarray(weight_of("head.w", None)))
    if head.bias:
        found = found + jnp.asarray(weight_of("head.b", None))
    found = head.scale * found
    return head.softcap * jnp.tanh(found / head.softcap) if head.softcap else found


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


@dataclass(frozen=True)
class _Site:
    """One layer: its absolute index, its weights and the sequence that passes."""

    graph: Graph
    index: int
    weight_of: WeightOf
    batch: Batch

    def residual_weight(self, key: str) -> np.ndarray:
        """A weight of the layer itself, by its name without "layer."."""
        return self.weight_of(f"layer.{key}", self.index)


def _layer(site: _Site, layer: Layer, x_TD: Array) -> Array:
    """The layer's additions to the residual stream in order."""
    for addition in layer.additions:
        x_TD = _add(site, addition, x_TD)
    return x_TD * jnp.asarray(site.residual_weight("scale")) if layer.scaled else x_TD


def _add(site: _Site, addition: Addition, x_TD: Array) -> Array:
    shared_TD = _maybe_norm(x_TD, addition.norm, site)
    y_TD = jnp.zeros_like(x_TD)
    for branch in addition.branches:
        h_TD = _maybe_norm(x_TD, branch.norm, site) if branch.norm else shared_TD
        y_TD = y_TD + _maybe_norm(_block(site, branch.inst, h_TD, x_TD), branch.post_norm, site)
    kept_TD = shared_TD if addition.keeps_normed else x_TD
    return addition.skip * kept_TD + addition.scale * _maybe_norm(y_TD, addition.post_norm, site)


def _block(site: _Site, inst: BlockInst, h_TD: Array, x_TD: Array) -> Array:
    names = block_weights(site.graph, inst)
    weights = {name: jnp.asarray(site.weight_of(f"{inst.name}.{name}", site.index)) for name in names}
    apply = REFERENCES[inst.kind]().apply
    return apply(inst.fields, site.graph.dims, h_TD, weights, site.batch, index_rows(site.batch), x_TD, site.index)


def _maybe_norm(x_TD: Array, norm: Norm | None, site: _Site) -> Array:
    return _norm(x_TD, norm.name, norm.fields, site.residual_weight) if norm else x_TD


def _norm(x_TD: Array, name: str, norm: NormFields, weight: Callable[[str], np.ndarray]) -> Array:
    gain = jnp.asarray(weight(name))
    if norm.kind == "layer":
        return layer_norm(x_TD, gain, jnp.asarray(weight(f"{name}_bias")) if norm.bias else None, eps=norm.eps)
    return rms_norm(x_TD, gain, eps=norm.eps, zero_centered=norm.zero_centered)


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
    rank = stored_rank(len(shape), source.ops)
    read = partial(_floats, graph, checkpoint)
    if source.packed:
        read = partial(_unpacked, checkpoint, packed=source.packed)
    parts = [apply_ops(read(name, rank), source.ops) for name in names]
    wrong = [
        f"{name}: gives {part.shape}, expected {shape}"
        for name, part in zip(names, parts, strict=True)
        if part.shape != shape
    ]
    if wrong:
        raise CheckpointError(wrong)
    return np.stack(parts) if per_expert else parts[0]


def _unpacked(checkpoint: Checkpoint, name: str, rank: int, packed: str) -> np.ndarray:
    """A packed tensor in float32."""
    scales = side_tensors(name, packed)["scales"]
    if scales not in checkpoint.tensors:
        raise CheckpointError([f"{name}: holds {packed} values without {scales}"])
    values = unpack(checkpoint.read(name), packed)
    assert values.ndim == rank, (name, values.shape, rank)
    return dequantize(values, unpack_scales(checkpoint.read(scales), packed), scale_block(packed))


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
