"""Keeps numbers: the peers', so that our bars can be checked where no peer is installed, and the last of ours."""

import json
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from moec.targets.target import load_target

from .case import Case
from .measure import HERE, Result

# A peer's two products of one expert; ours may be one kernel.
SUMS = {"gmm-v2-fp8": ("gmm-v2-w1-fp8", "gmm-v2-w2-fp8"), "gmm-v2-fp8-128": ("gmm-v2-w1-fp8-128", "gmm-v2-w2-fp8-128")}


def record(cases: Mapping[str, Case], results: Sequence[Result], peers: Path | None) -> list[Path]:
    """Merge results into results/{kernels,peers}_<chip>.json; a file's other entries stay if their versions agree."""
    theirs = [result for result in results if is_peer(cases[result.case])]
    ours = [result for result in results if not is_peer(cases[result.case])]
    written = []
    if theirs:
        path, document = _document("peers", theirs)
        document["commit"] = _commit(peers) or document.get("commit", "")
        document["peers"] |= entries_of(cases, theirs)
        _add_sums(document["peers"])
        written.append(_write(path, document, "peers"))
    if ours:
        path, document = _document("kernels", ours)
        known = recorded(ours[0])
        document["kernels"] |= {r.case: _entry(cases[r.case], r) | _ratio(cases[r.case], r, known) for r in ours}
        written.append(_write(path, document, "kernels"))
    return written


def is_peer(case: Case) -> bool:
    """Cases of peers/ are no variant of a block of ours."""
    return case.variant in ("xla", "tpu-inference", "tokamax")


def _document(what: str, results: Sequence[Result]) -> tuple[Path, dict[str, Any]]:
    path = _path(what, results[0].target)
    versions = next((r.versions for r in results if r.versions), {})
    document = json.loads(path.read_text()) if path.is_file() else {}
    if document.get("versions") != versions:
        document = {"target": results[0].target, "versions": dict(versions), what: {}}
    return path, document


def _write(path: Path, document: dict[str, Any], what: str) -> Path:
    document[what] = dict(sorted(document.pop(what).items()))
    path.write_text(json.dumps(document, indent=1) + "\n")
    return path


def _ratio(case: Case, result: Result, peers: Mapping[str, Any]) -> dict[str, Any]:
    bundles = peers.get(case.peer, {}).get("bundles")
    if not bundles or result.outcome != "compiled":
        return {}
    return {
        "peer": case.peer, "ratio": round(result.executed.bundles / case.units / bundles, 4), "bar": case.bar,
    }  # fmt: skip


def recorded(result: Result) -> dict[str, Any]:
    """The peers' entries compiled with the versions of `result` for its chip, none where they differ."""
    path = _path("peers", result.target)
    document = json.loads(path.read_text()) if path.is_file() else {}
    return document["peers"] if document.get("versions") == result.versions else {}


def bar_text(case: Case, result: Result, fresh: Mapping[str, Any]) -> str:
    """How a case stands to its bar; fresh: entries of peers compiled in the same run, which go before recorded ones."""
    entries = {**recorded(result), **fresh}
    peer = entries.get(case.peer)
    if not peer or not peer["bundles"]:
        return f"{case.name}: no numbers of {case.peer} for these versions"
    assert peer["unit"] == case.unit, f"{case.name} and {case.peer} count other units"
    ratio = result.executed.bundles / case.units / peer["bundles"]
    source = "this run" if case.peer in fresh else "recorded"
    text = f"{case.name}: {ratio:.3f} of {case.peer}'s bundles per {case.unit} ({source})"
    text += ", with loops counted once" if result.unknown else ""
    if case.bar is None:
        return text
    return f"{text}, {'within' if ratio <= case.bar else 'ABOVE'} the bar {case.bar:g}"


def entries_of(cases: Mapping[str, Case], results: Sequence[Result]) -> dict[str, Any]:
    """Entries of peers that were measured, with their sums."""
    entries = {result.case: _entry(cases[result.case], result) for result in results}
    _add_sums(entries)
    return entries


def _add_sums(entries: dict[str, Any]) -> None:
    for name, parts in SUMS.items():
        found = [entries[part] for part in parts if entries.get(part, {}).get("bundles")]
        if len(found) == len(parts):
            entries[name] = {key: sum(entry[key] for entry in found) for key in ("bundles", "spills", "floor_us")}
            entries[name] |= {"unit": found[0]["unit"], "sum_of": list(parts)}


def _path(what: str, target: str) -> Path:
    return HERE / "results" / f"{what}_{target.partition(':')[0]}.json"


def _entry(case: Case, result: Result) -> dict[str, Any]:
    if result.outcome != "compiled":
        return {"outcome": result.outcome, "message": result.message.splitlines()[-1], "unit": case.unit, "bundles": 0}
    per = result.executed * (1 / case.units)
    return {
        "source": case.variant,
        "unit": case.unit,
        "units": case.units,
        "bundles": round(per.bundles, 4),
        "around": round(result.around.bundles / case.units, 4),
        "spills": round(per.spills, 4),
        "pushes": round(per.pushes, 4),
        "vmatmul": round(per.vmatmul, 4),
        "dmas": round(per.dmas, 4),
        "static_bundles": round(result.static.bundles),
        "vmem_bytes": result.vmem_bytes,
        "lower_s": round(result.lower_s, 1),
        "compile_cpu_s": round(result.compile_cpu_s, 1),
        "floor_us": round(case.floor_bytes / load_target(result.target).hbm_gbps.value / 1e3, 3),
        "kernels": sorted(m.name for m in result.modules if m.counted),
        "unknown_loops": list(result.unknown),
    }


def _commit(peers: Path | None) -> str:
    """The checkout's commit, "" where git does not know one."""
    if peers is None:
        return ""
    command = ["git", "-C", str(peers / "tpu-inference"), "rev-parse", "HEAD"]
    return subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip()
