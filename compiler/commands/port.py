"""Write the spec of a model from its Hugging Face config.json: every number with the field it comes from.

What a model_type means is data under specs/families; for one that has no recipe a draft is written, with its
open questions. Fields of config.json that nothing in the spec comes from are named one by one. With --weights
the names and shapes of a checkpoint settle its table and are checked against it. Exit code 1 for a draft with
open questions and where the checkpoint does not fit, 2 when the model cannot be expressed."""

import argparse
import os
import re
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

from ..graph.ir import Graph
from ..port.config import read_config
from ..port.port import Ported, port
from ..problems import Problem, ProblemsError
from ..spec.files import show_path
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
    config, problems = read_config(path, show_path(path))
    checkpoint = _checkpoint(args.weights) if args.weights else None
    if config is None:
        raise ProblemsError(problems)
    stored = {name: tensor.shape for name, tensor in checkpoint.tensors.items()} if checkpoint else None
    ported = port(config, spec_name(args.out or path), stored)
    _write(ported.text, args.out)
    _report(ported, path)
    misfits = _misfits(ported, checkpoint)
    for line in misfits:
        log(f"checkpoint: {line}")
    open_ends = bool(misfits) or any(ported.questions.values())
    _next_step(args, "settle what is open, then " if open_ends else "")
    return EXIT_OPEN if open_ends else 0


def ported_graph(path: Path) -> Graph:
    """What a config.json ports to; raises ProblemsError where it does not, or only as a draft."""
    config, problems = read_config(path, show_path(path))
    if config is None:
        raise ProblemsError(problems)
    ported = port(config, spec_name(path))
    if ported.draft or ported.graph is None:
        kind = config.data.get("model_type")
        hint = f"moec port {path} writes a draft with its open questions"
        raise ProblemsError([Problem("model_type", f"there is no recipe for {kind!r}", hint, config.file)])
    return ported.graph


def spec_name(path: Path) -> str:
    """A spec's name from its file, or from the folder of a config.json."""
    words = path.resolve().parent.name if path.name == "config.json" else path.stem
    return re.sub(r"[^a-z0-9._-]+", "-", words.lower()).lstrip("._-") or "model"


def _checkpoint(folder: Path) -> "Checkpoint":
    from moec.runtime.checkpoint import Checkpoint

    return Checkpoint(folder)


def _misfits(ported: Ported, checkpoint: "Checkpoint | None") -> list[str]:
    """What keeps the checkpoint from filling the spec's weights, as the loader says it."""
    if checkpoint is None or ported.graph is None:
        return []
    from moec.runtime.errors import fold

    from ..verify.fits import misfits

    return fold(misfits(ported.graph, checkpoint))


def _report(ported: Ported, path: Path) -> None:
    """For people: what is not understood, and what is asked."""
    for left in ported.leftovers:
        if not left.reason:
            log(f"{show_path(path)}: warning: {left}: not used, the recipe does not know this field")
    for place, asks in ported.questions.items():
        for ask in asks:
            log(f"question: {f'{place}: ' if place else ''}{ask}")


def _next_step(args: argparse.Namespace, first: str) -> None:
    """What to do with the file that was written."""
    if args.out is None:
        return
    weights = args.weights or "DIR"
    log(f"next: {first}moec verify {args.out} --target cpu --weights {weights} --reference {weights}/ref.npz")


def _write(text: str, out: Path | None) -> None:
    """To stdout, or to the file in one step: it is either the old one or the whole new one."""
    if out is None:
        print(text, end="")
        return
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        handle, name = tempfile.mkstemp(prefix=f".{out.name}.", dir=out.parent)
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
    log(f"wrote {out}")


def _umask() -> int:
    """The process's umask, which can only be read by setting it."""
    value = os.umask(0)
    os.umask(value)
    return value
