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
    "moec bench kernels [--case NAME] [--target TARGET] [--peers DIR] [--xla] [--loops] [--tune] [--timeout S] [--json]"
)
EPILOG = """\
examples:
  moec bench kernels
  moec bench kernels --case rs-hierarchical-decode --loops
  moec bench kernels --target v6e:2x2 --json
"""
BENCHMARKS = ("kernels",)
VALUES, FLAGS = ("target", "peers", "timeout"), ("xla", "loops", "tune", "json")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("benchmark", choices=BENCHMARKS, help="what to measure")
    add_target(parser)
    parser.add_argument("--case", metavar="NAME", action="append", default=[], help="only this case; repeatable")
    parser.add_argument("--peers", metavar="DIR", type=Path, help="also the peers' kernels, from checkouts below DIR")
    parser.add_argument("--xla", action="store_true", help="also XLA's own operations, as baselines")
    parser.add_argument("--loops", action="store_true", help="print each module's loops and conditional regions")
    parser.add_argument("--tune", action="store_true", help="try the cases' tile grids and write targets/<chip>/tuned")
    parser.add_argument("--timeout", metavar="S", help="seconds per case (600)")
    add_json(parser)


def run(args: argparse.Namespace) -> int:
    """The benchmark's own exit code: 1 where a case did not compile, 2 for bad input."""
    root = Path(moec.__file__).parent.resolve().parent
    if not (root / "benchmarks" / args.benchmark).is_dir():
        fail(f"no benchmarks/{args.benchmark} here", "clone the repository and install it with `make setup`")
    options = [word for name in args.case for word in ("--case", name)]
    args.peers = str(args.peers.resolve()) if args.peers else None  # the benchmark runs in another folder
    options += [word for name in VALUES if (value := getattr(args, name)) for word in (f"--{name}", value)]
    options += [f"--{name}" for name in FLAGS if getattr(args, name)]
    command = [sys.executable, "-m", f"benchmarks.{args.benchmark}", *options]
    return subprocess.run(command, cwd=root, check=False).returncode
