"""An emitted program as the runtime sees it: what it must offer, and how it is imported from any folder."""

import hashlib
import importlib
import importlib.util
import sys
from collections.abc import Callable, Sequence
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Any, Protocol, cast

from jax.sharding import Mesh

from moec.blocks.core.array_info import ArrayInfo
from moec.blocks.core.batch import Batch, Bucket

from .errors import ProgramError

FILES = ("model.py", "weights.py")


class Program(Protocol):
    """The module-level names of an emitted model.py.

    Legend: R attention-DP ranks, T tokens and S rows per rank, L layers, V vocabulary, D hidden.

    MESH_AXES: name -> size, major to minor. RULES: logical axis -> mesh axes it is cut over
    ("rank" is the leading axis of state and batch). NUM_PAGES, NUM_SLOTS: counts per rank that
    the plan budgets, 0 is the sink of each. POOLS: state key -> what it takes per rank:
    tokens_per_page, bytes_per_page and window (tokens kept, None = all) where it is paged, else
    bytes_per_slot. COMPILE_OPTIONS: for whoever compiles for the target's backend. IGNORE:
    fnmatch patterns of checkpoint tensors nobody needs.
    SCALE_SUFFIX, SCALE_BLOCK: block scales of a float8 tensor are stored as name + suffix, one
    per (rows, columns) of the stored matrix.
    """

    NAME: str
    PLAN_DIGEST: str
    MESH_AXES: dict[str, int]
    RULES: dict[str, tuple[str, ...]]
    NUM_RANKS: int
    VOCAB: int
    PAGE_SIZE: int
    MAX_CONTEXT: int
    NUM_PAGES: int
    NUM_SLOTS: int
    BUCKETS: dict[str, Bucket]
    POOLS: dict[str, dict[str, int | None]]
    COMPILE_OPTIONS: dict[str, Any]
    IGNORE: tuple[str, ...]
    SCALE_SUFFIX: str | None
    SCALE_BLOCK: tuple[int, int] | None

    # Jitted, by bucket name; called as step(weights, state, batch). STEPS and STEPS_LOGITS donate the state.
    STEPS: dict[str, Callable[..., Any]]  # -> (state, {"tokens": int32 [R, S], "logprobs": float32 [R, S]})
    STEPS_LOGITS: dict[str, Callable[..., Any]]  # -> (state, float32 [R, T, V])
    STEPS_TAPPED: dict[str, Callable[..., Any]]  # -> (state, float32 [R, T, V], [L + 1, R, T, D])

    def mesh(self, devices: Sequence[Any]) -> Mesh: ...

    def weights(self) -> dict[str, Any]: ...

    def state(self, pages: dict[str, int], slots: dict[str, int]) -> dict[str, ArrayInfo]: ...

    def batch(self, bucket: str) -> Batch: ...

    # Jitted, the state is donated; one slot per rank, int32 [R], in every slot pool.
    def copy_slot(self, state: Any, source: Any, target: Any) -> Any: ...

    def zero_slot(self, state: Any, slot: Any) -> Any: ...


class Loadable(Protocol):
    """What resolving a checkpoint reads of a program."""

    IGNORE: tuple[str, ...]
    SCALE_SUFFIX: str | None
    SCALE_BLOCK: tuple[int, int] | None

    def weights(self) -> dict[str, Any]: ...


NAMES = (*Program.__annotations__, "mesh", "weights", "state", "batch", "copy_slot", "zero_slot")


def load_program(directory: str | Path) -> Program:
    """Import DIR/model.py as an emitted program; the folder needs not be on the path.

    The module name holds a digest of the folder's sources, so that a folder which was written
    anew is imported anew and an unchanged one keeps its compiled steps.
    """
    folder = Path(directory).resolve()
    lacking = [name for name in FILES if not (folder / name).is_file()]
    if lacking:
        raise ProgramError([f"{directory}: not an emitted program, it holds no {' and no '.join(lacking)}"])
    module = _import_package(folder)
    absent = [name for name in NAMES if not hasattr(module, name)]
    if absent:
        raise ProgramError([f"{directory}: not an emitted program, model.py defines no {', '.join(absent)}"])
    return cast(Program, module)


def _import_package(folder: Path) -> ModuleType:
    package = f"moec_program_{_digest(folder)}"
    if package not in sys.modules:
        spec = ModuleSpec(package, None, is_package=True)
        spec.submodule_search_locations = [str(folder)]
        sys.modules[package] = importlib.util.module_from_spec(spec)
    # Bytecode files are keyed by the source's time in whole seconds: a program that was written
    # twice within one would be imported from the stale one.
    writes, sys.dont_write_bytecode = sys.dont_write_bytecode, True
    try:
        return importlib.import_module(f"{package}.model")
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # whatever its code raises, SystemExit included
        raise ProgramError([f"{folder}: model.py cannot be imported: {_one_line(error)}"]) from error
    finally:
        sys.dont_write_bytecode = writes


def _one_line(error: BaseException) -> str:
    """What was raised; import and syntax errors speak for themselves."""
    text = str(error).partition("\n")[0]
    return text if text and isinstance(error, ImportError | SyntaxError) else f"{type(error).__name__}: {text}"


def _digest(folder: Path) -> str:
    """Of the folder's path and its Python sources."""
    found = hashlib.sha256(str(folder).encode())
    for path in sorted(folder.glob("*.py")):
        try:
            found.update(path.name.encode() + b"\0" + path.read_bytes() + b"\0")
        except OSError as error:
            raise ProgramError([f"{path}: cannot be read ({error.strerror})"]) from error
    return found.hexdigest()[:16]
