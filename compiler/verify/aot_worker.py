"""Compiles one bucket of an emitted program for a topology that is not there, in its own process.

`python -m moec.compiler.verify.aot_worker REQUEST.json RESULT.json`. A process of its own because
the compiler may abort it, and because libtpu wants its environment before the first import of jax.
"""

import importlib.metadata
import math
import os
import re
import resource
import sys
import tempfile
import threading
import time
import traceback
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import jax
from jax.experimental import topologies
from jax.sharding import Mesh

from moec.blocks.core.program import abstract_arrays
from moec.runtime.cache import state_info
from moec.runtime.program import Program, load_program

from . import cache, hlo
from .collectives import collectives
from .hbm import parse_oom, top_buffers
from .kernels import kernels
from .measured import Measured, Memory, Request, StateArray

MESSAGE_LINES = 25
_SCOPE_NAMES = re.compile(r'loc\("([^"]+)"\(')


def main(request_file: str, result_file: str) -> None:
    """Answer one request."""
    threading.Thread(target=_end_with_parent, args=(os.getppid(),), daemon=True).start()
    request = Request.model_validate_json(Path(request_file).read_bytes())
    Path(result_file).write_text(measure(request).model_dump_json())


def measure(request: Request) -> Measured:
    """Lower, look in the cache, compile under the lock, read the dump."""
    program = load_program(Path(request.program_dir))
    blank = Measured(
        outcome="error", bucket=request.bucket, plan_digest=program.PLAN_DIGEST, versions=versions(request.topology)
    )
    start = time.perf_counter()
    try:
        lowered, state = lower(program, request)
    except Exception:
        return blank.model_copy(update={"message": "\n".join(traceback.format_exc().splitlines()[-MESSAGE_LINES:])})
    lower_s = time.perf_counter() - start
    options = compile_options(program, request.topology)
    key = cache.cache_key(program_text(lowered), options, blank.versions, request.topology)
    blank = blank.model_copy(update={"key": key, "lower_s": lower_s, "state": state})
    found = None if request.keep_dump else cache.load(Path(request.cache_dir), key)
    if found:
        return _recalled(found, blank)
    with cache.exclusive(Path(request.lock_file)):
        # Another process may have compiled the same program while this one waited.
        found = None if request.keep_dump else cache.load(Path(request.cache_dir), key)
        if found:
            return _recalled(found, blank)
        result = compile_and_read(lowered, options, blank, dict(program.MESH_AXES), request.keep_dump)
    if result.outcome != "error":
        cache.store(Path(request.cache_dir), key, result)
    return result


def _recalled(found: Measured, asked: Measured) -> Measured:
    fresh = {"cached": True, "bucket": asked.bucket, "plan_digest": asked.plan_digest, "lower_s": asked.lower_s}
    return found.model_copy(update=fresh)


def lower(program: Program, request: Request) -> tuple[Any, tuple[StateArray, ...]]:
    """The bucket's step lowered for the topology's mesh from shapes alone, and the state's arrays."""
    mesh = topology_mesh(program, request.topology)
    infos = state_info(program, request.num_pages, request.num_slots)
    state = abstract_arrays(infos, program.RULES, mesh)
    weights = abstract_arrays(program.weights(), program.RULES, mesh)
    batch = abstract_arrays(program.batch(request.bucket), program.RULES, mesh)
    named = jax.tree_util.tree_flatten_with_path(state)[0]
    arrays = tuple(
        StateArray(name=jax.tree_util.keystr(path, simple=True, separator="."), bytes=local_bytes(a), aliased=False)
        for path, a in named
    )
    step: Any = program.STEPS[request.bucket]
    return step.lower(weights, state, batch), arrays


def topology_mesh(program: Program, topology: str) -> Mesh:
    """The program's mesh over the topology's devices; their number must agree."""
    names, sizes = tuple(program.MESH_AXES), tuple(program.MESH_AXES.values())
    if topology.startswith("cpu"):
        devices = jax.devices("cpu")
        assert math.prod(sizes) == len(devices), f"mesh {program.MESH_AXES} on {len(devices)} devices"
        return program.mesh(devices)
    described = topologies.get_topology_desc(topology, platform="tpu")
    available = len(described.devices)
    assert math.prod(sizes) == available, f"mesh {program.MESH_AXES} on the {available} devices of {topology}"
    return topologies.make_mesh(described, sizes, names)


def local_bytes(array: jax.ShapeDtypeStruct) -> int:
    """Bytes of one device's shard."""
    assert array.sharding is not None
    return math.prod(array.sharding.shard_shape(array.shape)) * array.dtype.itemsize


def compile_options(program: Program, topology: str) -> dict[str, str | bool]:
    """The program's own options; XLA:CPU knows none of the TPU's."""
    return {} if topology.startswith("cpu") else dict(program.COMPILE_OPTIONS)


def versions(topology: str) -> dict[str, str]:
    """Versions of everything that compiles."""
    packages = ("jax", "jaxlib") if topology.startswith("cpu") else ("jax", "jaxlib", "libtpu")
    return {name: importlib.metadata.version(name) for name in packages}


def program_text(lowered: Any) -> str:
    """StableHLO plus the named scopes (they attribute collectives), without file names and line numbers."""
    scopes = _SCOPE_NAMES.findall(lowered.as_text(debug_info=True))
    return lowered.as_text() + "\n" + "\n".join(scopes)


def compile_and_read(
    lowered: Any, options: dict[str, str | bool], blank: Measured, mesh_axes: dict[str, int], keep_dump: str | None
) -> Measured:
    """Compile with a dump and read memory, aliasing, collectives and kernels; an error becomes a result too."""
    with nullcontext(keep_dump) if keep_dump else tempfile.TemporaryDirectory(prefix="moec-aot-") as dump:
        assert dump is not None
        asked = {**options, "xla_dump_to": dump, "xla_dump_hlo_as_text": True}
        start, cpu_start = time.perf_counter(), _cpu_seconds()
        try:
            compiled, error = lowered.compile(compiler_options=asked), ""
        except jax.errors.JaxRuntimeError as e:
            compiled, error = None, str(e)
        times = {"compile_s": time.perf_counter() - start, "compile_cpu_s": _cpu_seconds() - cpu_start}
        report = _read(dump, "memory-usage-report.txt")
        shared = {**times, "peak_rss_bytes": _peak_rss(), "buffers": top_buffers(report)}
        if compiled is None:
            oom = parse_oom(error, report)
            message = "\n".join(error.splitlines()[:MESSAGE_LINES])
            return blank.model_copy(
                update={**shared, "outcome": "oom" if oom else "error", "oom": oom, "message": message}
            )
        module = hlo.parse(_read(dump, "after_optimizations.txt"))
    state = tuple(
        array.model_copy(update={"aliased": i in module.aliased_outputs}) for i, array in enumerate(blank.state)
    )
    launched = {"collectives": collectives(module, mesh_axes), "kernels": kernels(module)}
    found = {**launched, "state": state, "memory": memory_of(compiled)}
    return blank.model_copy(update={**shared, **found, "outcome": "compiled"})


def memory_of(compiled: Any) -> Memory:
    """memory_analysis() of the executable, per device."""
    stats = compiled.memory_analysis()
    return Memory(
        argument=stats.argument_size_in_bytes,
        output=stats.output_size_in_bytes,
        alias=stats.alias_size_in_bytes,
        temp=stats.temp_size_in_bytes,
        code=stats.generated_code_size_in_bytes,
    )


def _read(dump: str, ending: str) -> str:
    """The dump's file with this ending: the largest, should the compiler have built helper modules."""
    files = sorted(Path(dump).glob(f"*{ending}"), key=lambda path: path.stat().st_size)
    return files[-1].read_text() if files else ""


def _end_with_parent(parent: int) -> None:
    """A compile takes minutes: nobody should wait for one whose asker was killed."""
    while os.getppid() == parent:
        time.sleep(1)
    os._exit(1)


def _cpu_seconds() -> float:
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime


def _peak_rss() -> int:
    """ru_maxrss counts KiB on Linux, bytes on macOS."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


if __name__ == "__main__":
    main(*sys.argv[1:])
