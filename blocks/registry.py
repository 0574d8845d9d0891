"""The block kinds a spec may name; a new block is one folder and one line here."""

import importlib
from collections.abc import Callable
from functools import cache
from types import ModuleType

from .core.declare import AXES, AxisRole


def _thunk(kind: str, part: str) -> Callable[[], ModuleType]:
    return lambda: importlib.import_module(f"moec.blocks.{kind}.{part}")


KINDS = ("attention", "gated_delta", "lightning", "mamba1", "mamba2", "mla", "mlp", "moe", "short_conv")


# What a block declares, what it costs, what it adds to an emitted program, and what it means in float32.
BLOCKS: dict[str, Callable[[], ModuleType]] = {kind: _thunk(kind, "block") for kind in KINDS}
COSTS: dict[str, Callable[[], ModuleType]] = {kind: _thunk(kind, "cost") for kind in KINDS}
EMITTERS: dict[str, Callable[[], ModuleType]] = {kind: _thunk(kind, "emit") for kind in KINDS}
REFERENCES: dict[str, Callable[[], ModuleType]] = {kind: _thunk(kind, "reference") for kind in KINDS}


@cache
def axis_roles() -> dict[str, AxisRole]:
    """Logical axis -> the degree that cuts it, over all blocks. An axis means the same wherever it stands."""
    found = dict(AXES)
    for block in BLOCKS.values():
        for axis, role in block().AXES.items():
            assert found.setdefault(axis, role) == role, (axis, role)
    return found
