"""The composed float32 reference against recordings, and what verification compares with it."""

from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file

from moec.compiler.graph.ir import Graph
from moec.compiler.graph.weights import all_weights
from moec.compiler.spec.load import load
from moec.compiler.verify.random_checkpoint import write_random_checkpoint
from moec.compiler.verify.reference import WeightOf, checkpoint_weights, forward
from moec.runtime.checkpoint import INDEX
from moec.runtime.errors import CheckpointError

# Both sides compute in float32 (logits of standard deviation about 1); 1.4e-5 seen.
TOLERANCE = 1e-4
TINY = ("mixtral", "qwen3_5_moe", "qwen3_5_moe_bf16_published", "qwen3_5_moe_fp8_published", "qwen3_moe")


def graph_of(name: str, *overrides: str) -> Graph:
    return load(f"tiny/{name}", overrides=overrides).graph


def test_recorded_hidden_states_and_logits(oracle_dir: Path) -> None:
    """Every layer of one full prompt of 37 tokens."""
    graph, recorded = graph_of(oracle_dir.name), np.load(oracle_dir / "ref.npz")
    meaning = forward(graph, checkpoint_weights(graph, oracle_dir), recorded["ids_a"][0])
    assert len(meaning.hidden) == graph.num_layers + 1
    for i, hidden in enumerate(meaning.hidden):
        wanted = recorded[f"hidden_a_{i}"][0]
        assert np.abs(hidden - wanted).max() <= TOLERANCE * np.sqrt(np.mean(wanted**2)), f"hidden_a_{i}"
    assert np.abs(meaning.logits - recorded["logits_a"][0]).max() <= TOLERANCE


def test_reference_is_causal(oracle_dirs: dict[str, Path]) -> None:
    graph = graph_of("qwen3_5_moe")
    weight_of = checkpoint_weights(graph, oracle_dirs["qwen3_5_moe"])
    ids = list(range(3, 15))
    # Of one length: a product of other shapes sums in another order on some CPUs.
    one, other = (forward(graph, weight_of, ids[:5] + rest) for rest in (ids[5:], ids[:4:-1]))
    np.testing.assert_array_equal(one.hidden[:, :5], other.hidden[:, :5])
    assert not np.array_equal(one.hidden[:, 5:], other.hidden[:, 5:])


@pytest.mark.parametrize("name", TINY)
def test_random_checkpoint_holds_every_weight(name: str, tmp_path: Path) -> None:
    """Whatever the layout (split, stacked, per expert), each weight comes back in its declared shape, drawn once."""
    graph = graph_of(name)
    write_random_checkpoint(graph, tmp_path, seed=3)
    weight_of: WeightOf = checkpoint_weights(graph, tmp_path)
    stored = sum(tensor.size for tensor in load_file(tmp_path / "model.safetensors").values())
    read = 0
    for key, layers in layers_of(graph).items():
        for layer in layers:
            value = weight_of(key, layer)
            assert value.shape == all_weights(graph)[key].shape, key
            assert value.std() > 0.01, key
            read += value.size
    assert read == stored


def layers_of(graph: Graph) -> dict[str, list[int | None]]:
    """Each weight's layers, [None] outside the layers."""
    found: dict[str, list[int | None]] = {}
    for key in all_weights(graph):
        block = key.partition(".")[0]
        users = [i for i, layer in graph.layers() if block in ("layer", *(inst.name for inst in layer.blocks))]
        found[key] = [*users] if users else [None]
    return found


def test_random_checkpoint_in_shards(tmp_path: Path) -> None:
    graph = graph_of("qwen3_moe")
    write_random_checkpoint(graph, tmp_path / "one", seed=1)
    write_random_checkpoint(graph, tmp_path / "three", seed=1, shards=3)
    assert len(list((tmp_path / "three").glob("*.safetensors"))) == 3
    assert (tmp_path / "three" / INDEX).is_file()
    one, three = (checkpoint_weights(graph, tmp_path / name) for name in ("one", "three"))
    np.testing.assert_array_equal(one("moe.w_down", 3), three("moe.w_down", 3))
    assert not np.array_equal(one("moe.w_down", 3), one("moe.w_down", 2))


def test_missing_weight_is_named(tmp_path: Path) -> None:
    write_random_checkpoint(graph_of("qwen3_moe"), tmp_path)
    with pytest.raises(CheckpointError, match=r"gdn\.w_q, layer 0: not in the checkpoint"):
        checkpoint_weights(graph_of("qwen3_5_moe"), tmp_path)("gdn.w_q", 0)
