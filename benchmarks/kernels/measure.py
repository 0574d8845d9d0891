"""Runs one case in its worker process and reads the dump it left."""

import importlib
import json
import os
import re
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from moec.compiler.verify.bundles import Counts, Executed, Node, executed, modules, parse, static

from .case import Case, Trips

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
LLO_FLAGS = (
    "--xla_jf_dump_to={0} --xla_jf_dump_llo_text=true --xla_jf_dump_llo_pass_label_regex=.*final_bundles.* "
    "--xla_sc_dump_bundles_to={0}/sparsecore"
)
# Start-up and shut-down of a program, and the sequencer that launches its modules: not the kernel's work.
FRAME = ("<late-initialization>", "<late-finalization>", "TLP")
STDERR_LINES = 20
SPARSECORE = "sparsecore"  # folder of SparseCore programs in a dump
ANSWER = "answer.json"  # the worker's result, beside the dump


@dataclass(frozen=True)
class Module:
    """One compiled module of a case. counted: its bundles are part of the case's sums."""

    name: str
    tree: Node
    counted: bool
    executed: Executed


@dataclass(frozen=True)
class Result:
    """What became of a case. outcome: compiled, refused, error or timeout.

    sparsecore: static bundles of its SparseCore programs by engine ("scs" issues, "tec" computes); their loops are
    not read, so nothing of them is in `executed`.
    """

    case: str
    target: str
    outcome: str
    tiles: Mapping[str, int] = field(default_factory=dict)
    message: str = ""
    lower_s: float = 0.0
    compile_s: float = 0.0
    compile_cpu_s: float = 0.0
    vmem_bytes: int | None = None
    memory: Mapping[str, int] = field(default_factory=dict)
    versions: Mapping[str, str] = field(default_factory=dict)
    modules: tuple[Module, ...] = ()
    sparsecore: Mapping[str, int] = field(default_factory=dict)

    @property
    def static(self) -> Counts:
        """Everything once, over the counted modules."""
        return sum((static(m.tree) for m in self.modules if m.counted), Counts())

    @property
    def executed(self) -> Counts:
        """Per call, over the counted modules."""
        return sum((m.executed.counts for m in self.modules if m.counted), Counts())

    @property
    def around(self) -> Counts:
        """Per call, over what stands around the counted modules but for the program's frame."""
        return sum((m.executed.counts for m in self.modules if not m.counted and m.name not in FRAME), Counts())

    @property
    def unknown(self) -> tuple[str, ...]:
        """Dynamic loops without a number of trips, as module/path."""
        return tuple(f"{m.name}/{path}" for m in self.modules if m.counted for path in m.executed.unknown)


def stale(case: Case, result: Result) -> tuple[str, ...]:
    """Entries of `trips` that name no module, or no node of it: the kernel or the compiler changed."""
    found = []
    for pattern, given in case.trips_at(result.tiles).items():
        trees = [m.tree for m in result.modules if _matches(pattern, m.name)]
        paths = {node.path for tree in trees for node in tree.walk()}
        found += [f"{pattern}/{path}" for path in given if path != "*" and path not in paths]
    return tuple(found)


def find_cases(folder: str) -> dict[str, tuple[str, Case]]:
    """Cases of benchmarks/kernels/<folder>/*.py: name -> (module, case)."""
    found: dict[str, tuple[str, Case]] = {}
    for path in sorted((HERE / folder).glob("*.py")):
        module = f"benchmarks.kernels.{folder}.{path.stem}"
        for case in getattr(importlib.import_module(module), "CASES", ()):
            assert case.name not in found, f"two cases are named {case.name}"
            found[case.name] = (module, case)
    return found


def measure(
    module: str,
    case: Case,
    target: str,
    *,
    tiles: Mapping[str, int] | None = None,
    timeout_s: float = 600.0,
    peers: Path | None = None,
    keep_dumps: Path | None = None,
) -> Result:
    """Compile the case for the target and count its bundles."""
    asked = {"module": module, "case": case.name, "target": target, "tiles": dict(tiles or {})}
    with tempfile.TemporaryDirectory(prefix="moec-kernels-") as scratch:
        dump = _emptied(keep_dumps / case.name) if keep_dumps else Path(scratch)
        (dump / SPARSECORE).mkdir(exist_ok=True)  # libtpu does not make it
        (dump / ANSWER).write_text(json.dumps(_run_worker(asked, Path(scratch), dump, timeout_s, peers)))
        return _result(case, target, {**case.tiles, **asked["tiles"]}, dump)


def reread(case: Case, target: str, dumps: Path) -> Result | None:
    """The result again from what `keep_dumps` left, e.g. with other trips; None where there is nothing."""
    kept = dumps / case.name
    return _result(case, target, case.tiles, kept) if (kept / ANSWER).is_file() else None


def _result(case: Case, target: str, tiles: Mapping[str, int], dump: Path) -> Result:
    answer = json.loads((dump / ANSWER).read_text())
    programs = modules(dump) if answer["outcome"] == "compiled" else []
    found = tuple(_read(case, case.trips_at(tiles), name, file) for name, file in programs)
    offloaded = _sparsecore((dump / SPARSECORE).glob("*_bundles.txt"))
    return Result(case=case.name, target=target, tiles=tiles, modules=found, sparsecore=offloaded, **answer)


def _sparsecore(files: Iterable[Path]) -> dict[str, int]:
    """Static bundles by engine: a line that is one word starts a program of that engine."""
    counts: Counter[str] = Counter()
    engine = ""
    for line in (line for file in sorted(files) for line in file.read_text().splitlines()):
        if line.isalpha():
            engine = line
        counts[engine] += line.startswith("0x")
    return {engine: count for engine, count in counts.items() if count}


def _emptied(folder: Path) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    for old in (*folder.glob("*.*"), *folder.glob(f"{SPARSECORE}/*.*")):
        old.unlink()
    return folder


def _run_worker(
    request: dict[str, Any], scratch: Path, dump: Path, timeout_s: float, peers: Path | None
) -> dict[str, Any]:
    asked, answered = scratch / "request.json", scratch / "result.json"
    asked.write_text(json.dumps(request))
    command = [sys.executable, "-m", "benchmarks.kernels.worker", str(asked), str(answered)]
    env = worker_environment(dump, peers)
    try:
        done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=timeout_s)
    except subprocess.TimeoutExpired:
        return {"outcome": "timeout", "message": f"no result after {timeout_s:.0f} s"}
    if answered.exists():
        return json.loads(answered.read_text())
    tail = "\n".join(done.stderr.splitlines()[-STDERR_LINES:])
    return {"outcome": "error", "message": f"the compile process ended with code {done.returncode}\n{tail}"}


def worker_environment(dump: Path, peers: Path | None = None) -> dict[str, str]:
    """No TPU, several libtpu at once, and a dump of the final bundles only: every pass takes minutes."""
    return {
        **os.environ,
        "JAX_PLATFORMS": "cpu",
        "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
        "TPU_SKIP_MDS_QUERY": "1",
        "TF_CPP_MIN_LOG_LEVEL": "3",
        "JAX_TRACEBACK_FILTERING": "off",  # else the last line of a message is about filtering
        "LIBTPU_INIT_ARGS": LLO_FLAGS.format(dump),
        "MOEC_PEERS": str(peers.resolve()) if peers else "",
    }


def _read(case: Case, given_trips: Trips, name: str, file: Path) -> Module:
    tree = parse(file.read_text())
    trips: dict[str, float] = {}
    for pattern, given in given_trips.items():
        if _matches(pattern, name):
            trips |= given
    counted = any(_matches(p, name) for p in case.kernels) if case.kernels else name not in FRAME
    return Module(name=name, tree=tree, counted=counted, executed=executed(tree, trips))


def _matches(pattern: str, name: str) -> bool:
    """A module is named as its pallas_call, maybe with a number behind it."""
    return re.fullmatch(rf"(?:{pattern})(\.\d+)*", name) is not None


def document(case: Case, result: Result) -> dict[str, Any]:
    """The result as JSON has it: sums and the counted modules, without trees."""
    plain = {k: v for k, v in vars(result).items() if k != "modules"}
    return {
        **plain,
        "unit": case.unit,
        "units": case.units,
        "floor_bytes": case.floor_bytes,
        "static": asdict(result.static),
        "per_unit": asdict(result.executed * (1 / case.units)),
        "unknown_loops": list(result.unknown),
        "kernels": {m.name: static(m.tree).bundles for m in result.modules if m.counted},
        "others": {m.name: static(m.tree).bundles for m in result.modules if not m.counted},
    }
