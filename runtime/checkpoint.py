"""Hugging Face safetensors checkpoints: headers are read and checked at once, tensors lazily through memory maps.

File layout (https://github.com/huggingface/safetensors, "Format"): uint64 header length N,
N bytes of JSON {name: {dtype, shape, data_offsets}}, then the data; offsets count from its start.
The tensors fill the data without gaps or overlaps.
A checkpoint is `model.safetensors`, or the shards that `model.safetensors.index.json` names,
or every *.safetensors file of the folder.
"""

import json
import math
import mmap
from collections import Counter, defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, cast

import ml_dtypes
import numpy as np

from .errors import CheckpointError

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
DTYPES: dict[str, np.dtype] = {
    "F64": np.dtype(np.float64),
    "F32": np.dtype(np.float32),
    "F16": np.dtype(np.float16),
    "BF16": np.dtype(ml_dtypes.bfloat16),
    "F8_E4M3": np.dtype(ml_dtypes.float8_e4m3fn),
    "F8_E5M2": np.dtype(ml_dtypes.float8_e5m2),
    "I64": np.dtype(np.int64),
    "I32": np.dtype(np.int32),
    "I16": np.dtype(np.int16),
    "I8": np.dtype(np.int8),
    "U64": np.dtype(np.uint64),
    "U32": np.dtype(np.uint32),
    "U16": np.dtype(np.uint16),
    "U8": np.dtype(np.uint8),
    "BOOL": np.dtype(np.bool_),
}


@dataclass(frozen=True)
class Stored:
    """One tensor as its header declares it. start: byte offset in the file."""

    name: str
    file: Path
    dtype: np.dtype
    shape: tuple[int, ...]
    start: int

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


@dataclass(frozen=True)
class _Shard:
    """One opened file: its tensors and what is wrong with it."""

    tensors: dict[str, Stored]
    problems: tuple[str, ...]


class Checkpoint:
    """The tensors of one folder.

    tensors: what the headers declare, by name. problems: everything wrong with the files, each
    message starting with the tensor's or the file's name. absent: tensors that the index names
    but no readable file holds, with the file. Raises CheckpointError when there is nothing to
    read: no folder, no file, a broken index.
    """

    def __init__(self, directory: str | Path):
        self.directory = Path(directory)
        try:
            if not self.directory.is_dir():
                raise CheckpointError([f"{self.directory}: not a directory"])
            weight_map = _index(self.directory)
            files = _files(self.directory) if weight_map is None else sorted(set(weight_map.values()))
        except OSError as error:
            raise CheckpointError([f"{error.filename}: cannot be read ({error.strerror})"]) from error
        if not files:
            raise CheckpointError([f"{self.directory}: holds no *.safetensors file"])
        shards = {file: _open(self.directory / file) for file in files}
        found = [problem for shard in shards.values() for problem in shard.problems]
        self.tensors, duplicates = _merge(shards)
        self.absent = {name: file for name, file in (weight_map or {}).items() if name not in self.tensors}
        found += duplicates + _misplaced(weight_map or {}, self.tensors, shards, named(found))
        self.problems = tuple(found)
        self._maps: dict[Path, mmap.mmap] = {}

    @cached_property
    def prefixes(self) -> frozenset[str]:
        """Every dotted beginning of a tensor that is or should be there: "model", "model.layers", ..."""
        words = (name.split(".") for name in (*self.tensors, *self.absent))
        return frozenset(".".join(parts[:n]) for parts in words for n in range(1, len(parts)))

    def read(self, name: str) -> np.ndarray:
        """A read-only view of the stored bytes; pages are read as they are touched."""
        stored = self.tensors[name]
        if stored.file not in self._maps:
            with stored.file.open("rb") as file:
                self._maps[stored.file] = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        count = math.prod(stored.shape)
        flat = np.frombuffer(self._maps[stored.file], stored.dtype, count, stored.start)
        return flat.reshape(stored.shape)


def _files(directory: Path) -> list[str]:
    if (directory / SINGLE).is_file():
        return [SINGLE]
    return sorted(path.name for path in directory.iterdir() if path.suffix == ".safetensors")


def _index(directory: Path) -> dict[str, str] | None:
    """Tensor -> file of the index, None without one. A broken index leaves nothing to read."""
    path = directory / INDEX
    if not path.is_file():
        return None
    document, problem = _json(path.read_bytes(), INDEX)
    weight_map = document.get("weight_map")
    if problem is None and not (isinstance(weight_map, dict) and all(isinstance(f, str) for f in weight_map.values())):
        problem = f'{INDEX}: "weight_map" must map tensor names to file names'
    if problem:
        raise CheckpointError([problem])
    found = cast(dict[str, str], weight_map)
    if outside := [name for name, file in found.items() if Path(file).is_absolute() or ".." in Path(file).parts]:
        raise CheckpointError([f"{name}: {INDEX} places it in {found[name]}, outside the folder" for name in outside])
    return found


def _json(text: bytes, where: str) -> tuple[dict[str, Any], str | None]:
    """A JSON object, or the problem that keeps it from being one (a repeated key is one)."""
    repeated: list[str] = []

    def pairs(items: list[tuple[str, Any]]) -> dict[str, Any]:
        found = dict(items)
        if len(found) < len(items):
            repeated.extend(key for key, count in Counter(key for key, _ in items).items() if count > 1)
        return found

    try:
        document = json.loads(text, object_pairs_hook=pairs)
    except (ValueError, RecursionError) as error:
        return {}, f"{where}: unreadable JSON ({error})"
    if repeated:
        return {}, f"{where} names {', '.join(repeated)} twice"
    return (document, None) if isinstance(document, dict) else ({}, f"{where}: not a JSON object")


def _open(path: Path) -> _Shard:
    """Read and check one file's header."""
    try:
        if not path.exists():
            return _Shard({}, (f"{path.name}: missing, {INDEX} names it",))
        size = path.stat().st_size
        with path.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            if size < 8 or length > size - 8:
                return _Shard({}, (f"{path.name}: truncated inside its header ({size} bytes)",))
            header, problem = _json(file.read(length), f"{path.name}: header")
    except OSError as error:
        return _Shard({}, (f"{path.name}: cannot be read ({error.strerror})",))
    if problem:
        return _Shard({}, (problem,))
    tensors: dict[str, Stored] = {}
    problems = [p for name, entry in header.items() if (p := _declare(name, entry, path, 8 + length, tensors))]
    problems = problems or _untiled(tensors, path, 8 + length, size)  # a broken entry leaves a gap
    return _Shard(tensors, (*problems, *_truncated(tensors, path, size)))


def _declare(name: str, entry: Any, path: Path, data: int, tensors: dict[str, Stored]) -> str | None:
    """Add one header entry to `tensors`, or say what is wrong with it."""
    if name == "__metadata__":
        return None
    try:
        dtype_name, shape, (begin, end) = entry["dtype"], tuple(entry["shape"]), entry["data_offsets"]
    except (TypeError, KeyError, ValueError):
        return f"{name}: broken header entry in {path.name}"
    if not isinstance(dtype_name, str) or not all(type(n) is int and n >= 0 for n in (*shape, begin, end)):
        return (
            f"{name}: broken header entry in {path.name}: dtype {dtype_name!r}, shape {list(shape)}, data_offsets "
            f"{[begin, end]}; the dtype is a name, the others integers of 0 or more"
        )
    if dtype_name not in DTYPES:
        return f"{name}: dtype {dtype_name} in {path.name} is not known (known: {', '.join(DTYPES)})"
    stored = Stored(name, path, DTYPES[dtype_name], shape, data + begin)
    if end - begin != stored.nbytes:
        return f"{name}: header gives {end - begin} bytes, {dtype_name} {list(shape)} needs {stored.nbytes}"
    tensors[name] = stored
    return None


def _untiled(tensors: dict[str, Stored], path: Path, data: int, size: int) -> list[str]:
    """Gaps and overlaps between the tensors of a file whose entries are sound, and bytes after the last one."""
    found, end = [], data
    for tensor in sorted(tensors.values(), key=lambda t: (t.start, t.nbytes)):
        if tensor.start != end:
            where = f"starts at byte {tensor.start} of {path.name}, the tensor before it ends at byte {end}"
            found.append(f"{tensor.name}: {where}; tensors must follow each other without gap or overlap")
        end = max(end, tensor.start + tensor.nbytes)
    if not found and end < size:
        found.append(f"{path.name}: {size - end} bytes after its last tensor belong to none")
    return found


def _truncated(tensors: dict[str, Stored], path: Path, size: int) -> list[str]:
    """One problem per tensor that the file is too short to hold."""
    return [
        f"{t.name}: truncated, {path.name} ends at byte {size}, the tensor at byte {t.start + t.nbytes}"
        for t in tensors.values()
        if t.start + t.nbytes > size
    ]


def _merge(shards: dict[str, _Shard]) -> tuple[dict[str, Stored], list[str]]:
    """All tensors by name, and the names that several files hold."""
    holders = defaultdict(list)
    for file, shard in shards.items():
        for name in shard.tensors:
            holders[name].append(file)
    duplicates = [f"{name}: stored in {' and '.join(files)}" for name, files in holders.items() if len(files) > 1]
    return {name: shards[files[0]].tensors[name] for name, files in holders.items()}, duplicates


def named(problems: Iterable[str]) -> set[str]:
    """The tensors and files that some messages are about."""
    return {problem.partition(": ")[0] for problem in problems}


def _misplaced(
    weight_map: dict[str, str], tensors: dict[str, Stored], shards: dict[str, _Shard], known: set[str]
) -> list[str]:
    """Tensors that are not in the file the index gives for them, unless a `known` problem says why."""
    found = []
    for name, file in weight_map.items():
        if name in shards[file].tensors or not known.isdisjoint((name, file)):
            continue
        where = f"{tensors[name].file.name} holds it" if name in tensors else "no file holds it"
        found.append(f"{name}: not in {file}, where {INDEX} places it ({where})")
    return found
