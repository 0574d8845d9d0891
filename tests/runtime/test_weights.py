"""Loading every layout onto meshes: values against plain numpy, shardings against the rules, host memory measured."""

import tracemalloc
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from moec.blocks.core.array_info import ArrayInfo, Source
from moec.blocks.core.program import abstract_arrays, make_mesh
from moec.blocks.core.quant import dequantize_on_host, quantize_on_host
from moec.runtime.errors import CheckpointError
from moec.runtime.placement import HostFill
from moec.runtime.weights import load_weights

# D hidden, I expert width (both with a short last scale block), E experts, L layers, V vocabulary
D, I, E, L, V = 160, 192, 4, 4, 16  # noqa: E741
HEAD = 8
EVEN, ODD = (0, 2), (1, 3)
RULES = {"experts": ("data",), "expert_intermediate": ("tensor",), "heads": ("tensor",), "vocab": ("tensor", "data")}
MESHES = {"1-device": {}, "8-devices": {"data": 4, "tensor": 2}}
Tree = dict[str, Any]
Tensors = dict[str, np.ndarray]
Write = Callable[[Path, list[Tensors]], Path]


def both(name: str, *ops: tuple) -> tuple[Source, ...]:
    return tuple(Source(prefix + name, ops) for prefix in ("model.language_model.", "model."))


def experts(name: str, start: int, stop: int, single: str) -> tuple[Source, ...]:
    """Stacked, cut out of a fused tensor where it does not take all of it, or one by one."""
    cut = (("slice", -2, start, stop),) if stop - start < 2 * I and name == "gate_up_proj" else ()
    stacked = both(f"layers.{{layer}}.experts.{name}", *cut, ("transpose",))
    return (*stacked, *both(f"layers.{{layer}}.experts.{{expert}}.{single}.weight", ("transpose",)))


def declared(dtype: str, expert_dtype: str) -> Tree:
    """A weight tree with every op: slice, stride, transpose, repeat, dropped dims, stacks, scales."""
    t = ("transpose",)
    up, down = (None, "experts", None, "expert_intermediate"), (None, "experts", "expert_intermediate", None)
    every = tuple(range(L))
    stacks = {
        "w_gate": ArrayInfo((L, E, D, I), expert_dtype, up, experts("gate_up_proj", 0, I, "gate_proj"), every),
        "w_up": ArrayInfo((L, E, D, I), expert_dtype, up, experts("gate_up_proj", I, 2 * I, "up_proj"), every),
        "w_down": ArrayInfo((L, E, I, D), expert_dtype, down, experts("down_proj", 0, D, "down_proj"), every),
    }
    if expert_dtype == "float8_e4m3fn":
        for key, axes in (("w_gate", up), ("w_up", up), ("w_down", down)):
            stacks[f"{key}_scale"] = ArrayInfo((L, E, 2, 2), "float32", axes, (), every, scale_of=key)
    qkv, ab, heads = "layers.{layer}.qkv.weight", "layers.{layer}.ab.weight", (None, None, "heads")
    k_ops = (("slice", -2, 32, 48), t, ("repeat", -1, HEAD, 2))
    return {
        "embed": {"table": ArrayInfo((V, D), dtype, ("vocab", None), both("embed_tokens.weight"))},
        "final_norm": ArrayInfo((D,), dtype, (None,), both("norm.weight")),
        "head": {"w": ArrayInfo((D, V), dtype, (None, "vocab"), (Source("lm_head.weight", (t,)),))},
        "group0": {
            "layer0": {
                "w_q": ArrayInfo((2, D, 32), dtype, heads, both(qkv, ("slice", -2, 0, 32), t), EVEN),
                "w_k": ArrayInfo((2, D, 32), dtype, heads, both(qkv, *k_ops), EVEN),
                "conv": ArrayInfo((2, 12, 4), dtype, (None, "heads", None), both("layers.{layer}.conv1d.weight"), EVEN),
                "a_log": ArrayInfo((2, 6), "float32", (None, "heads"), both("layers.{layer}.A_log"), EVEN),
                "gate": ArrayInfo((2, D, 1), dtype, (None, None, None), both("layers.{layer}.gate.weight", t), EVEN),
            },
            "layer1": {
                "w_a": ArrayInfo((2, D, 6), dtype, heads, both(ab, ("stride", -2, 0, 2), t), ODD),
                "w_b": ArrayInfo((2, D, 6), dtype, heads, both(ab, ("stride", -2, 1, 2), t), ODD),
            },
        },
        "stacks": {"moe": stacks},
    }  # fmt: skip


def program(dtype: str = "float32", expert_dtype: str = "float32") -> Any:
    return SimpleNamespace(
        weights=lambda: declared(dtype, expert_dtype),
        RULES=RULES,
        IGNORE=("mtp.*", "model.visual.*"),
        SCALE_SUFFIX="_scale_inv",
        SCALE_BLOCK=(128, 128),
    )


def mesh_of(name: str) -> Mesh:
    axes = MESHES[name] or {"data": 1, "tensor": 1}
    return make_mesh(jax.devices()[: int(np.prod(list(axes.values())))], axes)


@pytest.fixture(scope="module")
def model() -> Tree:
    """Logical values by weight, float32: what the program should see."""
    rng = np.random.default_rng(1)

    def draw(*shape: int) -> np.ndarray:
        return rng.standard_normal(shape, np.float32)

    return {
        "table": draw(V, D), "norm": draw(D), "head": draw(D, V),
        "w_q": draw(2, D, 32), "w_k": draw(2, D, 16), "conv": draw(2, 12, 4), "a_log": draw(2, 6),
        "gate": draw(2, D, 1), "w_a": draw(2, D, 6), "w_b": draw(2, D, 6),
        "w_gate": draw(L, E, D, I), "w_up": draw(L, E, D, I), "w_down": draw(L, E, I, D),
    }  # fmt: skip


def common(model: Tree, prefix: str) -> Tensors:
    """Everything but the experts, stored as Hugging Face does: [out, in], fused, with idle dims."""
    found = {f"{prefix}embed_tokens.weight": model["table"], f"{prefix}norm.weight": model["norm"]}
    found["lm_head.weight"] = model["head"].T
    for n, layer in enumerate(EVEN):
        own = f"{prefix}layers.{layer}."
        v_rows = np.zeros((0, D), np.float32)
        found[own + "qkv.weight"] = np.concatenate([model["w_q"][n].T, model["w_k"][n].T, v_rows])
        found[own + "conv1d.weight"] = model["conv"][n][:, None, :]
        found[own + "A_log"] = model["a_log"][n].reshape(1, 1, 6, 1)
        found[own + "gate.weight"] = model["gate"][n].T
    for n, layer in enumerate(ODD):
        pair = np.stack([model["w_a"][n].T, model["w_b"][n].T], axis=1)
        found[f"{prefix}layers.{layer}.ab.weight"] = pair.reshape(12, D)
    return found


def stacked(model: Tree) -> list[Tensors]:
    """bfloat16, experts fused and stacked, two shards."""
    prefix = "model.language_model."
    tensors = common(model, prefix) | {"mtp.fc.weight": model["norm"], "model.visual.x": np.zeros(3, np.int32)}
    for layer in range(L):
        own = f"{prefix}layers.{layer}.experts."
        halves = [model[key][layer].swapaxes(-1, -2) for key in ("w_gate", "w_up")]
        tensors[own + "gate_up_proj"] = np.concatenate(halves, axis=1)
        tensors[own + "down_proj"] = model["w_down"][layer].swapaxes(-1, -2)
    shards: list[Tensors] = [{}, {}]
    for i, (name, value) in enumerate(tensors.items()):
        shards[i % 2][name] = value if value.dtype == np.int32 else value.astype(ml_dtypes.bfloat16)
    return shards


def matrices(model: Tree) -> Tensors:
    """Experts one by one, [out, in] float32."""
    names = {"w_gate": "gate_proj", "w_up": "up_proj", "w_down": "down_proj"}
    return {
        f"model.layers.{layer}.experts.{e}.{name}.weight": model[key][layer, e].T
        for key, name in names.items()
        for layer in range(L)
        for e in range(E)
    }


def single(model: Tree) -> list[Tensors]:
    """float32, experts one by one, one file."""
    return [common(model, "model.") | matrices(model)]


def quantised(model: Tree) -> list[Tensors]:
    """Experts and qkv in float8 with bfloat16 block scales, the rest bfloat16."""
    tensors: Tensors = {}
    for name, value in (common(model, "model.") | matrices(model)).items():
        if ".experts." not in name and ".qkv." not in name:
            tensors[name] = value.astype(ml_dtypes.bfloat16)
            continue
        _, scale = quantize_on_host(value, "float8_e4m3fn")
        tensors[name + "_scale_inv"] = scale.astype(ml_dtypes.bfloat16)
        rough = dequantize_on_host(np.ones(value.shape, ml_dtypes.float8_e4m3fn), tensors[name + "_scale_inv"])
        tensors[name] = np.clip(value / rough, -448, 448).astype(ml_dtypes.float8_e4m3fn)
    names = list(tensors)
    return [{n: tensors[n] for n in names[: len(names) // 2]}, {n: tensors[n] for n in names[len(names) // 2 :]}]


LAYOUTS = {"single": single, "stacked": stacked, "quantised": quantised}


def as_stored(model: Tree, layout: str) -> Tree:
    """The logical values after the rounding of the layout."""
    if layout == "single":
        return model
    rounded = {key: value.astype(ml_dtypes.bfloat16).astype(np.float32) for key, value in model.items()}
    if layout == "stacked":
        return rounded
    tensors = {name: value for shard in quantised(model) for name, value in shard.items()}

    def read(name: str) -> np.ndarray:
        return dequantize_on_host(tensors[name], tensors[name + "_scale_inv"]).T

    for key, name in {"w_gate": "gate_proj", "w_up": "up_proj", "w_down": "down_proj"}.items():
        layers = [[read(f"model.layers.{i}.experts.{e}.{name}.weight") for e in range(E)] for i in range(L)]
        rounded[key] = np.stack([np.stack(layer) for layer in layers])
    qkv = np.stack([read(f"model.layers.{layer}.qkv.weight") for layer in EVEN])
    return rounded | {"w_q": qkv[..., :32], "w_k": qkv[..., 32:]}


def in_program(values: Tree) -> Tree:
    """The weight tree as the program declares it."""
    twice = values["w_k"].reshape(2, D, 2, 1, HEAD).repeat(2, axis=3).reshape(2, D, 32)
    layer0 = {key: values[key] for key in ("w_q", "conv", "a_log", "gate")} | {"w_k": twice}
    return {
        "embed": {"table": values["table"]},
        "final_norm": values["norm"],
        "head": {"w": values["head"]},
        "group0": {"layer0": layer0, "layer1": {"w_a": values["w_a"], "w_b": values["w_b"]}},
        "stacks": {"moe": {key: values[key] for key in ("w_gate", "w_up", "w_down")}},
    }


def assert_trees_equal(found: Tree, expected: Tree) -> None:
    paths = [jax.tree_util.keystr(path) for path, _ in jax.tree_util.tree_leaves_with_path(found)]
    assert jax.tree.structure(found) == jax.tree.structure(expected)
    for path, a, b in zip(paths, jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        np.testing.assert_array_equal(np.asarray(a, np.float32), np.asarray(b, np.float32), err_msg=path)


@pytest.fixture(scope="module")
def folders(model: Tree, tmp_path_factory: pytest.TempPathFactory, write_checkpoint: Write) -> dict[str, Path]:
    return {name: write_checkpoint(tmp_path_factory.mktemp(name), make(model)) for name, make in LAYOUTS.items()}


@pytest.mark.parametrize("whole_bytes", [0, 1 << 30], ids=["layer-by-layer", "whole"])
@pytest.mark.parametrize("mesh", MESHES)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_layout_gives_the_same_weights(
    folders: dict[str, Path], model: Tree, layout: str, mesh: str, whole_bytes: int
) -> None:
    found = load_weights(program(), mesh_of(mesh), folders[layout], whole_bytes=whole_bytes)
    assert_trees_equal(found, in_program(as_stored(model, layout)))


def test_arrays_have_the_declared_dtypes_and_shardings(folders: dict[str, Path], model: Tree) -> None:
    mesh = mesh_of("8-devices")
    found = load_weights(program("bfloat16", "bfloat16"), mesh, folders["single"], whole_bytes=0)
    w_up = found["stacks"]["moe"]["w_up"]
    assert w_up.sharding == NamedSharding(mesh, PartitionSpec(None, "data", None, "tensor"))
    assert {shard.data.shape for shard in w_up.addressable_shards} == {(L, E // 4, D, I // 2)}
    assert found["embed"]["table"].sharding.spec == PartitionSpec(("tensor", "data"), None)
    assert {str(a.dtype) for a in jax.tree.leaves(found["stacks"])} == {"bfloat16"}
    assert str(found["group0"]["layer0"]["a_log"].dtype) == "float32"
    rounded = model["w_up"].astype(ml_dtypes.bfloat16)
    np.testing.assert_array_equal(np.asarray(w_up, np.float32), rounded.astype(np.float32))


@pytest.mark.parametrize("whole_bytes", [0, 1 << 30], ids=["layer-by-layer", "whole"])
@pytest.mark.parametrize("mesh", MESHES)
def test_float8_experts_keep_the_stored_bits(
    folders: dict[str, Path], model: Tree, mesh: str, whole_bytes: int
) -> None:
    wanted = program(expert_dtype="float8_e4m3fn")
    moe = load_weights(wanted, mesh_of(mesh), folders["quantised"], whole_bytes=whole_bytes)["stacks"]["moe"]
    stored = {name: value for shard in quantised(model) for name, value in shard.items()}
    for layer in range(L):
        for e in range(E):
            name = f"model.layers.{layer}.experts.{e}.down_proj.weight"
            q, scale = np.asarray(moe["w_down"][layer, e]), np.asarray(moe["w_down_scale"][layer, e])
            assert q.dtype == ml_dtypes.float8_e4m3fn and scale.dtype == np.float32
            np.testing.assert_array_equal(q.view(np.uint8), stored[name].T.view(np.uint8))
            np.testing.assert_array_equal(scale, stored[name + "_scale_inv"].T.astype(np.float32))
    expected = as_stored(model, "quantised")
    for key in ("w_gate", "w_up", "w_down"):
        np.testing.assert_array_equal(
            dequantize_on_host(np.asarray(moe[key]), np.asarray(moe[f"{key}_scale"])), expected[key], err_msg=key
        )


@pytest.mark.parametrize("layout", ["single", "stacked"])
def test_float8_experts_are_quantised_from_floats(folders: dict[str, Path], model: Tree, layout: str) -> None:
    wanted = program(expert_dtype="float8_e4m3fn")
    moe = load_weights(wanted, mesh_of("8-devices"), folders[layout], whole_bytes=0)["stacks"]["moe"]
    for key, value in as_stored(model, layout).items():
        if key not in moe:
            continue
        back = dequantize_on_host(np.asarray(moe[key]), np.asarray(moe[f"{key}_scale"]))
        # e4m3 has 3 mantissa bits: at most 2^-4 off, and near zero half the smallest step of 2^-9 scales.
        scale = np.asarray(moe[f"{key}_scale"]).max()
        assert (np.abs(back - value) <= np.maximum(np.abs(value) / 16, scale * 2**-10) * 1.001).all()
        assert np.abs(np.asarray(moe[key], np.float32)).max() == 448  # every block uses the full range


def test_conversions_that_lose_bits_are_told(folders: dict[str, Path]) -> None:
    def notes(wanted: Any, layout: str) -> list[str]:
        lines: list[str] = []
        load_weights(wanted, mesh_of("1-device"), folders[layout], on_note=lines.append)
        lines = [line.removeprefix(f"loading {folders[layout].name}: ") for line in lines]
        return [line for line in lines if "relative error" not in line]

    every = [f"stored as {dtype}" for dtype in ("float32", "bfloat16")]
    experts = "moe.w_gate, moe.w_up, moe.w_down"
    quantised = "quantised to float8_e4m3fn (one scale per 128 x 128 block)"
    # Fused and stacked: 2 tensors per layer hold the 3 weights; one by one: 3 per layer and expert.
    assert notes(program("bfloat16", "float8_e4m3fn"), "stacked") == [
        f"{quantised}: {2 * L} tensors {every[1]} ({experts})"
    ]
    assert notes(program("bfloat16", "float8_e4m3fn"), "single") == [
        f"rounded to bfloat16: 11 tensors {every[0]} (embed.table, final_norm, head.w, layer0.w_q and 5 more)",
        f"{quantised}: {3 * L * E} tensors {every[0]} ({experts})",
    ]
    # Values times scales are float32, whatever they are stored as.
    assert notes(program("bfloat16", "bfloat16"), "quantised") == [
        f"rounded to bfloat16: {2 + 3 * L * E} tensors stored as float8_e4m3fn "
        "(layer0.w_q, layer0.w_k, moe.w_gate, moe.w_up and 1 more)"
    ]
    assert notes(program(expert_dtype="float8_e4m3fn"), "quantised") == []
    assert [notes(program(), layout) for layout in LAYOUTS] == [[], [], []]


def test_conversions_go_to_stderr_unless_taken(folders: dict[str, Path], capsys: pytest.CaptureFixture[str]) -> None:
    load_weights(program(expert_dtype="float8_e4m3fn"), mesh_of("1-device"), folders["stacked"])
    line, *errors = capsys.readouterr().err.splitlines()
    assert line.startswith(f"loading {folders['stacked'].name}: quantised to float8_e4m3fn")
    wanted = [f"stacks.moe.{key} in float8_e4m3fn: relative error at most" for key in ("w_gate", "w_up", "w_down")]
    for key, error in zip(wanted, errors, strict=True):
        assert error.startswith(f"loading {folders['stacked'].name}: {key}") and error.endswith(" 0 saturated")


def test_a_cut_through_scale_blocks_is_refused(tmp_path: Path, model: Tree, write_checkpoint: Write) -> None:
    """Stacked float8 experts whose gate and up halves meet inside a 128-row block."""
    (bf16, more) = stacked(model)
    tensors = {**bf16, **more}
    for layer in range(L):
        for part in ("gate_up_proj", "down_proj"):
            name = f"model.language_model.layers.{layer}.experts.{part}"
            tensors[name], tensors[name + "_scale_inv"] = quantize_on_host(
                tensors[name].astype(np.float32), "float8_e4m3fn"
            )
    folder, name = write_checkpoint(tmp_path, [tensors]), "model.language_model.layers.{}.experts.gate_up_proj"
    with pytest.raises(CheckpointError) as caught:
        load_weights(program(expert_dtype="float8_e4m3fn"), mesh_of("1-device"), folder)
    assert caught.value.messages[:2] == tuple(
        f"{name.format(0)}: stacks.moe.{key} would cut through its (128, 128) scale blocks"
        for key in ("w_gate", "w_up")
    )
    assert len(caught.value.messages) == 2 * L
    found = load_weights(program(), mesh_of("1-device"), folder)  # as floats they can be cut anywhere
    fused = dequantize_on_host(tensors[name.format(3)], tensors[name.format(3) + "_scale_inv"])
    np.testing.assert_array_equal(found["stacks"]["moe"]["w_up"][3], fused[:, I:].swapaxes(-1, -2))


def test_progress_ends_at_the_total(folders: dict[str, Path]) -> None:
    seen: list[tuple[str, int, int]] = []
    load_weights(program(), mesh_of("1-device"), folders["single"], lambda *step: seen.append(step))
    names, done, totals = zip(*seen, strict=True)
    assert list(done) == sorted(done) and done[-1] == totals[0] and len(set(totals)) == 1
    assert names.count("stacks.moe.w_up") == L and names.count("final_norm") == 1
    nbytes = sum(np.prod(info.shape) * 4 for info in jax.tree.leaves(declared("float32", "float32")))
    assert totals[0] == nbytes


class TestHostMemory:
    """The largest sum of live Python and numpy allocations while loading (mapped file pages are not among them)."""

    LAYERS, EXPERTS, ROWS, COLUMNS = 6, 8, 256, 1024
    LAYER_BYTES = EXPERTS * ROWS * COLUMNS * 4

    def folder(self, tmp_path: Path, layout: str, write: Write) -> Path:
        matrix = np.ones((self.COLUMNS, self.ROWS), ml_dtypes.bfloat16)
        if layout == "stacked":
            whole = np.broadcast_to(matrix, (self.EXPERTS, *matrix.shape))
            return write(tmp_path, [{f"layers.{i}.up": whole for i in range(self.LAYERS)}])
        names = [f"layers.{i}.{e}.up" for i in range(self.LAYERS) for e in range(self.EXPERTS)]
        return write(tmp_path, [dict.fromkeys(names, matrix)])

    def program(self) -> Any:
        sources = tuple(Source(name, (("transpose",),)) for name in ("layers.{layer}.up", "layers.{layer}.{expert}.up"))
        shape = (self.LAYERS, self.EXPERTS, self.ROWS, self.COLUMNS)
        info = ArrayInfo(shape, "float32", (None, "experts", None, None), sources, tuple(range(self.LAYERS)))
        plain = {"RULES": {"experts": ("data",)}, "IGNORE": (), "SCALE_SUFFIX": None, "SCALE_BLOCK": None}
        return SimpleNamespace(weights=lambda: {"up": info}, **plain)

    @pytest.mark.parametrize("layout", ["stacked", "single"])
    def test_never_above_one_layer_of_a_stack(self, tmp_path: Path, layout: str, write_checkpoint: Write) -> None:
        folder, mesh = self.folder(tmp_path, layout, write_checkpoint), make_mesh(jax.devices(), {"data": 8})
        load_weights(self.program(), mesh, folder)  # compile first
        peak, loaded = self._peak(lambda: load_weights(self.program(), mesh, folder))
        assert self.LAYER_BYTES <= peak < 1.3 * self.LAYER_BYTES
        assert (jnp.sum(loaded["up"]) == np.prod(loaded["up"].shape)).item()

    def test_the_measure_would_see_a_whole_stack(self, tmp_path: Path, write_checkpoint: Write) -> None:
        folder, mesh = self.folder(tmp_path, "stacked", write_checkpoint), make_mesh(jax.devices(), {"data": 8})
        peak, _ = self._peak(lambda: load_weights(self.program(), mesh, folder, whole_bytes=1 << 40))
        assert peak >= self.LAYERS * self.LAYER_BYTES

    def _peak(self, call: Callable[[], Any]) -> tuple[int, Any]:
        tracemalloc.start()
        try:
            found = call()
            return tracemalloc.get_traced_memory()[1], found
        finally:
            tracemalloc.stop()


def test_pinned_rows_are_laid_out_row_by_row_and_steps_take_them() -> None:
    """On CPUs every array is: what is tested is that arrays, abstract arrays and compiled steps agree."""
    info = ArrayInfo((16, 5), "bfloat16", ("vocab", None), row_major=True)
    mesh = make_mesh(jax.devices(), {"data": 8})
    fill = HostFill(info, NamedSharding(mesh, PartitionSpec("data", None)))
    fill.layer(0)[:] = np.arange(80).reshape(16, 5)
    table = fill.result()
    (shape,) = jax.tree.leaves(abstract_arrays({"table": info}, {"vocab": ("data",)}, mesh))
    assert shape.format.layout.major_to_minor == table.format.layout.major_to_minor == (0, 1)
    assert shape.sharding == table.sharding
    step = jax.jit(lambda table: table[3]).lower(shape).compile()
    assert np.array_equal(np.asarray(step(table), np.float32), np.arange(15, 20))
