"""The checkpoint table as Source ops: which stored tensor holds a weight, and how to cut it out.

Stored coordinates: linear weights are [out, in] unless the line says otherwise, everything
else as the weight declares. Dims are counted from the end, so that the same ops fit a
stacked tensor [experts, ...] and one expert's matrix.
"""

from moec.blocks.core.array_info import Op, Source
from moec.blocks.core.declare import Weight

from .ir import Graph, TensorMap
from .weights import all_weights, table_key


def sources(graph: Graph, key: str) -> tuple[Source, ...]:
    """All places where a checkpoint may keep the weight `key`, in table order; () without a table."""
    if graph.checkpoint is None:
        return ()
    weights = all_weights(graph)
    wanted = table_key(graph, key)
    inst = key.partition(".")[0]
    found = []
    for line in graph.checkpoint.tensors:
        if wanted in line.into:
            siblings = tuple(weights[_instance_key(graph, into, wanted, inst, weights)] for into in line.into)
            found.append(Source(line.tensor, _ops(line, siblings, line.into.index(wanted)), line.packed))
    return tuple(found)


def stored_shape(line: TensorMap, weights: tuple[Weight, ...]) -> tuple[int, ...]:
    """The shape the whole stored tensor must have (stacked weights: with the experts dim); packed: unpacked."""
    shape = list(_stored(weights[0], line))
    shape[_out_dim(weights[0], line)] = sum(out_size(weight, line) for weight in weights)
    return (shape[0] * shape[1], *shape[2:]) if line.flat else tuple(shape)


def _instance_key(graph: Graph, into: str, wanted: str, inst: str, weights: dict[str, Weight]) -> str:
    """The sibling in the same block instance; lines may also join weights of different blocks."""
    base, _, name = into.partition(".")
    if base == wanted.partition(".")[0] and f"{inst}.{name}" in weights:
        return f"{inst}.{name}"
    if into in weights:
        return into
    # The base itself fills no layer, only variants of it do: they are stored alike, or the table does not fit them.
    return next(key for key in weights if table_key(graph, key) == into)


def _transposed(weight: Weight, line: TensorMap) -> bool:
    return weight.linear if line.transpose is None else line.transpose


def _stored(weight: Weight, line: TensorMap) -> tuple[int, ...]:
    """The weight's shape in stored coordinates."""
    if not _transposed(weight, line):
        return weight.shape
    return (*weight.shape[:-2], weight.shape[-1], weight.shape[-2])


def _out_dim(weight: Weight, line: TensorMap) -> int:
    """The stored dim that split and interleave cut: out of a matrix, else the first one."""
    if weight.linear:
        return -2 if _transposed(weight, line) else -1
    return -1 if _transposed(weight, line) else -len(weight.shape) + int(weight.stacked)


def out_size(weight: Weight, line: TensorMap) -> int:
    """Stored rows (or what split cuts) that the weight takes."""
    return _stored(weight, line)[_out_dim(weight, line)]


def _ops(line: TensorMap, weights: tuple[Weight, ...], index: int) -> tuple[Op, ...]:
    """Cut entry `index` of the line's weights out of the stored tensor, then turn it to [in, out]."""
    weight = weights[index]
    dim = _out_dim(weight, line)
    ops: list[Op] = [("stack", weight.shape[0])] if line.flat else []
    if line.op == "split":
        start = sum(out_size(before, line) for before in weights[:index])
        ops.append(_slice(dim, line.groups, start, start + out_size(weight, line)))
    if line.op == "interleave":
        ops.append(("stride", dim, index, len(weights)))
    if _transposed(weight, line):
        ops.append(("transpose",))
    return tuple(ops)


def _slice(dim: int, groups: int, start: int, stop: int) -> Op:
    """start, stop: rows of all groups together, which divide them (verify.check_table)."""
    if groups == 1:
        return ("slice", dim, start, stop)
    return ("group_slice", dim, groups, start // groups, stop // groups)
