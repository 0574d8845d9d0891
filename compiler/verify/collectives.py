"""The collectives of a compiled program: which, in which loop, how often, over which mesh axes."""

import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

from .hlo import COLLECTIVES, ArrayType, Instruction, Module, arrays_of, ints, trip_count
from .report import Frozen

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
        name = inst.op_name
        if inst.opcode == "async-start":
            thread = inst.attr("async_execution_thread")
            return replace(self, wrapper=self.wrapper or name, thread=thread or self.thread)
        if inst.opcode == "while":
            loop = Loop(name=inst.name, trips=trip_count(module, inst))
            return replace(self, loops=(*self.loops, loop), around=name or self.around)
        return replace(self, around=name or self.around)

    def op_name(self, inst: Instruction) -> str:
        """The compiler clones what an async-start wraps from one original: only the wrapper's own name counts."""
        own = inst.op_name if self.wrapper is None else self.wrapper
        return own or self.around


def _walk(module: Module, name: str, mesh_axes: Mapping[str, int], context: _Context) -> Iterator[Collective]:
    for inst in module.computations[name]:
        if "collective" in inst.kernel:
            yield _kernel(inst, mesh_axes, context)
            continue
        if inst.base in COLLECTIVES:
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
    op = inst.base
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


def _kernel(inst: Instruction, mesh_axes: Mapping[str, int], context: _Context) -> Collective:
    """A collective written as a kernel: it names what it does and over which axes, its operand is the full array."""
    axes = tuple(name for name in mesh_axes if name in inst.kernel["axes"].split(","))
    _, _, operands = inst.attrs.partition("operand_layout_constraints={")
    dtype, shape = arrays_of(operands.partition("custom_call_has")[0])[0]
    return Collective(
        op=inst.kernel["collective"],
        dtype=dtype,
        shape=shape,
        axes=axes,
        group_size=math.prod(mesh_axes[name] for name in axes),
        op_name=context.op_name(inst),
        name=inst.name,
        loops=context.loops,
        is_async=False,
        thread=context.thread,
        combined=False,
    )


def _results(inst: Instruction) -> list[ArrayType]:
    """The arrays a collective gives; the tuple form of an all-to-all (one per peer) is one array."""
    found = inst.results
    if inst.base == "all-to-all" and len(found) > 1:
        (dtype, shape), peers = found[0], len(found)
        return [(dtype, (peers, *shape))]
    return found


def _is_scatter(module: Module, computation: str) -> bool:
    """An all-reduce whose only use is a slice of it: the compiler's fused reduce-scatter."""
    body = module.computations[computation]
    root = next(inst for inst in body if inst.is_root)
    return root.opcode == "dynamic-slice" and any(inst.base == "all-reduce" for inst in body)


def _fused_scatter(
    module: Module, fusion: Instruction, computation: str, mesh_axes: Mapping[str, int], context: _Context
) -> Iterator[Collective]:
    for inst in module.computations[computation]:
        if inst.base == "all-reduce":
            for found in _arrays(inst, module, mesh_axes, context.inside(module, fusion)):
                yield found.model_copy(update={"op": "reduce-scatter", "name": fusion.name})


def replica_groups(attrs: str, num_devices: int) -> tuple[tuple[int, ...], ...]:
    """Groups of partition ids, from the list form {{0,1},{2,3}} or the iota form [2,2]<=[2,2]T(1,0)."""
    if match := _IOTA.search(attrs):
        dims, reshape = ints(match.group(1)), ints(match.group(2))
        order = ints(match.group(3)) if match.group(3) else tuple(range(len(reshape)))
        ids, per_group = _transposed_iota(reshape, order), dims[-1]
        return tuple(tuple(ids[i : i + per_group]) for i in range(0, len(ids), per_group))
    match = _GROUPS.search(attrs)
    groups = re.findall(r"\{([\d,]+)\}", match.group(1)) if match else []
    return tuple(ints(group) for group in groups) or (tuple(range(num_devices)),)


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


def _unscattered(shape: tuple[int, ...], attrs: str, group_size: int) -> tuple[int, ...]:
    match = re.search(r"\bdimensions=\{(\d+)\}", attrs)
    dim = int(match.group(1)) if match else 0
    return tuple(size * group_size if i == dim else size for i, size in enumerate(shape))
