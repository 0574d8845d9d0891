"""moec port: every recipe, provenance, leftovers, drafts, refusals, bad input, the command."""

import json
import re
from pathlib import Path
from statistics import median
from typing import Any

import pytest
import yaml

from moec.compiler.cli import main
from moec.compiler.port.config import Config, read_config
from moec.compiler.port.expressions import parse
from moec.compiler.port.fill import on_top, plain
from moec.compiler.port.functions import FUNCTIONS
from moec.compiler.port.port import port
from moec.compiler.port.recipes import FAMILIES, KEYS, load_recipe, merge_recipe, model_types
from moec.compiler.port.scope import Value
from moec.compiler.port.text import Style, render
from moec.compiler.problems import ProblemsError
from moec.compiler.spec.load import load

FIXTURES = Path(__file__).parents[1] / "fixtures" / "oracles"
CONFIGS = sorted((FIXTURES.parent / "configs").glob("*.json"))
# --- recipes -----------------------------------------------------------------------------------------------------


def test_merging() -> None:
    base = {"a": 1, "b": {"c": 2, "d": 3}, "e": [1]}
    assert merge_recipe(base, {"a": None, "b": {"c": 5}, "e": [2]}) == {"b": {"c": 5, "d": 3}, "e": [2]}
    assert merge_recipe(base, {"b": {"replace": {"x": 1}}})["b"] == {"x": 1}


@pytest.mark.parametrize("path", sorted(FAMILIES.glob("*.yaml")), ids=lambda path: path.stem)
def test_every_recipe_is_sound(path: Path) -> None:
    """Expressions parse, blocks and templates that are named exist, reasons are given."""
    recipe = load_recipe(path.stem)
    _parse_all(recipe.data)
    for entry in recipe.part("inexpressible").values():
        assert entry.keys() <= {"when", "means", "needs"}
        assert entry["means"] and entry["needs"]
    for asks in recipe.part("questions").values():
        assert all(ask.keys() <= {"when", "ask"} for ask in asks)
    assert all(isinstance(reason, str) and reason for reason in recipe.part("ignored").values())
    assert set(_named(recipe.data, "use")) <= recipe.part("templates").keys()
    assert set(_named(recipe.part("blocks"), "like")) <= recipe.part("blocks").keys()


def _parse_all(tree: Any) -> None:
    for item in tree.values() if isinstance(tree, dict) else tree if isinstance(tree, list) else ():
        if isinstance(item, str) and item.startswith("="):
            parse(item[1:])
        _parse_all(item)


def _named(tree: Any, key: str) -> list[str]:
    items = tree.values() if isinstance(tree, dict) else tree if isinstance(tree, list) else ()
    own = [tree[key]] if isinstance(tree, dict) and isinstance(tree.get(key), str) else []
    return own + [name for item in items for name in _named(item, key)]


def test_no_model_type_has_two_recipes() -> None:
    listed = [
        kind
        for path in FAMILIES.glob("[!_]*.yaml")
        for kind in yaml.safe_load(path.read_text()).get("model_types", [path.stem])
    ]
    assert len(listed) == len(set(listed)) == len(model_types())


def test_the_page_names_every_key_and_function() -> None:
    page = (Path(__file__).parents[2] / "docs" / "port.md").read_text()
    rows_of = [line.split("|")[1] for line in page.splitlines() if line.startswith("| `")]
    named = {name for row in rows_of for name in re.findall(r"`(?:\{)?([a-z_0-9]+)", row)}
    bases = {path.stem for path in FAMILIES.glob("_*.yaml")} - {"_draft"}
    assert named == {*KEYS, *FUNCTIONS, "when", "case", "use", *bases}


# --- ports -------------------------------------------------------------------------------------------------------


def config_of(folder: Path) -> Config:
    config, problems = read_config(folder / "config.json", "config.json")
    assert config is not None, problems
    return config


def _body(text: str) -> list[str]:
    """Lines of a spec without its checkpoint table, blank lines and the report at the end."""
    head = text.partition("\ncheckpoint:")[0]
    return [line for line in head.splitlines() if line.strip()]


def _shapes(folder: Path) -> dict[str, tuple[int, ...]]:
    from moec.runtime.checkpoint import Checkpoint

    return {name: tensor.shape for name, tensor in Checkpoint(folder).tensors.items()}


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_every_architecture_ports_and_loads(path: Path, tmp_path: Path) -> None:
    """What is written loads again as the same model, is short, and every field of the config is accounted for."""
    config, problems = read_config(path, path.name)
    assert config is not None, problems
    done = port(config, "x")
    assert not done.draft
    assert done.graph is not None
    assert [str(one) for one in done.leftovers if not one.reason] == []
    assert not any(done.questions.values())
    (tmp_path / "x.yaml").write_text(done.text)
    assert load(str(tmp_path / "x.yaml")).graph == done.graph
    assert len(_body(done.text)) <= 75


def test_specs_are_short_on_the_whole() -> None:
    lengths = []
    for path in CONFIGS:
        config, _ = read_config(path, path.name)
        assert config is not None
        lengths.append(len(_body(port(config, "x").text)))
    assert median(lengths) <= 60


def qwen3_moe(**changes: Any) -> Config:
    """The config of a committed oracle with some fields changed; None takes a field away."""
    config = config_of(FIXTURES / "qwen3_moe")
    for key, item in changes.items():
        if item is None:
            del config.data[key]
        else:
            config.data[key] = item
    return config


def problems_of(config: Config) -> list[str]:
    with pytest.raises(ProblemsError) as error:
        port(config, "x")
    return [str(problem) for problem in error.value.problems]


def test_values_say_where_they_come_from() -> None:
    text = port(qwen3_moe(), "x").text
    assert "num_q_heads: 4" in text
    assert any("num_q_heads: 4" in line and line.endswith("# num_attention_heads") for line in text.splitlines())
    assert "rope_parameters.rope_theta" in text


def test_dense_layers_become_groups_and_unused_blocks_are_left_out() -> None:
    plain = port(qwen3_moe(num_hidden_layers=24), "x")
    assert "mlp:" not in plain.text
    assert "only block mlp needs it, which no layer uses: intermediate_size" in plain.text
    mixed = port(qwen3_moe(num_hidden_layers=24, mlp_only_layers=[0, 1]), "x")
    assert "mlp.gate_proj.weight" in mixed.text
    assert mixed.graph is not None
    assert [(group.repeat, len(group.layers)) for group in mixed.graph.groups] == [(2, 1), (22, 1)]


def two_kinds(kinds: list[str]) -> Config:
    """Layers of two kinds, one of which is the other without rotary embedding."""
    config = config_of(FIXTURES / "qwen3_moe")
    config.data.update({"model_type": "exaone_moe", "layer_types": kinds, "sliding_window": 8})
    config.data["num_hidden_layers"] = len(kinds)
    return config


def test_a_block_like_another_is_written_by_what_differs() -> None:
    both = port(two_kinds(["sliding_attention", "full_attention"] * 3), "x").text
    assert "  window_gqa:\n    like: gqa\n" in both
    alone = port(two_kinds(["sliding_attention"] * 3), "x").text
    assert "window_gqa" not in alone
    assert "window: 8" in alone
    assert "gqa.w_q" in alone


def test_a_null_undoes_a_field_of_the_other_block() -> None:
    base = {"rope": {"dim": Value(8), "theta": Value(1e4)}, "window": Value(8)}
    written = on_top({"like": Value("gqa"), "rope": Value(None), "scale": Value(None), "window": Value(8)}, base)
    assert plain(written) == {"like": "gqa", "rope": None, "window": 8}


def test_long_patterns_are_written_entry_by_entry() -> None:
    entry = {"mixer": "gqa", "ffn": "moe", "override": {"ffn": {"experts": {"clamp": {"limit": 7.0}}}}}
    text = render([["layers"]], {"layers": [{"pattern": Value([entry] * 3)}]}, Style(lambda paths: ""))
    assert text.count("      - {mixer: gqa, ffn: moe, override: ") == 3
    assert yaml.safe_load(text) == {"layers": [{"pattern": [entry] * 3}]}


def test_every_field_that_is_not_used_is_named() -> None:
    done = port(qwen3_moe(new_trick=0.5, nested={"a": 1, "b": None}), "x")
    unknown = {str(one) for one in done.leftovers if not one.reason}
    assert unknown == {"new_trick = 0.5", "nested.a = 1"}
    assert "# UNUSED: new_trick = 0.5" in done.text
    known = {one.path for one in done.leftovers if one.reason}
    used = {"hidden_size", "num_hidden_layers", "rope_parameters.rope_theta", "sliding_window"}
    assert "attention_dropout" in known
    assert not used & known


def test_old_and_new_names_of_rope_mean_the_same() -> None:
    yarn = {"factor": 4.0, "original_max_position_embeddings": 128}
    new = qwen3_moe(rope_parameters={"rope_type": "yarn", "rope_theta": 5e5, **yarn})
    old = qwen3_moe(rope_parameters=None, rope_theta=5e5, rope_scaling={"type": "yarn", **yarn})
    assert port(new, "x").graph == port(old, "x").graph


def test_float8_checkpoints_get_their_scales() -> None:
    quantised = {"quant_method": "fp8", "weight_block_size": [64, 32]}
    graph = port(qwen3_moe(quantization_config=quantised), "x").graph
    assert graph is not None
    assert graph.checkpoint is not None
    assert graph.checkpoint.scale_block == (64, 32)


def test_what_cannot_be_expressed_is_refused_field_by_field(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps({"model_type": "deepseek_v4", "hc_mult": 4, "index_topk": 512}))
    for command in ("port", "check"):
        assert main([command, str(path)]) == 2
        out, err = capsys.readouterr()
        assert "hc_mult: the residual is several streams" in err
        assert "index_topk" in err
        assert "needs a residual form" in err
        assert not out


# --- drafts ------------------------------------------------------------------------------------------------------


def test_a_draft_of_an_unknown_type_loads_and_asks(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = qwen3_moe(model_type="unheard_of")
    path, out = tmp_path / "config.json", tmp_path / "draft.yaml"
    path.write_text(json.dumps(config.data))
    assert main(["port", str(path), "-o", str(out)]) == 1
    err = capsys.readouterr().err
    assert "question: blocks.moe.router" in err
    assert "question: checkpoint" in err
    text = out.read_text()
    assert text.startswith("# A DRAFT")
    assert "# QUESTION: " in text
    assert load(str(out)).graph.num_layers == 4
    assert main(["check", str(path)]) == 2


def test_a_draft_learns_from_the_checkpoint() -> None:
    folder = FIXTURES / "qwen3_moe"
    known = port(config_of(folder), "x", _shapes(folder)).graph
    drafted = port(qwen3_moe(model_type="unheard_of"), "x", _shapes(folder))
    assert drafted.draft
    assert drafted.graph is not None
    assert known is not None
    assert [layer.blocks for _, layer in drafted.graph.layers()] == [layer.blocks for _, layer in known.layers()]
    assert not drafted.questions.get("checkpoint")


def test_a_draft_sees_dense_layers_in_the_checkpoint() -> None:
    """Nothing in the config says so: layer 0 stores one MLP, the others experts."""
    shapes = {
        name: shape
        for name, shape in _shapes(FIXTURES / "qwen3_moe").items()
        if not name.startswith("model.layers.0.mlp")
    }
    shapes |= {f"model.layers.0.mlp.{one}_proj.weight": (96, 64) for one in ("gate", "up")}
    shapes |= {"model.layers.0.mlp.down_proj.weight": (64, 96)}
    done = port(qwen3_moe(model_type="unheard_of", intermediate_size=96), "x", shapes)
    assert done.graph is not None
    assert [layer.blocks[1].kind for _, layer in done.graph.layers()] == ["mlp", "moe", "moe", "moe"]
    assert not done.asked


def test_a_draft_takes_rope_of_each_layer_type() -> None:
    kinds = ["full_attention", "sliding_attention"] * 2
    ropes = {"full_attention": {"rope_theta": 5e5}, "sliding_attention": {"rope_theta": 1e4}}
    config = qwen3_moe(model_type="unheard_of", layer_types=kinds, sliding_window=8, rope_parameters=ropes)
    graph = port(config, "x").graph
    assert graph is not None
    assert [layer.blocks[0].fields.rope.theta for _, layer in graph.layers()] == [5e5, 1e4, 5e5, 1e4]


def test_a_draft_is_written_in_spite_of_a_value_it_cannot_use() -> None:
    done = port(qwen3_moe(model_type="unheard_of", rope_parameters={"rope_type": "spiral"}), "x")
    assert any("rope_parameters.rope_type: 'spiral' cannot be expressed" in ask for ask in done.questions[""])
    odd = port(qwen3_moe(model_type="unheard_of", layer_types=["full_attention", "spiral"] * 2), "x")
    assert any("layer_types has spiral (layers [1, 3])" in ask for ask in odd.questions["layers"])


def test_a_draft_says_what_cannot_be_expressed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path, out = tmp_path / "config.json", tmp_path / "x.yaml"
    path.write_text(json.dumps(qwen3_moe(model_type="unheard_of", index_topk=2048).data))
    assert main(["port", str(path), "-o", str(out)]) == 1
    err = capsys.readouterr().err
    assert "index_topk: is 2048: attention over an index of selected keys" in err and "next:" not in err
    assert "# CANNOT BE EXPRESSED: index_topk: is 2048" in out.read_text()
    assert main(["check", str(path)]) == 2
    assert "index_topk: is 2048" in capsys.readouterr().err


def test_unknown_fields_are_open_ends(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps(qwen3_moe(new_trick=0.5).data))
    assert main(["port", str(path)]) == 1
    assert main(["check", str(path)]) == 0
    assert capsys.readouterr().err.count("warning: new_trick = 0.5: not used") == 2


def test_a_draft_asks_about_tensors_it_does_not_know() -> None:
    shapes = {**_shapes(FIXTURES / "qwen3_moe"), "model.layers.0.self_attn.magic.weight": (3, 5)}
    done = port(qwen3_moe(model_type="unheard_of"), "x", shapes)
    assert done.questions["checkpoint"] == ["what is model.layers.N.self_attn.magic.weight, shape [3, 5] (N = 0 only)?"]
    assert done.asked == ("model.layers.0.self_attn.magic.weight",)


def test_a_draft_needs_sizes() -> None:
    found = problems_of(Config("config.json", {"model_type": "unheard_of", "vocab_size": 8}))
    assert any("is missing" in one for one in found)


# --- the command -------------------------------------------------------------------------------------------------


def test_a_checkpoint_that_does_not_fit(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps({**qwen3_moe().data, "moe_intermediate_size": 48}))
    assert main(["port", str(path), "--weights", str(FIXTURES / "qwen3_moe")]) == 1
    out, err = capsys.readouterr()
    assert "checkpoint: model.layers.0.mlp.experts.0.gate_proj.weight: shape [32, 64], expected [48, 64]" in err
    assert "intermediate_size: 48" in out
