"""Loading: shipped specs are clean, names and paths resolve, overrides land, errors are quick and complete."""

import json
import os
import random
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from moec.compiler.problems import ProblemsError
from moec.compiler.spec.assemble import assemble
from moec.compiler.spec.files import WORKLOADS
from moec.compiler.spec.load import list_models, list_targets, list_workloads, load
from moec.compiler.spec.marks import KeyPath, read_document, walk
from moec.compiler.spec.schema import Workload
from moec.compiler.spec.show import show_spec
from moec.compiler.spec.validate import parse

BASE = Path(__file__).parents[1] / "cases" / "spec" / "base.yaml"
SHIPPED = [
    "mixtral-8x7b",
    "qwen3-30b-a3b",
    "qwen3.5-122b-a10b",
    "qwen3.5-35b-a3b",
    "qwen3.5-397b-a17b",
    "tiny/mixtral",
    "tiny/qwen3_5_moe",
    "tiny/qwen3_5_moe_bf16_published",
    "tiny/qwen3_5_moe_fp8_published",
    "tiny/qwen3_moe",
]


def test_shipped_names() -> None:
    assert set(SHIPPED) <= set(list_models())
    assert {"default", "tiny", "decode_512x9216", "chat_8k1k_c512", "chat_1k8k_c64"} <= set(list_workloads())
    assert {"tpu7x:2x2x1", "cpu", "cpu:8"} <= set(list_targets())


@pytest.mark.parametrize("model", list_models())
def test_shipped_models_are_clean(model: str) -> None:
    request = load(model)
    assert request.graph.num_layers == request.model.num_layers
    assert request.graph.checkpoint is not None


@pytest.mark.parametrize("workload", list_workloads())
def test_shipped_workloads_are_clean(workload: str) -> None:
    path = WORKLOADS / f"{workload}.yaml"
    loaded, findings = parse(Workload, read_document(path, "workload", path.name).data, ("workload",))
    assert findings == []
    assert loaded is not None
    assert loaded.name == workload
    assert loaded.max_context >= loaded.isl + loaded.osl


def test_target_and_alias_are_the_same() -> None:
    by_name, by_alias = (load("tiny/mixtral", target=name).target for name in ("tpu7x:2x2x1", "tpu7x-8"))
    assert by_name == by_alias
    assert by_name is not None
    assert (by_name.chip, by_name.num_devices) == ("tpu7x", 8)


def test_overrides_reach_every_root() -> None:
    overrides = (
        "model.blocks.moe.router.top_k=3",
        "model.layers.0.repeat=8",
        "model.num_layers=8",
        "target.hbm_gib=7",
        "workload.concurrency=16",
        "plan.attention.dp=4",
        "plan.dtypes.kv=bfloat16",
        "+plan.page_size=128",
    )
    request = load("tiny/mixtral", target="cpu:8", workload="tiny", overrides=overrides)
    assert request.target is not None
    assert request.workload is not None
    assert request.graph.num_layers == 8
    assert request.graph.blocks()["moe"].fields.model_dump()["router"]["top_k"] == 3
    assert request.target.hbm_gib.value == 7
    assert request.workload.concurrency == 16
    assert (request.pins.attention.dp, request.pins.dtypes.kv, request.pins.page_size) == (4, "bfloat16", 128)
    assert request.overrides == overrides


def test_delete_and_interpolation_overrides() -> None:
    request = load("tiny/mixtral", overrides=["~model.num_layers", "model.max_context=${model.vocab_size}"])
    assert request.model.num_layers is None
    assert request.model.max_context == 256


def test_null_context_means_prompt_plus_output() -> None:
    workload = load("tiny/mixtral", workload="tiny", overrides=["workload.max_context=null"]).workload
    assert workload is not None
    assert workload.max_context == 128


def test_mesh_in_the_model_file_pins_the_plan_and_an_override_wins(tmp_path: Path) -> None:
    path = tmp_path / "spec.yaml"
    path.write_text(BASE.read_text() + "mesh: {attention: {dp: 8}, experts: {ep: 4, tp: 2}}\n")
    request = load(str(path), target="cpu:8", overrides=["plan.experts.ep=8", "plan.experts.tp=1"])
    assert (request.pins.attention.dp, request.pins.experts.ep, request.pins.experts.tp) == (8, 8, 1)


def test_digests_follow_content_not_spelling(tmp_path: Path) -> None:
    again = tmp_path / "again.yaml"
    again.write_text("# a comment\n" + BASE.read_text().replace("repeat: 2", "repeat:   2"))
    changed = tmp_path / "changed.yaml"
    changed.write_text(BASE.read_text().replace("theta: 1.0e7", "theta: 1.0e6"))
    digests = [load(str(path)).digests["spec"] for path in (BASE, again, changed)]
    assert digests[0] == digests[1] != digests[2]


@pytest.mark.parametrize("model", ["qwen3.5-397b-a17b", "mixtral-8x7b"])
def test_shown_spec_loads_again(model: str, tmp_path: Path) -> None:
    request = load(model)
    path = tmp_path / "again.yaml"
    path.write_text(yaml.safe_dump(yaml.safe_load(show_spec(request))["model"], sort_keys=False))
    again = load(str(path))
    assert again.graph == request.graph
    assert json.loads(show_spec(request, as_json=True)) == yaml.safe_load(show_spec(request))


def test_quoted_ambiguous_words_are_text(tmp_path: Path) -> None:
    path = tmp_path / "spec.yaml"
    path.write_text(BASE.read_text().replace("name: base", 'name: "010"'))
    assert load(str(path)).model.name == "010"


def test_exponents_are_numbers_with_or_without_a_point(tmp_path: Path) -> None:
    path = tmp_path / "spec.yaml"
    path.write_text(BASE.read_text().replace("eps: 1.0e-6", "eps: 1e-6").replace("theta: 1.0e7", "theta: 10000000"))
    assert load(str(path)).graph == load(str(BASE)).graph


def test_an_error_loads_no_jax() -> None:
    code = (
        "import sys\n"
        "from moec.compiler.spec.load import load\n"
        "from moec.compiler.problems import ProblemsError\n"
        "try:\n"
        "    load('qwen3.5-397b-a17b', target='tpu7x-8', overrides=['model.layres=3', 'plan.attention.dp=3'])\n"
        "except ProblemsError as error:\n"
        "    print(len(error.problems), 'jax' in sys.modules)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=_root(), check=True)
    assert done.stdout.split() == ["2", "False"]


def _root() -> str:
    return os.fspath(Path(__file__).parents[2])


ODD: list[Any] = [None, True, 0, -1, 7, 10**9, 1.5, "on", "gdn", "moe", "", [], {}, [1], {"a": 1}, ["gdn"], [None]]


def _parent(document: Any, path: KeyPath) -> Any:
    for key in path[:-1]:
        document = document[key]
    return document


@pytest.mark.parametrize("seed", range(4))
def test_no_document_makes_it_crash(seed: int) -> None:
    """Sound documents with random odd values either load or give findings, and never both."""
    draw = random.Random(seed)
    for _ in range(100):
        model = read_document(BASE, "model", "base.yaml").data
        for _ in range(draw.choice([1, 2, 4])):
            path = draw.choice([path for path, _ in walk(model)])
            parent = _parent(model, path)
            if draw.random() < 0.3 and isinstance(parent, dict):
                del parent[path[-1]]
            else:
                parent[path[-1]] = draw.choice(ODD)
        request, findings = assemble({"model": model, "plan": {}}, {"model", "plan"}, ())
        assert (request is None) == bool(findings)


@pytest.mark.parametrize("seed", range(2))
def test_no_text_makes_it_crash(seed: int, tmp_path: Path) -> None:
    """Text with characters lost, doubled or exchanged either loads or raises problems, nothing else."""
    draw = random.Random(seed)
    path = tmp_path / "spec.yaml"
    for _ in range(8):
        text = BASE.read_text()
        for _ in range(draw.choice([1, 3, 9])):
            at = draw.randrange(len(text))
            text = (
                text[:at]
                + draw.choice(["", "{", "}", ":", "- ", "\t", "${", "&a ", "*a ", "\n", "'", "%", "é"])
                + text[at + 1 :]
            )
        path.write_text(text)
        try:
            load(str(path))
        except ProblemsError as error:
            assert error.problems
