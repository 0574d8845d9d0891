"""The dtypes that accelerators get by default, on the recorded references: float8 experts, bfloat16 everywhere else."""

import json
from pathlib import Path

import jax
import numpy as np
import pytest

from moec.compiler.emit.emit import emit
from moec.compiler.plan.choose import make_plan
from moec.compiler.spec.load import load
from moec.compiler.verify.recorded import verify_recorded
from moec.runtime.program import load_program
from moec.runtime.score import score
from moec.runtime.weights import load_weights

FP8 = "qwen3_5_moe_fp8_cut"
FP8_EXPERTS = "plan.dtypes.expert=float8_e4m3fn"
FLAGSHIP = Path("generated/qwen3_5_397b_a17b/tpu7x_2x2x1/decode_512x9216/plan.json")
SCALES = "model.checkpoint.scales={suffix: _scale_inv, block: [128, 128]}"
# One step takes all prompts of a recording: 2 x 37 and 130 tokens.
ONE_STEP = "plan.max_batched_tokens=208"
TOLERANCE = 1e-4  # as test_oracles.py: the same values in float32
# Share of the logits' RMS that a token's logits may be off (RMS over the vocabulary). bfloat16 has 8 significant
# bits: one rounding is 2^-9 = 0.2 %, and some tens of them add up in four layers: 1.8 % for the median token, 2.7 %
# for the third quarter. Above that are tokens for which rounding flipped the choice of an expert. A wrong rope
# pairing, the mildest mistake tried, puts the median at 9 %.
BF16_MEDIAN, BF16_THREE_QUARTERS = 0.03, 0.05


def relative_errors(folder: Path, oracle: Path, *overrides: str) -> np.ndarray:
    """RMS logit error of every recorded token over the RMS of all recorded logits, on one CPU device."""
    request = load(f"tiny/{oracle.name}", target="cpu", workload="tiny", overrides=[ONE_STEP, *overrides])
    emit(request.graph, make_plan(request), folder)
    program = load_program(folder)
    mesh = program.mesh(jax.devices()[:1])
    weights = load_weights(program, mesh, oracle)
    with np.load(oracle / "ref.npz") as recorded:
        ids = [*recorded["ids_a"].tolist(), *recorded["ids_b"].tolist()]
        wanted = np.concatenate([*recorded["logits_a"], *recorded["logits_b"]])
    got = np.concatenate(score(program, mesh, weights, ids))
    return np.sqrt(np.mean((got - wanted) ** 2, axis=-1) / np.mean(wanted**2))


def flagship_dtypes(root: Path) -> list[str]:
    """Pins for the dtypes of the committed 397B plan."""
    dtypes = json.loads((root / FLAGSHIP).read_text())["dtypes"]
    assert (dtypes["activation"], dtypes["expert"]) == ("bfloat16", "float8_e4m3fn")
    return [f"plan.dtypes.{name}={dtype}" for name, dtype in dtypes.items()]


@pytest.mark.oracle
def test_flagship_dtypes_stay_within_bfloat16_rounding(
    root: Path, tmp_path: Path, oracle_dirs: dict[str, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    errors = relative_errors(tmp_path / "program", oracle_dirs[FP8], *flagship_dtypes(root))
    assert np.median(errors) <= BF16_MEDIAN
    assert np.quantile(errors, 0.75) <= BF16_THREE_QUARTERS
    assert "rounded to bfloat16" in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.oracle
def test_a_wrong_model_is_outside_of_bfloat16_rounding(
    root: Path, tmp_path: Path, oracle_dirs: dict[str, Path]
) -> None:
    wrong = "model.blocks.gqa.rope.pairing=interleaved"
    errors = relative_errors(tmp_path / "program", oracle_dirs[FP8], *flagship_dtypes(root), wrong)
    assert np.median(errors) > 2 * BF16_MEDIAN


# One device, experts cut eight ways, and heads cut beside them.
MESHES = {
    "one": ("cpu", ()),
    "dp8_ep8": ("cpu:8", ("plan.attention.dp=8", "plan.experts.ep=8")),
    "dp2tp2_ep4": ("cpu:4", ("plan.attention={dp: 2, tp: 2}", "plan.experts.ep=4")),
}


@pytest.mark.oracle
@pytest.mark.slow
@pytest.mark.parametrize("mesh", MESHES)
def test_float8_experts_give_the_recorded_values(mesh: str, tmp_path: Path, oracle_dirs: dict[str, Path]) -> None:
    """In float32 otherwise: the stored float8 values and scales are the values of the recording."""
    target, pins = MESHES[mesh]
    overrides = [FP8_EXPERTS, "plan.max_batched_tokens=136", *pins]
    request = load(f"tiny/{FP8}", target=target, workload="tiny", overrides=overrides)
    emit(request.graph, make_plan(request), tmp_path / "program")
    report = verify_recorded(tmp_path / "program", oracle_dirs[FP8], oracle_dirs[FP8] / "ref.npz", tolerance=TOLERANCE)
    assert report.status == "pass", report.checks
    assert report.load_notes == ()


@pytest.mark.oracle
def test_quantising_a_bfloat16_checkpoint_is_told(tmp_path: Path, oracle_dirs: dict[str, Path]) -> None:
    oracle = oracle_dirs["qwen3_5_moe_bf16_cut"]
    request = load(f"tiny/{oracle.name}", target="cpu", workload="tiny", overrides=[FP8_EXPERTS, SCALES])
    emit(request.graph, make_plan(request), tmp_path / "program")
    program, notes = load_program(tmp_path / "program"), list[str]()
    load_weights(program, program.mesh(jax.devices()[:1]), oracle, on_note=notes.append)
    told, *errors = notes
    assert told == (
        f"loading {oracle.name}: quantised to float8_e4m3fn (one scale per 128 x 128 block): "
        "8 tensors stored as bfloat16 (moe.w_gate, moe.w_up, moe.w_down)"
    )
    assert [error.split(":")[1] for error in errors] == [
        f" stacks.moe.{key} in float8_e4m3fn" for key in ("w_gate", "w_up", "w_down")
    ]
