"""Optimised HLO text as data: computations and instructions, what they call, trip counts, aliased outputs.

Input is the `after_optimizations` text of an XLA dump. `compiled.as_text()` is no substitute: it
fails for programs whose collectives are offloaded to the SparseCore, the default on recent chips.
"""

import math
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property

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

ArrayType = tuple[str, tuple[int, ...]]  # numpy/ml_dtypes name, shape

_HEADER = re.compile(r"^(ENTRY )?%?([\w.\-]+) (?:\(.*)?\{\s*$")
_RESULT = re.compile(r"^\s+(ROOT )?%?([\w.\-]+) = ")
_END = re.compile(r"^\}(?:, execution_thread=\"\w+\")?$")  # of a computation
_ARRAY = re.compile(r"\b([a-z]+\d*(?:e\d+m\d+(?:fn|fnuz|b11fnuz)?)?)\[([\d,]*)\]")
_CALLED = re.compile(r"\b(calls|to_apply|body|true_computation|false_computation)=%?([\w.\-]+)")
_CALLED_SETS = re.compile(r"\b(?:branch_computations|called_computations)=\{([^}]*)\}")
_KERNEL = re.compile(r"kernel_metadata=\{([^}]*)\}")
_FACT = re.compile(r'"(\w+)":"((?:[^"\\]|\\.)*)"')
_TRIPS = re.compile(r'"known_trip_count":\{"n":"(\d+)"')
_OP_NAME = re.compile(r'op_name="([^"]*)"')
_ALIAS = re.compile(r"\{([\d, ]*)\}: \(\d+, \{[\d, ]*\}, (?:may|must)-alias\)")


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
        if self.base in COLLECTIVES or self.opcode in ("async-update", "async-done"):
            return ()
        names = [name for _, name in _CALLED.findall(self.attrs)]
        for inner in _CALLED_SETS.findall(self.attrs):
            names += [name.strip().lstrip("%") for name in inner.split(",") if name.strip()]
        return tuple(names)

    @property
    def base(self) -> str:
        """The opcode without -start or -done."""
        return self.opcode.removesuffix("-start").removesuffix("-done")

    @property
    def op_name(self) -> str:
        """Path of named scopes the compiler kept for it, "" when it kept none."""
        match = _OP_NAME.search(self.attrs)
        return match.group(1) if match else ""

    @cached_property
    def kernel(self) -> Mapping[str, str]:
        """What a kernel says of itself (its metadata), {} for other instructions and for kernels that say nothing."""
        match = _KERNEL.search(self.attrs)
        return dict(_FACT.findall(match.group(1))) if match else {}

    @property
    def communicates(self) -> bool:
        """Whether it is a collective: the compiler's, or a kernel that says so."""
        return self.base in COLLECTIVES or "collective" in self.kernel

    @property
    def results(self) -> list[ArrayType]:
        """The arrays in its type; of an -start, those it will give."""
        if self.opcode in ("all-gather-start", "collective-permute-start"):
            return _second_of_tuple(self.type)  # (operands, results, contexts)
        return arrays_of(self.type)

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
                i.communicates or any(self.communicates(c) for c in i.called if c in self.computations)
                for i in self.computations[name]
            )
        return self._busy[name]


def parse(text: str) -> Module:
    """Parse the text of one HLO module."""
    header = text.split("\n", 1)[0]
    assert header.startswith("HloModule "), f"not an HLO module: {header[:80]!r}"
    computations: dict[str, tuple[Instruction, ...]] = {}
    entry, current, body = "", "", list[Instruction]()
    for line in _joined(text.splitlines()[1:]):
        if _END.match(line) and current:
            computations[current], current, body = tuple(body), "", list[Instruction]()
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


def _joined(lines: Iterable[str]) -> Iterator[str]:
    """Lines with what continues an instruction put behind it: the metadata of kernels spans several."""
    open_line: str | None = None
    for line in lines:
        if open_line is not None and not (_RESULT.match(line) or _END.match(line)):
            open_line += f" {line}"
            continue
        if open_line is not None:
            yield open_line
        open_line = line if _RESULT.match(line) else None
        if open_line is None:
            yield line
    if open_line is not None:
        yield open_line


def trip_count(module: Module, loop: Instruction) -> int | None:
    """Static trip count of a while: the compiler's annotation, or `counter < constant` of its condition."""
    if match := _TRIPS.search(loop.backend):
        return int(match.group(1))
    body = module.computations.get(loop.attr("condition"), ())
    root = next((inst for inst in body if inst.is_root), None)
    if root is None:
        return None
    # The comparison may be fused, with the constant inside or outside of the fusion.
    fused = tuple(inst for name in root.called for inst in module.computations.get(name, ()))
    compared = [inst for inst in (root, *fused) if inst.opcode == "compare"]
    if len(compared) != 1 or "direction=LT" not in compared[0].attrs:
        return None
    read = re.findall(r"%([\w.\-]+)", root.operands)
    limits = [
        value for inst in (*fused, *(i for i in body if i.name in read)) if (value := _constant(inst)) is not None
    ]
    return limits[0] if len(limits) == 1 else None


def _constant(inst: Instruction) -> int | None:
    is_integer = inst.opcode == "constant" and inst.operands.lstrip("-").isdigit()
    return int(inst.operands) if is_integer else None


def arrays_of(type_text: str) -> list[ArrayType]:
    """(dtype, shape) of every array in an HLO type."""
    return [(_dtype(name), ints(dims)) for name, dims in _ARRAY.findall(type_text)]


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


def _second_of_tuple(type_text: str) -> list[ArrayType]:
    """Arrays of the second element of a tuple type."""
    parts, depth, start = [], 0, 1
    for i, char in enumerate(type_text):
        depth += (char in "({[") - (char in ")}]")
        if (depth == 1 and char == ",") or depth == 0:
            parts.append(type_text[start:i])
            start = i + 1
    return arrays_of(parts[1])


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


def ints(text: str) -> tuple[int, ...]:
    """Comma-separated integers."""
    return tuple(int(part) for part in text.split(",") if part)
