"""The programs under generated/ that a CPU can run are run as committed, on the recorded reference."""

from pathlib import Path

import numpy as np
import pytest

from moec.compiler.plan.plan import Plan
from moec.compiler.verify.recorded import verify_recorded

TOLERANCE = 1e-4  # as test_oracles.py
COMMITTED = Path("generated/tiny_qwen3_5_moe")


def within(reference: Path, max_context: int, out: Path) -> Path:
    """The recording cut to what the program takes: models are causal, so the logits of a prefix are the same."""
    with np.load(reference) as archive:
        arrays = {name: archive[name] for name in archive.files}
    for part in ("ids_b", "logits_b"):
        assert arrays[part].shape[1] > max_context, "nothing to cut: compare with the recording itself"
        arrays[part] = arrays[part][:, :max_context]
    np.savez(out, **arrays)
    return out


@pytest.mark.slow
@pytest.mark.oracle
@pytest.mark.parametrize("target", ["cpu", "cpu_8"])
def test_committed_program_gives_the_recorded_logits(
    target: str, root: Path, tmp_path: Path, oracle_dirs: dict[str, Path]
) -> None:
    folder, oracle = root / COMMITTED / target / "default", oracle_dirs["qwen3_5_moe"]
    plan = Plan.model_validate_json((folder / "plan.json").read_bytes())
    reference = within(oracle / "ref.npz", plan.max_context, tmp_path / "ref.npz")
    report = verify_recorded(folder, oracle, reference, tolerance=TOLERANCE)
    assert report.status == "pass", report.checks
    assert set(report.max_abs_err) == {"full a", "ragged a", "full b", "ragged b", "cached steps"}


def test_every_committed_cpu_program_is_run(root: Path) -> None:
    """A program that joins them must join the test above."""
    found = {path.parent.relative_to(root).as_posix() for path in (root / "generated").glob("*/cpu*/*/plan.json")}
    assert found == {f"{COMMITTED}/{target}/default" for target in ("cpu", "cpu_8")}
