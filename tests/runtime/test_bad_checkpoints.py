"""Every case of tests/cases/checkpoint damages one good checkpoint and promises the exact messages."""

import json
import re
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import ml_dtypes
import numpy as np
import pytest
import yaml

from moec.blocks.core.array_info import ArrayInfo, Source
from moec.blocks.core.program import make_mesh
from moec.runtime.checkpoint import DTYPES, INDEX
from moec.runtime.errors import CheckpointError, fold
from moec.runtime.weights import load_weights

CASES = Path(__file__).parent.parent / "cases" / "checkpoint"
PREFIXES = ("model.language_model.", "model.")
Shards = list[dict[str, np.ndarray]]


def sources(name: str, *ops: tuple) -> tuple[Source, ...]:
    return tuple(Source(prefix + name, ops) for prefix in PREFIXES)


def stack(shape: tuple[int, ...], found: tuple[Source, ...]) -> ArrayInfo:
    return ArrayInfo((2, *shape), "float32", (None,) * (len(shape) + 1), found, layers=(0, 1))


def weights() -> dict[str, Any]:
    qkv = "layers.{layer}.qkv.weight"
    stacked, single = "layers.{layer}.experts.up", "layers.{layer}.experts.{expert}.up.weight"
    return {
        "embed": ArrayInfo((8, 4), "float32", (None, None), sources("embed.weight")),
        "final_norm": ArrayInfo((4,), "float32", (None,), sources("norm.weight")),
        "group0": {
            "w_q": ArrayInfo(
                (2, 4, 6), "float32", (None,) * 3, sources(qkv, ("slice", -2, 0, 6), ("transpose",)), (0, 1)
            ),
            "w_k": ArrayInfo(
                (2, 4, 4), "float32", (None,) * 3, sources(qkv, ("slice", -2, 6, 10), ("transpose",)), (0, 1)
            ),
        },
        "stacks": {"w_up": stack((2, 4, 6), (*sources(stacked, ("transpose",)), *sources(single, ("transpose",))))},
    }


PROGRAM = SimpleNamespace(
    weights=weights, RULES={}, IGNORE=("mtp.*",), SCALE_SUFFIX="_scale_inv", SCALE_BLOCK=(128, 128)
)


def good() -> Shards:
    """Two shards, one layer each; experts one by one in float8."""
    f32, f8, bf16 = np.float32, ml_dtypes.float8_e4m3fn, ml_dtypes.bfloat16
    layers: Shards = [{}, {}]
    for i, shard in enumerate(layers):
        shard[f"model.layers.{i}.qkv.weight"] = np.ones((10, 4), f32)
        for e in range(2):
            shard[f"model.layers.{i}.experts.{e}.up.weight"] = np.ones((6, 4), f8)
            shard[f"model.layers.{i}.experts.{e}.up.weight_scale_inv"] = np.ones((1, 1), bf16)
    last = {"model.norm.weight": np.ones(4, f32), "mtp.fc.weight": np.ones(4, f32)}
    return [{"model.embed.weight": np.ones((8, 4), f32), **layers[0]}, {**layers[1], **last}]


def packed_weights() -> dict[str, Any]:
    turned = ("transpose",)
    up, down = ((Source(f"layers.{{layer}}.{name}", (turned,), packed),) for name, packed in PACKED_TENSORS)
    return {"stacks": {"w_up": stack((2, 64, 6), up), "w_down": stack((2, 32, 4), down)}}


PACKED_TENSORS = (("up_blocks", "mxfp4"), ("{expert}.down.weight_packed", "int4"))
PACKED = SimpleNamespace(
    **{**vars(PROGRAM), "weights": packed_weights, "SCALE_SUFFIX": None, "SCALE_BLOCK": None, "IGNORE": ()}
)


def good_packed() -> Shards:
    """Two shards, one layer each; w_up [2, 64, 6] stacked in mxfp4, w_down [2, 32, 4] one by one in int4."""
    layers: Shards = [{}, {}]
    for i, shard in enumerate(layers):
        shard[f"layers.{i}.up_blocks"] = np.full((2, 6, 2, 16), 0x22, np.uint8)  # e2m1 code 2 is 1
        shard[f"layers.{i}.up_scales"] = np.full((2, 6, 2), 127, np.uint8)
        for e in range(2):
            shard[f"layers.{i}.{e}.down.weight_packed"] = np.full((4, 4), -0x66666667, np.int32)  # eight times 9 - 8
            shard[f"layers.{i}.{e}.down.weight_scale"] = np.ones((4, 1), ml_dtypes.bfloat16)
            shard[f"layers.{i}.{e}.down.weight_shape"] = np.array([4, 32], np.int64)
    return layers


# What a case damages: `program` in its file, "plain" unless it says so.
SETS = {"plain": (PROGRAM, good), "packed": (PACKED, good_packed)}


def edit_tensors(shards: Shards, edit: dict[str, Any]) -> None:
    if "drop_all" in edit:
        for shard in shards:
            shard.clear()
    if "drop" in edit:
        (holder,) = (shard for shard in shards if edit["drop"] in shard)
        del holder[edit["drop"]]
    if "add" in edit:
        new = edit["add"]
        array = np.zeros(new["shape"], DTYPES[new["dtype"]])
        holders = [shard for shard in shards if new["name"] in shard]
        target = shards[new["shard"]] if "shard" in new else holders[0] if holders else shards[0]
        target[new["name"]] = array


def edit_files(folder: Path, edit: dict[str, Any]) -> None:
    if "delete" in edit:
        (folder / edit["delete"]).unlink()
    if "write" in edit:
        (folder / edit["write"]["file"]).write_text(edit["write"]["text"])
    if "mkdir" in edit:
        (folder / edit["mkdir"]).mkdir()
    if "nest" in edit:
        (folder / edit["nest"]["file"]).write_text("[" * edit["nest"]["depth"])
    if "append" in edit:
        with (folder / edit["append"]["file"]).open("a") as file:
            file.write(edit["append"]["text"])
    if "truncate" in edit:
        path = folder / edit["truncate"]["file"]
        data = path.read_bytes()
        keep = edit["truncate"].get("keep_bytes", len(data) - edit["truncate"].get("drop_bytes", 0))
        path.write_bytes(data[:keep])
    if "replace" in edit:
        path, old, new = folder / edit["replace"]["file"], edit["replace"]["old"], edit["replace"]["new"]
        data = path.read_bytes()
        assert old.encode() in data and len(old) == len(new)
        path.write_bytes(data.replace(old.encode(), new.encode(), 1))
    if edit.get("keep_index"):
        edit_index(folder, edit["drop"], "model-00002-of-00002.safetensors")
    if "index" in edit:
        edit_index(folder, edit["index"]["name"], edit["index"]["file"])


def edit_index(folder: Path, name: str, file: str) -> None:
    index = json.loads((folder / INDEX).read_text())
    index["weight_map"][name] = file
    (folder / INDEX).write_text(json.dumps(index))


def messages(folder: Path, program: Any = PROGRAM) -> list[str]:
    with pytest.raises(CheckpointError) as caught:
        load_weights(program, make_mesh(jax.devices()[:1], {}), folder)
    assert str(caught.value) == "\n".join(fold(caught.value.messages))
    return list(caught.value.messages)


def promised(folder: Path, case: dict[str, Any]) -> list[str]:
    """The case's messages; {size}, {size+N} stand for the size of the truncated file."""
    sizes = [(folder / e["truncate"]["file"]).stat().st_size for e in case["edits"] if "truncate" in e]
    return [re.sub(r"\{size\+?(\d*)\}", lambda m: str(sizes[0] + int(m[1] or 0)), text) for text in case["expect"]]


@pytest.mark.parametrize("path", sorted(CASES.glob("*.yaml")), ids=lambda path: path.stem)
def test_each_case_gives_the_promised_messages(
    path: Path, tmp_path: Path, write_checkpoint: Callable[[Path, Shards], Path]
) -> None:
    case = yaml.safe_load(path.read_text())
    program, make = SETS[case.get("program", "plain")]
    shards = make()
    for edit in case["edits"]:
        edit_tensors(shards, edit)
    folder = write_checkpoint(tmp_path / "checkpoint", shards)
    for edit in case["edits"]:
        edit_files(folder, edit)
    assert messages(folder, program) == promised(folder, case)


@pytest.mark.parametrize("name", SETS)
def test_the_undamaged_checkpoint_loads(
    name: str, tmp_path: Path, write_checkpoint: Callable[[Path, Shards], Path]
) -> None:
    program, make = SETS[name]
    tree = load_weights(program, make_mesh(jax.devices()[:1], {}), write_checkpoint(tmp_path, make()))
    assert all((np.asarray(leaf) == 1).all() for leaf in jax.tree.leaves(tree))


def test_folders_without_a_checkpoint(tmp_path: Path) -> None:
    assert messages(tmp_path / "none") == [f"{tmp_path}/none: not a directory"]
    file = tmp_path / "model.safetensors"
    file.write_bytes(b"")
    assert messages(file) == [f"{file}: not a directory"]
    file.unlink()
    (tmp_path / "pytorch_model.bin").write_bytes(b"")
    assert messages(tmp_path) == [f"{tmp_path}: holds no *.safetensors file"]


def test_a_weight_without_sources_is_told(tmp_path: Path, write_checkpoint: Callable[[Path, Shards], Path]) -> None:
    """A spec without a checkpoint table still compiles, but cannot load."""
    tree = {"final_norm": ArrayInfo((4,), "float32", (None,))}
    program = SimpleNamespace(**{**vars(PROGRAM), "weights": lambda: tree, "IGNORE": ("*",)})
    with pytest.raises(CheckpointError, match=r"^final_norm: the program names no checkpoint tensor for it$"):
        load_weights(program, make_mesh(jax.devices()[:1], {}), write_checkpoint(tmp_path, good()))


def test_float8_without_declared_scales_is_told(
    tmp_path: Path, write_checkpoint: Callable[[Path, Shards], Path]
) -> None:
    program = SimpleNamespace(**{**vars(PROGRAM), "SCALE_SUFFIX": None, "SCALE_BLOCK": None})
    with pytest.raises(CheckpointError) as caught:
        load_weights(program, make_mesh(jax.devices()[:1], {}), write_checkpoint(tmp_path, good()))
    names = [f"model.layers.{i}.experts.{e}.up.weight" for i in range(2) for e in range(2)]
    assert list(caught.value.messages[:4]) == [
        f"{name}: stored as float8_e4m3fn, but the program declares no block scales" for name in names
    ]


def test_long_runs_of_alike_messages_are_folded() -> None:
    alike = [f"model.layers.{i}.experts.{i % 4}.up: missing" for i in range(100)]
    folded = fold(["config: odd", *alike, "other: missing"])
    assert folded == [
        "config: odd",
        *alike[:7],
        "... and 93 more like this, the last: model.layers.99.experts.3.up: missing",
        "other: missing",
    ]
    assert fold(alike[:8]) == alike[:8]
    assert CheckpointError(alike).messages == tuple(alike)
