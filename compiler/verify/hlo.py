"""Reads optimised HLO text: which collectives run, in which loop, how often, over which mesh axes.

Input is the `after_optimizations` text of an XLA dump. `compiled.as_text()` is no substitute: it
fails for programs whose collectives are offloaded to the SparseCore, the default on recent chips.
"""

import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property

from .report import Frozen

# HLO opcode (without -start) -> its name in the plan.
COLLECTIVES = (
    "all-gather",
    "reduce-scatter",
    "all-reduce",
    "all-to-all",
    "ragged-all-to-all",
    "collective-permute",
    "collective-broadcast",
)
# HLO primitive types whose numpy/ml_dtypes name differs.
DTYPES = {
    "pred": "bool",
    "bf16": "bfloat16",
    "f8e4m3fn": "float8_e4m3fn",
    "f8e5m2": "float8_e5m2",
    "f4e2m1fn": "float4_e2m1fn",
}
_NUMBERED = {"s": "int", "u": "uint", "f": "float", "c": "complex"}

_HEADER = re.compile(r"^(ENTRY )?%?([\w.\-]+) (?:\(.*)?\{\s*$")
_RESULT = re.compile(r"^\s+(ROOT )?%?([\w.\-]+) = ")
_ARRAY = re.compile(r"\b([a-z]+\d*(?:e\d+m\d+(?:fn|fnuz|b11fnuz)?)?)\[([\d,]*)\]")
_CALLED = re.compile(r"\b(calls|to_apply|body|true_computation|false_computation)=%?([\w.\-]+)")
_CALLED_SETS = re.compile(r"\b(?:branch_computations|called_computations)=\{([^}]*)\}")
_TRIPS = re.compile(r'"known_trip_count":\{"n":"(\d+)"')
_OP_NAME = re.compile(r'op_name="([^"]*)"')
_ALIAS = re.compile(r"\{([\d, ]*)\}: \(\d+, \{[\d, ]*\}, (?:may|must)-alias\)")
_IOTA = re.compile(r"replica_groups=\[([\d,]+)\]<=\[([\d,]+)\](?:T\(([\d,]+)\))?")
_GROUPS = re.compile(r"replica_groups=\{((?:\{[\d,]*\},?)*)\}")


class Loop(Frozen):
    """A while loop around an instruction. trips: None when it depends on data."""

    name: str
    trips: int | None


class Collective(Frozen):
    """One collective of the program, on one device.

    op: plan name; for a reduction followed by its scatter in one fusion "reduce-scatter".
    shape: the full shape (what an all-gather yields, what a reduce-scatter takes).
    axes: mesh axes it spans; () when the groups fit no set of axes. group_size: devices per group.
    op_name: path of named scopes. loops: outermost first. is_async, thread: how it is scheduled
        ("sparsecore" for offloaded ones). combined: one of several arrays in one instruction.
    """

    op: str
    dtype: str
    shape: tuple[int, ...]
    axes: tuple[str, ...]
    group_size: int
    op_name: str
    name: str
    loops: tuple[Loop, ...]
    is_async: bool
    thread: str
    combined: bool

    @property
    def elements(self) -> int:
        return math.prod(self.shape)

    @property
    def in_loop(self) -> bool:
        return bool(self.loops)

    @property
    def count(self) -> int | None:
        """Executions per step; None when a trip count is not static."""
        total = 1
        for loop in self.loops:
            if loop.trips is None:
                return None
            total *= loop.trips
        return total


@dataclass(frozen=True)
class Instruction:
    """`name = type opcode(operands), attrs`. attrs ends before the backend config, which is kept apart."""

    name: str
    type: str
    opcode: str
    operands: str
    attrs: str
    backend: str
    is_root: bool

    @cached_property
    def called(self) -> tuple[str, ...]:
        """Computations that run as part of this instruction (no reducers, no loop conditions)."""
        if self.opcode.removesuffix("-start") in COLLECTIVES or self.opcode in ("async-update", "async-done"):
            return ()
        names = [name for _, name in _CALLED.findall(self.attrs)]
        for inner in _CALLED_SETS.findall(self.attrs):
            names += [name.strip().lstrip("%") for name in inner.split(",") if name.strip()]
        return tuple(names)

    def attr(self, name: str) -> str:
        """Value of `name=%value` or `name="value"`, "" when absent."""
        match = re.search(rf'\b{name}="?%?([\w.\-]+)', self.attrs)
        return match.group(1) if match else ""


@dataclass(frozen=True)
class Module:
    """Computations by name, in order of the text. aliased_outputs: flat output indices that reuse an argument."""

    name: str
    entry: str
    computations: Mapping[str, tuple[Instruction, ...]]
    aliased_outputs: tuple[int, ...]
    num_devices: int
    _busy: dict[str, bool] = field(default_factory=dict)

    def communicates(self, name: str) -> bool:
        """Whether the computation, or one it calls, holds a collective."""
        if name not in self._busy:
            self._busy[name] = False
            self._busy[name] = any(
                _base(i.opcode) in COLLECTIVES or any(self.communicates(c) for c in i.called if c in self.computations)
                for i in self.computations[name]
            )
        return self._busy[name]


def parse(text: str) -> Module:
    """Parse the text of one HLO module."""
    header = text.split("\n", 1)[0]
    assert header.startswith("HloModule "), f"not an HLO module: {header[:80]!r}"
    computations: dict[str, tuple[Instruction, ...]] = {}
    entry, current, body = "", "", []
    for line in text.splitlines()[1:]:
        if line.startswith("}") and current:
            computations[current], current, body = tuple(body), "", []
        elif current:
            body += _instruction(line)
        elif match := _HEADER.match(line):
            current = match.group(2)
            entry = current if match.group(1) else entry
    assert entry, "HLO text without an ENTRY computation"
    return Module(
        name=header.split()[1].rstrip(","),
        entry=entry,
        computations=computations,
        aliased_outputs=_aliased(header),
        num_devices=_devices(header),
    )


def collectives(module: Module, mesh_axes: Mapping[str, int]) -> tuple[Collective, ...]:
    """Every collective the entry computation reaches, with the loops around it."""
    return tuple(_walk(module, module.entry, mesh_axes, _Context()))


@dataclass(frozen=True)
class _Context:
    """What surrounds a computation.

    around: op_name of the enclosing loop or call, for instructions that have none.
    wrapper: op_name of the enclosing async-start, None outside of one.
    """

    loops: tuple[Loop, ...] = ()
    thread: str = ""
    around: str = ""
    wrapper: str | None = None

    def inside(self, module: Module, inst: Instruction) -> "_Context":
        """The context of the computations that `inst` runs."""
        name = _op_name(inst)
        if inst.opcode == "async-start":
            thread = inst.attr("async_execution_thread")
            return replace(self, wrapper=self.wrapper or name, thread=thread or self.thread)
        if inst.opcode == "while":
            loop = Loop(name=inst.name, trips=trip_count(module, inst))
            return replace(self, loops=(*self.loops, loop), around=name or self.around)
        return replace(self, around=name or self.around)

    def op_name(self, inst: Instruction) -> str:
        """The compiler clones what an async-start wraps from one original: only the wrapper's own name counts."""
        own = _op_name(inst) if self.wrapper is None else self.wrapper
        return own or self.around


def _walk(module: Module, name: str, mesh_axes: Mapping[str, int], context: _Context) -> Iterator[Collective]:
    for inst in module.computations[name]:
        if _base(inst.opcode) in COLLECTIVES:
            if not inst.opcode.endswith("-done"):
                yield from _arrays(inst, module, mesh_axes, context)
            continue
        inner = [c for c in inst.called if c in module.computations and module.communicates(c)]
        if inner and inst.opcode == "fusion" and _is_scatter(module, inner[0]):
            yield from _fused_scatter(module, inst, inner[0], mesh_axes, context)
            continue
        for called in inner:
            yield from _walk(module, called, mesh_axes, context.inside(module, inst))


def _arrays(inst: Instruction, module: Module, mesh_axes: Mapping[str, int], context: _Context) -> Iterator[Collective]:
    """One Collective per array the instruction carries."""
    op = _base(inst.opcode)
    found = _results(inst)
    groups = replica_groups(inst.attrs, module.num_devices)
    for dtype, shape in found:
        yield Collective(
            op=op,
            dtype=dtype,
            shape=_unscattered(shape, inst.attrs, len(groups[0])) if op == "reduce-scatter" else shape,
            axes=spanned_axes(groups, mesh_axes),
            group_size=len(groups[0]),
            op_name=context.op_name(inst),
            name=inst.name,
            loops=context.loops,
            is_async=context.wrapper is not None or inst.opcode.endswith("-start"),
            thread=context.thread,
            combined=len(found) > 1,
        )


def _results(inst: Instruction) -> list[tuple[str, tuple[int, ...]]]:
    """The arrays a collective gives."""
    if inst.opcode in ("all-gather-start", "collective-permute-start"):
        return _second_of_tuple(inst.type)  # (operands, results, contexts)
    found = arrays_of(inst.type)
    if _base(inst.opcode) == "all-to-all" and len(found) > 1:
        # The tuple form: one array per peer.
        (dtype, shape), peers = found[0], len(found)
        return [(dtype, (peers, *shape))]
    return found


def _is_scatter(module: Module, computation: str) -> bool:
    """An all-reduce whose only use is a slice of it: the compiler's fused reduce-scatter."""
    body = module.computations[computation]
    root = next(inst for inst in body if inst.is_root)
    return root.opcode == "dynamic-slice" and any(_base(inst.opcode) == "all-reduce" for inst in body)


def _fused_scatter(
    module: Module, fusion: Instruction, computation: str, mesh_axes: Mapping[str, int], context: _Context
) -> Iterator[Collective]:
    for inst in module.computations[computation]:
        if _base(inst.opcode) == "all-reduce":
            for found in _arrays(inst, module, mesh_axes, context.inside(module, fusion)):
                yield found.model_copy(update={"op": "reduce-scatter", "name": fusion.name})


def trip_count(module: Module, loop: Instruction) -> int | None:
    """Static trip count of a while: the compiler's annotation, or `counter < constant` of its condition."""
    if match := _TRIPS.search(loop.backend):
        return int(match.group(1))
    body = module.computations.get(loop.attr("condition"), ())
    root = next((inst for inst in body if inst.is_root), None)
    if root is None or root.opcode not in ("compare", "fusion"):
        return None
    if root.opcode == "compare" and "direction=LT" not in root.attrs:
        return None
    named = {inst.name: inst for inst in body}
    limits = [
        int(named[name].operands)
        for name in re.findall(r"%([\w.\-]+)", root.operands)
        if name in named and named[name].opcode == "constant" and named[name].operands.lstrip("-").isdigit()
    ]
    return limits[0] if len(limits) == 1 else None


def replica_groups(attrs: str, num_devices: int) -> tuple[tuple[int, ...], ...]:
    """Groups of partition ids, from the list form {{0,1},{2,3}} or the iota form [2,2]<=[2,2]T(1,0)."""
    if match := _IOTA.search(attrs):
        dims, reshape = _ints(match.group(1)), _ints(match.group(2))
        order = _ints(match.group(3)) if match.group(3) else tuple(range(len(reshape)))
        ids, per_group = _transposed_iota(reshape, order), dims[-1]
        return tuple(tuple(ids[i : i + per_group]) for i in range(0, len(ids), per_group))
    match = _GROUPS.search(attrs)
    groups = re.findall(r"\{([\d,]+)\}", match.group(1)) if match else []
    return tuple(_ints(group) for group in groups) or (tuple(range(num_devices)),)


def spanned_axes(groups: tuple[tuple[int, ...], ...], mesh_axes: Mapping[str, int]) -> tuple[str, ...]:
    """The mesh axes whose groups these are; () when none fit. Partition ids count row-major over the mesh."""
    wanted = {frozenset(group) for group in groups}
    names = tuple(mesh_axes)
    for mask in range(1, 1 << len(names)):
        chosen = tuple(name for i, name in enumerate(names) if mask >> i & 1)
        size = math.prod(mesh_axes[name] for name in chosen)
        if size == len(groups[0]) and _axis_groups(mesh_axes, chosen) == wanted:
            return chosen
    return ()


def arrays_of(type_text: str) -> list[tuple[str, tuple[int, ...]]]:
    """(dtype, shape) of every array in an HLO type."""
    return [(_dtype(name), _ints(dims)) for name, dims in _ARRAY.findall(type_text)]


def _axis_groups(mesh_axes: Mapping[str, int], chosen: tuple[str, ...]) -> set[frozenset[int]]:
    groups: dict[tuple[int, ...], list[int]] = {}
    for device in range(math.prod(mesh_axes.values())):
        rest, key = device, []
        for name in reversed(tuple(mesh_axes)):
            rest, coordinate = divmod(rest, mesh_axes[name])
            key += [] if name in chosen else [coordinate]
        groups.setdefault(tuple(key), []).append(device)
    return {frozenset(group) for group in groups.values()}


def _transposed_iota(shape: tuple[int, ...], order: tuple[int, ...]) -> list[int]:
    """numpy.arange(prod(shape)).reshape(shape).transpose(order).ravel(), without numpy."""
    strides = [math.prod(shape[i + 1 :]) for i in range(len(shape))]
    ids = [0]
    for axis in order:
        ids = [base + i * strides[axis] for base in ids for i in range(shape[axis])]
    return ids


def _instruction(line: str) -> list[Instruction]:
    """The instruction on a line, [] for a line that holds none."""
    match = _RESULT.match(line)
    if not match:
        return []
    start = match.end()
    after_type = _closing(line, start) + 1 if line[start] == "(" else line.index(" ", start)
    opening = line.index("(", after_type)
    closing = _closing(line, opening)
    attrs, _, backend = line[closing + 1 :].partition("backend_config=")
    found = Instruction(
        name=match.group(2),
        type=line[start:after_type],
        opcode=line[after_type:opening].strip(),
        operands=line[opening + 1 : closing],
        attrs=attrs,
        backend=backend,
        is_root=match.group(1) is not None,
    )
    return [found]


def _closing(line: str, opening: int) -> int:
    """Index of the parenthesis that closes the one at `opening`."""
    depth = 0
    for match in re.compile(r"[()]").finditer(line, opening):
        depth += 1 if match.group() == "(" else -1
        if depth == 0:
            return match.start()
    return len(line) - 1


def _second_of_tuple(type_text: str) -> list[tuple[str, tuple[int, ...]]]:
    """Arrays of the second element of a tuple type."""
    parts, depth, start = [], 0, 1
    for i, char in enumerate(type_text):
        depth += (char in "({[") - (char in ")}]")
        if (depth == 1 and char == ",") or depth == 0:
            parts.append(type_text[start:i])
            start = i + 1
    return arrays_of(parts[1])


def _unscattered(shape: tuple[int, ...], attrs: str, group_size: int) -> tuple[int, ...]:
    match = re.search(r"\bdimensions=\{(\d+)\}", attrs)
    dim = int(match.group(1)) if match else 0
    return tuple(size * group_size if i == dim else size for i, size in enumerate(shape))


def _base(opcode: str) -> str:
    return opcode.removesuffix("-start").removesuffix("-done")


def _op_name(inst: Instruction) -> str:
    match = _OP_NAME.search(inst.attrs)
    return match.group(1) if match else ""


def _aliased(header: str) -> tuple[int, ...]:
    """Flat output indices in input_output_alias ({} is the only output)."""
    start = header.find("input_output_alias={")
    if start < 0:
        return ()
    stop = header.find("entry_computation_layout", start)
    return tuple(int(index.split(",")[0] or 0) for index in _ALIAS.findall(header[start:stop]))


def _devices(header: str) -> int:
    counts = [int(n) for n in re.findall(r"\b(?:num_partitions|replica_count)=(\d+)", header)]
    return math.prod(counts)


def _dtype(name: str) -> str:
    if name in DTYPES:
        return DTYPES[name]
    match = re.fullmatch(r"([sufc])(\d+)", name)
    return f"{_NUMBERED[match.group(1)]}{match.group(2)}" if match else name


def _ints(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in text.split(",") if part)
