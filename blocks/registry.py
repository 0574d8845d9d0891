"""The block kinds a spec may name; a new block is one folder and one line here."""

import importlib
from collections.abc import Callable
from functools import cache
from types import ModuleType

from .core.declare import AXES, AxisRole, Variant


def _thunk(kind: str, part: str) -> Callable[[], ModuleType]:
    return lambda: importlib.import_module(f"moec.blocks.{kind}.{part}")


KINDS = ("attention", "gated_delta", "lightning", "mamba1", "mamba2", "mla", "mlp", "moe", "short_conv")


# What a block declares, what it adds to an emitted program, and what it means in float32.
BLOCKS: dict[str, Callable[[], ModuleType]] = {kind: _thunk(kind, "block") for kind in KINDS}
EMITTERS: dict[str, Callable[[], ModuleType]] = {kind: _thunk(kind, "emit") for kind in KINDS}
# What blocks call and has variants of its own; a block's field of the same name holds its declaration.
PARTS: dict[str, Callable[[], ModuleType]] = {"router": _thunk("router", "variants")}
# How what blocks compute for other ranks returns to them: one variant for the whole program.
COLLECTIVES: Callable[[], ModuleType] = _thunk("collectives", "variants")
REFERENCES: dict[str, Callable[[], ModuleType]] = {kind: _thunk(kind, "reference") for kind in KINDS}


def cost(kind: str, variant: Variant) -> ModuleType:
    """What a variant of a block or a part costs."""
    return importlib.import_module(f"moec.blocks.{kind}.{variant.cost}")


@cache
def axis_roles() -> dict[str, AxisRole]:
    """Logical axis -> the degree that cuts it, over all blocks. An axis means the same wherever it stands."""
    found = dict(AXES)
    for block in BLOCKS.values():
        for axis, role in block().AXES.items():
            assert found.setdefault(axis, role) == role, (axis, role)
    return found
