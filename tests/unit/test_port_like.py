"""moec port: blocks that are like another one, in recipes and in what is written of them."""

import copy
import json
from pathlib import Path
from typing import Any

import pytest

from moec.compiler.port.config import Config
from moec.compiler.port.expressions import Value
from moec.compiler.port.fill import on_top, plain
from moec.compiler.port.port import port
from moec.compiler.spec.load import load

CONFIGS = Path(__file__).parents[1] / "fixtures" / "configs"


def test_nulls_are_written_where_they_undo_something() -> None:
    base = {"a": Value(1), "b": {"c": Value(2), "d": Value(3)}, "e": Value("x")}
    tree = {"a": Value(None), "b": {"c": Value(None), "z": Value(None)}, "y": Value(None), "e": Value("x")}
    assert plain(on_top(tree, base)) == {"a": None, "b": {"c": None}, "e": "x"}


def test_what_differs_from_the_base_is_no_default_to_leave_out() -> None:
    item = on_top({"a": Value("none", computed=True)}, {"a": Value("l2")})["a"]
    assert item.value == "none" and not item.computed
    assert on_top({"a": Value("none", computed=True)}, {})["a"].computed


def mixers(name: str, tmp_path: Path, **changes: Any) -> list[Any]:
    """Fields of every layer's mixer of the port, loaded again from its text."""
    data = json.loads((CONFIGS / f"{name}.json").read_text()) | copy.deepcopy(changes)
    done = port(Config(f"{name}.json", data), "x")
    (tmp_path / "x.yaml").write_text(done.text)
    graph = load(str(tmp_path / "x.yaml")).graph
    assert graph == done.graph
    return [layer.blocks[0].fields for _, layer in graph.layers()]


@pytest.mark.parametrize("name", ["laguna", "step3p7"])
def test_windows_beside_scaled_attention_are_not_scaled(name: str, tmp_path: Path) -> None:
    found = mixers(name, tmp_path)
    assert {bool(one.window) for one in found} == {True, False}
    assert all((one.rope.scaling is None) == bool(one.window) for one in found)


def test_layers_without_positions_have_none(tmp_path: Path) -> None:
    found = mixers("llama4", tmp_path)
    assert [one.rope is None for one in found] == [False, False, False, True, False, True]
    assert all((one.rope is None) == (one.chunk is None) == (one.qk_norm == "none") for one in found)
    assert all((one.rope is None) == (one.temperature is not None) for one in found)


@pytest.mark.parametrize(
    "thetas",
    [[0, 1e4, 1e4, 500.0, 1e4], [0, 1e4, 1e4, 500.0, 0], [1e4, 0, 0, 0, 1e4], [0, 0, 0, 0, 0], [500.0, 0, 1e4, 0, 0]],
)
def test_whichever_of_several_alike_blocks_takes_the_place_of_the_base(thetas: list[float], tmp_path: Path) -> None:
    found = mixers("granitemoe_swa", tmp_path, layer_rope_theta=thetas)
    assert [one.rope.theta if one.rope else 0 for one in found] == thetas
    assert [one.window for one in found] == [None, 8, 8, 8, None]
