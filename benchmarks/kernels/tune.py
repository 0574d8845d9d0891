"""Tries a case's tile grid and stores the ranking's best in targets/<chip>/tuned (format: its README.md).

Rank: seconds = max(bundles executed / clock, HBM floor bytes / bandwidth). Candidates below the floor are equal in
that measure, so ties go to fewer bundles, then to less VMEM.
"""

import itertools
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich import box
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from moec.targets.target import Target, load_target

from .case import Case, Tiles
from .measure import ROOT, Result, measure, stale

LEAST_GAIN = 0.995  # of the bundles of a case's own tiles; counts of one compiler repeat exactly


@dataclass(frozen=True)
class Candidate:
    """One point of the grid. seconds, bundles: per call; no seconds where it did not compile or trips are unknown."""

    tiles: Tiles
    result: Result
    seconds: float | None
    bundles: float

    @property
    def rank(self) -> tuple[float, float, int]:
        assert self.seconds is not None
        return self.seconds, self.bundles, self.result.vmem_bytes or 0


def tune(found: Mapping[str, tuple[str, Case]], target: str, *, timeout_s: float, console: Console) -> int:
    """Tune every case that has a grid; 1 if one of them has no candidate that compiles."""
    machine = load_target(target)
    tunable = {name: entry for name, entry in found.items() if entry[1].grid}
    if not tunable:
        console.print("none of these cases has a tile grid")
    failed = 0
    for name, (module, case) in tunable.items():
        candidates = _try_all(module, case, machine, timeout_s)
        console.print(_table(name, candidates))
        if all(c.seconds is None for c in candidates):
            failed = 1
            console.print(f"{name}: no candidate compiles; first: {candidates[0].result.message}", markup=False)
        elif best := winner(case, candidates):
            path = store(case, best, machine)
            console.print(f"{name}: {dict(best.tiles)} -> {path.relative_to(ROOT)}", markup=False)
        else:
            console.print(f"{name}: nothing issues {1 - LEAST_GAIN:.1%} fewer bundles than its own tiles", markup=False)
    return failed


def winner(case: Case, candidates: Sequence[Candidate]) -> Candidate | None:
    """The best in rank, where it issues fewer bundles than the case's own tiles, by LEAST_GAIN."""
    best = min((c for c in candidates if c.seconds is not None), key=lambda c: c.rank)
    own = next((c for c in candidates if c.seconds is not None and c.tiles.items() <= case.tiles.items()), None)
    return best if own is None or best.bundles < LEAST_GAIN * own.bundles else None


def points(grid: Mapping[str, tuple[int, ...]]) -> list[dict[str, int]]:
    """Every combination, in the grid's order."""
    return [dict(zip(grid, values, strict=True)) for values in itertools.product(*grid.values())]


def seconds(bundles: float, case: Case, machine: Target) -> float:
    """What a call takes at least: its issue slots, or its bytes."""
    assert machine.clock_ghz is not None, f"{machine.name} states no clock"
    return max(bundles / (machine.clock_ghz.value * 1e9), case.floor_bytes / (machine.hbm_gbps.value * 1e9))


def _try_all(module: str, case: Case, machine: Target, timeout_s: float) -> list[Candidate]:
    console = Console(stderr=True)
    tried = []
    with Progress(console=console, disable=not console.is_terminal) as bar:
        for tiles in bar.track(points(case.grid), description=case.name):
            result = measure(module, case, machine.name, tiles=tiles, timeout_s=timeout_s)
            bundles = result.executed.bundles
            usable = result.outcome == "compiled" and not result.unknown and not stale(case, result)
            tried.append(Candidate(tiles, result, seconds(bundles, case, machine) if usable else None, bundles))
    return tried


def store(case: Case, best: Candidate, machine: Target) -> Path:
    """Write the tiles of the case's shape; others stay, and so do tiles that were measured on a chip."""
    path = ROOT / "targets" / machine.chip / "tuned" / f"{case.block}.{case.variant}.json"
    document: dict[str, Any] = json.loads(path.read_text()) if path.is_file() else {}
    document.setdefault("block", case.block)
    document.setdefault("variant", case.variant)
    entry = document.setdefault("entries", {}).setdefault(case.shape, {})
    measured = {tile for tile, one in entry.items() if one["provenance"]["kind"] == "measured"}
    entry |= {tile: one for tile, one in _entry(case, best, machine).items() if tile not in measured}
    document["entries"] = dict(sorted(document["entries"].items()))
    path.parent.mkdir(exist_ok=True)
    path.write_text(json.dumps(document, indent=1) + "\n")
    return path


def _entry(case: Case, best: Candidate, machine: Target) -> dict[str, Any]:
    assert best.seconds is not None
    provenance = {
        "kind": "compiler",
        "topology": machine.name,
        **best.result.versions,
        "case": case.name,
        "candidates": len(points(case.grid)),
        "bundles": round(best.bundles),
        "vmem_bytes": best.result.vmem_bytes,
        "seconds_at_least": float(f"{best.seconds:.4g}"),
    }
    return {tile: {"value": value, "provenance": provenance} for tile, value in best.tiles.items()}


def _table(name: str, candidates: list[Candidate]) -> Table:
    table = Table(title=name, title_justify="left", box=box.SIMPLE)
    for head in ("tiles", "outcome", "us at least", "bundles", "VMEM MiB", "compile s"):
        table.add_column(head, justify="left" if head in ("tiles", "outcome") else "right")
    for c in sorted(candidates, key=lambda c: c.rank if c.seconds is not None else (float("inf"), 0.0, 0)):
        tiles = " ".join(f"{k}={v}" for k, v in c.tiles.items())
        if c.seconds is None:
            table.add_row(tiles, "wrong trips" if c.result.modules else c.result.outcome)
            continue
        vmem = (c.result.vmem_bytes or 0) / 2**20
        times = (f"{c.seconds * 1e6:,.1f}", f"{c.bundles:,.0f}", f"{vmem:.1f}", f"{c.result.compile_s:.1f}")
        table.add_row(tiles, c.result.outcome, *times)
    return table
