"""Recorded references that cannot be compared with: one error with every reason."""

from pathlib import Path

import numpy as np
import pytest

from moec.compiler.problems import ProblemsError
from moec.compiler.verify.recording import check_vocab, positions, read_reference

Arrays = dict[str, np.ndarray]


def good() -> Arrays:
    ids_a, ids_b = np.ones((2, 7), np.int32), np.ones((1, 40), np.int32)
    logits = {"logits_a": np.zeros((2, 7, 5), np.float32), "logits_b": np.zeros((1, 40, 5), np.float32)}
    prompt, gen = np.ones((1, 3), np.int64), np.ones((1, 4), np.int64)
    return {"ids_a": ids_a, "ids_b": ids_b, **logits, "gen_prompt": prompt, "gen": gen}


def problems(path: Path) -> list[str]:
    with pytest.raises(ProblemsError) as caught:
        read_reference(path)
    return [problem.text.removeprefix(f"{path}: ") for problem in caught.value.problems]


def test_a_sound_recording_is_read(tmp_path: Path) -> None:
    path = tmp_path / "ref.npz"
    np.savez(path, **good())  # type: ignore[arg-type]
    arrays = read_reference(path)
    assert positions(arrays) == 40
    check_vocab(path, arrays, 5, "fake")
    with pytest.raises(ProblemsError, match="logits of 5 tokens, the vocabulary of fake is 6"):
        check_vocab(path, arrays, 6, "fake")


def test_damaged_files(tmp_path: Path) -> None:
    path = tmp_path / "ref.npz"
    np.savez_compressed(path, **good())  # type: ignore[arg-type]
    data = path.read_bytes()
    flipped = bytearray(data)
    flipped[60:90] = bytes(30)
    np.save(tmp_path / "one.npy", np.ones(3))
    for text in (b"", b"text", data[:20], data[: len(data) // 2], bytes(flipped), (tmp_path / "one.npy").read_bytes()):
        path.write_bytes(text)
        (problem,) = problems(path)
        assert problem.startswith(f"cannot read the reference {path}: ")


@pytest.mark.parametrize(
    ("changes", "messages"),
    [
        (
            {"ids_a": np.ones(7, np.int32), "gen": np.ones((1, 4), np.float32)},
            [
                "ids_a is int32 [7], expected integers [sequences, tokens], none of them 0",
                "gen is float32 [1, 4], expected integers [sequences, tokens], none of them 0",
            ],
        ),
        (
            {
                "ids_b": np.full((1, 30), 5),
                "logits_b": np.zeros((1, 30, 6), np.float32),
                "gen": np.ones((2, 4), int),
                "logits_step": np.zeros((1, 3, 5), np.float32),
            },
            [
                "logits_b has shape [1, 30, 6], expected [1, 30, 5]",
                "logits_step has shape [1, 3, 5], expected [1, 15, 5]",
                "gen has 2 sequences, expected 1",
                "ids_b has 30 tokens, at least 35 (20 to prefill, 15 cached steps) are needed",
                "ids_b holds token 5: valid ids are 0 to 4",
            ],
        ),
    ],
)
def test_arrays_that_do_not_fit(tmp_path: Path, changes: Arrays, messages: list[str]) -> None:
    path = tmp_path / "ref.npz"
    np.savez(path, **{**good(), **changes})  # type: ignore[arg-type]
    assert sorted(problems(path)) == sorted(messages)
