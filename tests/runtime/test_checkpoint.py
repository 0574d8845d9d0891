"""Reading safetensors: against the safetensors library, single files, shards with and without an index."""

import errno
import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from moec.runtime.checkpoint import DTYPES, INDEX, Checkpoint
from moec.runtime.errors import CheckpointError

Write = Callable[[Path, list[dict[str, np.ndarray]]], Path]


def test_tensors_are_those_the_library_writes(tmp_path: Path) -> None:
    tensors = {str(d): np.arange(6).reshape(2, 3).astype(d) for d in DTYPES.values() if d.itemsize > 1}
    tensors |= {"bool": np.array([True, False, True]), "scalar": np.array(2.5, np.float32), "none": np.zeros((0, 4))}
    save_file(tensors, tmp_path / "model.safetensors", {"format": "np"})
    checkpoint = Checkpoint(tmp_path)
    assert checkpoint.problems == () and set(checkpoint.tensors) == set(tensors)
    for name, value in tensors.items():
        found = checkpoint.read(name)
        assert found.dtype == value.dtype and found.shape == value.shape and not found.flags.writeable
        np.testing.assert_array_equal(found, value)


@pytest.mark.parametrize("dtype", ["BF16", "F8_E4M3", "F8_E5M2", "U8", "BOOL"])
def test_small_dtypes_and_odd_offsets(tmp_path: Path, write_checkpoint: Write, dtype: str) -> None:
    """A tensor of odd size leaves the next one unaligned."""
    values = np.arange(5).astype(DTYPES[dtype])
    write_checkpoint(tmp_path, [{"odd": np.ones(3, np.uint8), "values": values, "after": np.arange(3, dtype=np.int64)}])
    checkpoint = Checkpoint(tmp_path)
    assert checkpoint.read("values").tobytes() == values.tobytes()
    assert checkpoint.read("after").tolist() == [0, 1, 2]


def test_an_index_decides_which_files_are_read(tmp_path: Path, write_checkpoint: Write) -> None:
    one, two, other = ({name: np.full(2, i, np.float32)} for i, name in enumerate(("one", "two", "other")))
    write_checkpoint(tmp_path, [one, two])
    write_checkpoint(tmp_path / "elsewhere", [other])
    (tmp_path / "elsewhere" / "model.safetensors").rename(tmp_path / "consolidated.safetensors")
    assert set(Checkpoint(tmp_path).tensors) == {"one", "two"}
    (tmp_path / INDEX).unlink()
    assert set(Checkpoint(tmp_path).tensors) == {"one", "two", "other"}  # no index: every file
    (tmp_path / "consolidated.safetensors").rename(tmp_path / "model.safetensors")
    assert set(Checkpoint(tmp_path).tensors) == {"other"}  # no index: the usual single file


def test_headers_alone_are_read_at_first(tmp_path: Path) -> None:
    """A hole of 64 GiB stands for the data: only its header is touched until a tensor is read."""
    count = 1 << 34
    header = json.dumps({"big": {"dtype": "F32", "shape": [count], "data_offsets": [0, 4 * count]}}).encode()
    with (tmp_path / "model.safetensors").open("wb") as file:
        file.write(len(header).to_bytes(8, "little") + header)
        file.truncate(8 + len(header) + 4 * count)
    checkpoint = Checkpoint(tmp_path)
    assert checkpoint.problems == () and checkpoint.tensors["big"].nbytes == 4 * count
    assert checkpoint.read("big")[-2:].tolist() == [0.0, 0.0]


def test_what_may_not_be_read_is_told(tmp_path: Path, write_checkpoint: Write, monkeypatch: pytest.MonkeyPatch) -> None:
    write_checkpoint(tmp_path, [{"one": np.ones(2, np.float32)}])

    def refuse(path: Path, *_: object) -> None:
        raise PermissionError(errno.EACCES, "Permission denied", str(path))

    with monkeypatch.context() as patch:
        patch.setattr(Path, "open", refuse)
        assert Checkpoint(tmp_path).problems == ("model.safetensors: cannot be read (Permission denied)",)
    monkeypatch.setattr(Path, "is_dir", refuse)
    with pytest.raises(CheckpointError, match=f"{tmp_path}: cannot be read .Permission denied."):
        Checkpoint(tmp_path)
