"""From a stored tensor to a weight: the Source ops, block scales, and the shapes they imply. Numpy only.

Legend: ops as blocks.core.array_info.Op; a block is (rows, columns) of a stored matrix that share one scale.
"""

import numpy as np

from moec.blocks.core.array_info import Op

FLOAT8 = ("float8_e4m3fn", "float8_e5m2")
FLOATS = ("float64", "float32", "float16", "bfloat16", *FLOAT8)

STRIP = 16  # columns per copy of a transposed matrix: stays within the cache, about 3 times faster than all at once


def squeeze(shape: tuple[int, ...], rank: int) -> tuple[int, ...]:
    """A stored shape without its dims of size 1 where the rank differs from what is expected."""
    return shape if len(shape) == rank else tuple(size for size in shape if size != 1)


def apply_ops(array: np.ndarray, ops: tuple[Op, ...]) -> np.ndarray:
    """The ops in order; slices, strides and transposes are views."""
    for op in ops:
        array = _apply(array, op)
    return array


def _apply(array: np.ndarray, op: Op) -> np.ndarray:
    match op:
        case ("stack", int(n)):
            return array.reshape(n, array.shape[0] // n, *array.shape[1:])
        case ("slice", int(dim), int(start), int(stop)):
            return array[_along(array, dim, slice(start, stop))]
        case ("group_slice", int(dim), int(groups), int(start), int(stop)):
            return _group_slice(array, dim % array.ndim, groups, slice(start, stop))
        case ("stride", int(dim), int(start), int(step)):
            return array[_along(array, dim, slice(start, None, step))]
        case ("transpose",):
            return array.swapaxes(-1, -2)
        case ("repeat", int(dim), int(size), int(times)):
            return _repeat(array, dim % array.ndim, size, times)
    raise AssertionError(f"unknown op {op}")


def _along(array: np.ndarray, dim: int, part: slice) -> tuple[slice, ...]:
    index = [slice(None)] * array.ndim
    index[dim] = part
    return tuple(index)


def _group_slice(array: np.ndarray, dim: int, groups: int, part: slice) -> np.ndarray:
    """[.., groups * size, ..] -> [.., groups * piece, ..], the same piece of each group."""
    shape = array.shape
    runs = array.reshape(*shape[:dim], groups, shape[dim] // groups, *shape[dim + 1 :])
    return runs[_along(runs, dim + 1, part)].reshape(*shape[:dim], -1, *shape[dim + 1 :])


def _repeat(array: np.ndarray, dim: int, size: int, times: int) -> np.ndarray:
    """[.., n * size, ..] -> [.., n * times * size, ..], each run of `size` entries `times` times."""
    shape = array.shape
    runs = array.reshape(*shape[:dim], shape[dim] // size, size, *shape[dim + 1 :])
    return runs.repeat(times, axis=dim).reshape(*shape[:dim], shape[dim] * times, *shape[dim + 1 :])


def extent_of(op: Op) -> int:
    """Size of the stored dim that a slice cuts, as far as it says."""
    match op:
        case ("slice", int(), int(), int(stop)):
            return stop
        case ("group_slice", int(), int(groups), int(), int(stop)):
            return groups * stop
    return 0


def stored_rank(rank: int, ops: tuple[Op, ...]) -> int:
    """Rank of the stored tensor that the ops turn into one of `rank`."""
    return rank - sum(op[0] == "stack" for op in ops)


def stored_shape(wanted: tuple[int, ...], ops: tuple[Op, ...], extent: int) -> tuple[int, ...]:
    """The stored shape that the ops turn into `wanted`. extent: size of the stored dim that a slice cuts."""
    shape = list(wanted)
    for op in reversed(ops):
        match op:
            case ("stack", int(n)):
                shape = [n * shape[1], *shape[2:]]
            case ("slice", int(dim), int(), int()) | ("group_slice", int(dim), int(), int(), int()):
                shape[dim] = extent
            case ("stride", int(dim), int(), int(step)):
                shape[dim] *= step
            case ("transpose",):
                shape[-1], shape[-2] = shape[-2], shape[-1]
            case ("repeat", int(dim), int(), int(times)):
                shape[dim] //= times
            case _:
                raise AssertionError(f"unknown op {op}")
    return tuple(shape)


def scale_shape(shape: tuple[int, ...], block: tuple[int, int]) -> tuple[int, ...]:
    """Shape of the block scales of a stored [..., rows, columns]; ragged last blocks count."""
    return (*shape[:-2], *(-(-size // edge) for size, edge in zip(shape[-2:], block, strict=True)))


def scale_ops(ops: tuple[Op, ...], shape: tuple[int, ...], block: tuple[int, int]) -> tuple[Op, ...] | None:
    """The same ops on the block scales of a stored `shape`; None when they cut through a block."""
    edges: dict[int, int] = {-2: block[0], -1: block[1]}
    found: list[Op] = []
    for op in ops:
        match op:
            case ("stack", int(n)) if shape[-2] // n % edges[-2] == 0:
                found.append(op)
                shape = (n, shape[-2] // n, shape[-1])
            case ("slice", int(dim), int(start), int(stop)) if dim in edges:
                edge, size = edges[dim], shape[dim]
                if start % edge or (stop % edge and stop != size):
                    return None
                found.append(("slice", dim, start // edge, -(-stop // edge)))
            case ("group_slice", int(dim), int(groups), int(start), int(stop)) if dim in edges:
                edge = edges[dim]
                if shape[dim] // groups % edge or start % edge or stop % edge:
                    return None
                found.append(("group_slice", dim, groups, start // edge, stop // edge))
            case ("stride", int(dim), int(), int()) if edges.get(dim) == 1:
                found.append(op)
            case ("transpose",):
                edges = {-2: edges[-1], -1: edges[-2]}
                shape = (*shape[:-2], shape[-1], shape[-2])
                found.append(op)
            case _:
                return None
    return tuple(found)


def turned(ops: tuple[Op, ...], block: tuple[int, int]) -> tuple[int, int]:
    """(rows, columns) of a stored block after the ops."""
    rows, columns = block
    return (columns, rows) if sum(op == ("transpose",) for op in ops) % 2 else block


def dequantize(q: np.ndarray, scale: np.ndarray, block: tuple[int, int]) -> np.ndarray:
    """[..., rows, columns] in 8 or 4 bits times the scale of its block, float32."""
    # At most 256 possible values: a table is several times faster than the cast.
    table = np.arange(256, dtype=np.uint8).view(q.dtype).astype(np.float32)
    values = table.take(q.view(np.uint8))
    along_rows = scale.astype(np.float32).repeat(block[1], -1)[..., : q.shape[-1]]
    if block[0] == 1:
        return np.multiply(values, along_rows, out=values)
    for i in range(scale.shape[-2]):
        values[..., i * block[0] : (i + 1) * block[0], :] *= along_rows[..., i : i + 1, :]
    return values


def copy_into(out: np.ndarray, value: np.ndarray) -> None:
    """Write `value` into `out`, cast to its dtype. Equal dtypes are copied as bits, which numpy does faster."""
    if out.dtype != value.dtype:
        np.copyto(out, value, casting="unsafe")
        return
    bits = np.dtype(f"u{out.dtype.itemsize}")
    out, value = out.view(bits), value.view(bits)
    width = value.shape[-1]
    strip = width if value.flags.c_contiguous else STRIP
    for start in range(0, width, strip):
        out[..., start : start + strip] = value[..., start : start + strip]
