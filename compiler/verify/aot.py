"""Ahead-of-time verification: compiles an emitted program for its target's topology and judges it by the plan."""

import importlib.util
import os
import platform
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import moec

from ..graph.ir import Graph
from ..plan.plan import Plan
from .checks import check_bucket
from .collectives import Collective
from .measured import Measured, Request
from .report import Check, Frozen, Section, Status, combine, size_text

WORKER = "moec.compiler.verify.aot_worker"
STDERR_LINES = 30


class AotBucket(Frozen):
    """One bucket: what the compiler said and what the plan makes of it."""

    measured: Measured
    checks: tuple[Check, ...]


class AotReport(Frozen):
    """Result of verify_aot. reason: why nothing was compiled, "" when it was."""

    program: str
    topology: str
    reason: str = ""
    buckets: tuple[AotBucket, ...] = ()

    @property
    def status(self) -> Status:
        return combine(check.status for bucket in self.buckets for check in bucket.checks)

    def sections(self) -> tuple[Section, ...]:
        """For report.render."""
        if self.reason:
            skipped = Check(name="compile", status="skipped", detail=self.reason)
            return (Section(title=f"AOT {self.topology}", checks=(skipped,)),)
        return tuple(_section(self.topology, bucket) for bucket in self.buckets)


def verify_aot(
    program_dir: Path,
    plan: Plan,
    topology: str,
    *,
    layers: Mapping[str, int],
    kernels: Mapping[str, Mapping[str, int]],
    cache_dir: Path,
    buckets: Sequence[str] | None = None,
    num_pages: int | None = None,
    num_slots: int | None = None,
    keep_dumps: Path | None = None,
    timeout_s: float = 1800.0,
    progress: Callable[[str], None] | None = None,
) -> AotReport:
    """Compile the program's buckets for `topology` and check each against the plan.

    topology: a libtpu name such as "tpu7x:2x2x1", or "cpu:N". layers: layers per block instance
    (block_layers(graph)). kernels: launches per step by bucket and kernel (planned_kernels(graph,
    plan)). buckets: names, None = all. num_pages, num_slots: per rank, None = as planned; more of
    them ask whether the chip would hold more. cache_dir keeps results and the lock.
    keep_dumps: a directory for the XLA dumps, one folder per bucket; bypasses the cache.
    """
    reason = why_not(topology)
    if reason:
        return AotReport(program=plan.model, topology=topology, reason=reason)
    names = tuple(buckets or (b.name for b in plan.buckets))
    unknown = set(names) - {b.name for b in plan.buckets}
    assert not unknown, f"the plan has no bucket {sorted(unknown)}"
    results = []
    for name in names:
        if progress:
            progress(f"compiling {plan.model}, bucket {name}, for {topology}")
        request = Request(
            program_dir=str(program_dir.resolve()),
            topology=topology,
            bucket=name,
            num_pages=num_pages or plan.pages_per_rank,
            num_slots=num_slots or plan.slots_per_rank,
            cache_dir=str(cache_dir / "aot"),
            lock_file=str(cache_dir / "aot.lock"),
            keep_dump=str((keep_dumps / name).resolve()) if keep_dumps else None,
        )
        measured = run_worker(request, timeout_s)
        checks = check_bucket(measured, plan, layers, kernels[name], topology.split(":")[0])
        results.append(AotBucket(measured=measured, checks=checks))
    return AotReport(program=plan.model, topology=topology, buckets=tuple(results))


def block_layers(graph: Graph) -> dict[str, int]:
    """How many layers use each block instance."""
    return {name: len(graph.layers_of(name)) for name in graph.blocks()}


def why_not(topology: str) -> str:
    """Why this machine cannot compile for the topology, "" when it can."""
    if topology.startswith("cpu") or importlib.util.find_spec("libtpu"):
        return ""
    machine = f"{platform.system()} {platform.machine()}"
    if (platform.system(), platform.machine()) == ("Linux", "x86_64"):
        return "libtpu is not installed: pip install libtpu"
    return f"libtpu has no wheel for {machine}: run this check on Linux x86_64"


def run_worker(request: Request, timeout_s: float) -> Measured:
    """One compile in a process of its own; a crash or a timeout becomes an error result."""
    with tempfile.TemporaryDirectory(prefix="moec-aot-") as scratch:
        asked, answered = Path(scratch) / "request.json", Path(scratch) / "result.json"
        asked.write_text(request.model_dump_json())
        command = [sys.executable, "-m", WORKER, str(asked), str(answered)]
        try:
            done = subprocess.run(
                command, env=worker_environment(request.topology), capture_output=True, text=True, timeout=timeout_s
            )
        except subprocess.TimeoutExpired:
            return _failed(request, f"no result after {timeout_s:.0f} s")
        if answered.exists():
            return Measured.model_validate_json(answered.read_bytes())
    tail = "\n".join(done.stderr.splitlines()[-STDERR_LINES:])
    return _failed(request, f"the compile process ended with code {done.returncode}\n{tail}")


def worker_environment(topology: str) -> dict[str, str]:
    """libtpu needs to be told that there is no TPU, and that others may load it at the same time."""
    package_root = str(Path(moec.__file__).absolute().parents[1])
    inherited = os.environ.get("PYTHONPATH")
    env = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(filter(None, (package_root, inherited))),
        "JAX_PLATFORMS": "cpu",
        "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
        "TPU_SKIP_MDS_QUERY": "1",
    }
    name, _, count = topology.partition(":")
    if name == "cpu":
        env["XLA_FLAGS"] = f"--xla_force_host_platform_device_count={count or 1}"
    return env


def _failed(request: Request, message: str) -> Measured:
    return Measured(outcome="error", bucket=request.bucket, plan_digest="", versions={}, message=message)


def _section(topology: str, bucket: AotBucket) -> Section:
    m = bucket.measured
    versions = ", ".join(f"{name} {version}" for name, version in m.versions.items())
    facts = [("compiler", versions + (" (cached result)" if m.cached else ""))]
    if m.outcome == "compiled" or m.oom:
        facts.append(("time", f"lower {m.lower_s:.1f} s, compile {m.compile_s:.1f} s, CPU {m.compile_cpu_s:.1f} s"))
    if m.memory:
        parts = ("argument", "output", "alias", "temp", "code")
        facts.append(("memory/device", ", ".join(f"{p} {size_text(getattr(m.memory, p))}" for p in parts)))
    lines = Counter(_line(c) for c in m.collectives)
    facts += [("collective", f"{line} ({count} alike)" if count > 1 else line) for line, count in lines.items()]
    if m.outcome != "compiled":
        facts += [("largest buffer", f"{size_text(b.bytes)} {b.shapes}") for b in m.buffers[:6]]
    return Section(title=f"AOT {topology} {m.bucket}", facts=tuple(facts), checks=bucket.checks)


def _line(c: Collective) -> str:
    where = " x ".join(str(loop.trips) for loop in c.loops) or "1"
    how = f"async {c.thread}".strip() if c.is_async else "sync"
    return f"{where} x {c.op} {c.dtype}{list(c.shape)} over {','.join(c.axes) or '?'} ({how}) {c.op_name}"


__all__ = ["AotBucket", "AotReport", "block_layers", "run_worker", "verify_aot", "why_not"]
