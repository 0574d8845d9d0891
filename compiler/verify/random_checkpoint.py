"""Writes a random checkpoint in a graph's own layout, so that verification loads weights as users do.

The distributions perturb everything a wrong convention could hide behind: gains away from 0 and
1, decay parameters, convolution taps, biases.
"""

import json
from collections.abc import Iterable, Iterator
from pathlib import Path

import numpy as np
from safetensors.numpy import save_file

from moec.blocks.core.array_info import PACKED
from moec.blocks.core.declare import Weight
from moec.runtime.checkpoint import INDEX, SINGLE
from moec.runtime.convert import apply_ops

from ..graph.ir import Graph, TensorMap
from ..graph.sources import sources, stored_shape
from ..graph.weights import layer_weights, model_weights, table_key
from .pack import packed_tensors

# Standard deviations: matrices keep activations near unit scale (0.12 at a fan-in of 64).
MATRIX_GAIN = 0.96
EMBED_STD = 0.7
TAPS_STD = 0.35
# Between the neutral gains 0 (zero-centred) and 1: either convention shows when it is taken for the other.
GAIN_MEAN, GAIN_STD = 0.5, 0.15
LOG_DECAY_RANGE = (-1.0, 0.5)
DECAY_STD = 0.5


def write_random_checkpoint(graph: Graph, directory: Path, *, seed: int = 0, shards: int = 1) -> None:
    """A complete checkpoint in the first layout of the graph's table: float32, and packed where a line says so.

    shards: number of files; more than one come with an index.
    """
    assert graph.checkpoint is not None, f"{graph.name} declares no checkpoint table"
    directory.mkdir(parents=True, exist_ok=True)
    rng = np.random.default_rng(seed)
    tensors = dict(_tensors(graph, rng))
    if shards == 1:
        save_file(tensors, directory / SINGLE)
        return
    names = [f"model-{i + 1:05d}-of-{shards:05d}.safetensors" for i in range(shards)]
    placed = {tensor: names[i * shards // len(tensors)] for i, tensor in enumerate(tensors)}
    for file in names:
        save_file({name: value for name, value in tensors.items() if placed[name] == file}, directory / file)
    (directory / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": placed}, indent=1))


def random_weight(weight: Weight, rng: np.random.Generator) -> np.ndarray:
    """One weight as the model means it, float32."""
    if weight.init == "log_decay":
        return rng.uniform(*LOG_DECAY_RANGE, weight.shape).astype(np.float32)
    mean, std = 0.0, MATRIX_GAIN * weight.shape[-2 if len(weight.shape) > 1 else -1] ** -0.5
    if weight.role == "embed":
        std = EMBED_STD
    elif weight.role == "decay":
        std = DECAY_STD
    elif weight.init == "gain":
        mean, std = GAIN_MEAN, GAIN_STD
    elif weight.init == "bias":
        std = GAIN_STD
    elif weight.role == "gain":
        std = TAPS_STD
    return rng.normal(mean, std, weight.shape).astype(np.float32)


def _tensors(graph: Graph, rng: np.random.Generator) -> Iterator[tuple[str, np.ndarray]]:
    """Stored tensors by name: outside the layers, then layer by layer."""
    yield from _fill(graph, model_weights(graph), None, rng)
    for index, layer in graph.layers():
        yield from _fill(graph, layer_weights(graph, layer), index, rng)


def _fill(
    graph: Graph, weights: dict[str, Weight], layer: int | None, rng: np.random.Generator
) -> Iterator[tuple[str, np.ndarray]]:
    """The stored tensors that together hold the given weights."""
    by_table_key = {table_key(graph, key): (key, weight) for key, weight in weights.items()}
    for line in _layout(graph, by_table_key.keys()):
        members = [by_table_key[into] for into in line.into]
        stored = np.empty(stored_shape(line, tuple(weight for _, weight in members)), np.float32)
        places = np.arange(stored.size).reshape(stored.shape)
        for key, weight in members:
            (source,) = (s for s in sources(graph, key) if s.tensor == line.tensor)
            # The ops say which stored places a weight is read from: writing to these inverts them.
            stored.reshape(-1)[apply_ops(places, source.ops)] = random_weight(weight, rng)
        name = line.tensor.replace("{layer}", str(layer))
        parts = {name: stored}
        if "{expert}" in name:
            parts = {name.replace("{expert}", str(e)): part.copy() for e, part in enumerate(stored)}
        for tensor, values in parts.items():
            yield from (packed_tensors(tensor, values, line.packed) if line.packed else {tensor: values}).items()


def writes_packed(graph: Graph, dtype: str) -> bool:
    """Whether every expert matrix of a random checkpoint is written as 4-bit values in `dtype`."""
    for _, layer in graph.layers():
        by_table_key = {table_key(graph, key): weight for key, weight in layer_weights(graph, layer).items()}
        for line in _layout(graph, by_table_key):
            stored = PACKED[line.packed].dtype if line.packed else None
            if stored != dtype and any(by_table_key[into].role == "expert" for into in line.into):
                return False
    return True


def _layout(graph: Graph, keys: Iterable[str]) -> list[TensorMap]:
    """The first lines of the table that hold each of the keys exactly once."""
    assert graph.checkpoint is not None
    left, chosen = set(keys), list[TensorMap]()
    for line in graph.checkpoint.tensors:
        if left.issuperset(line.into):
            left -= set(line.into)
            chosen.append(line)
    assert not left, f"{graph.name}: the checkpoint table has no place for {', '.join(sorted(left))}"
    return chosen
