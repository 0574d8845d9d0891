"""Write the program of a model on a target for a workload: readable JAX, its plan and its weights table.

The default folder is generated/<model>/<target>/<workload>. With --check nothing is written:
exit code 1 when the folder differs from what would be written. `moec compile --check` without
a MODEL checks every program under generated/ (or -o DIR)."""

import argparse
from pathlib import Path

from ..emit.emit import check
from ..emit.package import program_dir
from ..plan.choose import make_plan
from ..problems import Problem, ProblemsError
from .common import add_target, add_words, add_workload, fail, log, one_name, required
from .plan_file import read_plan, recorded_in
from .programs import load_request, same_request, write_program

USAGE = "moec compile MODEL --target TARGET [--workload NAME] [-o DIR] [--standalone] [--check] [key=value ...]"
EPILOG = """\
examples:
  moec compile my_model.yaml --target tpu7x-8 --workload NAME
  moec compile my_model.yaml --target cpu:8 -o out/program --standalone
  moec compile --check
"""
GENERATED = Path("generated")
EXIT_DRIFT = 1


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_words(parser, "a model name or file, and overrides")
    add_target(parser)
    add_workload(parser)
    parser.add_argument("-o", "--out", metavar="DIR", type=Path, help="folder to write instead of the default")
    parser.add_argument("--standalone", action="store_true", help="splice the used blocks in: needs only jax and numpy")
    parser.add_argument("--check", action="store_true", help="write nothing, report what differs")


def run(args: argparse.Namespace) -> int:
    """Emit, or look for drift."""
    if args.check and not args.words:
        return _check_all(args.out or GENERATED)
    if args.standalone and args.out is None:
        fail("--standalone would replace the program that imports the library", "name another folder with -o DIR")
    model, overrides = one_name(args.words)
    request = load_request(model, required(args.target, "--target"), args.workload, overrides)
    plan = make_plan(request)
    folder = args.out or program_dir(GENERATED, plan)
    if args.check:
        return _report(check(request.graph, plan, folder, standalone=args.standalone), f"{folder}: no drift")
    for path in write_program(request, plan, folder, standalone=args.standalone):
        log(f"wrote {path}")
    print(folder)
    return 0


def _check_all(root: Path) -> int:
    """Plan every committed program again from the inputs in its plan.json and compare."""
    found = (path for path in root.rglob("plan.json") if not _hidden(path.relative_to(root)))
    plans = sorted(path for path in found if (path.parent / "model.py").is_file())
    if not plans:
        fail(f"no emitted program under {root}", "moec compile MODEL --target TARGET writes one")
    drift: list[str] = []
    problems: list[Problem] = []
    for path in plans:
        try:
            drift += _drift(path.parent)
        except ProblemsError as error:
            problems += error.problems
    if problems:
        raise ProblemsError(problems)
    return _report(drift, f"{root}: no drift in {len(plans)} programs")


def _drift(folder: Path) -> list[str]:
    """What differs between a folder and what its plan.json asks for."""
    request = same_request(read_plan(folder), folder)
    with recorded_in(folder):
        plan = make_plan(request)
    return check(request.graph, plan, folder)


def _hidden(path: Path) -> bool:
    """Folders in the making, and what a killed process left of them."""
    return any(part.startswith(".") for part in path.parts)


def _report(drift: list[str], good: str) -> int:
    for line in drift or [good]:
        print(line)
    return EXIT_DRIFT if drift else 0
