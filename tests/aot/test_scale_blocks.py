"""A program with one scale per 512 x 512 values compiles for Ironwood with the grouped kernel: arguments as planned."""

from pathlib import Path

import pytest

from moec.compiler.emit.emit import emit
from moec.compiler.plan.choose import make_plan
from moec.compiler.spec.load import load
from moec.compiler.verify.aot import block_layers, verify_aot
from moec.compiler.verify.kernels import planned_kernels

pytestmark = [pytest.mark.aot, pytest.mark.timeout(600)]

SPEC = Path(__file__).parents[1] / "numerics" / "specs" / "wide_scales.yaml"
TARGET = "tpu7x:2x2x1"
SIZES = ["workload.concurrency=64", "workload.max_context=256", "model.blocks.moe.router.num_experts=16"]
PINS = ["plan.dtypes.scale_block=512", "plan.attention.dp=8", "plan.experts.ep=8"]


@pytest.mark.parametrize("variant", ["tpu_grouped", "xla"])
def test_decode_compiles_as_planned(variant: str, tmp_path: Path) -> None:
    pins = [*SIZES, *PINS, f"plan.variants.moe={variant}"]
    request = load(str(SPEC), target=TARGET, workload="tiny", overrides=pins)
    plan = make_plan(request)
    assert (plan.dtypes.expert, plan.dtypes.scale_block) == ("float8_e4m3fn", 512)
    emit(request.graph, plan, tmp_path / "program")
    report = verify_aot(
        tmp_path / "program",
        plan,
        TARGET,
        layers=block_layers(request.graph),
        kernels=planned_kernels(request.graph, plan),
        cache_dir=tmp_path / "cache",
        buckets=["decode"],
    )
    (found,) = report.buckets
    assert [check for check in found.checks if check.status == "fail"] == []
    memory = found.measured.memory
    assert memory is not None
    assert memory.argument == pytest.approx(plan.memory.arguments_bytes, rel=1e-3)
    # A copy of the experts, or of their scales spread out, would be as much as they are.
    assert memory.temp < plan.memory.components["moe.experts"]
