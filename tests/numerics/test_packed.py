"""Specs whose checkpoint packs experts in 4 bits: programs hold the stored bits and agree with the reference."""

from pathlib import Path

import jax
import numpy as np
import pytest

from moec.blocks.core.quant import dequantize_on_host
from moec.compiler.emit.emit import emit
from moec.compiler.plan.choose import make_plan
from moec.compiler.plan.plan import Plan
from moec.compiler.spec.load import load
from moec.compiler.spec.schema import Request
from moec.compiler.verify.aot import block_layers, verify_aot
from moec.compiler.verify.kernels import planned_kernels
from moec.compiler.verify.numerics import verify_numerics
from moec.compiler.verify.random_checkpoint import write_random_checkpoint
from moec.compiler.verify.reference import checkpoint_weights
from moec.runtime.program import load_program
from moec.runtime.weights import load_weights

SPECS = Path(__file__).parent / "specs"
DTYPES = {"packed_mxfp4": "float4_e2m1fn", "packed_int4": "int4"}
# Experts cut over two devices each in their width: w_down's blocks of 32 rows are cut with it.
MESHES = {
    "cpu": (),
    "cpu:2": ("plan.attention.dp=2", "plan.experts.ep=2"),
    "cpu:4": ("plan.attention.tp=4", "plan.experts={ep: 2, tp: 2}"),
}


def emitted(name: str, target: str, folder: Path, *pins: str) -> tuple[Request, Plan]:
    """The spec's program, written to `folder`."""
    request = load(str(SPECS / f"{name}.yaml"), target=target, workload="tiny", overrides=pins)
    plan = make_plan(request)
    emit(request.graph, plan, folder)
    return request, plan


@pytest.mark.parametrize(
    ("name", "mesh"),
    [
        ("packed_mxfp4", "cpu"),
        ("packed_int4", "cpu:4"),
        pytest.param("packed_mxfp4", "cpu:2", marks=pytest.mark.slow),
        pytest.param("packed_int4", "cpu", marks=pytest.mark.slow),
    ],
)
def test_a_program_with_4_bit_experts_agrees_with_the_reference(name: str, mesh: str, tmp_path: Path) -> None:
    request, plan = emitted(name, mesh, tmp_path / "program", f"plan.dtypes.expert={DTYPES[name]}", *MESHES[mesh])
    report = verify_numerics(tmp_path / "program", plan, request.graph)
    assert not report.reason and report.status == "pass", report.checks
    assert len(report.errors) == 3
    assert max(report.errors[0].hidden_abs) > 0


@pytest.mark.parametrize("expert", ["stored", "float32"])
@pytest.mark.parametrize("name", DTYPES)
def test_experts_are_loaded_as_the_reference_reads_them(name: str, expert: str, tmp_path: Path) -> None:
    """To the bit: in 4 bits with their scales, and widened, which is what a CPU does without a pin."""
    pins = (f"plan.dtypes.expert={DTYPES[name]}",) if expert == "stored" else ()
    request, plan = emitted(name, "cpu", tmp_path / "program", *pins)
    assert plan.dtypes.expert == (DTYPES[name] if expert == "stored" else "float32")
    write_random_checkpoint(request.graph, tmp_path / "weights")
    program, notes = load_program(tmp_path / "program"), list[str]()
    mesh = program.mesh(jax.devices()[:1])
    moe = load_weights(program, mesh, tmp_path / "weights", on_note=notes.append)["stacks"]["moe"]
    assert notes == []
    weight_of = checkpoint_weights(request.graph, tmp_path / "weights")
    for key in ("w_gate", "w_up", "w_down"):
        found = np.asarray(moe[key])
        assert found.dtype.name == plan.dtypes.expert
        if expert == "stored":
            scale = np.asarray(moe[f"{key}_scale"])
            assert scale.dtype.name == "bfloat16" and scale.shape == (
                *found.shape[:2],
                found.shape[2] // 32,
                found.shape[3],
            )
            found = dequantize_on_host(found, scale)
        np.testing.assert_array_equal(found, np.stack([weight_of(f"moe.{key}", layer) for layer in (0, 1)]))


def test_experts_that_the_loader_must_quantise_are_not_compared(tmp_path: Path) -> None:
    """The random checkpoint holds mxfp4, the program int4: other values than the reference's."""
    request, plan = emitted("packed_mxfp4", "cpu", tmp_path / "program", "plan.dtypes.expert=int4")
    report = verify_numerics(tmp_path / "program", plan, request.graph)
    assert report.status == "skipped" and "expert int4" in report.reason


@pytest.mark.aot
@pytest.mark.parametrize("name", DTYPES)
def test_4_bit_experts_take_4_bits_on_the_chip(name: str, tmp_path: Path) -> None:
    """Arguments as planned; temporaries hold no widened stack, though one layer's would be larger than all stacks."""
    sizes = (
        "model.hidden_size=2048",
        "model.blocks.moe.experts.intermediate_size=1024",
        "model.blocks.moe.router.num_experts=64",
    )
    request, plan = emitted(name, "tpu7x:2x2x1", tmp_path / "program", *sizes)
    assert plan.dtypes.expert == DTYPES[name]
    experts = plan.memory.components["moe.experts"]
    assert experts == 2 * 64 // plan.mesh.ep // plan.mesh.etp * 3 * 2048 * 1024 // 2
    report = verify_aot(
        tmp_path / "program",
        plan,
        "tpu7x:2x2x1",
        layers=block_layers(request.graph),
        kernels=planned_kernels(request.graph, plan),
        cache_dir=tmp_path,
        buckets=["decode"],
    )
    (found,) = report.buckets
    assert [check for check in found.checks if check.status not in ("pass", "skipped")] == []
    memory = found.measured.memory
    assert memory is not None
    assert memory.argument == pytest.approx(plan.memory.arguments_bytes, rel=0.01)
    assert memory.temp < experts
