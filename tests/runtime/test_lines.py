"""The lines server of an emitted program: a completion per input line, and messages instead of tracebacks."""

import io
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from moec.runtime.lines import main
from moec.runtime.program import Program, load_program

Tensors = dict[str, np.ndarray]


@pytest.fixture(scope="module")
def program(fake_folder: Callable[[int], Path]) -> Program:
    return load_program(fake_folder(1))


@pytest.fixture(scope="module")
def weights(tmp_path_factory: pytest.TempPathFactory, write_checkpoint: Callable[[Path, list[Tensors]], Path]) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("weights"), [{"model.norm.weight": np.ones(4, np.float32)}])


def serve(program: Program, text: str, *words: str) -> tuple[int, str]:
    """(exit code, what was written)."""
    sink = io.StringIO()
    return main(program, words, io.StringIO(text), sink), sink.getvalue()


@pytest.fixture(autouse=True)
def _devices_as_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    """The tests have devices already; asking for virtual ones is too late in this process."""
    import jax

    monkeypatch.setattr("moec.runtime.lines._devices", lambda count: jax.devices()[:count])


def test_a_completion_per_line(program: Program, weights: Path, next_token: Callable[..., int]) -> None:
    code, written = serve(program, "1,2,3\n\n 5\n", "--weights", str(weights), "--ids", "--max-tokens", "2")
    wanted = []
    for prompt in ([1, 2, 3], [5]):
        first = next_token(prompt)
        wanted.append(f"{first},{next_token([*prompt, first])}")
    assert (code, written.splitlines()) == (0, wanted)


@pytest.mark.parametrize(
    ("text", "messages"),
    [
        ("1,2\n\none, two\n3,\n", ["line 3: 'one, two' is not a list of token ids (1,2,3)", "line 4: '3,' is not a"]),
        ("1\n97\n", ["prompt 1 holds token 97: valid ids are 0 to 96"]),
    ],
)
def test_bad_lines_are_messages(
    program: Program, weights: Path, text: str, messages: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert serve(program, text, "--weights", str(weights), "--ids") == (2, "")
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == len(messages)
    assert all(line.startswith(f"error: {message}") for line, message in zip(lines, messages, strict=True))


def test_bad_folders_are_messages(program: Program, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert serve(program, "1\n", "--weights", str(tmp_path), "--ids") == (2, "")
    assert capsys.readouterr().err == f"error: {tmp_path}: holds no *.safetensors file\n"
    assert serve(program, "some text\n", "--weights", str(tmp_path)) == (2, "")
    assert "holds no tokenizer.json" in capsys.readouterr().err
