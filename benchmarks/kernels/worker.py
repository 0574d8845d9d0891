"""Compiles one case in a process of its own: `python -m benchmarks.kernels.worker REQUEST.json RESULT.json`.

A process of its own because the compiler may abort it, and because libtpu reads its flags once.
"""

import importlib
import importlib.metadata
import json
import re
import sys
import time
import traceback
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.experimental import topologies
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from moec.blocks.core.program import abstract_mesh
from moec.compiler.plan.chip import chip_limits
from moec.targets.target import Target, load_target

from .case import Arg, Case, Refused

AXIS = "data"
MESSAGE_LINES = 25
_SCOPED = re.compile(r'"used_scoped_memory_configs":\[([^\]]*)\]')
_SIZE = re.compile(r'"memory_space":"1"[^}]*?"size":"(\d+)"')


def main(request_file: str, result_file: str) -> None:
    """Answer one request: {module, case, target, tiles}."""
    request = json.loads(Path(request_file).read_text())
    result = {"versions": versions(), **measure(**request)}
    Path(result_file).write_text(json.dumps(result))


def measure(module: str, case: str, target: str, tiles: dict[str, int]) -> dict[str, Any]:
    """Lower and compile; a refusal and an error are results too."""
    chosen = next(c for c in importlib.import_module(module).CASES if c.name == case)
    try:
        return compile_case(chosen, load_target(target), {**chosen.tiles, **tiles})
    except Refused as refusal:
        return {"outcome": "refused", "message": str(refusal)}
    except Exception:
        lines = traceback.format_exc().splitlines()
        return {"outcome": "error", "message": "\n".join(lines[-MESSAGE_LINES:])}


def compile_case(case: Case, target: Target, tiles: dict[str, int]) -> dict[str, Any]:
    """Times and memory of one case; its bundles are in the dump."""
    mesh = device_mesh(target, case.devices)
    start = time.perf_counter()
    # As an emitted program: traced over a mesh without devices, lowered for arguments that lie on them.
    function = case.build(chip_limits(target), abstract_mesh(dict(mesh.shape)), tiles)
    abstract = jax.tree.map(lambda arg: _abstract(arg, mesh), case.args, is_leaf=lambda x: isinstance(x, Arg))
    with jax.set_mesh(mesh) if case.knows_chip else nullcontext():
        lowered = jax.jit(function, donate_argnums=case.donate).lower(*abstract)
    lowered_at, cpu_start = time.perf_counter(), time.process_time()
    compiled = lowered.compile(compiler_options={**target.compile_options, **case.options})
    done, cpu_done = time.perf_counter(), time.process_time()
    stats = compiled.memory_analysis()
    names = ("argument", "output", "alias", "temp", "generated_code")
    return {
        "outcome": "compiled",
        "lower_s": lowered_at - start,
        "compile_s": done - lowered_at,
        "compile_cpu_s": cpu_done - cpu_start,
        "memory": {name: getattr(stats, f"{name}_size_in_bytes") for name in names},
        "vmem_bytes": _scoped_vmem(compiled),
    }


def device_mesh(target: Target, devices: str) -> Mesh:
    """One device of the topology, or all of them along one axis."""
    described = topologies.get_topology_desc(target.name, platform=target.platform)
    if devices == "all":
        return topologies.make_mesh(described, (target.num_devices,), (AXIS,))
    return Mesh(np.array(described.devices)[:1], (AXIS,))


def versions() -> dict[str, str]:
    """Everything bundle counts depend on."""
    return {name: importlib.metadata.version(name) for name in ("jax", "jaxlib", "libtpu")}


def _abstract(arg: Arg, mesh: Mesh) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(arg.shape, arg.dtype, sharding=NamedSharding(mesh, PartitionSpec(*arg.spec)))


def _scoped_vmem(compiled: Any) -> int | None:
    """Largest scoped VMEM of a call; None where the compiler cannot print the program (SparseCore)."""
    try:
        text = compiled.as_text()
    except jax.errors.JaxRuntimeError:
        return None
    sizes = [int(size) for used in _SCOPED.findall(text) for size in _SIZE.findall(used)]
    return max(sizes, default=0)


if __name__ == "__main__":
    main(*sys.argv[1:])
