"""Results of ahead-of-time compiles as JSON files, one per key.

XLA's persistent compile cache cannot be read back for another machine's chips, so we keep
what we need of a compile: memory, collectives, kernels, times. The key covers everything that can
change the result: the program, the options, the compiler's flags in the environment, the
topology, the compiler and our own parser.
"""

import fcntl
import hashlib
import json
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from pydantic import ValidationError

from .measured import Measured

# Environment variables that the compilers take flags from.
FLAGS = ("XLA_FLAGS", "LIBTPU_INIT_ARGS")
_READERS = ("hlo.py", "collectives.py", "kernels.py", "hbm.py", "aot_worker.py", "measured.py")


def cache_key(stablehlo: str, options: Mapping[str, str | bool], versions: Mapping[str, str], topology: str) -> str:
    """SHA-256 over the program text, options, versions, topology, compiler flags and the code that reads the result."""
    here = Path(__file__).parent
    readers = hashlib.sha256(b"".join((here / name).read_bytes() for name in _READERS)).hexdigest()
    flags = {name: os.environ.get(name, "") for name in FLAGS}
    parts = [stablehlo, dict(sorted(options.items())), dict(sorted(versions.items())), topology, flags, readers]
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()


def load(directory: Path, key: str) -> Measured | None:
    """The stored result, None when there is none that can be read."""
    try:
        return Measured.model_validate_json((directory / f"{key}.json").read_bytes())
    except (FileNotFoundError, ValidationError):
        return None


def store(directory: Path, key: str, result: Measured) -> None:
    """Write atomically: readers see the whole file or none."""
    directory.mkdir(parents=True, exist_ok=True)
    partial = directory / f"{key}.{os.getpid()}.tmp"
    partial.write_text(result.model_dump_json(indent=1))
    partial.replace(directory / f"{key}.json")


@contextmanager
def exclusive(lock_file: Path) -> Iterator[None]:
    """Hold a lock between processes; it falls with the process that holds it."""
    lock_file.parent.mkdir(parents=True, exist_ok=True)
    with lock_file.open("w") as handle:
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield
