"""Run a benchmark of this checkout: `kernels` compiles every kernel case for a TPU that is not there.

Prints, per unit of work, the bundles a kernel's schedule executes, its spills, matrix-unit and transfer
counts, its vector memory, and the time its bytes take at least (benchmarks/kernels/README.md). An
installed package has no benchmarks: run it from a checkout."""

import argparse
import subprocess
import sys
from pathlib import Path

import moec

from .common import add_json, add_target, fail

USAGE = (
    "moec bench kernels [--case NAME] [--target TARGET] [--peers DIR] [--xla] [--loops] [--tune] [--record]\n"
    "                          [--timeout S] [--keep-dumps DIR] [--reread DIR] [--json]"
)
EPILOG = """\
examples:
  moec bench kernels
  moec bench kernels --case rs-hierarchical-decode --loops
  moec bench kernels --target v6e:2x2 --json
"""
BENCHMARKS = ("kernels",)
VALUES, FOLDERS = ("target", "timeout"), ("peers", "keep_dumps", "reread")
FLAGS = ("xla", "loops", "tune", "record", "json")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("benchmark", choices=BENCHMARKS, help="what to measure")
    add_target(parser)
    parser.add_argument("--case", metavar="NAME", action="append", default=[], help="only this case; repeatable")
    parser.add_argument("--peers", metavar="DIR", type=Path, help="also the peers' kernels, from checkouts below DIR")
    parser.add_argument("--xla", action="store_true", help="also XLA's own operations, as baselines")
    parser.add_argument("--loops", action="store_true", help="print each module's loops and conditional regions")
    parser.add_argument("--tune", action="store_true", help="try the cases' tile grids and write targets/<chip>/tuned")
    parser.add_argument("--record", action="store_true", help="keep the numbers in benchmarks/kernels/results/")
    parser.add_argument("--timeout", metavar="S", help="seconds per case (600)")
    parser.add_argument("--keep-dumps", metavar="DIR", type=Path, help="leave the bundles in DIR/CASE")
    parser.add_argument("--reread", metavar="DIR", type=Path, help="no compiling for what --keep-dumps DIR has")
    add_json(parser)


def run(args: argparse.Namespace) -> int:
    """The benchmark's own exit code: 1 where a case did not compile, 2 for bad input."""
    root = Path(moec.__file__).parent.resolve().parent
    if not (root / "benchmarks" / args.benchmark).is_dir():
        fail(f"no benchmarks/{args.benchmark} here", "clone the repository and install it with `make setup`")
    given = [("case", name) for name in args.case]
    given += [(name, value) for name in VALUES if (value := getattr(args, name)) is not None]
    # The benchmark runs in another folder.
    given += [(name.replace("_", "-"), str(value.resolve())) for name in FOLDERS if (value := getattr(args, name))]
    options = [f"--{name}={value}" for name, value in given]
    options += [f"--{name}" for name in FLAGS if getattr(args, name)]
    command = [sys.executable, "-m", f"benchmarks.{args.benchmark}", *options]
    return subprocess.run(command, cwd=root, check=False).returncode
