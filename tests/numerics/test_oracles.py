"""Emitted programs against recorded Hugging Face references, on one device and on virtual meshes.

Tolerance 1e-4 on logits of standard deviation about 1: both sides compute in float32 and differ in
summation order only (2e-5 seen); a wrong norm, gate, rope pairing or router term shows at 1e-2 and up.
"""

from pathlib import Path

import pytest

from moec.compiler.emit.emit import emit
from moec.compiler.plan.choose import make_plan
from moec.compiler.plan.space import has_cut
from moec.compiler.spec.load import load
from moec.compiler.verify.recorded import verify_recorded

TOLERANCE = 1e-4
# Target and pins. Every architecture runs on one device, data x expert and tensor x expert parallel; the larger meshes
# cover shardings, for which two models are enough.
MESHES = {
    "dp2_ep2": ("cpu:2", ("plan.attention.dp=2", "plan.experts.ep=2")),
    "tp2_ep2": ("cpu:2", ("plan.attention.tp=2", "plan.experts.ep=2")),
    "dp4tp2_ep8": ("cpu:8", ("plan.attention.dp=4", "plan.attention.tp=2", "plan.experts.ep=8")),
    "dp8_ep8": ("cpu:8", ("plan.attention.dp=8", "plan.experts.ep=8")),
    "dp8_ep4tp2": ("cpu:8", ("plan.attention.dp=8", "plan.experts.ep=4", "plan.experts.tp=2")),
    "dp2tp2_ep4": ("cpu:4", ("plan.attention.dp=2", "plan.attention.tp=2", "plan.experts.ep=4")),
}
EVERY_MODEL, LARGER = list(MESHES)[:2], list(MESHES)[2:]
PLACES = {"shared_expert": "shared", "mlp": "mlp", "embed": "embed", "head": "head"}


def verify(oracle: Path, folder: Path, target: str, pins: tuple[str, ...]) -> None:
    """Full prefill (2 x 37, 1 x 130 tokens), ragged chunks, cached single steps, 24 greedy ids."""
    # 136 tokens per step, so that the longest reference is one chunk.
    overrides = [*pins, "plan.max_batched_tokens=136"]
    request = load(f"tiny/{oracle.name}", target=target, workload="tiny", overrides=overrides)
    emit(request.graph, make_plan(request), folder)
    report = verify_recorded(folder, oracle, oracle / "ref.npz", tolerance=TOLERANCE)
    assert report.greedy == report.greedy_wanted
    assert len(report.greedy) == 24
    assert set(report.max_abs_err) == {"full a", "ragged a", "full b", "ragged b", "cached steps"}
    assert max(report.max_abs_err.values()) <= TOLERANCE, report.max_abs_err


def sharded(name: str) -> tuple[str, ...]:
    """Pins that cut everything the model has that may be replicated."""
    graph = load(f"tiny/{name}").graph
    return tuple(f"plan.{pin}=sharded" for pin, role in PLACES.items() if has_cut(graph, role))


def test_recorded_reference(oracle_dir: Path, tmp_path: Path) -> None:
    """One device."""
    verify(oracle_dir, tmp_path / "program", "cpu", ())


@pytest.mark.slow
@pytest.mark.parametrize("mesh", EVERY_MODEL)
def test_on_two_devices(oracle_dir: Path, mesh: str, tmp_path: Path) -> None:
    """Every architecture, everything cut that can be."""
    target, pins = MESHES[mesh]
    verify(oracle_dir, tmp_path / "program", target, (*pins, *sharded(oracle_dir.name)))


@pytest.mark.oracle
@pytest.mark.parametrize(
    ("name", "mesh"),
    [("qwen3_5_moe", "dp4tp2_ep8")]
    + [
        pytest.param(name, mesh, marks=pytest.mark.slow)
        for name in ("qwen3_5_moe", "mixtral")
        for mesh in LARGER
        if (name, mesh) != ("qwen3_5_moe", "dp4tp2_ep8")
    ],
)
def test_on_larger_meshes(name: str, mesh: str, oracle_dirs: dict[str, Path], tmp_path: Path) -> None:
    """Every kind of mesh: degrees that divide each other, cut experts, repeated key/value heads."""
    target, pins = MESHES[mesh]
    verify(oracle_dirs[name], tmp_path / "program", target, (*pins, *sharded(name)))


def test_a_wrong_model_is_caught(tmp_path: Path, root: Path, oracle_dirs: dict[str, Path]):
    """The comparison can fail: rope pairing swapped in the spec shows far above the tolerance."""
    oracle = oracle_dirs["qwen3_moe"]
    overrides = ["model.blocks.gqa.rope.pairing=interleaved", "plan.max_batched_tokens=136"]
    request = load("tiny/qwen3_moe", target="cpu", workload="tiny", overrides=overrides)
    emit(request.graph, make_plan(request), tmp_path / "program")
    report = verify_recorded(tmp_path / "program", oracle, oracle / "ref.npz", tolerance=TOLERANCE)
    assert report.status == "fail"
    assert min(report.max_abs_err.values()) > 10 * TOLERANCE
    assert report.first_difference.startswith("layer 0 (max_abs_err ")
