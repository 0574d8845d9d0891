"""Write an emitted program, or check a folder for drift.

All files are rendered first and written to a temporary directory, which is then renamed:
nothing half-written is ever seen.
"""

import shutil
import tempfile
from pathlib import Path

from ..graph.ir import Graph
from ..plan.plan import Plan
from .package import plan_digest as plan_digest
from .package import program_dir as program_dir
from .package import program_files, regenerate_command
from .standalone import standalone_files


def emit(graph: Graph, plan: Plan, out_dir: Path, *, standalone: bool = False) -> list[Path]:
    """Write the package; returns the files written. standalone: without imports of the library."""
    return write_files(_files(graph, plan, standalone), out_dir)


def _files(graph: Graph, plan: Plan, standalone: bool) -> dict[str, str]:
    return standalone_files(graph, plan) if standalone else program_files(graph, plan)


def write_files(files: dict[str, str], out_dir: Path) -> list[Path]:
    """Replace out_dir by these files, all or nothing."""
    out_dir.parent.mkdir(parents=True, exist_ok=True)
    staging = Path(tempfile.mkdtemp(prefix=f".{out_dir.name}.", dir=out_dir.parent))
    try:
        for name, text in files.items():
            (staging / name).parent.mkdir(exist_ok=True)
            (staging / name).write_text(text)
        staging.chmod(0o755)
        _swap(staging, out_dir)
    finally:
        shutil.rmtree(staging, ignore_errors=True)
    return [out_dir / name for name in files]


def _swap(staging: Path, out_dir: Path) -> None:
    """Put the new folder in the old one's place; the old one is moved aside whole, then deleted."""
    old = Path(tempfile.mkdtemp(prefix=f".{out_dir.name}.", dir=out_dir.parent)) / "old"
    try:
        if out_dir.exists():
            out_dir.rename(old)
        staging.rename(out_dir)
    finally:
        shutil.rmtree(old.parent, ignore_errors=True)


def check(graph: Graph, plan: Plan, out_dir: Path, *, standalone: bool = False) -> list[str]:
    """What differs between out_dir and what would be emitted now; empty = no drift."""
    wanted = _files(graph, plan, standalone)
    sources = (p.relative_to(out_dir) for p in out_dir.rglob("*") if p.is_file() and "__pycache__" not in p.parts)
    present = {p.as_posix() for p in sources}
    drift = [f"{out_dir / name}: missing" for name in sorted(wanted.keys() - present)]
    drift += [f"{out_dir / name}: not emitted by this compiler" for name in sorted(present - wanted.keys())]
    for name in sorted(wanted.keys() & present):
        if (out_dir / name).read_text() != wanted[name]:
            drift.append(f"{out_dir / name}: differs; regenerate with {regenerate_command(plan)}")
    return drift
