"""Variants: what a plan records of every block and part, pins, refusals; emitted imports and calls follow them."""

from dataclasses import replace
from functools import cache
from typing import Any

import pytest

from moec.blocks.core.chip import ChipLimits
from moec.blocks.core.declare import Variant
from moec.blocks.core.work import Degrees, Dtypes, Load
from moec.blocks.moe import tpu_cost
from moec.blocks.moe.block import Fields as MoeFields
from moec.blocks.router import variants as router_variants
from moec.compiler.emit.package import program_files
from moec.compiler.emit.view import emission
from moec.compiler.graph.ir import Graph
from moec.compiler.plan.choose import make_plan
from moec.compiler.plan.plan import CollectivePlan, Plan
from moec.compiler.plan.variants import OTHERS, WAY_BACK, places, way_back
from moec.compiler.problems import ProblemsError
from moec.compiler.spec.load import load


def test_the_plan_records_every_part_and_the_imports_follow(monkeypatch: pytest.MonkeyPatch) -> None:
    request = load("tiny/mixtral", target="cpu", workload="tiny")
    plan = make_plan(request)
    assert plan.variants.keys() == {*request.graph.blocks(), "moe.router", WAY_BACK, *OTHERS}
    block = request.graph.blocks()["moe"]
    other = replace(router_variants.VARIANTS[0], name="other", module="moec.blocks.router.other")
    monkeypatch.setattr(router_variants, "VARIANTS", (*router_variants.VARIANTS, other))
    for router in ("xla", "other"):
        chosen = plan.model_copy(update={"variants": plan.variants | {"moe.router": router}})
        assert (f"moec.blocks.router.{router}", "route") in emission(block, request.graph, chosen).imports


def test_every_place_has_one_chosen_variant() -> None:
    request = load("qwen3.5-397b-a17b", target="tpu7x:2x2x1", workload="decode_512x9216")
    plan = make_plan(request)
    for place in (way_back(request.graph), *places(request.graph)):
        mine = [one for one in plan.variant_choices if one.scope == place.name]
        assert [one.variant for one in mine] == [variant.name for variant in place.variants]
        assert [one.variant for one in mine if one.verdict == "CHOSEN"] == [plan.variants[place.name]]
        assert all(one.why for one in mine)


def test_pins_choose_a_variant() -> None:
    pins = ["plan.variants.gdn=xla", "plan.variants.router=xla"]
    plan = make_plan(load("qwen3.5-397b-a17b", target="tpu7x:2x2x1", workload="decode_512x9216", overrides=pins))
    assert plan.variants["gdn"] == plan.variants["moe.router"] == "xla"
    pinned = {one.scope: one.why for one in plan.variant_choices if one.verdict == "CHOSEN"}
    assert pinned["gdn"] == "plan.variants.gdn" and pinned["moe.router"] == "plan.variants.router"


@pytest.mark.parametrize(
    ("pin", "path", "text", "hint"),
    [
        ("plan.variants.gdm=xla", "plan.variants.gdm", "no block 'gdm'", "did you mean 'gdn'?"),
        ("plan.variants.gdn=fast", "plan.variants.gdn", "no variant 'fast' for cpu", "valid: xla"),
    ],
)
def test_pins_of_what_does_not_exist(pin: str, path: str, text: str, hint: str) -> None:
    with pytest.raises(ProblemsError) as raised:
        make_plan(load("tiny/qwen3_5_moe", target="cpu", workload="tiny", overrides=[pin]))
    (problem,) = raised.value.problems
    assert problem.path == path and text in problem.text and problem.hint == hint


def test_page_tables_are_as_wide_as_the_longest_context_allowed() -> None:
    """64 rows of 9,216 tokens; the table has room for 131,072: 2 MiB with pages of 16, 1 MiB is all there is."""
    wide = ["workload.max_context=131072", "plan.attention.dp=8", "plan.dtypes.kv=bfloat16", "target.hbm_gib=1000"]
    for pages, verdict in (("plan.page_size=16", "REFUSED"), ("plan.page_size=64", "CHOSEN")):
        asked = load("qwen3.5-397b-a17b", target="tpu7x-8", workload="decode_512x9216", overrides=[*wide, pages])
        (kernel,) = (one for one in make_plan(asked).variant_choices if one.variant == "tpu_ragged")
        assert kernel.verdict == verdict
        assert verdict == "CHOSEN" or "page tables of 2097152 bytes: the kernels hold 917504" in kernel.why


def test_functions_of_kernels_are_called_after_their_variant() -> None:
    kernel = Variant("tpu_fused", "moec.blocks.x.tpu_fused", ("tpu",), kernel=True)
    assert kernel.function("gated_delta") == "gated_delta_fused"
    assert replace(kernel, kernel=False).function("gated_delta") == "gated_delta"


# --- how sums return from the experts ---

FLAGSHIP = {"target": "tpu7x:2x2x1", "workload": "decode_512x9216"}
DP8 = ("plan.attention.dp=8", "plan.experts.ep=8", "plan.shared_expert=replicated")
ALONE = [f"plan.variants.{name}=xla" for name in ("gdn", "gqa", "moe", "router")]
KERNEL = "plan.variants.collectives=tpu_hierarchical"


@cache
def planned(*overrides: str) -> tuple[Graph, Plan]:
    request = load("qwen3.5-397b-a17b", **FLAGSHIP, overrides=list(overrides))
    return request.graph, make_plan(request)


def returns(plan: Plan, bucket: str) -> list[CollectivePlan]:
    return [one for one in plan.collectives if (one.bucket, one.scope, one.op) == (bucket, "moe", "reduce-scatter")]


def test_the_compilers_way_back_is_predicted_at_least_as_fast() -> None:
    _, plan = planned(*DP8)
    xla, kernel = (one for one in plan.variant_choices if one.scope == WAY_BACK)
    assert (xla.variant, xla.verdict, kernel.variant, kernel.verdict) == ("xla", "CHOSEN", "tpu_hierarchical", "SLOWER")
    assert all(xla.us[bucket] <= kernel.us[bucket] < 1.1 * xla.us[bucket] for bucket in ("decode", "mixed"))
    assert 0 < kernel.vmem_bytes <= 32 << 20
    assert not any(name.startswith("collectives.") for name in plan.tuning)


def test_a_pin_returns_tokens_through_the_kernel() -> None:
    """The only kernel of its program: the chip's limits are there for it."""
    graph, plan = planned(*DP8, *ALONE, KERNEL)
    assert plan.variants[WAY_BACK] == "tpu_hierarchical"
    tiles = {"micro_batches.decode": 2, "micro_batches.mixed": 16, "shards_per_chip": 2}
    assert {key: plan.tuning[f"collectives.{key}"] for key in tiles} == tiles
    (message,) = returns(plan, "decode")
    (chosen,) = (one for one in plan.variant_choices if one.scope == WAY_BACK and one.verdict == "CHOSEN")
    assert message.shape == (512, 4096) and message.predicted_us == chosen.us["decode"]
    text = program_files(graph, plan)["model.py"]
    assert "from moec.blocks.collectives.tpu_hierarchical import reduce_scatter_hierarchical" in text
    assert "reduce_scatter_hierarchical(\n            y_AD,\n            DATA,\n            chip=CHIP," in text
    assert 'COLLECTIVES_MICRO_BATCHES = {"decode": 2, "mixed": 16}  #' in text
    assert "CHIP = ChipLimits(" in text and "from moec.blocks.collectives.xla import" in text
    assert "reduce_scatter_tokens" not in text


def test_plain_programs_return_through_xla() -> None:
    graph, plan = planned(*DP8, *ALONE)
    text = program_files(graph, plan)["model.py"]
    assert "y_TD = reduce_scatter_tokens(y_AD, DATA)  # sum over experts, back to own tokens" in text
    assert "CHIP" not in text and "COLLECTIVES" not in text


def test_a_sharding_that_scatters_nothing_refuses_the_kernel() -> None:
    with pytest.raises(ProblemsError) as raised:
        planned("plan.attention.tp=8", KERNEL)
    assert "nothing is scattered" in "".join(problem.text for problem in raised.value.problems)


def test_tokens_per_rank_that_fill_no_tile_refuse_the_kernel() -> None:
    _, plan = planned(*DP8, "plan.max_seqs=62")
    (why,) = (one.why for one in plan.variant_choices if (one.scope, one.verdict) == (WAY_BACK, "REFUSED"))
    assert why == "62 tokens per rank: the kernel takes multiples of 8 (bucket decode)"


def test_large_sums_return_in_chunks() -> None:
    """64 MiB in four messages, each counted; one beside the sums of the next. A decode step's 4 MiB in one."""
    graph, plan = planned(*DP8)
    assert (plan.tuning["moe.return_chunks.decode"], plan.tuning["moe.return_chunks.mixed"]) == (1, 4)
    assert [one.shape for one in returns(plan, "decode")] == [(512, 4096)]
    assert [one.shape for one in returns(plan, "mixed")] == [(2048, 4096)] * 4
    (step,) = (one for one in plan.breakdown if (one.bucket, one.op) == ("mixed", "return tokens"))
    assert step.binding == "ICI"
    assert step.us == pytest.approx(sum(one.predicted_us for one in returns(plan, "mixed")), rel=1e-5)
    text = program_files(graph, plan)["model.py"]
    assert "y_TD = experts_reduce_scatter_grouped(" in text
    assert "axes=DATA, return_chunks=MOE_RETURN_CHUNKS[bucket]," in text
    assert 'MOE_RETURN_CHUNKS = {"decode": 1, "mixed": 4}  #' in text
    assert "reduce_scatter_tokens" not in text


def test_the_kernel_way_back_is_not_chunked() -> None:
    """It runs on the TensorCore, beside no sums."""
    graph, plan = planned(*DP8, KERNEL)
    assert plan.variants["moe"] == "tpu_grouped" and "moe.return_chunks.mixed" not in plan.tuning
    assert [one.shape for one in returns(plan, "mixed")] == [(8192, 4096)]
    assert "y_AD = experts_grouped(" in program_files(graph, plan)["model.py"]


def test_what_keeps_sums_in_one_message() -> None:
    graph, _ = planned(*DP8)
    fields = graph.blocks()["moe"].fields
    assert isinstance(fields, MoeFields)
    dtypes = Dtypes("bfloat16", "bfloat16", "float8_e4m3fn", "float8_e4m3fn", "bfloat16", "bfloat16")
    chip = ChipLimits(64 << 20, 128, 8, ("float8_e4m3fn",), sparse_cores=2, cores_per_chip=2, smem_bytes=1 << 20)
    load_ = Load(1024, 64, 64, 1, 1, 960, 1, 256, Degrees(dp=8, ep=8), dtypes, 16, 256, chip=chip)

    def chunks(**changed: Any) -> int:
        return tpu_cost.return_chunks(fields, graph.dims, replace(load_, **changed))

    assert [chunks(tokens=tokens) for tokens in (1024, 512, 511, 256)] == [4, 2, 1, 1]
    assert chunks(tokens=1022) == 2  # four messages would not be equal
    # A shared expert is added to the sums; a kernel returns them; nothing exchanges beside the TensorCore.
    assert chunks(degrees=Degrees(dp=8, ep=8, shared=8)) == 1
    assert chunks(kernel_returns=True) == chunks(chip=replace(chip, sparse_cores=0)) == 1


def test_rows_in_float8_are_a_pin_that_only_the_kernel_takes() -> None:
    """Plain XLA refuses it, the emitted call says it, and experts without block scales refuse it."""
    asked = ["plan.dtypes.expert_rows=float8_e4m3fn", "plan.dtypes.gather=float8_e4m3fn"]
    request = load("qwen3.5-397b-a17b", target="tpu7x:2x2x1", workload="decode_512x9216", overrides=asked)
    plan = make_plan(request)
    refused = {one.scope: one.why for one in plan.variant_choices if one.verdict == "REFUSED" and one.variant == "xla"}
    assert "rows in float8_e4m3fn" in refused["moe"] and plan.variants["moe"] == "tpu_grouped"
    emitted = emission(request.graph.blocks()["moe"], request.graph, plan)
    text = "\n".join(str(line) for line in emitted.fields.values())
    assert "row_parts=MOE_ROW_PARTS" in text and "gather_tokens_float8(h_TD, packed_T2K, DATA)" in text
    assert {one.name: one.text for one in emitted.constants}["MOE_ROW_PARTS"] == "1"
    assert {one.dtype for one in plan.collectives if one.scope == "moe" and one.op == "all-gather"} == {
        "float8_e4m3fn", "int32",
    }  # fmt: skip
    with pytest.raises(ProblemsError) as raised:
        make_plan(load("mixtral-8x7b", target="tpu7x-8", workload="decode_512x9216", overrides=asked[:1]))
    assert raised.value.problems[0].path == "plan.dtypes.expert_rows"
    pinned = [*asked[:1], "plan.variants.moe=xla"]
    with pytest.raises(ProblemsError, match="plain XLA multiplies rows"):
        make_plan(load("qwen3.5-397b-a17b", target="tpu7x-8", workload="decode_512x9216", overrides=pinned))


def test_pinned_small_steps_are_planned() -> None:
    """How many sequences would fit is asked of steps that the pin leaves no room for prefill in."""
    pins = ["plan.page_size=16", "plan.max_batched_tokens=23"]
    plan = make_plan(load("tiny/qwen3_5_moe", target="cpu", workload="tiny", overrides=pins))
    assert plan.estimates["max_sequences"].value > 1000


def test_kernels_get_the_limits_the_plan_was_made_with() -> None:
    """An overridden target decides refusals and stands in the program, not the shipped one."""
    asked = ["target.vmem_mib=48"]
    request = load("qwen3.5-397b-a17b", target="tpu7x:2x2x1", workload="decode_512x9216", overrides=asked)
    plan = make_plan(request)
    assert plan.chip["vmem_bytes"] == 48 * 2**20
    assert "vmem_bytes=50331648" in program_files(request.graph, plan)["model.py"]
    small = ["target.vmem_mib=1"]
    tight = make_plan(load("qwen3.5-397b-a17b", target="tpu7x:2x2x1", workload="decode_512x9216", overrides=small))
    assert not any(name.startswith("tpu_") for name in tight.variants.values())
