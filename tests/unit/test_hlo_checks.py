"""How a compile is judged by the plan, on made-up records."""

from typing import Any

import pytest

from moec.compiler.plan.plan import BucketPlan, CollectivePlan, MemoryPlan, MeshPlan, Plan
from moec.compiler.verify import checks
from moec.compiler.verify.collectives import Collective, Loop
from moec.compiler.verify.hbm import parse_oom, top_buffers
from moec.compiler.verify.measured import Measured, Memory, StateArray
from moec.compiler.verify.report import GIB, Check

LAYERS = {"gdn": 45, "gqa": 15, "moe": 60}
SCAN = (Loop(name="while.1", trips=15),)
DECODE = BucketPlan(name="decode", tokens_per_rank=64, seqs_per_rank=64, max_q=1, pages_per_seq=36)


def planned(op: Any, dtype: str, shape: tuple[int, ...], scope: str = "moe", axes: Any = ("data",)) -> CollectivePlan:
    return CollectivePlan(bucket="decode", scope=scope, op=op, axes=axes, dtype=dtype, shape=shape, what="test")


def found(op: str, dtype: str, shape: tuple[int, ...], path: str = "while/body/moe", **more: Any) -> Collective:
    defaults = {"axes": ("data",), "group_size": 8, "loops": SCAN, "is_async": True, "thread": "sparsecore"}
    return Collective(op=op, dtype=dtype, shape=shape, op_name=path, name=op, combined=False, **{**defaults, **more})


def plan(*collectives: CollectivePlan, axes: Any = (("data", 8),)) -> Plan:
    names = tuple(name for name, _ in axes)
    mesh = MeshPlan(axes=axes, attention_dp=names, attention_tp=(), expert_ep=names, expert_tp=())
    return Plan.model_construct(mesh=mesh, collectives=collectives, buckets=(DECODE,))


MOE = (
    planned("all-gather", "bfloat16", (512, 4096)),
    planned("all-gather", "int32", (512, 20)),
    planned("reduce-scatter", "bfloat16", (512, 4096)),
)
# One scan body of four layers.
BODY = (
    *[found("all-gather", "bfloat16", (512, 4096))] * 4,
    *[found("all-gather", "int32", (8, 64, 20))] * 4,
    *[found("reduce-scatter", "bfloat16", (512, 4096))] * 4,
)


def judge(
    collectives: tuple[Collective, ...], of: Plan, bucket: BucketPlan = DECODE, backend: str = "tpu7x"
) -> list[Check]:
    return list(checks.check_collectives(collectives, of, bucket, LAYERS, backend))


def test_scan_of_four_layers() -> None:
    per_layer, per_step = judge(BODY, plan(*MOE))
    assert (per_layer.status, per_step.status) == ("pass", "pass")
    assert per_layer.detail == "as planned: 120 all-gather, 60 reduce-scatter"


def test_unrolled_scan_counts_the_same() -> None:
    """XLA may run two iterations per trip, or inline a scan of one."""
    half = tuple(c.model_copy(update={"loops": (Loop(name="w", trips=5),)}) for c in BODY) * 3
    assert judge(half, plan(*MOE))[0].status == "pass"


@pytest.mark.parametrize(
    ("collectives", "said"),
    [
        (BODY[1:], "missing 15 x all-gather bfloat16[2097152] over data in moe"),
        ((*BODY, BODY[0]), "unplanned 15 x all-gather bfloat16[2097152] over data in moe"),
        (
            (*BODY, found("all-reduce", "bfloat16", (64, 4096), "while/body/gqa/psum")),
            "unplanned 15 x all-reduce bfloat16[262144] over data in gqa",
        ),
        (
            (*BODY, found("all-reduce", "bfloat16", (64, 4096), "while/body")),
            "unplanned 15 x all-reduce bfloat16[262144] over data in an unnamed place",
        ),
        (
            (*BODY[:8], *[c.model_copy(update={"op": "all-reduce"}) for c in BODY[8:]]),
            "XLA made an all-reduce of 60 x reduce-scatter bfloat16[2097152] over data in moe",
        ),
    ],
)
def test_layer_differences_fail(collectives: tuple[Collective, ...], said: str) -> None:
    per_layer, _ = judge(collectives, plan(*MOE))
    assert per_layer.status == "fail"
    assert said in per_layer.detail


def test_wrong_axes_fail() -> None:
    wanted = tuple(c.model_copy(update={"axes": ("data", "tensor")}) for c in MOE)
    assert judge(BODY, plan(*wanted, axes=(("data", 4), ("tensor", 2))))[0].status == "fail"


def test_scope_lost_in_the_loop_counts_when_it_fits() -> None:
    bare = tuple(c.model_copy(update={"op_name": "jit(step)/while"}) for c in BODY)
    assert judge(bare, plan(*MOE))[0].status == "pass"


def test_rewrites_are_free_once_per_step_and_below_eight_tokens() -> None:
    logits = planned("all-gather", "float32", (64, 2048), scope="step")
    summed = found("all-reduce", "float32", (131072,), "jit(step)/head/all_gather", loops=())
    rewritten = (*BODY[:8], *[c.model_copy(update={"op": "all-reduce", "op_name": ""}) for c in BODY[8:]])
    tiny = DECODE.model_copy(update={"tokens_per_rank": 4})
    for collectives, bucket in ((BODY, DECODE), (rewritten, tiny)):
        per_layer, per_step = judge((*collectives, summed), plan(*MOE, logits), bucket)
        assert (per_layer.status, per_step.status) == ("pass", "pass")
        assert "XLA made an all-reduce of 1 x all-gather" in per_step.detail


def test_loop_without_trip_count_fails() -> None:
    endless = found("all-gather", "int32", (8,), loops=(Loop(name="w", trips=None),))
    (check,) = judge((*BODY, endless), plan(*MOE))
    assert (check.status, "static trip count" in check.detail) == ("fail", True)


def test_cpu_widens_bfloat16() -> None:
    wide = tuple(c.model_copy(update={"dtype": "float32"}) if c.dtype == "bfloat16" else c for c in BODY)
    assert judge(wide, plan(*MOE), backend="cpu")[0].status == "pass"
    assert judge(wide, plan(*MOE))[0].status == "fail"


def memory_plan(arguments: float, temp: float) -> Plan:
    memory = MemoryPlan(
        components={},
        arguments_bytes=int(arguments),
        temp_bytes={"decode": int(temp)},
        reserve_bytes=int(0.5 * GIB),
        usable_bytes=int(94.74 * GIB),
    )
    return Plan.model_construct(memory=memory)


def use(argument: float, temp: float) -> Memory:
    return Memory(argument=int(argument), output=GIB, alias=GIB, temp=int(temp), code=0)


def statuses(memory: Memory, of: Plan) -> dict[str, str]:
    return {check.name: check.status for check in checks.check_memory(memory, of, "decode", "tpu7x")}


def test_memory_within_two_percent() -> None:
    memory = use(82.72 * GIB, 0.23 * GIB)
    assert set(statuses(memory, memory_plan(82.7 * GIB, 0.5 * GIB)).values()) == {"pass"}
    # The arguments agree, the temporaries do not: 1 GiB is within the bound of the total, but not of its own.
    off = statuses(memory, memory_plan(82.7 * GIB, 1.23 * GIB))
    assert (off["arguments"], off["temporaries"], off["total memory"]) == ("pass", "fail", "pass")
    assert statuses(memory, memory_plan(82.7 * GIB, 3 * GIB))["total memory"] == "fail"
    assert statuses(memory, memory_plan(80 * GIB, 3 * GIB)) == {
        "arguments": "fail",
        "temporaries": "fail",
        "total memory": "pass",
        "fits": "pass",
    }


def test_reserve_counts() -> None:
    assert statuses(use(94 * GIB, 0.3 * GIB), memory_plan(94 * GIB, 0.3 * GIB))["fits"] == "fail"


def test_small_programs_are_not_judged() -> None:
    small = statuses(use(0.1 * GIB, 0.1 * GIB), memory_plan(1, 1))
    assert small == {"arguments": "skipped", "temporaries": "skipped", "total memory": "skipped", "fits": "pass"}


def test_lost_donation_names_the_array() -> None:
    state = (StateArray(name="gqa.kv", bytes=GIB, aliased=True), StateArray(name="gdn.state", bytes=5, aliased=False))
    measured = Measured(
        outcome="compiled", bucket="decode", plan_digest="", versions={}, memory=use(2 * GIB, 0), state=state
    )
    check = checks.check_donation(measured)
    assert check.status == "fail"
    assert "not aliased: gdn.state" in check.detail


OOM = """RESOURCE_EXHAUSTED: E1000: CompileTimeHbmOom: Ran out of memory on HBM, the total memory required for HLO \
temporaries (160.00G) exceeds available HBM (94.74G). HLO module: jit__lambda.
See https://openxla.org/xla/errors/error_1000 for more details."""
USAGE = """Memory Space: default (color=0)
Total bytes: 171798693408 (160.00GiB)
  cumulative_size;       size;       offset; used_by_n_values; shapes_list
  ------------------------------------------------------------
   40.00GiB(100%);   40.00GiB;            0;                1; bf16[20,1024,1024,1024]

  cumulative_size;       size;       offset; used_by_n_values; shapes_list
  ------------------------------------------------------------
       512B(100%);       512B;            0;                1; bf16[]
"""


def test_hbm_verdict_of_the_compiler() -> None:
    oom = parse_oom(OOM, USAGE)
    assert oom is not None
    assert (oom.needed, round(oom.available / GIB, 2)) == (171798693408, 94.74)
    older = parse_oom("Used 102.75G of 94.74G hbm. Exceeded hbm capacity by 8.01G.", "")
    assert older is not None and round(older.needed / GIB, 2) == 102.75
    assert parse_oom("INTERNAL: Mosaic failed to compile TPU kernel", USAGE) is None


def test_largest_buffers() -> None:
    assert [(b.bytes, b.shapes) for b in top_buffers(USAGE)] == [
        (40 * GIB, "bf16[20,1024,1024,1024]"),
        (512, "bf16[]"),
    ]
