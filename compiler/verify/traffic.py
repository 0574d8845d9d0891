"""HBM bytes that the instructions of a compiled computation read and write, counted from operands and results.

* Only arrays in HBM count: what the compiler placed elsewhere, as in VMEM, says S(n) in its layout.
* An instruction reads its operands and writes its results, at their logical sizes (padding of tiles does not count).
* Slices and gathers read what they give. An update in place (dynamic-update-slice, scatter) writes its update, and of
  its target reads nothing, unless a scatter combines. In a fusion this holds behind bitcasts and conversions too.
* An operation in two halves reads at its start (or update) and writes at its end. Parameters, constants, tuples and
  bitcasts move nothing; nor do loops, calls and branches: count the computations that they call.
* A kernel counts its whole operands and results, an upper bound; or, where given, the bytes of its DMAs (bundles.py).
  One that updates operands in place needs them: it takes parts of pools.
"""

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass

import ml_dtypes  # noqa: F401  (numpy then knows all names of dtypes)
import numpy as np

from .hlo import Instruction, Module, arrays_of

_ARRAY = re.compile(r"\b[a-z]\w*\[[\d,]*\](?:\{[^}]*\})?")
FREE = {"parameter", "constant", "tuple", "get-tuple-element", "bitcast", "after-all", "while", "call", "conditional"}
_VIEWS, _SLICES = {"bitcast", "convert", "reshape", "copy"}, {"slice", "dynamic-slice", "gather"}
_UPDATES = {"dynamic-update-slice": 1, "scatter": 2}  # which operand is the update
_Body = Mapping[str, Instruction]


@dataclass(frozen=True)
class Moved:
    """HBM bytes of one instruction, reads by operand."""

    inst: Instruction
    reads: Mapping[str, int]
    written: int

    @property
    def read(self) -> int:
        return sum(self.reads.values())


def traffic(module: Module, computation: str, dmas: Mapping[str, tuple[int, int]] | None = None) -> list[Moved]:
    """What one pass through the computation moves. dmas: (read, written) of kernels, by name without its number."""
    body = {inst.name: inst for inst in module.computations[computation]}
    return [_moved(module, inst, body, dmas or {}) for inst in body.values() if inst.opcode not in FREE]


def operands(inst: Instruction) -> list[str]:
    """Names of what it reads."""
    return re.findall(r"%([\w.\-]+)", inst.operands)


def _moved(module: Module, inst: Instruction, body: _Body, dmas: Mapping[str, tuple[int, int]]) -> Moved:
    if inst.opcode == "custom-call":
        if (kernel := inst.name.rsplit(".", 1)[0]) in dmas:
            return Moved(inst, {"": dmas[kernel][0]}, dmas[kernel][1])
        assert "aliasing={{" not in inst.attrs, f"{inst.name} updates operands in place: give the bytes of its DMAs"
    reads: dict[str, int] = {}
    for index, name in enumerate(() if inst.opcode.endswith("-done") else operands(inst)):
        size = sum(_bytes(array) for array in _ARRAY.findall(body[name].type))
        reads[name] = min(reads.get(name, 0) + round(size * _share_read(module, inst, index, body)), size)
    if inst.opcode.endswith("-start") or inst.opcode == "async-update":
        return Moved(inst, reads, 0)
    fused = inst.opcode == "fusion"
    inside = {i.name: i for i in module.computations[inst.called[0]]} if fused else body
    root = next(i for i in inside.values() if i.is_root) if fused else inst
    roots = [inside[name] for name in operands(root)] if root.opcode == "tuple" else [root]
    sizes = [_bytes(array) for array in _ARRAY.findall(inst.type)]
    shares = [_share_written(one, inside, fused) for one in roots] if len(roots) == len(sizes) else [1.0] * len(sizes)
    return Moved(inst, reads, sum(round(size * share) for size, share in zip(sizes, shares, strict=True)))


def _share_read(module: Module, inst: Instruction, index: int, body: _Body) -> float:
    """Which share of its operand at `index` an instruction reads."""
    whole = max(_elements(body[operands(inst)[index]]), 1)
    if inst.opcode in _SLICES and index == 0:
        return min(_elements(inst) / whole, 1)
    if inst.opcode in _UPDATES and index == 0:
        kept = next(i for i in module.computations[inst.attr("to_apply")] if i.is_root) if inst.called else None
        replaces = kept is None or (kept.opcode, kept.operands) == ("parameter", "1")
        return 0 if replaces else _elements(body[operands(inst)[2]]) / whole
    if inst.opcode not in ("fusion", "async-start", "call"):
        return 1
    inside = {i.name: i for i in module.computations[inst.called[0]]}
    given = next(i for i in inside.values() if i.opcode == "parameter" and i.operands == str(index))
    return _share_used(module, given, inside)


def _share_used(module: Module, value: Instruction, body: _Body) -> float:
    """Which share of a value the others of a fused computation read; the same slice twice is read once."""
    shares: dict[tuple[str, str, int], float] = {}
    for user in body.values():
        for index in (i for i, name in enumerate(operands(user)) if name == value.name):
            seen_through = user.opcode in _VIEWS and not user.is_root
            share = _share_used(module, user, body) if seen_through else _share_read(module, user, index, body)
            shares[user.opcode, user.operands, index] = share
    return min(sum(shares.values()), 1)


def _share_written(root: Instruction, body: _Body, fused: bool) -> float:
    """Which share of its result an instruction, or a fusion with this root, writes."""
    while fused and root.opcode in _VIEWS:
        root = body[operands(root)[0]]
    if root.opcode not in _UPDATES or (fused and body[operands(root)[0]].opcode not in ("parameter", "bitcast")):
        return 1
    return _elements(body[operands(root)[_UPDATES[root.opcode]]]) / _elements(root)


def _elements(inst: Instruction) -> int:
    return sum(math.prod(shape) for _, shape in arrays_of(inst.type))


def _bytes(array: str) -> int:
    """Bytes of an array in HBM; 0 where its layout names another memory."""
    ((dtype, shape),) = arrays_of(array)
    return 0 if "S(" in array else math.prod(shape) * np.dtype(dtype).itemsize


__all__ = ["FREE", "Moved", "operands", "traffic"]
