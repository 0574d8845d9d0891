"""What the commands share: argument shapes, output, and the environment jax must find."""

import argparse
import json
import math
import os
import sys
from pathlib import Path
from typing import Any, NoReturn

from rich.console import Console

from ..problems import Problem, ProblemsError

WIDTH = 120


class Parser(argparse.ArgumentParser):
    """argparse with our layout: descriptions keep their lines, no abbreviated options."""

    def __init__(self, prog: str, usage: str, description: str | None, epilog: str):
        super().__init__(
            prog=prog,
            usage=usage,
            description=description,
            epilog=epilog,
            allow_abbrev=False,
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )


def console() -> Console:
    """stdout for tables; where it is no terminal, wide enough for them."""
    return Console() if sys.stdout.isatty() else Console(width=WIDTH)


def print_json(document: Any) -> None:
    """The one document of --json; JSON has no NaN and no infinity, they become text."""
    print(json.dumps(_finite(document), indent=1, default=str, allow_nan=False))


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
    return value


def log(text: str) -> None:
    """A line for people that must not mix with results on stdout."""
    print(text, file=sys.stderr)


def fail(text: str, hint: str = "") -> NoReturn:
    """Bad input that has no position in a file."""
    raise ProblemsError([Problem(path="", text=text, hint=hint)])


def split_words(words: list[str]) -> tuple[list[str], tuple[str, ...]]:
    """Positional words into (names, overrides): a word with '=' or Hydra's '~' prefix is an override."""
    overrides = [word for word in words if "=" in word or word.startswith("~")]
    names = [word for word in words if word not in overrides]
    return names, tuple(overrides)


def one_name(words: list[str], what: str = "MODEL") -> tuple[str, tuple[str, ...]]:
    """Exactly one name and the overrides."""
    names, overrides = split_words(words)
    if len(names) != 1:
        given = ", ".join(names) or "none"
        fail(f"expected one {what}, got {len(names)}: {given}", "an override has the form key=value")
    return names[0], overrides


def required(value: str | None, option: str, why: str = "") -> str:
    """The value of an option that this use of the command cannot do without."""
    if value is None:
        fail(f"{option} is required", why)
    return value


def add_words(parser: argparse.ArgumentParser, explain: str) -> None:
    """Positionals: names and overrides, in any order among the options."""
    parser.add_argument("words", nargs="*", metavar="WORD", help=explain)


def add_target(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--target", metavar="TARGET", help="machine: tpu7x:2x2x1 (alias tpu7x-8), cpu, cpu:8, ...")


def add_workload(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--workload", metavar="NAME", help="what is served: a name under specs/workloads or a file")


def add_json(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="print one JSON document on stdout, logs on stderr")


def use_cpu_devices(count: int) -> None:
    """Give this process `count` virtual CPU devices; only works before jax is imported."""
    assert "jax" not in sys.modules, "virtual devices must be set up before jax is imported"
    os.environ["JAX_PLATFORMS"] = "cpu"
    os.environ["NPROC"] = str(max(16, count))  # else XLA's thread pool may be too small for the collectives
    flags = [f for f in os.environ.get("XLA_FLAGS", "").split() if "host_platform_device_count" not in f]
    os.environ["XLA_FLAGS"] = " ".join([*flags, f"--xla_force_host_platform_device_count={count}"])


def program_folder(path: str | Path) -> Path | None:
    """The folder when `path` is an emitted program, else None."""
    folder = Path(path)
    return folder if (folder / "plan.json").is_file() and (folder / "model.py").is_file() else None
