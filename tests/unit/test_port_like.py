"""moec port: blocks that are like another one, in recipes and in what is written of them."""

import copy
import json
from pathlib import Path
from typing import Any

import pytest

from moec.compiler.port.config import Config
from moec.compiler.port.fill import on_top, plain
from moec.compiler.port.port import port
from moec.compiler.port.recipes import changes_of, merge_recipe
from moec.compiler.port.scope import Value
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


def test_changes_of_a_recipe_are_the_other_way_round_of_merging() -> None:
    base = {"kind": "attention", "rope": {"use": "rope", "dim": 8}, "bias": {"qkv": True, "out": True}, "scale": 2.0}
    for changes in (
        {"window": 8},
        {"scale": None},
        {"bias": {"qkv": None, "out": False}, "sinks": True},
        {"rope": {"use": "rope", "dim": 4}},
    ):
        whole = merge_recipe(base, changes)
        assert changes_of(whole, base) == changes
        assert merge_recipe(base, changes_of(whole, base)) == whole


def test_what_is_written_on_top_of_a_base_gives_the_whole_again() -> None:
    """merge_recipe of filled trees, as a spec's `like` merges: on_top keeps what is needed for it, and no more."""
    base = {"a": Value(1), "b": {"c": Value(2), "d": Value(3)}, "e": {"f": Value(4)}}
    tree = {"a": Value(5), "b": {"c": Value(2), "d": Value(None)}, "e": {"f": Value(4)}, "g": Value(None)}
    written = plain(on_top(tree, base))
    assert written == {"a": 5, "b": {"c": 2, "d": None}}
    assert merge_recipe(plain(base), written) == {"a": 5, "b": {"c": 2}, "e": {"f": 4}}


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
