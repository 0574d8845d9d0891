"""moec port on recorded references: what it writes, unedited, is the shipped tiny spec of the same model."""

from dataclasses import replace
from pathlib import Path

import pytest

from moec.compiler.cli import main
from moec.compiler.port.config import read_config
from moec.compiler.port.port import port
from moec.compiler.spec.load import load
from moec.compiler.verify.random_checkpoint import write_random_checkpoint
from moec.runtime.checkpoint import Checkpoint

ROOT = Path(__file__).parents[2]
TINY = ROOT / "specs" / "models" / "tiny"
CONFIGS = ROOT / "tests" / "fixtures" / "configs"
WRITTEN = sorted(path.stem for path in TINY.glob("*.yaml") if "\n# Written by `moec port`" in path.read_text())
BODY_LINES = 60  # of a tiny spec, without its checkpoint table


def test_most_tiny_specs_are_written_by_port() -> None:
    assert len(WRITTEN) >= 9


def test_a_reference_ports_to_its_tiny_spec(
    oracle_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Exit code 0: the checkpoint fits, nothing is asked. The graph is the shipped one's but for name and table."""
    out = tmp_path / "spec.yaml"
    assert main(["port", str(oracle_dir / "config.json"), "--weights", str(oracle_dir), "-o", str(out)]) == 0
    err = capsys.readouterr().err
    assert "warning" not in err
    assert f"next: moec verify {out} --target cpu --weights {oracle_dir} --reference {oracle_dir}/ref.npz" in err
    assert list(tmp_path.iterdir()) == [out]
    shipped, ported = load(f"tiny/{oracle_dir.name}").graph, load(str(out)).graph
    assert replace(ported, name=shipped.name, checkpoint=shipped.checkpoint) == shipped
    body = out.read_text().partition("\ncheckpoint:")[0]
    assert sum(bool(line.strip()) for line in body.splitlines()) <= BODY_LINES


@pytest.mark.parametrize("name", WRITTEN)
def test_tiny_specs_that_port_wrote_are_what_it_writes(name: str, tmp_path: Path) -> None:
    """The table is cut down to a checkpoint of its own layout, as it was to the reference's.

    Where the text has changed for good: moec port CONFIG --weights REFERENCE, keeping `name: tiny_...`.
    """
    shipped = load(f"tiny/{name}").graph
    write_random_checkpoint(shipped, tmp_path)
    stored = {tensor: found.shape for tensor, found in Checkpoint(tmp_path).tensors.items()}
    config, problems = read_config(CONFIGS / f"{name}.json", "config.json")
    assert config is not None, problems
    assert port(config, shipped.name, stored).text == (TINY / f"{name}.yaml").read_text()
