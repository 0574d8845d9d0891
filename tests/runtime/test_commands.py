"""`moec run` and `moec verify` as users call them: in a process of their own, with virtual devices."""

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from moec.compiler.cli import main
from moec.compiler.commands.common import print_json

MODEL = "tiny/qwen3_5_moe"


def moec(root: Path, cwd: Path, *words: str) -> subprocess.CompletedProcess[str]:
    """One command line, without the devices that the tests set up for themselves."""
    env = {"PYTHONPATH": str(root), "PATH": "/usr/bin:/bin"}
    return subprocess.run([sys.executable, "-m", "moec", *words], cwd=cwd, env=env, capture_output=True, text=True)


def test_json_has_no_other_numbers(capsys: pytest.CaptureFixture[str]) -> None:
    print_json({"a": [float("nan"), 1.5], "b": (float("inf"), {"c": -float("inf")})})
    text = capsys.readouterr().out
    assert json.loads(text, parse_constant=pytest.fail) == {"a": ["NaN", 1.5], "b": ["Infinity", {"c": "-Infinity"}]}


def test_run_names_everything_wrong_before_it_compiles(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "config.json").write_text('{"eos_token_id": "x"}')
    words = ["run", MODEL, "--target", "cpu", "--weights", str(tmp_path), "--ids", "1,x", "--ids", "y"]
    assert main([*words, "--top-k", str(2**40), "--temperature", "nan", "--seed", "-1", "model.no_such=1"]) == 2
    told = capsys.readouterr().err
    for text in ("--ids '1,x'", "--ids 'y'", "eos_token_id", "no *.safetensors", "top_k 1099511627776: must"):
        assert text in told
    for text in ("temperature nan: must", "seed -1: must", "model.no_such"):
        assert text in told


@pytest.mark.slow
@pytest.mark.oracle
def test_run_generates_what_the_reference_generated(root: Path, tmp_path: Path) -> None:
    oracle = root / "tests" / "fixtures" / "oracles" / "qwen3_5_moe"
    with np.load(oracle / "ref.npz") as archive:
        prompt, wanted = archive["gen_prompt"][0].tolist(), archive["gen"][0].tolist()
    ids = ("--ids", ",".join(map(str, prompt)), "--max-tokens", str(len(wanted)))
    done = moec(root, tmp_path, "run", MODEL, "--target", "cpu:2", "--weights", str(oracle), *ids, "--json")
    assert done.returncode == 0, done.stderr
    document = json.loads(done.stdout)
    assert document["target"] == "cpu:2"
    assert document["completions"][0]["tokens"] == wanted
    assert document["load_notes"] == []  # float32 in the checkpoint and in the program

    # The same program by its folder, as text for people: one prompt streams its ids.
    done = moec(root, tmp_path, "run", document["program"], "--weights", str(oracle), *ids)
    assert done.returncode == 0, done.stderr
    assert done.stdout == ",".join(map(str, wanted)) + "\n"


@pytest.mark.slow
@pytest.mark.oracle
def test_verify_exits_with_1_above_the_tolerance(root: Path, tmp_path: Path) -> None:
    reference = root / "tests" / "fixtures" / "oracles" / "qwen3_5_moe" / "ref.npz"
    words = ("verify", MODEL, "--target", "cpu", "--reference", str(reference), "--json")
    done = moec(root, tmp_path, *words, "--tolerance", "1e-4")
    assert done.returncode == 0, done.stderr
    errors = json.loads(done.stdout)["reference"]["max_abs_err"]
    assert len(errors) == 5
    assert all(0 < error <= 1e-4 for error in errors.values())
    assert moec(root, tmp_path, *words, "--tolerance", str(max(errors.values()) / 2)).returncode == 1


@pytest.mark.slow
@pytest.mark.oracle
def test_run_says_what_loading_changed(root: Path, tmp_path: Path) -> None:
    """On stderr and in the JSON document: float8 experts kept, everything else rounded to bfloat16."""
    oracle = root / "tests" / "fixtures" / "oracles" / "qwen3_5_moe_fp8_cut"
    pins = ("plan.dtypes.activation=bfloat16", "plan.dtypes.weight=bfloat16", "plan.dtypes.expert=float8_e4m3fn")
    words = ("run", f"tiny/{oracle.name}", "--target", "cpu", "--weights", str(oracle), "--ids", "5", *pins)
    done = moec(root, tmp_path, *words, "--max-tokens", "2", "--json")
    assert done.returncode == 0, done.stderr
    (note,) = json.loads(done.stdout)["load_notes"]
    assert "rounded to bfloat16: 26 tensors stored as float8_e4m3fn" in note
    assert note in done.stderr.splitlines()
