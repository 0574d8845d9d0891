"""Check a program: against the TPU compiler, against the float32 references, against a recording.

--aot compiles every bucket for the target's topology (no chip needed) and compares memory,
donation, collectives and kernels with the plan. --numerics compares every layer with the float32
references on random weights, on virtual CPU devices. --reference compares full, chunked and
cached logits and greedy ids with a recorded reference on its checkpoint. Without any of them,
a program for a CPU gets --numerics and any other --aot. A check that cannot be made here is
skipped and says why. Exit code 1 when a check failed, or when one was asked for by name and
skipped. --keep-dumps keeps the compiler's dumps of --aot: the HLO before and after its passes."""

import argparse
import math
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..graph.ir import Graph
from .common import add_json, add_target, add_words, add_workload, console, fail, log, print_json
from .programs import CACHE, Emitted, find_program, is_cpu, same_request, take_devices, virtual_devices

if TYPE_CHECKING:
    from ..verify.aot import AotReport
    from ..verify.numerics import NumericsReport
    from ..verify.recorded import Recorded

    Report = AotReport | NumericsReport | Recorded

USAGE = (
    "moec verify MODEL|DIR [--target TARGET] [--workload NAME] [--aot] [--numerics] [--on-device] "
    "[--weights DIR] [--reference ref.npz] [--tolerance X] [--bucket NAME] [--keep-dumps DIR] [--json] [key=value ...]"
)
EPILOG = """\
examples:
  moec verify my_model.yaml --target tpu7x-8 --workload NAME --aot
  moec verify my_model.yaml --target cpu:8 --numerics
  moec verify generated/my_model/cpu_8/default --weights CHECKPOINT_DIR --reference ref.npz
"""
EXIT_FAILED = 1


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_words(parser, "a model name or file, or the folder of an emitted program; overrides of a model")
    add_target(parser)
    add_workload(parser)
    parser.add_argument("--aot", action="store_true", help="compile for the target's topology and check the result")
    parser.add_argument("--numerics", action="store_true", help="compare with the references on random weights")
    parser.add_argument("--on-device", action="store_true", help="use the visible devices, not virtual CPU devices")
    parser.add_argument("--weights", metavar="DIR", type=Path, help="checkpoint (default: the folder of the reference)")
    parser.add_argument("--reference", metavar="NPZ", type=Path, help="a recorded reference to compare with")
    parser.add_argument("--tolerance", metavar="X", type=float, default=1e-4, help="largest logit error (1e-4)")
    parser.add_argument("--bucket", metavar="NAME", action="append", help="--aot only for this bucket; repeatable")
    parser.add_argument(
        "--keep-dumps", metavar="DIR", type=Path, help="--aot compiles anew and leaves the XLA dumps in DIR/BUCKET"
    )
    add_json(parser)


def run(args: argparse.Namespace) -> int:
    """Make the checks, print them, 1 if one failed."""
    from ..verify.report import combine, render

    if args.weights and not args.reference:
        fail("--weights is the checkpoint of a recorded reference", "name the recording with --reference ref.npz")
    if not 0 <= args.tolerance < math.inf:
        fail(f"--tolerance {args.tolerance}: must be a number of 0 or more")
    positions = _positions(args.reference) if args.reference else 0
    emitted = find_program(args.words, args.target, args.workload, positions=positions)
    checks = _chosen(args, emitted)
    if (args.keep_dumps or args.bucket) and "aot" not in checks:
        fail("--keep-dumps and --bucket are options of --aot, which is not asked for here", "add --aot")
    reports = {name: check(args, emitted) for name, check in checks.items()}
    status = combine(report.status for report in reports.values())
    if args.json:
        print_json(_document(emitted, status, reports))
    else:
        sections = [section for report in reports.values() for section in report.sections()]
        render(f"verify {emitted.plan.model} on {emitted.plan.target}", sections, console())
    unmade = [name for name, report in reports.items() if report.status == "skipped" and _asked(args, name)]
    for name in unmade:
        log(f"--{name} was asked for and could not be made: that is no pass")
    return EXIT_FAILED if status == "fail" or unmade else 0


def _positions(reference: Path) -> int:
    """Tokens of the longest sequence of a recording, which is read and checked before anything is compiled."""
    from ..verify.recording import positions, read_reference

    return positions(read_reference(reference))


Check = Callable[[argparse.Namespace, Emitted], "Report"]


def _chosen(args: argparse.Namespace, emitted: Emitted) -> dict[str, Check]:
    """The checks that were asked for, else the one that fits the target."""
    nothing = not (args.aot or args.numerics or args.reference)
    cpu = is_cpu(emitted.plan)
    wanted: dict[str, tuple[bool, Check]] = {
        "aot": (args.aot or (nothing and not cpu), _aot),
        "numerics": (args.numerics or (nothing and cpu), _numerics),
        "reference": (bool(args.reference), _reference),
    }
    return {name: check for name, (asked, check) in wanted.items() if asked}


def _asked(args: argparse.Namespace, name: str) -> bool:
    """Whether the user named the check: the one that fits the target may be skipped."""
    return bool(getattr(args, name))


def _aot(args: argparse.Namespace, emitted: Emitted) -> "AotReport":
    from ..verify.aot import block_layers, verify_aot
    from ..verify.kernels import planned_kernels

    if args.keep_dumps and args.keep_dumps.is_dir() and any(args.keep_dumps.iterdir()):
        fail(f"--keep-dumps {args.keep_dumps} is not empty", "name an empty or absent folder")
    names = [bucket.name for bucket in emitted.plan.buckets]
    unknown = sorted(set(args.bucket or ()) - set(names))
    if unknown:
        fail(f"the program has no bucket {', '.join(unknown)}", f"buckets: {', '.join(names)}")
    graph = _graph(emitted)
    return verify_aot(
        emitted.folder,
        emitted.plan,
        emitted.plan.target,
        layers=block_layers(graph),
        kernels=planned_kernels(graph, emitted.plan),
        cache_dir=CACHE,
        buckets=args.bucket,
        keep_dumps=args.keep_dumps,
        progress=log,
    )


def _numerics(args: argparse.Namespace, emitted: Emitted) -> "NumericsReport":
    devices = _devices(args, emitted)
    from ..verify.numerics import verify_numerics

    return verify_numerics(emitted.folder, emitted.plan, _graph(emitted), devices=devices)


def _reference(args: argparse.Namespace, emitted: Emitted) -> "Recorded":
    devices = _devices(args, emitted)
    from ..verify.recorded import verify_recorded

    weights = args.weights or args.reference.parent
    return verify_recorded(emitted.folder, weights, args.reference, tolerance=args.tolerance, devices=devices)


def _devices(args: argparse.Namespace, emitted: Emitted) -> list[Any]:
    """The visible devices if asked for, else virtual CPU devices, whatever the program's target."""
    if args.on_device:
        return take_devices(emitted.plan)
    return virtual_devices(emitted.plan.mesh.num_devices)


def _graph(emitted: Emitted) -> Graph:
    """The graph the program was emitted from."""
    if emitted.request:
        return emitted.request.graph
    request = same_request(emitted.plan, emitted.folder)
    if request.digests != emitted.plan.digests:
        fail(
            f"{emitted.folder} was emitted from other files than those of today", "compile it again, or name the MODEL"
        )
    return request.graph


def _document(emitted: Emitted, status: str, reports: dict[str, "Report"]) -> dict[str, Any]:
    plan = emitted.plan
    head = {"model": plan.model, "target": plan.target, "program": str(emitted.folder), "status": status}
    return {**head, **{name: _with_status(report) for name, report in reports.items()}}


def _with_status(report: "Report") -> dict[str, Any]:
    return {"status": report.status, **report.model_dump(mode="json")}
