"""The standalone program in a process that has only jax and numpy: the recorded logits, on one device and on eight.

The process gets a folder of links to jax and what jax itself requires, and nothing else.
"""

import importlib.metadata
import os
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from moec.compiler.emit.emit import emit
from moec.compiler.plan.choose import make_plan
from moec.compiler.spec.load import load

MODEL = "qwen3_5_moe"
TOLERANCE = 1e-4  # as test_oracles.py
ABSENT = ("moec", "pydantic", "safetensors", "tokenizers", "jinja2", "libtpu")
# One step takes all prompts of a recording on one rank: 2 x 37 and 130 tokens.
PINS = {"cpu": ("plan.max_batched_tokens=208",), "cpu:8": ("plan.attention.dp=8", "plan.max_batched_tokens=136")}


def required(name: str) -> set[str]:
    """A distribution and everything it requires without extras."""
    found = {name}
    for line in importlib.metadata.requires(name) or ():
        requirement, _, condition = line.partition(";")
        if "extra" not in condition:
            found |= required(re.split(r"[\s<>=!~\[(]", requirement.strip(), maxsplit=1)[0])
    return found


@pytest.fixture(scope="session")
def jax_only(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder for sys.path with jax, numpy and what they require."""
    folder = tmp_path_factory.mktemp("jax_only")
    for name in sorted(required("jax")):
        distribution = importlib.metadata.distribution(name)
        tops = {Path(file).parts[0] for file in distribution.files or () if ".." not in Path(file).parts}
        for top in tops - {"__pycache__"}:
            (folder / top).symlink_to(Path(str(distribution.locate_file(top))))
    return folder


def python(jax_only: Path, *words: str, timeout: float = 500) -> subprocess.CompletedProcess[str]:
    """Python without site-packages (-S), the working directory or the script's own devices."""
    env = {"PATH": os.environ["PATH"], "HOME": str(jax_only), "PYTHONPATH": str(jax_only), "JAX_PLATFORMS": "cpu"}
    command = [sys.executable, "-S", "-s", "-P", *words]
    return subprocess.run(command, env=env, cwd=jax_only, capture_output=True, text=True, timeout=timeout)


def test_the_process_has_jax_and_numpy_only(jax_only: Path) -> None:
    script = f"import importlib.util as u, jax; print([n for n in {('numpy', *ABSENT)!r} if u.find_spec(n)])"
    done = python(jax_only, "-c", script)
    assert (done.stdout, done.returncode) == ("['numpy']\n", 0), done.stderr


@pytest.mark.oracle
@pytest.mark.parametrize("target", PINS)
def test_standalone_logits(target: str, jax_only: Path, tmp_path: Path, oracle_dirs: dict[str, Path]) -> None:
    oracle, folder = oracle_dirs[MODEL], tmp_path / "program"
    request = load(f"tiny/{MODEL}", target=target, workload="tiny", overrides=PINS[target])
    emit(request.graph, make_plan(request), folder, standalone=True)
    with np.load(oracle / "ref.npz") as recorded:
        ids = [*recorded["ids_a"].tolist(), *recorded["ids_b"].tolist()]
        wanted = [*recorded["logits_a"], *recorded["logits_b"]]
    prompts = [word for tokens in ids for word in ("--ids", ",".join(map(str, tokens)))]
    out = tmp_path / "logits.npz"
    done = python(jax_only, str(folder / "run.py"), "--weights", str(oracle), "--logits", str(out), *prompts)
    assert done.returncode == 0, done.stderr
    with np.load(out) as archive:
        assert len(archive.files) == len(wanted) == 3
        for i, logits in enumerate(wanted):
            assert np.abs(archive[f"prompt{i}"] - logits).max() <= TOLERANCE


@pytest.mark.slow
@pytest.mark.oracle
def test_standalone_generates(jax_only: Path, tmp_path: Path, oracle_dirs: dict[str, Path]) -> None:
    oracle, folder = oracle_dirs[MODEL], tmp_path / "program"
    request = load(f"tiny/{MODEL}", target="cpu", workload="tiny")
    emit(request.graph, make_plan(request), folder, standalone=True)
    with np.load(oracle / "ref.npz") as recorded:
        prompt, wanted = recorded["gen_prompt"][0].tolist(), recorded["gen"][0].tolist()
    words = ("--ids", ",".join(map(str, prompt)), "--max-tokens", str(len(wanted)))
    done = python(jax_only, str(folder / "run.py"), "--weights", str(oracle), *words)
    assert done.returncode == 0, done.stderr
    assert done.stdout == ",".join(map(str, wanted)) + "\n"
