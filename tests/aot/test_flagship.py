"""The committed 397B program compiled for Ironwood: it fits, its state is donated, its collectives and kernels are the
plan's.

No TPU is needed: libtpu compiles for the topology on any Linux x86-64 machine.
"""

from collections import Counter
from pathlib import Path

import pytest

from moec.compiler.emit.emit import emit
from moec.compiler.plan.choose import make_plan
from moec.compiler.plan.plan import Plan
from moec.compiler.problems import ProblemsError
from moec.compiler.spec.load import load
from moec.compiler.verify.aot import block_layers, verify_aot
from moec.compiler.verify.checks import STEP
from moec.compiler.verify.kernels import planned_kernels

pytestmark = [pytest.mark.aot, pytest.mark.timeout(1800)]

MODEL, TARGET, WORKLOAD = "qwen3.5-397b-a17b", "tpu7x:2x2x1", "decode_512x9216"
COMMITTED = Path("generated/qwen3_5_397b_a17b/tpu7x_2x2x1/decode_512x9216")
TOLERANCE = 0.02
GIB = 1 << 30


@pytest.mark.parametrize("bucket", ["decode", "mixed"])
def test_committed_program_compiles_as_planned(bucket: str, root: Path, tmp_path: Path) -> None:
    plan = Plan.model_validate_json((root / COMMITTED / "plan.json").read_bytes())
    graph = load(MODEL, target=TARGET, workload=WORKLOAD).graph
    layers, kernels = block_layers(graph), planned_kernels(graph, plan)
    report = verify_aot(
        root / COMMITTED, plan, TARGET, layers=layers, kernels=kernels, cache_dir=tmp_path, buckets=[bucket]
    )
    (found,) = report.buckets
    assert [check for check in found.checks if check.status != "pass"] == []
    memory = found.measured.memory
    assert memory is not None
    planned = plan.memory.arguments_bytes + plan.memory.temp_bytes[bucket]
    needed = memory.argument + memory.output - memory.alias + memory.temp
    assert needed > 80 * GIB
    assert abs(planned - needed) <= TOLERANCE * needed
    assert abs(plan.memory.arguments_bytes - memory.argument) <= 0.001 * memory.argument
    in_layers: Counter[str] = Counter()
    for collective in found.measured.collectives:
        if collective.in_loop:
            in_layers[collective.op] += collective.count or 0
    wanted: Counter[str] = Counter()
    for entry in plan.collectives:
        if entry.bucket == bucket and entry.scope != STEP:
            wanted[entry.op] += layers[entry.scope]
    assert in_layers == wanted
    # One reduce-scatter per chunk of the experts' sums.
    assert wanted["reduce-scatter"] == layers["moe"] * plan.tuning[f"moe.return_chunks.{bucket}"]
    assert {one.name for one in found.measured.kernels} == set(kernels[bucket])


def test_tensor_parallel_with_bf16_cache_runs_out_of_memory(tmp_path: Path) -> None:
    """The planner refuses TP8 at 512 sequences; so does the compiler, when it is asked for the same cache."""
    pins = ["plan.attention.tp=8", "plan.experts.ep=8", "plan.dtypes.kv=bfloat16"]
    with pytest.raises(ProblemsError, match=r"(?s)HBM|GiB"):
        make_plan(load(MODEL, target=TARGET, workload=WORKLOAD, overrides=pins))
    smaller = [*pins, "workload.concurrency=256"]
    request = load(MODEL, target=TARGET, workload=WORKLOAD, overrides=smaller)
    plan = make_plan(request)
    emit(request.graph, plan, tmp_path / "program")
    pages_per_sequence = next(b.pages_per_seq for b in plan.buckets if b.name == "decode")
    report = verify_aot(
        tmp_path / "program",
        plan,
        TARGET,
        layers=block_layers(request.graph),
        kernels=planned_kernels(request.graph, plan),
        cache_dir=tmp_path,
        buckets=["decode"],
        num_pages=512 * pages_per_sequence + 1,
        num_slots=513,
    )
    (found,) = report.buckets
    assert report.status == "fail"
    assert found.measured.oom is not None
    assert found.measured.oom.needed > 110 * GIB > found.measured.oom.available > 94 * GIB
