"""Predictions against the published numbers and the formulas they follow from."""

from dataclasses import replace
from typing import Literal

import pytest

from moec.blocks.core.declare import Weight
from moec.blocks.core.work import Collective, Degrees, Dtypes, Gemm, Load, touched
from moec.blocks.registry import COSTS
from moec.compiler.graph.ir import BlockInst, Graph
from moec.compiler.plan.cost import Machine, Span, count_layers, floor_seconds, span_of
from moec.compiler.plan.memory import component_bytes, layer_arrays, streamed_bytes
from moec.compiler.spec.load import load
from moec.targets.target import Tiling, load_target

AXES_DP8 = (("data", 8),)
AXES_DP4_TP2 = (("data", 4), ("tensor", 2))
IRONWOOD = load_target("tpu7x-8")
MACHINE = Machine.of(IRONWOOD)
# What the published roofline assumes: float8 caches, bfloat16 state.
PUBLISHED = Dtypes("bfloat16", "bfloat16", "float8_e4m3fn", "float8_e4m3fn", "bfloat16", "bfloat16")
# Small or sensitive matrices that float8 checkpoints keep in high precision.
HIGH_PRECISION = ("router", "shared_router", "w_a", "w_b")


@pytest.fixture(scope="module")
def big() -> Graph:
    return load("qwen3.5-397b-a17b").graph


def decode_load(dp: int, concurrency: int, context: float, dtypes: Dtypes = PUBLISHED) -> Load:
    """A decode step of `concurrency` sequences; head and shared expert follow attention, as the report has it."""
    tp = 8 // dp
    rows = concurrency // dp
    degrees = Degrees(dp=dp, tp=tp, ep=8, shared=tp, head=tp, embed=tp)
    return Load(rows, rows, rows, context, context, 0, 0, 256, degrees, dtypes, 8)


def published_dtype(inst: BlockInst | None, key: str, weight: Weight) -> str:
    """Projections and experts in float8, everything else in bfloat16."""
    projection = weight.role in ("linear", "expert") and key not in HIGH_PRECISION
    return "float8_e4m3fn" if projection else "bfloat16"


def floor_ms(graph: Graph, dp: int, concurrency: int, context: float, all_experts: bool = True) -> float:
    moved = streamed_bytes(graph, decode_load(dp, concurrency, context), published_dtype, all_experts)
    return floor_seconds(moved, IRONWOOD) * 1e3


def test_decode_floor_is_the_published_step(big: Graph) -> None:
    floor = floor_ms(big, 8, 64, 5120)
    assert floor == pytest.approx(16.36, rel=0.005)
    assert 64 / floor * 1e3 / 4 == pytest.approx(978, rel=0.005)
    derated = 0.87 * 64 / 16.36e-3 / 4
    assert derated == pytest.approx(850, rel=0.002)


def test_decode_floor_of_full_tensor_parallelism_differs(big: Graph) -> None:
    assert abs(floor_ms(big, 1, 64, 5120) / 16.36 - 1) > 0.05


def test_uniform_routing_touches_fewer_experts(big: Graph) -> None:
    assert floor_ms(big, 8, 64, 5120, all_experts=False) == pytest.approx(12.68, rel=0.005)
    assert touched(64, 10 / 512) == pytest.approx(0.717, abs=0.0005)
    assert touched(512, 10 / 512) == pytest.approx(1.0, abs=1e-4)
    assert touched(3, 1.0) == 1.0


def test_floors_at_512_sequences(big: Graph) -> None:
    dp4, dp8, tp8 = (floor_ms(big, dp, 512, 5120) for dp in (4, 8, 1))
    assert dp8 == pytest.approx(20.54, rel=0.005)
    assert dp4 == pytest.approx(19.24, rel=0.005)
    assert dp4 < dp8 < tp8


@pytest.mark.parametrize("concurrency", [4, 8])
@pytest.mark.parametrize("context", [1536, 8704])
def test_full_tensor_parallelism_has_the_lowest_floor_at_few_sequences(
    big: Graph, concurrency: int, context: float
) -> None:
    floors = {dp: floor_ms(big, dp, max(concurrency, dp), context, all_experts=False) for dp in (1, 4, 8)}
    assert min(floors, key=lambda dp: floors[dp]) == 1


def test_streamed_bytes_are_the_report_s(big: Graph) -> None:
    moved = streamed_bytes(big, decode_load(8, 64, 5120), published_dtype, all_experts=True)
    assert moved["weights"] == pytest.approx(58_270_062_080, rel=1e-6)
    per_sequence = streamed_bytes(big, replace(decode_load(8, 8, 1), decode_rows=1))
    assert per_sequence["kv"] == 15_360
    assert per_sequence["state"] == 2 * 94_371_840
    assert per_sequence["conv"] == 2 * 3_317_760


def test_work_streams_the_weights_that_memory_counts(big: Graph) -> None:
    """Two accounts of the same bytes: products in cost.py, declarations in block.py."""
    load_ = decode_load(8, 512, 5120)
    arrays = component_bytes(layer_arrays(big, load_.degrees, load_.dtypes), Tiling(sublanes=1, lanes=1, source="test"))
    layers = count_layers(big)
    for inst in big.blocks().values():
        terms = COSTS[inst.kind]().work(inst.fields, big.dims, load_)
        dense = sum(t.weight_bytes for t in terms if isinstance(t, Gemm) and t.weight_dtype == "bfloat16")
        # Gains, convolutions and decays are no products.
        assert dense * layers[inst.name] == pytest.approx(arrays[inst.name], rel=2e-3)
    experts = [t for t in COSTS["moe"]().work(big.blocks()["moe"].fields, big.dims, load_) if isinstance(t, Gemm)]
    moved = sum(t.weight_bytes for t in experts if t.op == "experts") * layers["moe"]
    assert moved == pytest.approx(arrays["moe.experts"] * touched(512, 10 / 512), rel=1e-9)


@pytest.mark.parametrize(
    ("axes", "used", "expected"),
    [
        (AXES_DP8, ("data",), Span(8, 4, 1)),
        (AXES_DP4_TP2, ("tensor",), Span(2, 1, 1)),
        (AXES_DP4_TP2, ("data",), Span(4, 4, 2)),
        (AXES_DP4_TP2, ("data", "tensor"), Span(8, 4, 1)),
        ((("data", 2), ("tensor", 4)), ("tensor",), Span(4, 2, 1)),
        ((("data", 2), ("tensor", 4)), ("data",), Span(2, 2, 2)),
    ],
)
def test_spans(axes: tuple[tuple[str, int], ...], used: tuple[str, ...], expected: Span) -> None:
    assert span_of(axes, used, 2) == expected


def _call(kind: Literal["all-gather", "reduce-scatter", "all-reduce"], tokens: int) -> Collective:
    return Collective("x", kind, ("attention_dp",), "bfloat16", (tokens, 4096), "test")


def test_collective_times_follow_the_fit() -> None:
    everyone = span_of(AXES_DP8, ("data",), 2)
    seconds, link = MACHINE.collective_seconds(_call("all-gather", 8192), everyone)
    assert link == "ICI"
    assert seconds == pytest.approx(13.2e-6 + 8192 * 4096 * 2 * 3 / 4 / 178.5e9)
    assert MACHINE.collective_seconds(_call("reduce-scatter", 8192), everyone)[0] == seconds
    twice = MACHINE.collective_seconds(_call("all-reduce", 8192), everyone)[0]
    assert twice == pytest.approx(2 * seconds - 13.2e-6)


def test_core_pairs_use_their_own_link() -> None:
    pair = span_of(AXES_DP4_TP2, ("tensor",), 2)
    seconds, link = MACHINE.collective_seconds(_call("all-reduce", 128), pair)
    assert link == "D2D"
    assert seconds == pytest.approx(2e-6 + 128 * 4096 * 2 / 600e9)


def test_groups_on_one_chip_share_its_links() -> None:
    shared = MACHINE.collective_seconds(_call("all-gather", 8192), span_of(AXES_DP4_TP2, ("data",), 2))[0]
    alone = MACHINE.collective_seconds(_call("all-gather", 8192), span_of(AXES_DP8, ("data",), 2))[0]
    assert shared - 13.2e-6 == pytest.approx(2 * (alone - 13.2e-6))


def test_work_binds_where_a_roofline_says() -> None:
    few = Gemm("x", 8, 16384, 4096, "bfloat16", "bfloat16")
    many = replace(few, m=8192)
    for gemm, memory_bound in ((few, True), (many, False)):
        memory = MACHINE.memory_seconds(gemm.weight_bytes + gemm.activation_bytes, gemm.weight_bytes)
        assert (memory > MACHINE.matrix_seconds([gemm])) == memory_bound
