"""How many values of a float8 expert share a scale: what plans say of each granularity, pins, refusals, bytes."""

import json
from functools import cache
from math import prod

import pytest

from moec.compiler.emit.package import program_files
from moec.compiler.plan.choose import make_plan
from moec.compiler.plan.memory import padded_bytes
from moec.compiler.plan.plan import Plan, ScaleChoice
from moec.compiler.plan.report import plan_markdown
from moec.compiler.problems import Problem, ProblemsError
from moec.compiler.spec.load import load
from moec.compiler.spec.schema import Request
from moec.targets.target import load_target

MODEL, TARGET, WORKLOAD = "qwen3.5-397b-a17b", "tpu7x:2x2x1", "decode_512x9216"
WIDE = "plan.dtypes.scale_block=512"


def request(*overrides: str, model: str = MODEL) -> Request:
    return load(model, target=TARGET, workload=WORKLOAD, overrides=overrides)


@cache
def planned(*overrides: str) -> tuple[Plan, dict[int, ScaleChoice]]:
    plan = make_plan(request(*overrides))
    return plan, {one.edge: one for one in plan.scale_choices}


def refused(*overrides: str, model: str = MODEL) -> Problem:
    with pytest.raises(ProblemsError) as caught:
        make_plan(request(*overrides, model=model))
    (problem,) = caught.value.problems
    return problem


def test_stored_blocks_are_kept_unless_pinned() -> None:
    plan, found = planned()
    assert plan.dtypes.scale_block == 128
    assert [(one.edge, one.verdict) for one in plan.scale_choices] == [(128, "CHOSEN"), (512, "LOSSY")]
    assert found[128].delta_us == {"decode": 0, "mixed": 0}
    assert (found[128].relative_error, found[128].absolute_error) == (0, 0)
    # Half of e4m3's last of 3 bits; half its smallest step of 2**-9, in units of a peak that becomes 448.
    assert found[512].relative_error == 2**-4 and found[512].absolute_error == 2**-10 / 448
    assert found[512].why == "only plan.dtypes.scale_block=512 takes it"
    json_of = json.loads(plan.model_dump_json())["scale_choices"]
    assert [one["edge"] for one in json_of] == [128, 512]


def test_the_runner_up_is_priced_as_its_own_plan() -> None:
    plan, found = planned()
    wide, others = planned(WIDE)
    assert [(one.edge, one.verdict) for one in wide.scale_choices] == [(512, "CHOSEN"), (128, "PINNED")]
    assert others[128].why == "excluded by plan.dtypes.scale_block=512"
    for name in ("decode", "mixed"):
        delta = (wide.estimates[f"{name}_step"].value - plan.estimates[f"{name}_step"].value) * 1e3
        assert found[512].delta_us[name] == pytest.approx(delta, abs=1)  # six digits of a step
        # Weights bind both: only the bytes of the scales are less.
        assert -10 < found[512].delta_us[name] < 0 and others[128].delta_us[name] == -found[512].delta_us[name]


def test_scales_shrink_to_a_sixteenth_and_arguments_by_as_much() -> None:
    plan, found = planned()
    wide, _ = planned(WIDE)
    tiling = load_target(TARGET).tiling
    shapes = {128: [(60, 64, 32, 8)] * 2 + [(60, 64, 8, 32)], 512: [(60, 64, 8, 2)] * 2 + [(60, 64, 2, 8)]}
    for edge, arrays in shapes.items():
        assert found[edge].scale_bytes == sum(padded_bytes(shape, "float32", tiling) for shape in arrays)
    assert sum(map(prod, shapes[128])) == 16 * sum(map(prod, shapes[512]))
    less = found[128].scale_bytes - found[512].scale_bytes
    assert plan.memory.arguments_bytes - wide.memory.arguments_bytes == less > 0
    assert wide.memory.components["moe.scales"] == found[512].scale_bytes


def test_the_program_and_the_report_say_the_block() -> None:
    asked = request(WIDE)
    plan = make_plan(asked)
    files = program_files(asked.graph, plan)
    assert files["weights.py"].count("block=(512, 512)") == 3
    assert '"w_down_scale": ArrayInfo(\n            (len(layers), 512, 2, 8), "float32"' in files["weights.py"]
    assert "SCALE_BLOCK = (128, 128)  # rows x columns under one scale" in files["weights.py"]  # the checkpoint's
    text = plan_markdown(plan)
    assert "expert float8_e4m3fn, one scale per 512 x 512" in text
    assert "| 512 x 512 | CHOSEN |" in text and "| 128 x 128 | PINNED |" in text
    assert "a value by at most 6.25% or 2.2e-06 of its block's largest" in text
    usual = request()
    assert "block=" not in program_files(usual.graph, make_plan(usual))["weights.py"]


def test_experts_without_float8_have_no_such_choice() -> None:
    plan, found = planned("plan.dtypes.expert=bfloat16", "workload.concurrency=64", "target.hbm_gib=288")
    assert found == {} and "Block scales" not in plan_markdown(plan)
    problem = refused(WIDE, "plan.dtypes.expert=bfloat16")
    assert problem.path == "plan.dtypes.scale_block" and "these are bfloat16" in problem.text


def test_dims_of_no_whole_blocks_are_refused() -> None:
    odd = "model.blocks.moe.experts.intermediate_size=1280"
    problem = refused(WIDE, odd)
    assert problem.path == "plan.dtypes.scale_block" and problem.hint == "valid: 128"
    assert problem.text.endswith("goes with multiples of 512, and moe.w_gate is 4096 x 1280")
    found = planned(odd)[1][512]
    assert found.verdict == "REFUSED" and "4096 x 1280" in found.why and found.delta_us == {}
    # 1024 columns are two blocks: four devices would hold half a one each.
    with pytest.raises(ProblemsError, match="2 scale blocks of 512 expert_intermediate over 4 devices"):
        make_plan(request(WIDE, "plan.experts.tp=4"))


def test_the_kernel_refuses_blocks_that_vector_memory_does_not_hold() -> None:
    """Fewer columns of an expert at a time would fit, but 512 share their scales."""
    small = "target.vmem_mib=20"
    wide, usual = make_plan(request(WIDE, small)), make_plan(request(small))
    assert (wide.variants["moe"], usual.variants["moe"]) == ("xla", "tpu_grouped")
    assert min(size for key, size in usual.tuning.items() if key.startswith("moe.inner_tile")) < 512
    (why,) = [one.why for one in wide.variant_choices if (one.scope, one.verdict) == ("moe", "REFUSED")]
    assert "vector memory with 512 columns of an expert" in why
    with pytest.raises(ProblemsError, match="vector memory with 512 columns of an expert"):
        make_plan(request(WIDE, small, "plan.variants.moe=tpu_grouped"))


def test_checkpoints_with_wide_blocks_keep_them() -> None:
    stored = "model.checkpoint.scales.block=[512,512]"
    problem = refused(stored)
    assert problem.path == "model.checkpoint.scales.block" and problem.hint == WIDE
    plan, found = planned(stored, WIDE)
    assert plan.scale_choices[0].why.endswith("bits of float8 checkpoints are kept")
    assert found[512].relative_error == 0 and found[128].verdict == "REFUSED"


def test_other_stored_blocks_are_requantised() -> None:
    plan, found = planned("model.checkpoint.scales.block=[64,32]", WIDE)
    assert plan.dtypes.scale_block == 512 and found[512].relative_error == 2**-4
    assert found[128].verdict == "REFUSED" and "64 x 32" in found[128].why
