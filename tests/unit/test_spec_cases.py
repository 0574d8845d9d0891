"""Every bad input of tests/cases/spec gives exactly the messages its case promises, all in one pass.

A case is base.yaml with replacements (or a whole text), overrides, target, workload, and
the messages in order: `file:line:col: error: dotted.path: what is wrong (hint)`.
"""

from pathlib import Path
from typing import Any

import pytest
import yaml

from moec.compiler.problems import Problem, ProblemsError
from moec.compiler.spec.load import load

FOLDER = Path(__file__).parents[1] / "cases" / "spec"
CASES = sorted(path for path in FOLDER.glob("*.yaml") if path.name != "base.yaml")


def spoiled(case: dict[str, Any]) -> str:
    """base.yaml with the case's replacements; each must hit exactly one place."""
    text = case.get("text", (FOLDER / "base.yaml").read_text())
    for old, new in case.get("replace", []):
        assert text.count(old) == 1, f"{old!r} occurs {text.count(old)} times"
        text = text.replace(old, new)
    return text


def messages(case: dict[str, Any]) -> list[str]:
    """What loading ./spec.yaml (or the case's model) says."""
    with pytest.raises(ProblemsError) as caught:
        load(
            case.get("model", "spec.yaml"),
            target=case.get("target"),
            workload=case.get("workload"),
            overrides=case.get("overrides", ()),
        )
    return [str(problem) for problem in caught.value.problems]


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty working directory, so that messages name files the same way everywhere."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize("path", CASES, ids=lambda path: path.stem)
def test_case(path: Path, here: Path) -> None:
    case = yaml.safe_load(path.read_text())
    (here / "spec.yaml").write_text(spoiled(case))
    assert messages(case) == case["problems"]


def test_there_are_enough_cases() -> None:
    assert len(CASES) >= 30


def test_base_is_sound(here: Path) -> None:
    (here / "spec.yaml").write_text(spoiled({}))
    assert load("spec.yaml").graph.num_layers == 8


def test_problems_of_later_stages_name_the_place_too(here: Path) -> None:
    """A pin is on the command line or in the model file, a dtype in the target's; what nobody wrote has no place."""
    text = spoiled({}) + "mesh: {attention: {dp: 8}}\n"
    (here / "spec.yaml").write_text(text)
    request = load("spec.yaml", target="cpu:8", workload="default", overrides=["plan.page_size=16"])

    def said(path: str) -> str:
        return str(request.locate(Problem(path, "no", "hint")))

    line = len(text.splitlines())
    assert said("plan.page_size") == "<command line>:arg1: error: plan.page_size: no (hint)"
    assert said("plan.attention.dp") == f"spec.yaml:{line}:24: error: plan.attention.dp: no (hint)"
    both = said("plan.page_size, plan.attention.dp")
    assert both == f"<command line>:arg1: error: plan.page_size, plan.attention.dp: no (hint; see spec.yaml:{line}:24)"
    assert "targets/cpu/chip.yaml:" in said("plan.dtypes.kv") and "targets/cpu/chip.yaml:" in said("target.hbm_gib")
    assert said("plan.max_seqs") == "error: plan.max_seqs: no (hint)"
    assert said("plan") == "error: plan: no (hint)"
