"""What loading changes: one line per kind of conversion that loses bits, so that none happens unnoticed."""

from collections.abc import Iterable

import ml_dtypes
import numpy as np

from moec.blocks.core.array_info import FP8_BLOCK

from .checkpoint import Checkpoint
from .convert import FLOAT8
from .resolve import Target, keeps_bits

NAMED = 4  # weights that a line names


def lossy_conversions(targets: Iterable[Target], checkpoint: Checkpoint) -> list[str]:
    """`quantised to float8_e4m3fn (...): 12 tensors stored as bfloat16 (moe.w_up, moe.w_down)`, and the like."""
    found: dict[tuple[str, str], tuple[dict[str, None], dict[str, None]]] = {}
    for target in targets:
        for name in (tensor for piece in target.pieces for tensor in piece.tensors):
            stored = checkpoint.tensors[name]
            if keeps_bits(stored, target) or (target.scale is None and _holds(target.info.dtype, stored.dtype.name)):
                continue
            tensors, weights = found.setdefault((_what(target), stored.dtype.name), ({}, {}))
            tensors[name] = weights[".".join(target.path[-2:])] = None
    return [
        f"{what}: {len(tensors)} tensor{'s' if len(tensors) > 1 else ''} stored as {dtype} ({_some(list(weights))})"
        for (what, dtype), (tensors, weights) in found.items()
    ]


def _what(target: Target) -> str:
    if target.scale is not None:
        return f"quantised to {target.info.dtype} (one scale per {FP8_BLOCK} x {FP8_BLOCK} block)"
    return f"rounded to {target.info.dtype}"


def _some(names: list[str]) -> str:
    more = f" and {len(names) - NAMED} more" if len(names) > NAMED else ""
    return ", ".join(names[:NAMED]) + more


def _holds(wide: str, narrow: str) -> bool:
    """Whether one dtype has every value of the other. Float8 comes with scales: the products are float32."""
    a, b = (ml_dtypes.finfo(np.dtype(name)) for name in (wide, "float32" if narrow in FLOAT8 else narrow))
    return bool(a.nmant >= b.nmant and a.maxexp >= b.maxexp and a.minexp <= b.minexp)
