"""The graph: exact counts, layer order, overrides, and the checkpoint table against recorded checkpoints."""

import math
from collections.abc import Callable
from dataclasses import replace
from fnmatch import fnmatch
from pathlib import Path

import numpy as np
import pytest
from safetensors import safe_open

from moec.blocks.core.array_info import Op, Source
from moec.compiler.graph.count import active_params, kv_values_per_token, slot_values, total_params
from moec.compiler.graph.ir import Branch, Graph, Group
from moec.compiler.graph.show import show_graph
from moec.compiler.graph.sources import sources, stored_shape
from moec.compiler.graph.verify import verify_graph
from moec.compiler.graph.weights import all_weights, layer_weights, model_weights, table_key
from moec.compiler.spec.load import list_models, load

GOLDEN = Path(__file__).parents[1] / "cases" / "graph"
BASE = Path(__file__).parents[1] / "cases" / "spec" / "base.yaml"


@pytest.mark.parametrize(
    ("model", "total", "active"),
    [
        ("qwen3.5-397b-a17b", 396_346_350_336, 17_349_036_800),
        ("qwen3.5-122b-a10b", 122_111_526_912, 9_771_285_504),
        ("qwen3.5-35b-a3b", 34_660_610_688, 3_454_986_880),
        ("qwen3-30b-a3b", 30_532_122_624, 3_353_030_656),
        ("mixtral-8x7b", 46_702_792_704, 12_879_921_152),
        ("tiny/qwen3_5_moe", 337_832, 190_312),
        ("tiny/qwen3_5_moe_bf16_published", 9_868_816, 3_478_800),
        ("tiny/qwen3_moe", 281_280, 133_760),
        ("tiny/mixtral", 674_368, 231_936),
    ],
)
def test_parameter_counts(model: str, total: int, active: int) -> None:
    graph = load(model).graph
    assert (total_params(graph), active_params(graph)) == (total, active)


@pytest.mark.parametrize(
    ("model", "kv_bytes_bf16", "state_mib_f32", "conv_mib_bf16"),
    [
        ("qwen3.5-397b-a17b", 30_720, 180, 3.16),
        ("qwen3.5-122b-a10b", 24_576, 144, 2.53),
        ("qwen3.5-35b-a3b", 20_480, 60, 1.41),
    ],
)
def test_state_sizes(model: str, kv_bytes_bf16: int, state_mib_f32: int, conv_mib_bf16: float) -> None:
    graph = load(model).graph
    gdn = next(layer.blocks[0] for _, layer in graph.layers()).fields.model_dump()
    num_gdn = len(graph.layers_of("gdn"))
    state = num_gdn * gdn["num_v_heads"] * gdn["head_dim"] ** 2
    assert 2 * kv_values_per_token(graph) == kv_bytes_bf16
    assert state * 4 == state_mib_f32 * 2**20
    assert (slot_values(graph) - state) * 2 / 2**20 == pytest.approx(conv_mib_bf16, abs=0.006)


def test_layer_order() -> None:
    graph = load("qwen3.5-397b-a17b").graph
    order = [(index, layer.blocks[0].name) for index, layer in graph.layers()]
    assert order == [(i, "gqa" if (i + 1) % 4 == 0 else "gdn") for i in range(60)]
    assert graph.groups[0].layer_indices(3) == tuple(range(3, 60, 4))


@pytest.mark.parametrize("model", list_models())
def test_graphs_verify(model: str) -> None:
    assert verify_graph(load(model).graph) == []


def test_verify_finds_broken_graphs() -> None:
    graph = load(str(BASE)).graph
    group = graph.groups[0]
    shifted = replace(graph, groups=(replace(group, first_layer=1),))
    assert any("starts at layer 1" in str(one) for one in verify_graph(shifted))
    first, *rest = group.layers[0].additions
    inst = first.branches[0].inst
    wider = replace(inst, fields=inst.fields.model_copy(update={"num_v_heads": 8}))
    other = replace(group.layers[0], additions=(replace(first, branches=(Branch(wider),)), *rest))
    clash = replace(graph, groups=(Group(1, (other, *group.layers[1:]), 0),))
    assert any("share a name" in str(one) for one in verify_graph(clash))
    assert graph.checkpoint is not None
    bare = replace(graph, checkpoint=replace(graph.checkpoint, tensors=graph.checkpoint.tensors[1:]))
    (problem,) = verify_graph(bare)
    assert str(problem) == 'error: base["embed.table"]: has no source in the checkpoint table'


def test_overridden_entries_become_their_own_instances(tmp_path: Path) -> None:
    pattern = "[gdn, {mixer: gqa, override: {mixer: {rope: {theta: 5.0e5}}, ffn: {router: {top_k: 4}}}}, gdn, gqa]"
    path = tmp_path / "spec.yaml"
    path.write_text(BASE.read_text().replace("[gdn, gdn, gdn, gqa]", pattern))
    graph = load(str(path)).graph
    assert list(graph.blocks()) == ["gdn", "moe", "gqa_2", "moe_2", "gqa"]
    changed = graph.blocks()["gqa_2"].fields.model_dump()
    assert changed["rope"] == {"dim": 8, "theta": 5.0e5, "pairing": "half", "scaling": None}
    assert graph.blocks()["moe_2"].fields.model_dump()["router"]["top_k"] == 4
    assert sources(graph, "gqa_2.w_q") == sources(graph, "gqa.w_q") != ()
    assert verify_graph(graph) == []


def test_tied_head_has_no_own_matrix(tmp_path: Path) -> None:
    path = tmp_path / "spec.yaml"
    text = BASE.read_text().replace("tied: false", "tied: true").replace('    "head.weight": head.w\n', "")
    path.write_text(text)
    graph = load(str(path)).graph
    assert "head.w" not in model_weights(graph)
    assert total_params(graph) == total_params(load(str(BASE)).graph) - 64 * 256


def test_sources_of_split_interleave_and_plain() -> None:
    graph = load(str(BASE)).graph
    assert sources(graph, "gdn.w_k") == (Source("model.{layer}.qkv", (("slice", -2, 32, 64), ("transpose",))),)
    assert sources(graph, "gdn.conv_v") == (Source("model.{layer}.conv", (("slice", -2, 64, 128),)),)
    assert sources(graph, "moe.w_up") == (Source("model.{layer}.gate_up", (("stride", -2, 1, 2), ("transpose",))),)
    assert sources(graph, "moe.w_down") == (Source("model.{layer}.{expert}.down", (("transpose",),)),)
    assert sources(graph, "gdn.a_log") == (Source("model.{layer}.A_log"),)
    assert sources(graph, "embed.table") == (Source("model.embed.weight"),)


def test_untransposed_storage_is_cut_on_its_last_dim(tmp_path: Path) -> None:
    path = tmp_path / "spec.yaml"
    rule = "{interleave: [moe.w_gate, moe.w_up]"
    path.write_text(BASE.read_text().replace(rule, rule + ", transpose: false"))
    graph = load(str(path)).graph
    assert sources(graph, "moe.w_up") == (Source("model.{layer}.gate_up", (("stride", -1, 1, 2),)),)


def test_several_layouts_are_alternatives_in_table_order() -> None:
    found = sources(load("qwen3.5-397b-a17b").graph, "moe.w_gate")
    assert [one.tensor for one in found] == [
        f"{prefix}layers.{{layer}}.mlp.experts.{name}"
        for name in ("gate_up_proj", "{expert}.gate_proj.weight")
        for prefix in ("model.language_model.", "model.")
    ]


def _apply(op: Op, array: np.ndarray) -> np.ndarray:
    """What the ops of a Source mean (see blocks/core/array_info.py)."""
    name, *args = op
    if name == "transpose":
        return np.swapaxes(array, -1, -2)
    numbers = [int(arg) for arg in args]
    if name == "stack":
        return array.reshape(numbers[0], -1, array.shape[-1])
    if name == "group_slice":
        dim, groups, first, last = numbers
        return np.concatenate([run[first:last] for run in np.split(np.moveaxis(array, dim, 0), groups)]).swapaxes(
            0, dim
        )
    dim, first, last = numbers
    index = [slice(None)] * array.ndim
    index[dim] = slice(first, last) if name == "slice" else slice(first, None, last)
    return array[tuple(index)]


def test_sources_of_groups_flat_and_packed_tensors() -> None:
    graph = load(str(PACKED[0])).graph
    t = ("transpose",)
    # Two groups of [32 query, 16 key, 16 value] rows.
    cuts = {"w_q": (0, 32), "w_k": (32, 48), "w_v": (48, 64)}
    for key, (start, stop) in cuts.items():
        assert sources(graph, f"gqa.{key}") == (Source("{layer}.qkv", (("group_slice", -2, 2, start, stop), t)),)
    packed, alone = sources(graph, "moe.w_up")
    assert packed == Source("{layer}.gate_up_blocks", (("stride", -2, 1, 2), t), "mxfp4")
    assert alone == Source("{layer}.gate_up", (("stride", -1, 1, 2),))
    packed, flat = sources(load(str(PACKED[1])).graph, "moe.w_gate")
    assert packed == Source("{layer}.{expert}.gate_up.weight_packed", (("slice", -2, 0, 128), t), "int4")
    assert flat == Source("{layer}.w1", (("stack", 4), t))


PACKED = sorted((Path(__file__).parents[1] / "numerics" / "specs").glob("packed_*.yaml"), reverse=True)


@pytest.mark.parametrize("model", [*(name for name in list_models() if name.startswith("tiny/")), *map(str, PACKED)])
def test_ops_give_the_weights_shapes(model: str) -> None:
    """Every table line's whole tensor, cut by each of its weights' ops, is the weight, and nothing is left over."""
    graph = load(model).graph
    assert graph.checkpoint is not None
    weights = all_weights(graph)
    for line in graph.checkpoint.tensors:
        shape = stored_shape(line, tuple(weights[key] for key in line.into))
        stored = np.arange(math.prod(shape)).reshape(shape)
        taken = []
        for key in line.into:
            array = stored
            for op in next(one for one in sources(graph, key) if one.tensor == line.tensor).ops:
                array = _apply(op, array)
            assert array.shape == weights[key].shape, key
            taken.append(array.ravel())
        np.testing.assert_array_equal(np.sort(np.concatenate(taken)), np.arange(stored.size))


def _expected(graph: Graph) -> dict[str, tuple[int, ...]]:
    """Every stored tensor the table speaks of, with its shape: layers and experts written out."""
    assert graph.checkpoint is not None
    weights = all_weights(graph)
    found: dict[str, tuple[int, ...]] = {}
    for line in graph.checkpoint.tensors:
        shape = stored_shape(line, tuple(weights[key] for key in line.into))
        wanted = line.into[0]
        layers = [i for i, one in graph.layers() if wanted in {table_key(graph, k) for k in layer_weights(graph, one)}]
        for index in layers or [0]:
            name = line.tensor.replace("{layer}", str(index))
            if "{expert}" in name:
                found |= {name.replace("{expert}", str(expert)): shape[1:] for expert in range(shape[0])}
            else:
                found[name] = shape
    return found


def _stored_shapes(folder: Path) -> dict[str, tuple[int, ...]]:
    """Names and shapes in the safetensors files; dims of size 1 beyond matrices are dropped, as loading does."""
    found = {}
    for path in folder.glob("*.safetensors"):
        with safe_open(path, "np") as file:
            for key in file.keys():  # noqa: SIM118 (not a mapping)
                shape = tuple(file.get_slice(key).get_shape())
                found[key] = tuple(size for size in shape if size != 1) if len(shape) > 2 else shape
    return found


@pytest.mark.oracle
def test_table_names_every_tensor_of_the_oracle(oracle_dir: Path) -> None:
    """Names and shapes of a recorded checkpoint, exactly: nothing missing, nothing left over."""
    name = f"tiny/{oracle_dir.name}"
    graph = load(name).graph
    assert graph.checkpoint is not None
    stored = _stored_shapes(oracle_dir)
    kept = {key for key in stored if not any(fnmatch(key, pattern) for pattern in graph.checkpoint.ignore)}
    suffix = graph.checkpoint.scale_suffix
    scales = {key for key in kept if suffix is not None and key.endswith(suffix)}
    expected = _expected(graph)
    assert {key: stored[key] for key in kept - scales} == expected
    for key in scales:
        rows, cols = expected[key.removesuffix(str(suffix))]
        assert stored[key] == (math.ceil(rows / 128), math.ceil(cols / 128))


@pytest.mark.parametrize("model", ["tiny/qwen3_5_moe", "tiny/mixtral", "qwen3.5-397b-a17b"])
def test_shown_graph(model: str, golden: Callable[[Path, str], None]) -> None:
    golden(GOLDEN / f"{model.replace('/', '_')}.txt", show_graph(load(model).graph))
