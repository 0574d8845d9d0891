"""moec port: every recipe, provenance, leftovers, drafts, refusals, bad input, the command."""

import copy
import json
import random
import re
from pathlib import Path
from statistics import median
from typing import Any

import pytest
import yaml

from moec.compiler.cli import main
from moec.compiler.port.config import Config, read_config
from moec.compiler.port.expressions import FUNCTIONS, Scope, Value, evaluate, parse
from moec.compiler.port.fill import on_top, plain
from moec.compiler.port.port import port
from moec.compiler.port.recipes import FAMILIES, KEYS, load_recipe, merge, model_types
from moec.compiler.port.text import Style, render
from moec.compiler.problems import ProblemsError
from moec.compiler.spec.load import load

FIXTURES = Path(__file__).parents[1] / "fixtures" / "oracles"
NUMBERS = [-1, 0, 3, 1.5, 10**18, 10**25, float("inf"), float("nan")]
OTHERS = [None, True, "", "\n\x1b", [], [1, "a"], ["full_attention"] * 4, {}, {"a": 1}, {"rope_type": "yarn"}]
JUNK: list[Any] = [*NUMBERS, *OTHERS]
CONFIGS = sorted((FIXTURES.parent / "configs").glob("*.json"))
ORACLES = sorted(path.parent for path in FIXTURES.glob("*/config.json"))
# --- recipes -----------------------------------------------------------------------------------------------------


def test_merging() -> None:
    base = {"a": 1, "b": {"c": 2, "d": 3}, "e": [1]}
    assert merge(base, {"a": None, "b": {"c": 5}, "e": [2]}) == {"b": {"c": 5, "d": 3}, "e": [2]}
    assert merge(base, {"b": {"replace": {"x": 1}}})["b"] == {"x": 1}


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


@pytest.mark.parametrize("folder", ORACLES, ids=lambda path: path.name)
def test_committed_configs_port_and_load(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "spec.yaml"
    assert main(["port", str(folder / "config.json"), "--weights", str(folder), "-o", str(out)]) == 0
    assert f"next: moec verify {out} --target cpu --weights {folder} --reference" in capsys.readouterr().err
    graph = load(str(out)).graph
    assert graph == port(config_of(folder), "spec", _shapes(folder)).graph
    assert len(_body(out.read_text())) <= 60
    assert list(tmp_path.iterdir()) == [out]


def _body(text: str) -> list[str]:
    """Lines of a spec without its checkpoint table, blank lines and the report at the end."""
    head = text.partition("\ncheckpoint:")[0]
    return [line for line in head.splitlines() if line.strip()]


def _shapes(folder: Path) -> dict[str, tuple[int, ...]]:
    from moec.runtime.checkpoint import Checkpoint

    return {name: tensor.shape for name, tensor in Checkpoint(folder).tensors.items()}


@pytest.mark.parametrize("folder", ORACLES, ids=lambda path: path.name)
def test_a_port_is_the_shipped_tiny_spec(folder: Path) -> None:
    """The recipe says what was written by hand from the model's code."""
    shipped = load(f"tiny/{folder.name}").graph
    ported = port(config_of(folder), shipped.name, _shapes(folder)).graph
    assert ported is not None
    assert [layer for _, layer in ported.layers()] == [layer for _, layer in shipped.layers()]
    assert (ported.dims, ported.head, ported.embed, ported.final_norm, ported.max_context) == (
        shipped.dims,
        shipped.head,
        shipped.embed,
        shipped.final_norm,
        shipped.max_context,
    )


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
    config.data |= {"model_type": "exaone_moe", "layer_types": kinds, "sliding_window": 8}
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


@pytest.mark.parametrize("seed", range(8))
def test_no_config_leads_to_an_exception(seed: int) -> None:
    """Fields that are missing, of another type or absurd make a spec or problems, whatever the family."""
    rng = random.Random(seed)
    for path in rng.sample(CONFIGS, 4):
        config, _ = read_config(path, path.name)
        assert config is not None
        for _ in range(rng.randint(1, 3)):
            _spoil(config.data, rng)
        try:
            assert port(config, "x").text
        except ProblemsError as error:
            assert all(problem.text for problem in error.problems)


def _spoil(data: dict[str, Any], rng: random.Random) -> None:
    """Take a field away, or put something else in its place."""
    place = data
    key = rng.choice(list(place))
    while isinstance(place[key], dict) and place[key] and rng.random() < 0.7:
        place = place[key]
        key = rng.choice(list(place))
    if rng.random() < 0.2 and len(data) > 1:
        del place[key]
    else:
        place[key] = copy.deepcopy(rng.choice(JUNK))


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


def test_missing_and_wrong_fields_come_in_one_pass() -> None:
    found = problems_of(qwen3_moe(num_attention_heads=None, vocab_size="256", rms_norm_eps=None, hidden_act="swosh"))
    assert any("num_attention_heads: is missing" in one and "blocks.gqa.num_q_heads" in one for one in found)
    assert any("rms_norm_eps: is missing" in one for one in found)
    assert any("vocab_size: expected an integer, got '256'" in one for one in found)
    assert any("hidden_act: 'swosh' is not known to the recipe (known: silu" in one for one in found)
    assert len(found) == 4


@pytest.mark.parametrize(
    ("changes", "wanted"),
    [
        ({"num_hidden_layers": 0}, "num_hidden_layers: expected a number of layers"),
        ({"num_hidden_layers": 10**6}, "num_hidden_layers: expected a number of layers"),
        ({"num_hidden_layers": 2.5}, "num_hidden_layers: expected a number of layers"),
        ({"num_experts_per_tok": 99}, "num_experts_per_tok: top_k 99 exceeds num_experts 8"),
        ({"rope_parameters": {"rope_type": "spiral", "rope_theta": 1e4}}, "'spiral' cannot be expressed"),
        ({"rope_parameters": [1]}, "rope_parameters: expected a mapping, got [1]"),
        ({"hidden_size": 10**30}, "no number a spec can hold"),
        ({"mlp_only_layers": 3}, "cannot be computed"),
    ],
)
def test_values_that_make_no_model(changes: dict[str, Any], wanted: str) -> None:
    assert any(wanted in one for one in problems_of(qwen3_moe(**changes))), problems_of(qwen3_moe(**changes))


def test_lists_of_another_length_than_the_layers() -> None:
    config = config_of(FIXTURES / "qwen3_5_moe")
    config.data["layer_types"] = config.data["layer_types"] * 2
    assert any("layer_types: has 8 entries for 4 layers" in one for one in problems_of(config))


def test_what_cannot_be_expressed_is_refused_field_by_field(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps({"model_type": "deepseek_v4", "hc_mult": 4, "index_topk": 512}))
    for command in ("port", "check"):
        assert main([command, str(path)]) == 2
        out, err = capsys.readouterr()
        assert "hc_mult: hc_mult is 4" in err
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


def test_a_draft_asks_about_tensors_it_does_not_know() -> None:
    shapes = {**_shapes(FIXTURES / "qwen3_moe"), "model.layers.0.self_attn.magic.weight": (3, 5)}
    asked = port(qwen3_moe(model_type="unheard_of"), "x", shapes).questions["checkpoint"]
    assert asked == ["what is model.layers.N.self_attn.magic.weight, shape [3, 5]?"]


def test_a_draft_needs_sizes() -> None:
    found = problems_of(Config("config.json", {"model_type": "unheard_of", "vocab_size": 8}))
    assert any("is missing" in one for one in found)


# --- the command -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        ("{", "is no JSON"),
        ("[1]", "holds no JSON object"),
        ('{"a": 1, "a": 2}', "twice"),
        ("[" * 100_000, "is no JSON"),
        ('{"a": ' + "9" * 5000 + "}", "is no JSON"),
        (json.dumps({"model_type": "qwen3_moe"}), "hidden_size: is missing"),
        (json.dumps({"model_type": 7}), "is missing"),
        ("{}", "is missing"),
    ],
)
def test_bad_files_get_messages(tmp_path: Path, text: str, wanted: str, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "config.json"
    path.write_text(text)
    out = tmp_path / "spec.yaml"
    assert main(["port", str(path), "-o", str(out)]) == 2
    assert wanted in capsys.readouterr().err
    assert not out.exists()


def test_a_file_that_is_not_there(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["port", str(tmp_path / "nothing.json")]) == 2
    assert "cannot be read: No such file" in capsys.readouterr().err


def test_an_older_spec_stays_when_the_port_fails(tmp_path: Path) -> None:
    out = tmp_path / "spec.yaml"
    out.write_text("old")
    path = tmp_path / "config.json"
    path.write_text("{}")
    assert main(["port", str(path), "-o", str(out)]) == 2
    assert out.read_text() == "old"


def test_a_checkpoint_that_does_not_fit(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps({**qwen3_moe().data, "moe_intermediate_size": 48}))
    assert main(["port", str(path), "--weights", str(FIXTURES / "qwen3_moe")]) == 1
    out, err = capsys.readouterr()
    assert "checkpoint: model.layers.0.mlp.experts.0.gate_proj.weight: shape [32, 64], expected [48, 64]" in err
    assert "intermediate_size: 48" in out


def test_infinity_as_transformers_writes_it(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_text('{"limit": [0.0, {"__float__": "Infinity"}]}')
    config, _ = read_config(path, "config.json")
    assert config is not None
    assert evaluate("finite(limit[1])", Scope(config)).value is None
    assert config.data["limit"][1] == float("inf")
