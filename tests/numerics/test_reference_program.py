"""verify_numerics: an emitted program agrees with the references layer by layer, and a wrong one is located."""

from pathlib import Path

import numpy as np
import pytest

from moec.compiler.emit.emit import emit
from moec.compiler.plan.choose import make_plan
from moec.compiler.plan.plan import Plan
from moec.compiler.problems import ProblemsError
from moec.compiler.spec.load import load
from moec.compiler.verify import chunks, numerics
from moec.compiler.verify.numerics import NumericsReport, compare, difference, verify_numerics
from moec.compiler.verify.recording import read_reference
from moec.compiler.verify.reference import Meaning
from moec.runtime.score import Trace

KINDS = ["full prefill", "ragged chunks", "cached steps"]


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Plan]:
    request = load("tiny/qwen3_5_moe", target="cpu:2", workload="tiny", overrides=["plan.attention.dp=2"])
    plan, folder = make_plan(request), tmp_path_factory.mktemp("numerics") / "program"
    emit(request.graph, plan, folder)
    return folder, plan


def test_program_agrees_in_every_layer(program: tuple[Path, Plan]) -> None:
    folder, plan = program
    report = verify_numerics(folder, plan, load("tiny/qwen3_5_moe").graph)
    assert report.status == "pass", report.checks
    assert [errors.kind for errors in report.errors] == KINDS
    assert all(len(errors.hidden_abs) == 5 for errors in report.errors)
    # Zero everywhere would mean that nothing was compared.
    assert max(report.errors[0].hidden_abs) > 0
    assert NumericsReport.model_validate_json(report.model_dump_json()) == report


def test_wrong_layer_is_located(program: tuple[Path, Plan]) -> None:
    """The program was emitted from another rope: only the last layer has attention."""
    folder, plan = program
    other = load("tiny/qwen3_5_moe", overrides=["model.blocks.gqa.rope.pairing=interleaved"]).graph
    report = verify_numerics(folder, plan, other)
    assert report.status == "fail"
    layers = {check.name: check for check in report.checks if check.name.endswith("layers")}
    assert len(layers) == 3
    for check in layers.values():
        assert check.status == "fail"
        assert "first above at the output of layer 3 (gqa_moe) and the final norm" in check.detail


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"dtypes": "bfloat16"}, "not float32 (kv bfloat16)"),
        ({"devices": 1}, "needs 2 devices, 1 are visible"),
        ({"bound": 1000}, "parameters: the token-by-token reference takes at most 1,000"),
    ],
)
def test_what_cannot_be_compared_is_skipped(
    program: tuple[Path, Plan], change: dict, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, plan = program
    if "dtypes" in change:
        plan = plan.model_copy(update={"dtypes": plan.dtypes.model_copy(update={"kv": "bfloat16"})})
    if "bound" in change:
        monkeypatch.setattr(numerics, "MAX_PARAMS", change["bound"])
    devices = [None] * change.get("devices", 2)
    report = verify_numerics(folder, plan, load("tiny/qwen3_5_moe").graph, devices=devices)
    assert report.status == "skipped"
    assert said in report.reason


def test_difference_sees_nan() -> None:
    wanted = np.array([3.0, 4.0], np.float32)
    assert difference(wanted, wanted) == (0.0, 0.0)
    absolute, relative = difference(np.array([3.0, 4.5]), wanted)
    assert (absolute, round(relative, 4)) == (0.5, 0.1414)
    assert difference(np.array([3.0, np.nan]), wanted) == (np.inf, np.inf)


def test_compare_takes_the_worst_sequence() -> None:
    def one(error: float) -> tuple[Trace, Meaning]:
        logits, hidden = np.ones((2, 3), np.float32), np.ones((2, 2, 4), np.float32)
        off = hidden.copy()
        off[1, 1, 2] += error
        return Trace(logits, off), Meaning(logits, hidden)

    traces, meanings = zip(one(0.0), one(0.25), strict=True)
    errors = compare("full prefill", traces, meanings)
    assert errors.hidden_abs == (0.0, 0.25)
    assert errors.logits_abs == 0.0


def test_chunks_add_up() -> None:
    lengths = [1, 2, 37, 130]
    for cuts in (chunks.whole(lengths, 64), chunks.ragged(lengths, 64, seed=0), chunks.steps(lengths, 64, 15)):
        assert [sum(cut) for cut in cuts] == lengths
        assert all(1 <= n <= 64 for cut in cuts for n in cut)
    assert chunks.whole([130], 64) == [[64, 64, 2]]
    assert chunks.steps([35], 64, 15) == [[20] + [1] * 15]
    assert len(set(chunks.ragged([130], 64, seed=0)[0])) > 2


def test_reference_without_its_keys(tmp_path: Path) -> None:
    np.savez(tmp_path / "ref.npz", ids_a=np.zeros((2, 3), np.int32))
    with pytest.raises(ProblemsError, match="lacks logits_a, ids_b, logits_b, gen_prompt, gen"):
        read_reference(tmp_path / "ref.npz")
    with pytest.raises(ProblemsError, match="cannot read the reference"):
        read_reference(tmp_path / "absent.npz")
