"""What loading changes: one line per kind of conversion that loses bits, so that none happens unnoticed."""

from collections.abc import Iterable, Iterator

import ml_dtypes
import numpy as np

from .checkpoint import Checkpoint, Stored
from .convert import FLOAT8
from .packed import EXACT_IN, side_tensors
from .resolve import Piece, Target, keeps_bits

NAMED = 4  # weights that a line names


Block = tuple[int, int] | None  # rows, columns under one scale


def lossy_conversions(targets: Iterable[Target], checkpoint: Checkpoint, block: Block) -> list[str]:
    """`quantised to float8_e4m3fn (...): 12 tensors stored as bfloat16 (moe.w_up, moe.w_down)`, and the like.

    block: that of stored float8 tensors.
    """
    found: dict[tuple[str, str], tuple[dict[str, None], dict[str, None]]] = {}
    for target, piece, stored in _uses(targets, checkpoint):
        if loss := _loss(target, piece, stored, checkpoint, block):
            tensors, weights = found.setdefault(loss, ({}, {}))
            tensors[stored.name] = weights[".".join(target.path[-2:])] = None
    return [
        f"{what}: {len(tensors)} tensor{'s' if len(tensors) > 1 else ''} stored as {dtype} ({_some(list(weights))})"
        for (what, dtype), (tensors, weights) in found.items()
    ]


def _uses(targets: Iterable[Target], checkpoint: Checkpoint) -> Iterator[tuple[Target, Piece, Stored]]:
    for target in targets:
        for piece in target.pieces:
            for name in piece.tensors:
                yield target, piece, checkpoint.tensors[name]


def _loss(target: Target, piece: Piece, stored: Stored, checkpoint: Checkpoint, block: Block) -> tuple[str, str] | None:
    """(what is done to the values, what they are stored as) when that loses bits."""
    dtype = piece.packed or stored.dtype.name
    if target.scale is None:
        # Float8 comes with scales: the products are float32.
        exact_in = EXACT_IN[piece.packed] if piece.packed else "float32" if dtype in FLOAT8 else dtype
        return None if _holds(target.info.dtype, exact_in) else (f"rounded to {target.info.dtype}", dtype)
    if not keeps_bits(stored, piece, target, block):
        stored_as = f"{dtype}, one per {block[0]} x {block[1]}" if dtype in FLOAT8 and block else dtype
        how = "one scale per {} x {} block".format(*target.block)
        again = "re" if dtype == target.info.dtype else ""
        return f"{again}quantised to {target.info.dtype} ({how})", stored_as
    return _scale_loss(target, piece, stored, checkpoint) if piece.packed else None


def _scale_loss(target: Target, piece: Piece, stored: Stored, checkpoint: Checkpoint) -> tuple[str, str] | None:
    """Scales of packed values may be stored wider than the program holds them."""
    assert target.scale is not None
    scale = checkpoint.tensors[side_tensors(stored.name, piece.packed)["scales"]].dtype.name
    if scale == "uint8" or _holds(target.scale.dtype, scale):
        return None
    return f"scales rounded to {target.scale.dtype}", f"{piece.packed} with {scale} scales"


def _some(names: list[str]) -> str:
    more = f" and {len(names) - NAMED} more" if len(names) > NAMED else ""
    return ", ".join(names[:NAMED]) + more


def _holds(wide: str, narrow: str) -> bool:
    """Whether one dtype has every value of the other."""
    a, b = (ml_dtypes.finfo(np.dtype(name)) for name in (wide, narrow))
    return bool(a.nmant >= b.nmant and a.maxexp >= b.maxexp and a.minexp <= b.minexp)
