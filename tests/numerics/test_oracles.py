"""Emitted programs against recorded Hugging Face references, on one device and on virtual meshes.

Tolerance 1e-4 on logits of standard deviation about 1: both sides compute in float32 and differ in
summation order only (2e-5 seen); a wrong norm, gate, rope pairing or router term shows at 1e-2 and up.
"""

from pathlib import Path

import pytest

from moec.compiler.emit.emit import emit
from moec.compiler.plan.choose import make_plan
from moec.compiler.spec.load import load
from moec.compiler.verify.recorded import verify_recorded

TOLERANCE = 1e-4
# target and pins; the first two run by default, the others in the full suite
MESHES = {
    "one": ("cpu", ()),
    "dp4tp2_ep8": ("cpu:8", ("plan.attention.dp=4", "plan.attention.tp=2", "plan.experts.ep=8")),
    "dp8_ep8": ("cpu:8", ("plan.attention.dp=8", "plan.experts.ep=8")),
    "dp8_ep4tp2": ("cpu:8", ("plan.attention.dp=8", "plan.experts.ep=4", "plan.experts.tp=2")),
    "dp2tp2_ep4": ("cpu:4", ("plan.attention.dp=2", "plan.attention.tp=2", "plan.experts.ep=4")),
    "dp2_ep2": ("cpu:2", ("plan.attention.dp=2", "plan.experts.ep=2")),
    "tp2_ep2": ("cpu:2", ("plan.attention.tp=2", "plan.experts.ep=2")),
}
DEFAULT = ("one", "dp4tp2_ep8")
PLACED = ("plan.embed=sharded", "plan.head=sharded", "plan.shared_expert=sharded")


SLOW = tuple(name for name in MESHES if name not in DEFAULT)


@pytest.mark.parametrize("mesh", [*DEFAULT, *(pytest.param(name, marks=pytest.mark.slow) for name in SLOW)])
def test_recorded_reference(oracle_dir: Path, mesh: str, tmp_path: Path, root: Path):
    """Full prefill (2 x 37, 1 x 130 tokens), ragged chunks, cached single steps, 24 greedy ids."""
    if not (root / "specs" / "models" / "tiny" / f"{oracle_dir.name}.yaml").is_file():
        assert not oracle_dir.is_relative_to(root), f"the committed recording {oracle_dir.name} has no spec"
        pytest.skip(f"no spec for {oracle_dir.name} of $MOEC_ORACLES yet")
    target, pins = MESHES[mesh]
    # 136 tokens per step, so that the longest reference is one chunk.
    overrides = [*pins, "plan.max_batched_tokens=136", *(PLACED if target != "cpu" else ())]
    if mesh != "one" and oracle_dir.name in ("qwen3_moe", "mixtral"):
        overrides.remove("plan.shared_expert=sharded")  # these have no shared expert to place
    request = load(f"tiny/{oracle_dir.name}", target=target, workload="tiny", overrides=overrides)
    emit(request.graph, make_plan(request), tmp_path / "program")
    report = verify_recorded(tmp_path / "program", oracle_dir, oracle_dir / "ref.npz", tolerance=TOLERANCE)
    assert report.greedy == report.greedy_wanted
    assert len(report.greedy) == 24
    assert set(report.max_abs_err) == {"full a", "ragged a", "full b", "ragged b", "cached steps"}
    assert max(report.max_abs_err.values()) <= TOLERANCE, report.max_abs_err


def test_a_wrong_model_is_caught(tmp_path: Path, root: Path, oracle_dirs: dict[str, Path]):
    """The comparison can fail: rope pairing swapped in the spec shows far above the tolerance."""
    oracle = oracle_dirs["qwen3_moe"]
    overrides = ["model.blocks.gqa.rope.pairing=interleaved", "plan.max_batched_tokens=136"]
    request = load("tiny/qwen3_moe", target="cpu", workload="tiny", overrides=overrides)
    emit(request.graph, make_plan(request), tmp_path / "program")
    report = verify_recorded(tmp_path / "program", oracle, oracle / "ref.npz", tolerance=TOLERANCE)
    assert report.status == "fail"
    assert min(report.max_abs_err.values()) > 10 * TOLERANCE
