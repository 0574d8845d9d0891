"""moec port on spoilt configs, odd files and odd places to write to: a spec, or problems that name the field."""

import copy
import json
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from safetensors.numpy import save_file

from moec.compiler.cli import main
from moec.compiler.port.config import Config, read_config
from moec.compiler.port.expressions import evaluate
from moec.compiler.port.port import port
from moec.compiler.port.scope import Scope
from moec.compiler.problems import ProblemsError

CONFIGS = Path(__file__).parents[1] / "fixtures" / "configs"
NAMES = sorted(path.stem for path in CONFIGS.glob("*.json"))
NUMBERS = [-1, 0, 3, 1.5, 10**18, 10**25, float("inf"), float("nan")]
OTHERS = [None, True, "", "\n\x1b", [], [1, "a"], ["full_attention"] * 4, {}, {"a": 1}, {"rope_type": "yarn"}]
JUNK: list[Any] = [*NUMBERS, *OTHERS]
ABSENT: Any = object()


def config_of(name: str, **changes: Any) -> Config:
    """A committed config with some fields of its root changed; ABSENT takes a field away."""
    config, problems = read_config(CONFIGS / f"{name}.json", "config.json")
    assert config is not None, problems
    place = config.data.get("text_config") or config.data
    for key, item in changes.items():
        place.pop(key, None)
        if item is not ABSENT:
            place[key] = item
    return config


def problems_of(name: str, **changes: Any) -> list[str]:
    with pytest.raises(ProblemsError) as error:
        port(config_of(name, **changes), "x")
    return [str(problem) for problem in error.value.problems]


# --- values ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(8))
def test_no_config_leads_to_an_exception(seed: int) -> None:
    """Fields that are missing, of another type or absurd make a spec or problems, whatever the family."""
    rng = random.Random(seed)
    for name in rng.sample(NAMES, 4):
        config = config_of(name)
        for _ in range(rng.randint(1, 3)):
            _spoil(config.data, rng)
        try:
            yaml.safe_load(port(config, "x").text)
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


def test_missing_and_wrong_fields_come_in_one_pass() -> None:
    changes = {"num_attention_heads": ABSENT, "vocab_size": "256", "rms_norm_eps": ABSENT, "hidden_act": "swosh"}
    found = problems_of("olmoe", **changes)
    assert any("num_attention_heads: is missing" in one and "blocks.gqa.num_q_heads" in one for one in found)
    assert any("rms_norm_eps: is missing" in one for one in found)
    assert any("vocab_size: expected an integer, got '256'" in one for one in found)
    assert any("hidden_act: 'swosh' is not known to the recipe (known: silu" in one for one in found)
    assert len(found) == 4


@pytest.mark.parametrize(
    ("name", "changes", "wanted"),
    [
        ("olmoe", {"num_hidden_layers": 0}, "num_hidden_layers: expected a number of layers"),
        ("olmoe", {"num_hidden_layers": 10**6}, "num_hidden_layers: expected a number of layers"),
        ("olmoe", {"num_hidden_layers": 2.5}, "num_hidden_layers: expected a number of layers"),
        ("olmoe", {"num_hidden_layers": {}}, "num_hidden_layers: expected a number of layers"),
        ("olmoe", {"num_experts_per_tok": 99}, "num_experts_per_tok: top_k 99 exceeds num_experts 8"),
        ("olmoe", {"num_experts_per_tok": None}, "num_experts_per_tok: missing key 'top_k' (for blocks.moe.router)"),
        ("qwen3_next", {"num_attention_heads": None}, "num_attention_heads: missing key 'num_q_heads'"),
        ("exaone_moe", {"num_attention_heads": None}, "num_attention_heads: expected a number, got null"),
        ("olmoe", {"max_position_embeddings": None}, "max_position_embeddings: missing key 'max_context'"),
        ("olmoe", {"rope_parameters": {"rope_type": "spiral"}}, "rope_parameters.rope_type: 'spiral' cannot be"),
        ("olmoe", {"rope_parameters": {"rope_type": {}}}, "rope_parameters.rope_type: {} cannot be"),
        ("olmoe", {"rope_parameters": [1]}, "rope_parameters: expected a mapping, got [1]"),
        ("olmoe", {"hidden_size": 10**30}, "hidden_size: 'hidden_size' is no number a spec can hold"),
        ("olmoe", {"hidden_act": {}}, "hidden_act: {} is not known to the recipe"),
        (
            "olmoe",
            {"rms_norm_eps": "1e-6"},
            "rms_norm_eps: 'float(rms_norm_eps)' cannot be computed: expected a number",
        ),
        ("olmoe", {"rms_norm_eps": float("nan")}, "rms_norm_eps: nan is no number a spec can hold"),
        ("deepseek_v3", {"rope_interleave": "false"}, "rope_interleave: expected true or false, got 'false'"),
        ("deepseek_v3", {"attention_bias": "x"}, "attention_bias: expected true or false, got 'x'"),
        ("step3p7", {"layer_types": {}}, "layer_types: expected a list, got {}"),
        ("granitemoehybrid", {"mamba_proj_bias": {}}, "mamba_proj_bias: expected true or false"),
        ("jamba", {"attn_layer_offset": "x"}, "attn_layer_offset: expected an integer of at least 0, got 'x'"),
        ("deepseek_v3", {"first_k_dense_replace": float("nan")}, "first_k_dense_replace: expected an integer"),
        ("deepseek_v3", {"n_shared_experts": -1}, "n_shared_experts: expected an integer of at least 0, got -1"),
        ("deepseek_v3", {"n_group": -1}, "n_group: expected an integer of at least 0, got -1"),
        ("qwen2_moe", {"decoder_sparse_step": 1.5}, "decoder_sparse_step: expected an integer of at least 1, got 1.5"),
        ("qwen2_moe", {"mlp_only_layers": "x"}, "mlp_only_layers: expected a list of layer numbers, got 'x'"),
        ("kimi_linear", {"moe_router_activation_func": "softmax"}, "moe_router_activation_func: is 'softmax'"),
        ("minimax_m2", {"scoring_func": "softmax"}, "scoring_func: is 'softmax'"),
        ("laguna", {"gating": "zzz"}, "gating: 'zzz' is not known to the recipe (known: True, per-head"),
        ("qwen3_next", {"layer_types": ["full_attention"] * 9}, "layer_types: has 9 entries for 4 layers"),
    ],
)
def test_values_that_make_no_model(name: str, changes: dict[str, Any], wanted: str) -> None:
    found = problems_of(name, **changes)
    assert any(wanted in one for one in found), found


def test_a_part_that_is_no_mapping() -> None:
    config = config_of("olmoe")
    config.data["text_config"] = 3
    with pytest.raises(ProblemsError, match=r"text_config: expected a mapping, got 3 \(the text decoder's fields\)"):
        port(config, "x")


def test_layers_that_are_not_there() -> None:
    config = config_of("kimi_linear")
    for wrong in ([0], [None], [99], "x"):
        config.data["linear_attn_config"] = {"full_attn_layers": wrong, "kda_layers": [1, 2]}
        config.data.pop("layer_types", None)
        with pytest.raises(ProblemsError, match=r"linear_attn_config\.full_attn_layers"):
            port(config, "x")


def test_a_missing_field_is_called_by_its_usual_name() -> None:
    with pytest.raises(ProblemsError) as error:
        port(Config("config.json", {}), "x")
    missing = {problem.path for problem in error.value.problems}
    assert {"num_hidden_layers", "hidden_size", "max_position_embeddings", "vocab_size"} <= missing
    assert not {"num_layers", "dim", "model_max_length"} & missing


@pytest.mark.parametrize("kind", [3, None, [], "MIXTRAL", "mixtral\n", "../x"])
def test_a_model_type_without_recipe_is_told(kind: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps({**config_of("olmoe").data, "model_type": kind}))
    assert main(["port", str(path)]) == 1
    err = capsys.readouterr().err
    assert "there is no recipe for model_type" in err
    assert ("did you mean 'mixtral'?" in err) == (str(kind).strip().lower() == "mixtral")


ODD = ["x\nlayers: [evil]", "\x1b[31mred\x00", "a\u2028layers: 1", "\ud800", "x\x85y: z"]


@pytest.mark.parametrize("text", ODD, ids=range(len(ODD)))
def test_text_of_the_file_cannot_leave_its_comment(
    text: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    clean = port(config_of("olmoe"), "x").text
    path = tmp_path / "config.json"
    path.write_text(json.dumps({**config_of("olmoe").data, "foo": text, f"key {text}": 1}))
    assert main(["port", str(path), "-o", str(tmp_path / "x.yaml")]) == 1
    assert yaml.safe_load((tmp_path / "x.yaml").read_text()) == yaml.safe_load(clean)
    assert all(line.isprintable() for line in (tmp_path / "x.yaml").read_text().split("\n"))
    assert len(capsys.readouterr().err.splitlines()) == 4  # two warnings, "wrote", "next"


def test_keys_with_dots_are_other_fields() -> None:
    config = config_of("olmoe", **{"rope_parameters.rope_theta": 5.0})
    assert [one.path for one in port(config, "x").leftovers if not one.reason] == ["[rope_parameters.rope_theta]"]


# --- quantisation ------------------------------------------------------------------------------------------------

INT4 = {"num_bits": 4, "group_size": 32, "symmetric": True, "strategy": "group", "type": "int", "actorder": None}


def int4(group: dict[str, Any] | None = None, **weights: Any) -> dict[str, Any]:
    """quantization_config of a compressed-tensors checkpoint."""
    whole = {"weights": {**INT4, **weights}, "input_activations": None, **(group or {})}
    return {"quant_method": "compressed-tensors", "format": "pack-quantized", "config_groups": {"group_0": whole}}


def test_known_formats() -> None:
    fp8 = port(
        config_of("deepseek_v3", quantization_config={"quant_method": "fp8", "weight_block_size": [64, 32]}), "x"
    )
    assert fp8.graph and fp8.graph.checkpoint and fp8.graph.checkpoint.scale_block == (64, 32)
    usual = port(config_of("deepseek_v3", quantization_config={"quant_method": "fp8"}), "x").graph
    assert usual and usual.checkpoint and usual.checkpoint.scale_block == (128, 128)  # transformers' default
    packed = port(config_of("deepseek_v3", model_type="kimi_k2", quantization_config=int4()), "x").text
    assert "experts.{expert}.down_proj.weight_packed" in packed
    assert 'experts.{expert}.down_proj.weight"' not in packed
    mxfp4 = {"hidden_size": 64, "intermediate_size": 64, "quantization_config": {"quant_method": "mxfp4"}}
    assert "experts.down_proj_blocks" in port(config_of("gpt_oss", **mxfp4), "x").text


@pytest.mark.parametrize(
    ("given", "wanted"),
    [
        ("fp8", "quantization_config: expected a mapping, got 'fp8'"),
        ({"bits": 4}, "weights are not known to be stored in that format"),
        ({"quant_method": "awq", "bits": 4}, "quantization_config.quant_method: is 'awq': this family's weights"),
        ({"quant_method": "mxfp4"}, "quantization_config.quant_method: is 'mxfp4': this family's weights"),
        ({"quant_method": "fp8", "weight_block_size": None}, "scaled by something else than blocks"),
        ({"quant_method": "fp8", "weight_block_size": [64]}, "quantization_config.weight_block_size"),
        ({"quant_method": "fp8", "weight_block_size": [4, 4], "activation_scheme": "static"}, "stored scales"),
        ({"quant_method": "fp8", "weight_block_size": [4, 4], "scale_fmt": "ue8m0"}, "stored as exponents"),
        (int4(num_bits=8), "weights.num_bits: is 8: packed weights are no 4-bit integers"),
        (int4(type="float"), "packed weights are no 4-bit integers"),
        (int4(group_size=128), "weights.group_size: is 128: packed weights do not share a scale per 32"),
        (int4(strategy="channel", group_size=None), "do not share a scale per 32"),
        (int4(symmetric=False), "weights.symmetric: is false: packed weights have zero points"),
        (int4(actorder="group"), "columns of packed weights are reordered"),
        (int4({"input_activations": {"num_bits": 8}}), "activations are quantised too"),
        ({**int4(), "format": "nvfp4-pack-quantized"}, "another layout"),
        ({**int4(), "config_groups": {}}, "not all packed weights are packed alike"),
    ],
)
def test_other_formats_are_refused_with_the_reason(given: Any, wanted: str) -> None:
    found = problems_of("deepseek_v3", model_type="kimi_k2", quantization_config=given)
    assert any(wanted in one for one in found), found
    assert all("quantization_config" in one for one in found), found


# --- files -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        ("{", "is no JSON"),
        ("[1]", "holds no JSON object"),
        ('{"a": 1, "a": 2}', "twice"),
        ("[" * 100_000, "is no JSON"),
        ('{"a": ' + "9" * 5000 + "}", "is no JSON"),
        ('{"a": {"__float__": [1]}}', "is missing"),
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


@pytest.mark.parametrize(
    ("name", "wanted"), [("nothing.json", "No such file"), ("a\0b.json", "a\\x00b.json is no path")]
)
def test_a_file_that_is_not_there(name: str, wanted: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["port", str(tmp_path / name)]) == 2
    assert wanted in capsys.readouterr().err


@pytest.mark.parametrize("content", [b"", b"1234567", b"\x08" + b"\0" * 7 + b"nonsense", b"\xff" * 100])
def test_a_checkpoint_that_cannot_be_read_is_blamed_itself(
    content: bytes, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(config_of("olmoe").data))
    (tmp_path / "model.safetensors").write_bytes(content)
    assert main(["port", str(tmp_path), "--weights", str(tmp_path)]) == 2
    out, err = capsys.readouterr()
    assert "model.safetensors" in err and "config.json" not in err and not out


def test_a_checkpoint_of_another_model_leaves_a_whole_spec(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "config.json").write_text(json.dumps(config_of("olmoe").data))
    save_file({"model.nothing": np.zeros(3, np.float32)}, tmp_path / "model.safetensors")
    assert main(["port", str(tmp_path), "--weights", str(tmp_path), "-o", str(tmp_path / "x.yaml")]) == 1
    assert "checkpoint: model.layers.0.mlp.experts.0.gate_proj.weight: missing" in capsys.readouterr().err
    assert main(["check", str(tmp_path / "x.yaml")]) == 0


def test_infinity_as_transformers_writes_it(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_text('{"limit": [0.0, {"__float__": "Infinity"}]}')
    config, _ = read_config(path, "config.json")
    assert config is not None
    assert evaluate("finite(limit[1])", Scope(config)).value is None
    assert config.data["limit"][1] == float("inf")


def test_only_specs_are_replaced(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Neither the config, nor what else is there; links are written through."""
    path = tmp_path / "config.json"
    path.write_text(json.dumps(config_of("olmoe").data))
    (tmp_path / "notes.txt").write_text("precious")
    before = path.read_text()
    for out in (path, tmp_path / "notes.txt", tmp_path, Path("")):
        assert main(["port", str(path), "-o", str(out)]) == 2
        assert "cannot write" in capsys.readouterr().err
    assert (path.read_text(), (tmp_path / "notes.txt").read_text()) == (before, "precious")
    spec, link = tmp_path / "spec.yaml", tmp_path / "link.yaml"
    spec.write_text("# mine\nspec_version: 1\n")
    link.symlink_to(spec)
    assert main(["port", str(path), "-o", str(link)]) == 0
    assert link.is_symlink() and "name: link" in spec.read_text()


def test_an_older_spec_stays_when_the_port_fails(tmp_path: Path) -> None:
    out = tmp_path / "spec.yaml"
    out.write_text("spec_version: 1\n")
    path = tmp_path / "config.json"
    path.write_text("{}")
    assert main(["port", str(path), "-o", str(out)]) == 2
    assert out.read_text() == "spec_version: 1\n"
