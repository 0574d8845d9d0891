"""Write an emitted program, or check a folder for drift.

All files are rendered first and written to a temporary directory, which is then renamed:
nothing half-written is ever seen, and a folder that is not ours is never replaced.
"""

import json
import shutil
import tempfile
from pathlib import Path

from ..graph.ir import Graph
from ..plan.plan import Plan
from .package import program_files, regenerate_command
from .standalone import standalone_files

MARK = "# Emitted by moec"  # how every emitted model.py starts
OURS = {"__init__.py", "model.py", "weights.py", "serve.py", "run.py", "engine", "plan.json", "README.md"}
SIDE_EFFECTS = {"__pycache__"}


def why_not_ours(out_dir: Path, plan: Plan) -> str:
    """Why out_dir must not be replaced by this plan's program, "" when it may be (absent, empty or an older one)."""
    if out_dir.is_symlink():
        return "is a symbolic link"
    if not out_dir.exists():
        return ""
    if not out_dir.is_dir():
        return "is a file"
    names = {path.name for path in out_dir.iterdir()} - SIDE_EFFECTS
    if not names:
        return ""
    foreign = sorted(names - OURS)
    if foreign:
        return f"holds what no emitted program has: {', '.join(foreign[:5])}"
    return _why_other(out_dir, plan)


def _why_other(out_dir: Path, plan: Plan) -> str:
    """Whether the folder is a program, and of the same model."""
    try:
        text = (out_dir / "model.py").read_text(encoding="utf-8")
        # Not as a Plan: an older compiler's plan may have had other fields.
        old = json.loads((out_dir / "plan.json").read_bytes())["model"]
    except (OSError, ValueError, KeyError, TypeError):
        return "holds something that is no emitted program"
    if not text.startswith(MARK):
        return "holds a model.py that moec did not write"
    return "" if old == plan.model else f"holds the program of another model, {old}"


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
            (staging / name).write_text(text, encoding="utf-8")
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
    except BaseException:
        if old.exists() and not out_dir.exists():
            old.rename(out_dir)
        raise
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
        if (out_dir / name).read_bytes() != wanted[name].encode():
            drift.append(f"{out_dir / name}: differs; regenerate with {regenerate_command(plan)}")
    return drift
