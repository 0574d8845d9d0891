"""Write the spec of a model from its Hugging Face config.json: every number with the field it comes from.

What a model_type means is data under specs/families; for one that has no recipe a draft is written, with its
open questions. Fields of config.json that nothing in the spec comes from are named one by one. With --weights
the names and shapes of a checkpoint settle its table and are checked against it. Exit code 1 for a draft with
open questions, for fields that the recipe does not know and where the checkpoint does not fit, 2 when the model
cannot be expressed."""

import argparse
import difflib
import os
import re
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..graph.ir import Graph
from ..port.config import Config, read_config, shown
from ..port.port import Ported, port
from ..port.recipes import recipe_names
from ..problems import Problem, ProblemsError
from ..spec.files import show_path
from ..spec.limits import printable
from .common import fail, log

if TYPE_CHECKING:
    from moec.runtime.checkpoint import Checkpoint

USAGE = "moec port CONFIG.json [--weights DIR] [-o SPEC.yaml]"
EPILOG = """\
examples:
  moec port Some-Model/config.json
  moec port Some-Model/config.json --weights Some-Model -o some-model.yaml
"""
EXIT_OPEN = 1


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("config", metavar="CONFIG.json", type=Path, help="a Hugging Face config.json, or its folder")
    parser.add_argument("--weights", metavar="DIR", type=Path, help="the checkpoint, whose tensors are checked")
    parser.add_argument("-o", "--out", metavar="SPEC.yaml", type=Path, help="file to write (default: print the spec)")


def run(args: argparse.Namespace) -> int:
    """Port, check, write."""
    path = args.config / "config.json" if args.config.is_dir() else args.config
    config = _config(path)
    out = _writable(args.out, path) if args.out else None
    checkpoint = _checkpoint(args.weights) if args.weights else None
    stored = {name: tensor.shape for name, tensor in checkpoint.tensors.items()} if checkpoint else None
    ported = port(config, spec_name(args.out or path), stored)
    _write(ported.text, out)
    _report(ported, path)
    misfits = _misfits(ported, checkpoint)
    for line in misfits:
        log(f"checkpoint: {line}")
    open_ends = bool(misfits) or ported.open
    if not ported.inexpressible:
        _next_step(args, "settle what is open, then " if open_ends else "")
    return EXIT_OPEN if open_ends else 0


def _config(path: Path) -> Config:
    if "\0" in str(path):
        fail(f"{printable(str(path))} is no path", "name a config.json")
    config, problems = read_config(path, show_path(path))
    if config is None:
        raise ProblemsError(problems)
    return config


def ported_graph(path: Path) -> Graph:
    """What a config.json ports to, with warnings; raises ProblemsError where it does not, or only as a draft."""
    config = _config(path)
    ported = port(config, spec_name(path))
    if ported.draft or ported.graph is None:
        hint = f"moec port {path} writes a draft with its open questions"
        lacking = Problem("model_type", _no_recipe(ported.model_type), hint, config.file)
        raise ProblemsError([lacking, *ported.inexpressible])
    _warn(ported, path)
    return ported.graph


def _no_recipe(model_type: Any) -> str:
    kind = str(model_type).strip().lower()
    alike = difflib.get_close_matches(kind, recipe_names(), 1)
    return f"there is no recipe for model_type {shown(model_type)}" + (
        f" (did you mean '{alike[0]}'?)" if alike else ""
    )


def spec_name(path: Path) -> str:
    """A spec's name from its file, or from the folder of a config.json."""
    words = path.resolve().parent.name if path.name == "config.json" else path.stem
    return re.sub(r"[^a-z0-9._-]+", "-", words.lower()).lstrip("._-") or "model"


def _checkpoint(folder: Path) -> "Checkpoint":
    from moec.runtime.checkpoint import Checkpoint
    from moec.runtime.errors import CheckpointError

    checkpoint = Checkpoint(folder)
    if not checkpoint.tensors:
        raise CheckpointError(checkpoint.problems or [f"{folder}: holds no tensors"])
    return checkpoint


def _misfits(ported: Ported, checkpoint: "Checkpoint | None") -> list[str]:
    """What keeps the checkpoint from filling the spec's weights, as the loader says it, but for what is asked about."""
    if checkpoint is None or ported.graph is None:
        return []
    from moec.runtime.errors import fold

    from ..verify.fits import misfits

    asked = set(ported.asked)
    return fold([line for line in misfits(ported.graph, checkpoint) if line.partition(":")[0] not in asked])


def _report(ported: Ported, path: Path) -> None:
    """For people: what cannot be said, what is not understood, and what is asked."""
    if ported.draft:
        log(f"{show_path(path)}: {_no_recipe(ported.model_type)}: this is a draft")
    for problem in ported.inexpressible:
        log(str(problem))
    _warn(ported, path)
    for place, asks in ported.questions.items():
        for ask in asks:
            log(f"question: {f'{place}: ' if place else ''}{ask}")


def _warn(ported: Ported, path: Path) -> None:
    for left in ported.unknown:
        log(f"{show_path(path)}: warning: {left}: not used, the recipe does not know this field")


def _next_step(args: argparse.Namespace, first: str) -> None:
    """What to do with the file that was written."""
    if args.out is None:
        return
    weights = args.weights or "DIR"
    log(f"next: {first}moec verify {args.out} --target cpu --weights {weights} --reference {weights}/ref.npz")


def _writable(out: Path, config: Path) -> Path:
    """The file to write, behind links; a file that is no spec is nobody's to replace."""
    hint = "name a new file, or an older spec, with -o"
    if "\0" in str(out):
        fail(f"{printable(str(out))} is no path", hint)
    try:
        out = out.resolve()
        if out.is_dir():
            fail(f"cannot write {out}: it is a directory", hint)
        if out.exists() and (out == config.resolve() or not _is_spec(out)):
            fail(f"cannot write {out}: it is there already and is no spec", hint)
    except OSError as error:
        fail(f"cannot write {out}: {error.strerror or error}", hint)
    return out


def _is_spec(path: Path) -> bool:
    """Whether a file is empty or has a spec's first key."""
    text = path.read_text(encoding="utf-8", errors="replace") if path.is_file() else "?"
    return not text.strip() or bool(re.search(r"^spec_version:", text, re.MULTILINE))


def _write(text: str, out: Path | None) -> None:
    """To stdout, or to the file in one step: it is either the old one or the whole new one."""
    if out is None:
        print(text, end="")
        return
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        handle, name = tempfile.mkstemp(prefix=".port.", dir=out.parent)
        try:
            with os.fdopen(handle, "w", encoding="utf-8") as file:
                file.write(text)
            os.chmod(name, 0o666 & ~_umask())
            os.replace(name, out)
        except BaseException:
            Path(name).unlink(missing_ok=True)
            raise
    except OSError as error:
        fail(f"cannot write {out}: {error.strerror or error}", "name a file that can be written with -o")
    log(f"wrote {show_path(out)}")


def _umask() -> int:
    """The process's umask, which can only be read by setting it."""
    value = os.umask(0)
    os.umask(value)
    return value
