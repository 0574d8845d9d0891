"""A fake program on the real contract, and checkpoints written byte by byte."""

import json
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path

import jax
import numpy as np
import pytest
from jax.sharding import Mesh

from moec.runtime.checkpoint import DTYPES, INDEX
from moec.runtime.program import Program, load_program

FAKE = Path(__file__).parent / "fake_program"
DTYPE_NAMES = {dtype: name for name, dtype in DTYPES.items()}


@pytest.fixture(scope="session")
def fake_folder(tmp_path_factory: pytest.TempPathFactory) -> Callable[[int], Path]:
    """The fake program's folder for a number of ranks."""

    def write(num_ranks: int) -> Path:
        folder = tmp_path_factory.mktemp("program") / "fake"
        shutil.copytree(FAKE, folder, ignore=shutil.ignore_patterns("__pycache__"))
        text = (FAKE / "model.py").read_text()
        assert "NUM_RANKS = 1\n" in text
        (folder / "model.py").write_text(text.replace("NUM_RANKS = 1\n", f"NUM_RANKS = {num_ranks}\n"))
        return folder

    return write


@pytest.fixture(scope="session", params=[1, 8], ids=["1-rank", "8-ranks"])
def fake(request: pytest.FixtureRequest, fake_folder: Callable[[int], Path]) -> tuple[Program, Mesh]:
    """The fake program and its mesh, on 1 and on 8 ranks."""
    program = load_program(fake_folder(request.param))
    return program, program.mesh(jax.devices()[: request.param])


@pytest.fixture(scope="session")
def next_token() -> Callable[..., int]:
    """What the fake program gives after some tokens: (tokens, seed or None) -> token."""

    def compute(tokens: list[int], seed: int | None = None) -> int:
        drawn = 0 if seed is None else seed * len(tokens)
        return (11 * sum(tokens) + drawn) % 97

    return compute


Tensors = Mapping[str, np.ndarray]


def safetensors_bytes(tensors: Tensors) -> bytes:
    """One safetensors file."""
    header, data = {}, b""
    for name, array in tensors.items():
        part = np.ascontiguousarray(array).tobytes()
        offsets = [len(data), len(data) + len(part)]
        header[name] = {"dtype": DTYPE_NAMES[array.dtype], "shape": list(array.shape), "data_offsets": offsets}
        data += part
    text = json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + data


@pytest.fixture(scope="session")
def write_checkpoint() -> Callable[[Path, list[Tensors]], Path]:
    """Write tensors as model.safetensors, or as shards with an index when several groups are given."""

    def write(folder: Path, groups: list[Tensors]) -> Path:
        folder.mkdir(parents=True, exist_ok=True)
        if len(groups) == 1:
            (folder / "model.safetensors").write_bytes(safetensors_bytes(groups[0]))
            return folder
        names = [f"model-{i + 1:05}-of-{len(groups):05}.safetensors" for i in range(len(groups))]
        for name, tensors in zip(names, groups, strict=True):
            (folder / name).write_bytes(safetensors_bytes(tensors))
        weight_map = {tensor: name for name, tensors in zip(names, groups, strict=True) for tensor in tensors}
        (folder / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
        return folder

    return write
