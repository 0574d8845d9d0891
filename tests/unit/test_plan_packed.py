"""4-bit experts in plans: defaults by checkpoint table and target, pins, what is refused, and the bytes they take."""

from pathlib import Path

import pytest

from moec.blocks.core.work import Gemm, itembits, itemsize
from moec.compiler.plan.choose import make_plan
from moec.compiler.plan.dtypes import packed_experts
from moec.compiler.problems import ProblemsError
from moec.compiler.spec.load import load
from moec.compiler.spec.schema import Request

SPECS = Path(__file__).parents[1] / "numerics" / "specs"
WIDE = ("plan.dtypes.expert=bfloat16",)
DTYPES = {"packed_mxfp4": "float4_e2m1fn", "packed_int4": "int4"}


def request(name: str, *overrides: str, target: str = "tpu7x-8") -> Request:
    return load(str(SPECS / f"{name}.yaml"), target=target, workload="tiny", overrides=overrides)


@pytest.mark.parametrize("target", ["tpu7x-8", "v6e:2x2", "v5p:2x2x1"])
@pytest.mark.parametrize("name", DTYPES)
def test_packed_experts_stay_packed_by_default(name: str, target: str) -> None:
    asked = request(name, target=target)
    assert packed_experts(asked.graph) == DTYPES[name]
    dtypes = make_plan(asked).dtypes
    assert (dtypes.expert, dtypes.weight, dtypes.activation) == (DTYPES[name], "bfloat16", "bfloat16")


@pytest.mark.parametrize("name", DTYPES)
def test_a_cpu_widens_them_and_pins_win(name: str) -> None:
    assert make_plan(request(name, target="cpu")).dtypes.expert == "float32"
    pin = "plan.dtypes.expert"
    assert make_plan(request(name, f"{pin}=int4", target="cpu")).dtypes.expert == "int4"
    assert make_plan(request(name, f"{pin}=bfloat16")).dtypes.expert == "bfloat16"


def test_other_tables_keep_the_default_and_may_be_quantised() -> None:
    path = str(SPECS / "two_groups.yaml")
    plain = load(path, target="tpu7x-8", workload="tiny")
    assert packed_experts(plain.graph) is None
    assert make_plan(plain).dtypes.expert == "bfloat16"
    path, pin = str(SPECS / "wide_tp.yaml"), "plan.dtypes.expert=float4_e2m1fn"
    quantised = make_plan(load(path, target="cpu", workload="tiny", overrides=[pin]))
    assert quantised.dtypes.expert == "float4_e2m1fn" and quantised.memory.components["moe.scales"] > 0


def test_odd_in_dims_are_refused() -> None:
    with pytest.raises(ProblemsError) as caught:
        make_plan(
            load(str(SPECS / "tied_head.yaml"), target="cpu", workload="tiny", overrides=["plan.dtypes.expert=int4"])
        )
    (problem,) = caught.value.problems
    assert problem.path == "plan.dtypes.expert"
    assert problem.text == (
        "UNSUPPORTED: experts in int4 have one scale per 32 values of the in dim, and moe.w_down has 24"
    )
    with pytest.raises(ProblemsError, match=r"plan\.dtypes\.weight: got 'int4'"):
        request("packed_int4", "plan.dtypes.weight=int4")


def test_widths_that_cut_a_block_of_scales_are_no_choice() -> None:
    """w_down's 128 rows are 4 blocks: over 8 devices each would hold half a one."""
    plan = make_plan(request("packed_int4"))
    cut = [c for c in plan.candidates if (c.attention, c.experts) == ("DP8", "TP8")]
    assert cut and all("4 scale blocks of 32 expert_intermediate over 8 devices" in c.why for c in cut)


@pytest.mark.parametrize("name", DTYPES)
def test_bytes_are_a_quarter_of_bfloat16_and_a_scale_per_32(name: str) -> None:
    large = ("model.hidden_size=2048", "model.blocks.moe.experts.intermediate_size=1024")
    packed, wide = (make_plan(request(name, *large, *more)).memory.components for more in ((), WIDE))
    assert packed["moe.experts"] * 4 == wide["moe.experts"]
    assert packed["moe.scales"] * 8 == packed["moe.experts"]  # 2 bytes per 32 values of half a byte
    assert "moe.scales" not in wide


def test_weights_of_4_bits_are_read_at_half_a_byte() -> None:
    product = {dtype: Gemm("experts", 8, 64, 128, "bfloat16", dtype) for dtype in ("bfloat16", "float8_e4m3fn", "int4")}
    assert [one.weight_bytes for one in product.values()] == [64 * 128 * 2, 64 * 128, 64 * 128 / 2]
    assert (itembits("int4"), itembits("float4_e2m1fn"), itembits("bfloat16")) == (4, 4, 16)
    with pytest.raises(AssertionError, match="int4 has no whole bytes"):
        itemsize("int4")
