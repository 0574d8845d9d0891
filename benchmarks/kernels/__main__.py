"""Compile kernels for a TPU that is not there and count what their schedules execute.

Prints, per unit of a case's work: bundles executed, spills, matrix-unit pushes and products, transfers; and per case
static bundles, scoped VMEM, seconds, and the time its HBM bytes take at least. Run from the repository's root."""

import argparse
import json
import sys
from pathlib import Path

from rich import box
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from moec.compiler.verify.bundles import Node, static
from moec.targets.target import load_target

from .asked import canonical, problems_of
from .case import Case
from .measure import FRAME, ROOT, Result, document, find_cases, measure, reread, stale
from .record import bar_text, entries_of, is_peer, record

EXIT_FAILED, EXIT_BAD_INPUT = 1, 2
WIDTH = 180
Found = dict[str, tuple[str, Case]]


def main(words: list[str]) -> int:
    """Measure the asked cases, print them, 1 if one neither compiled nor was refused."""
    args = _parser().parse_args(words)
    found = _chosen(args)
    if problems := problems_of(args, found):
        print(*problems, sep="\n", file=sys.stderr)
        if args.json:
            print(json.dumps({"problems": [vars(problem) for problem in problems]}, indent=1))
        return EXIT_BAD_INPUT
    target = canonical(args.target)
    if args.tune:
        from .tune import tune

        return tune(found, target, timeout_s=args.timeout, console=_console())
    results = _measure_all(found, target, args)
    if args.record:
        for path in record(_cases(found), results, args.peers):
            print(f"recorded in {path.relative_to(ROOT)}", file=sys.stderr)
    if args.json:
        print(json.dumps([document(found[r.case][1], r) for r in results], indent=1))
    else:
        _show(found, results, target, loops=args.loops)
    return EXIT_FAILED if any(r.outcome in ("error", "timeout") for r in results) else 0


def _cases(found: Found) -> dict[str, Case]:
    return {name: case for name, (_, case) in found.items()}


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="moec bench kernels", description=__doc__, allow_abbrev=False)
    parser.add_argument("--case", metavar="NAME", action="append", help="only this case; repeatable")
    parser.add_argument("--target", default="tpu7x:2x2x1", help="machine (tpu7x:2x2x1)")
    parser.add_argument("--peers", metavar="DIR", type=Path, help="also the peers' kernels, from checkouts below DIR")
    parser.add_argument("--xla", action="store_true", help="also XLA's own operations, as baselines")
    parser.add_argument("--loops", action="store_true", help="print each module's loops and conditional regions")
    parser.add_argument("--tune", action="store_true", help="try the cases' tile grids and write targets/<chip>/tuned")
    parser.add_argument("--record", action="store_true", help="keep the numbers in results/")
    parser.add_argument("--timeout", metavar="S", type=_seconds, default=600.0, help="seconds per case (600)")
    parser.add_argument("--keep-dumps", metavar="DIR", type=Path, help="leave the bundles in DIR/CASE")
    parser.add_argument("--reread", metavar="DIR", type=Path, help="no compiling for what --keep-dumps DIR has")
    parser.add_argument("--json", action="store_true", help="one JSON document on stdout")
    return parser


def _seconds(text: str) -> float | str:
    """The number, or the text of none: problems_of says so with whatever else is wrong."""
    try:
        return float(text)
    except ValueError:
        return text


def _chosen(args: argparse.Namespace) -> Found:
    ours, peers = find_cases("cases"), find_cases("peers")
    if args.case:
        every = {**ours, **peers}
        return {name: every[name] for name in args.case if name in every}
    baselines = {name: entry for name, entry in peers.items() if entry[1].variant == "xla"}
    others = {name: entry for name, entry in peers.items() if entry[1].variant != "xla"}
    return {**ours, **(baselines if args.xla or args.peers else {}), **(others if args.peers else {})}


def _measure_all(found: Found, target: str, args: argparse.Namespace) -> list[Result]:
    console = Console(stderr=True)
    columns = (TextColumn("compiling"), BarColumn(), MofNCompleteColumn(), TextColumn("{task.description}"))
    results = []
    with Progress(*columns, TimeElapsedColumn(), console=console, disable=not console.is_terminal) as bar:
        task = bar.add_task("", total=len(found))
        for name, (module, case) in found.items():
            bar.update(task, description=name)
            options = {"timeout_s": args.timeout, "peers": args.peers, "keep_dumps": args.keep_dumps}
            again = reread(case, target, args.reread) if args.reread else None
            results.append(again or measure(module, case, target, **options))
            bar.advance(task)
            if not console.is_terminal:  # a log keeps what an interrupted run found
                done = results[-1]
                print(f"{name}: {done.outcome}, {done.lower_s + done.compile_s:.0f} s", file=sys.stderr)
    return results


def _console() -> Console:
    return Console() if sys.stdout.isatty() else Console(width=WIDTH)


def _show(found: Found, results: list[Result], target: str, *, loops: bool) -> None:
    console = _console()
    console.print(_table(found, results, target))
    for result in results:
        if result.message:
            console.print(f"{result.case}: {result.outcome}\n{result.message}", markup=False, highlight=False)
        if result.sparsecore:
            engines = ", ".join(f"{engine} {count:,}" for engine, count in result.sparsecore.items())
            console.print(f"{result.case}: SparseCore programs, static bundles: {engines}", highlight=False)
        if result.unknown:
            known = "count once, for want of a number of trips"
            console.print(f"? {result.case}: {', '.join(result.unknown)} {known}", markup=False, highlight=False)
        lost = stale(found[result.case][1], result) if result.modules else ()
        if lost:
            console.print(f"? {result.case}: no such node: {', '.join(lost)}", markup=False, highlight=False)
    fresh = entries_of(_cases(found), [r for r in results if is_peer(found[r.case][1])])
    for result in results:
        if found[result.case][1].peer and result.outcome == "compiled":
            console.print(bar_text(found[result.case][1], result, fresh), markup=False, highlight=False)
    for result in results if loops else ():
        for module in result.modules:
            if module.name not in FRAME:
                console.print(_tree(f"{result.case}: {module.name}", module.tree, counted=module.counted))


COLUMNS = (
    ("static", "bundles"), ("executed", "bundles/unit"), ("spills", "/unit"), ("pushes", "/unit"),
    ("vmatmul", "/unit"), ("DMAs", "/unit"), ("DMA KiB", "/unit"), ("VMEM", "MiB"), ("lower", "s"), ("compile", "s"),
    ("bundles", "us/call"), ("HBM floor", "us/call"),
)  # fmt: skip


def _table(found: Found, results: list[Result], target: str) -> Table:
    versions = next((r.versions for r in results if r.versions), {})
    title = f"kernels on {target} ({', '.join(f'{k} {v}' for k, v in versions.items())})"
    table = Table(title=title, title_justify="left", box=box.SIMPLE)
    table.add_column("case", overflow="fold")
    table.add_column("unit", overflow="fold")
    for head, unit in COLUMNS:
        table.add_column(f"{head}\n{unit}", justify="right")
    for result in results:
        case = found[result.case][1]
        unit = f"{case.units:g} {case.unit}"
        table.add_row(result.case, unit, *(_row(case, result, target) if result.modules else (result.outcome,)))
    return table


def _row(case: Case, result: Result, target: str) -> tuple[str, ...]:
    per = result.executed * (1 / case.units)
    machine = load_target(target)
    clock = machine.clock_ghz.value if machine.clock_ghz else 0.0
    vmem = "-" if result.vmem_bytes is None else f"{result.vmem_bytes / 2**20:.1f}"
    unsized = f" +{per.unsized:.3g}?" if per.unsized else ""
    return (
        f"{result.static.bundles:,.0f}",
        _short(per.bundles) + ("?" if result.unknown else ""),
        *map(_short, (per.spills, per.pushes, per.vmatmul, per.dmas)),
        _short(sum(per.bytes.values()) / 1024) + unsized,
        vmem,
        f"{result.lower_s:.1f}",
        f"{result.compile_s:.1f}",
        _short(result.executed.bundles / clock / 1e3) if clock else "-",
        _short(case.floor_bytes / machine.hbm_gbps.value / 1e3),
    )


def _short(number: float) -> str:
    """Three digits of small numbers, whole large ones."""
    return f"{number:,.0f}" if number >= 100 else f"{number:.3g}"


def _tree(title: str, root: Node, *, counted: bool) -> Table:
    """Control tree of one module: own counts of each node, indented by depth."""
    note = "" if counted else " (not counted)"
    heading = f"{title}: {static(root).bundles:,.0f} bundles{note}"
    table = Table(title=heading, title_justify="left", box=None, min_width=len(heading))
    table.add_column("node")
    for head in ("lines", "trips", "bundles", "spills", "pushes", "vmatmul", "DMAs", "DMA KiB"):
        table.add_column(head, justify="right")
    for node in root.walk():
        own = node.own
        trips = "dynamic" if node.trips is None else f"{node.trips:g}"
        numbers = (own.bundles, own.spills, own.pushes, own.vmatmul, own.dmas, sum(own.bytes.values()) / 1024)
        name = "  " * node.path.count(".") + node.path or "-"
        table.add_row(name, f"{node.first}-{node.last}", trips, *(f"{n:,.0f}" for n in numbers))
    return table


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
