"""Weights from a checkpoint straight to sharded arrays; the host never holds more than one layer of a stack.

Every problem of the checkpoint is collected before the first tensor is read (resolve.py).
"""

import os
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import Executor, ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from jax import Array
from jax.sharding import Mesh

from moec.blocks.core.array_info import SCALED, Op
from moec.blocks.core.quant import quantize_on_host

from .checkpoint import Checkpoint
from .conversions import lossy_conversions
from .convert import FLOAT8, apply_ops, copy_into, dequantize, scale_ops, squeeze, stored_rank, turned
from .errors import CheckpointError
from .packed import scale_block, side_tensors, unpack, unpack_scales
from .placement import DeviceFill, HostFill, fill_of, sharding_of
from .program import Program
from .requantise import F8_E4M3, RoundingError, requantise, rounding_error
from .resolve import Path as TreePath
from .resolve import Piece, Target, layer_shape, resolve, scale_path

Progress = Callable[[str, int, int], None]  # (weight that was just loaded, bytes done, bytes in total)
OnNote = Callable[[str], None]  # what loading changed, a line at a time
MAX_THREADS = 32  # that copy and convert one layer's experts
WHOLE_BYTES = 16 << 20  # stacks up to this size are built on the host: a compiled fill would cost more


def to_stderr(line: str) -> None:
    """Where notes go unless the caller takes them."""
    print(line, file=sys.stderr)


@dataclass(frozen=True)
class _Reader:
    """Reads stored tensors with their block scales. suffix, block: those of float8 tensors."""

    checkpoint: Checkpoint
    suffix: str | None
    block: tuple[int, int]

    def read(self, name: str, rank: int, packed: str | None) -> "_Stored":
        """A tensor whose values have `rank` dims."""
        if packed:
            scales = self.checkpoint.read(side_tensors(name, packed)["scales"])
            return _Stored(self.checkpoint.read(name), scales, scale_block(packed), packed)
        values = self._squeezed(name, rank)
        if self.checkpoint.tensors[name].dtype.name not in FLOAT8:
            return _Stored(values, None, self.block, None)
        assert self.suffix is not None, name
        return _Stored(values, self._squeezed(name + self.suffix, rank), self.block, None)

    def _squeezed(self, name: str, rank: int) -> np.ndarray:
        view = self.checkpoint.read(name)
        return view.reshape(squeeze(view.shape, rank))


@dataclass(frozen=True)
class _Stored:
    """A tensor, or a part of its first dim, as it is stored: values or packed words, and their scales if there are.

    block: (rows, columns) under one scale.
    """

    words: np.ndarray
    scales: np.ndarray | None
    block: tuple[int, int]
    packed: str | None

    def entry(self, index: int) -> "_Stored":
        """One entry of the first dim."""
        return replace(self, words=self.words[index], scales=None if self.scales is None else self.scales[index])

    def stacks(self, op: Op) -> bool:
        """Whether the op "stack" leaves every block of scales whole (packed ones are of one row)."""
        return self.scales is None or bool(self.packed) or bool(scale_ops((op,), self.words.shape, self.block))

    def stack(self, op: Op) -> "_Stored":
        """The op "stack" on values and scales, before anything is unpacked."""
        scales = None if self.scales is None else apply_ops(self.scales, (op,))
        return replace(self, words=apply_ops(self.words, (op,)), scales=scales)

    def unpacked(self) -> "_Stored":
        """The same with values for words."""
        if self.packed is None:
            return self
        assert self.scales is not None
        scales = unpack_scales(self.scales, self.packed)
        return replace(self, words=unpack(self.words, self.packed), scales=scales, packed=None)

    def floats(self) -> np.ndarray:
        """The values of an unpacked tensor, scales applied."""
        return self.words if self.scales is None else dequantize(self.words, self.scales, self.block)


def load_weights(
    program: Program,
    mesh: Mesh,
    directory: str | Path,
    progress: Progress | None = None,
    *,
    on_note: OnNote = to_stderr,
    whole_bytes: int = WHOLE_BYTES,
) -> dict[str, Any]:
    """The program's weight tree on the mesh. Raises one CheckpointError that names every wrong tensor.

    on_note: takes a line per kind of conversion that loses bits (weights quantised or rounded), and one per weight that
    was rounded to float8, with the error.
    """
    checkpoint = Checkpoint(directory)
    targets, problems = resolve(program, checkpoint)
    if problems:
        raise CheckpointError(problems)
    place = f"loading {checkpoint.directory.name}: "
    for line in lossy_conversions(targets, checkpoint, program.SCALE_BLOCK):
        on_note(place + line)
    reader = _Reader(checkpoint, program.SCALE_SUFFIX, program.SCALE_BLOCK or (1, 1))
    total, done, tree = sum(_layer_bytes(t) * len(t.pieces) for t in targets), 0, dict[str, Any]()
    with ThreadPoolExecutor(min(MAX_THREADS, os.cpu_count() or 1)) as pool:
        for target in targets:
            fills = _fills(program, mesh, target, whole_bytes)
            error = RoundingError()
            for index, piece in enumerate(target.pieces):
                error += _load_layer(reader, pool, target, piece, [fill.layer(index) for fill in fills.values()])
                for fill in fills.values():
                    fill.commit(index)
                done += _layer_bytes(target)
                if progress:
                    progress(target.label, done, total)
            if error.values:
                on_note(f"{place}{target.label} in {target.info.dtype}: {error}")
            for path, fill in fills.items():
                _insert(tree, path, fill.result())
    return tree


def _fills(program: Program, mesh: Mesh, target: Target, whole_bytes: int) -> dict[TreePath, HostFill | DeviceFill]:
    """The target's fill and that of its block scales, by path."""
    found = {target.path: fill_of(target.info, sharding_of(program, mesh, target.info), whole_bytes)}
    if target.scale is not None:
        sharding = sharding_of(program, mesh, target.scale)
        found[scale_path(target.path)] = fill_of(target.scale, sharding, whole_bytes)
    return found


def _layer_bytes(target: Target) -> int:
    return int(np.prod(layer_shape(target.info))) * np.dtype(target.info.dtype).itemsize


def _insert(tree: dict[str, Any], path: TreePath, array: Array) -> None:
    for key in path[:-1]:
        tree = tree.setdefault(key, {})
    tree[path[-1]] = array


def _load_layer(reader: _Reader, pool: Executor, target: Target, piece: Piece, out: list[np.ndarray]) -> RoundingError:
    """Fill one layer's buffers: [values] or [quantised values, block scales]; experts side by side.

    Returns what rounding to float8 moved, nothing where bits are kept or the dtype is another.
    """
    rank = len(layer_shape(target.info)) - int(piece.per_expert)

    def load(part: tuple[Any, _Stored, tuple[Op, ...]]) -> RoundingError:
        entry, stored, ops = part
        if target.scale is None:
            copy_into(out[0][entry], apply_ops(stored.unpacked().floats(), ops))
            return RoundingError()
        q, scale, error = _quantised(stored.unpacked(), ops, target)
        copy_into(out[0][entry], q)
        out[1][entry] = scale
        return error

    return sum(pool.map(load, _parts(reader, piece, rank)), RoundingError())


def _parts(reader: _Reader, piece: Piece, rank: int) -> Iterator[tuple[Any, _Stored, tuple[Op, ...]]]:
    """(entry of the layer, what is stored, ops on it), one expert at a time so that temporaries stay small."""
    if piece.per_expert:
        for expert, name in enumerate(piece.tensors):
            yield expert, reader.read(name, rank, piece.packed), piece.ops
        return
    (name,), ops = piece.tensors, piece.ops
    stored = reader.read(name, stored_rank(rank, ops), piece.packed)
    if ops and ops[0][0] == "stack" and stored.stacks(ops[0]):
        stored, ops = stored.stack(ops[0]), ops[1:]
    if rank != 3 or not _within_matrix(ops):
        yield ..., stored, ops
        return
    for entry in range(len(stored.words)):
        yield entry, stored.entry(entry), ops


def _within_matrix(ops: tuple[Op, ...]) -> bool:
    """Whether the ops act on each matrix of a stack alone."""
    return all(op[0] == "transpose" or (op[0] != "stack" and op[1] in (-1, -2)) for op in ops)


def _quantised(stored: _Stored, ops: tuple[Op, ...], target: Target) -> tuple[np.ndarray, np.ndarray, RoundingError]:
    """(values, block scales, error): taken over as stored, requantised from blocks of scales, or from floats."""
    dtype, block = target.info.dtype, target.block
    if stored.scales is not None and stored.words.dtype == np.dtype(dtype):
        on_scales = scale_ops(ops, stored.words.shape, stored.block)
        if turned(ops, stored.block) == block:
            assert on_scales is not None  # resolve refuses cuts through a block
            return apply_ops(stored.words, ops), apply_ops(stored.scales, on_scales), RoundingError()
        if on_scales is not None and _divides(stored, ops, block):
            return _requantised(stored, ops, on_scales, block[0])
    w = apply_ops(stored.floats(), ops).astype(np.float32)
    q, scale = quantize_on_host(w, dtype, replace(SCALED[dtype], rows=block[0], columns=block[1]))
    return q, scale, rounding_error(w, q, scale, block[0]) if q.dtype == F8_E4M3 else RoundingError()


def _divides(stored: _Stored, ops: tuple[Op, ...], block: tuple[int, int]) -> bool:
    """Whether one matrix's wider blocks hold whole stored ones, and the matrix whole blocks."""
    small, whole = turned(ops, stored.block), apply_ops(stored.words, ops).shape
    pairs = zip(whole[-2:], block, small, strict=True)
    return len(whole) == 2 and all(size % wide == 0 and wide % own == 0 for size, wide, own in pairs)


def _requantised(
    stored: _Stored, ops: tuple[Op, ...], on_scales: tuple[Op, ...], edge: int
) -> tuple[np.ndarray, np.ndarray, RoundingError]:
    """In the order in which values are stored, so that memory is read in lines; a square turned is the same."""
    assert stored.scales is not None
    flip = ops[-1:] == (("transpose",),)
    if flip:
        ops, on_scales = ops[:-1], on_scales[:-1]
    q, scale, error = requantise(
        apply_ops(stored.words, ops), apply_ops(stored.scales, on_scales), turned(ops, stored.block), edge
    )
    return (q.T, scale.T, error) if flip else (q, scale, error)


__all__ = ["Checkpoint", "OnNote", "Progress", "load_weights"]
