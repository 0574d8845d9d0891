"""The block kinds a spec may name; a new block is one folder and one line here."""

import importlib
from collections.abc import Callable
from types import ModuleType


def _thunk(kind: str, part: str) -> Callable[[], ModuleType]:
    return lambda: importlib.import_module(f"moec.blocks.{kind}.{part}")


KINDS = ("attention", "gated_delta", "moe")


# What a block declares, what it costs, what it adds to an emitted program, and what it means in float32.
BLOCKS: dict[str, Callable[[], ModuleType]] = {kind: _thunk(kind, "block") for kind in KINDS}
COSTS: dict[str, Callable[[], ModuleType]] = {kind: _thunk(kind, "cost") for kind in KINDS}
EMITTERS: dict[str, Callable[[], ModuleType]] = {kind: _thunk(kind, "emit") for kind in KINDS}
REFERENCES: dict[str, Callable[[], ModuleType]] = {kind: _thunk(kind, "reference") for kind in KINDS}
