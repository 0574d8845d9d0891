"""Predictions against the published numbers and the formulas they follow from."""

from dataclasses import replace
from types import ModuleType
from typing import Literal

import pytest

from moec.blocks.core.work import Collective, Degrees, Dtypes, Gemm, Load, Round, Stream, touched
from moec.blocks.registry import BLOCKS, PARTS, cost
from moec.compiler.graph.ir import Graph
from moec.compiler.plan.cost import Machine, Span, floor_seconds, price, span_of
from moec.compiler.plan.memory import component_bytes, layer_arrays, streamed_bytes
from moec.compiler.plan.plan import MeshPlan
from moec.compiler.spec.load import load
from moec.targets.target import Tiling, load_target

AXES_DP8 = (("data", 8),)
AXES_DP4_TP2 = (("data", 4), ("tensor", 2))
IRONWOOD = load_target("tpu7x-8")
MACHINE = Machine.of(IRONWOOD)
# As the published roofline has it: float8 experts and caches, bfloat16 state.
DTYPES = Dtypes("bfloat16", "bfloat16", "float8_e4m3fn", "float8_e4m3fn", "bfloat16", "bfloat16")

# Values on one device under DP8 with EP8, counted from the model's sizes.
HIDDEN = 4096
EXPERTS = 60 * 512 // 8 * 3 * HIDDEN * 1024
PROJECTIONS = (
    45 * HIDDEN * (2 * 16 * 128 + 3 * 64 * 128)  # Gated DeltaNet: q and k; v, z and output
    + 15 * HIDDEN * (2 * 32 * 256 + 2 * 2 * 256 + 32 * 256)  # attention: gated q, k and v, output
    + 60 * 3 * HIDDEN * 1024  # shared expert
)
# Routers, gates, decays and the head, which float8 checkpoints keep in bfloat16.
PRECISE = 60 * HIDDEN * (512 + 1) + 45 * HIDDEN * 2 * 64 + HIDDEN * 248320


@pytest.fixture(scope="module")
def big() -> Graph:
    return load("qwen3.5-397b-a17b").graph


def decode_load(dp: int, concurrency: int, context: float) -> Load:
    """A decode step of `concurrency` sequences; head and shared expert are cut as attention is."""
    tp, rows = 8 // dp, concurrency // dp
    degrees = Degrees(dp=dp, tp=tp, ep=8, shared=tp, head=tp, embed=tp)
    return Load(rows, rows, rows, context, context, 0, 0, 256, degrees, DTYPES, 16, 256)


def floor_ms(graph: Graph, dp: int, concurrency: int, context: float) -> float:
    return floor_seconds(streamed_bytes(graph, decode_load(dp, concurrency, context)), IRONWOOD) * 1e3


def test_streamed_bytes_are_those_of_the_sizes(big: Graph) -> None:
    moved = streamed_bytes(big, decode_load(8, 64, 5120))
    used = 1 - (1 - 10 / 512) ** 64
    assert moved["weights"] == pytest.approx(EXPERTS * used + 2 * (PROJECTIONS + PRECISE), rel=2e-4)
    one = streamed_bytes(big, replace(decode_load(8, 8, 1), decode_rows=1))
    assert one["kv"] == 15 * 2 * 2 * 256
    assert one["state"] == 2 * 45 * 64 * 128 * 128 * 2
    assert one["conv"] == 2 * 45 * 3 * (2 * 16 + 64) * 128 * 2


def test_decode_floor_is_the_published_step(big: Graph) -> None:
    """16.36 ms and 978 output tokens per second and chip at 64 sequences of 1k + 8k tokens.

    https://developers.googleblog.com/systems-engineering-playbook-optimizing-qwen-35-397b-moe-on-ironwood-tpu7x
    Its inputs are not published: it comes out when projections are float8 and every expert is read.
    """
    moved = streamed_bytes(big, decode_load(8, 64, 5120))
    moved["weights"] += EXPERTS * (1 - touched(64, 10 / 512)) - PROJECTIONS
    floor = floor_seconds(moved, IRONWOOD)
    assert floor == pytest.approx(16.36e-3, rel=0.005)
    assert 64 / floor / 4 == pytest.approx(978, rel=0.005)


def test_tensor_parallelism_streams_the_cache_more_often(big: Graph) -> None:
    """Two key/value heads on eight devices: each streams a whole one."""
    dp4, dp8, tp8 = (streamed_bytes(big, decode_load(dp, 512, 5120))["kv"] for dp in (4, 8, 1))
    assert tp8 == 4 * dp8 == 4 * dp4


def test_uniform_routing_touches_fewer_experts() -> None:
    assert touched(2, 1 / 2) == 3 / 4  # two tokens, two experts: half the time they meet in one
    assert touched(3, 1.0) == 1.0
    assert touched(512, 10 / 512) == pytest.approx(1.0, abs=1e-4)


@pytest.mark.parametrize("concurrency", [4, 8])
@pytest.mark.parametrize("context", [1536, 8704])
def test_full_tensor_parallelism_has_the_lowest_floor_at_few_sequences(
    big: Graph, concurrency: int, context: float
) -> None:
    floors = {dp: floor_ms(big, dp, max(concurrency, dp), context) for dp in (1, 4, 8)}
    assert min(floors, key=lambda dp: floors[dp]) == 1


def xla_cost(kind: str) -> ModuleType:
    """What a block or a part costs in plain XLA."""
    return cost(kind, (BLOCKS.get(kind) or PARTS[kind])().VARIANTS[0])


def test_work_streams_the_weights_that_memory_counts(big: Graph) -> None:
    """Two accounts of the same bytes: products in cost.py, declarations in block.py."""
    load_ = decode_load(8, 512, 5120)
    arrays = component_bytes(layer_arrays(big, load_.degrees, load_.dtypes), Tiling(sublanes=1, lanes=1, source="test"))
    layers = {name: len(big.layers_of(name)) for name in big.blocks()}
    for inst in big.blocks().values():
        terms = [*xla_cost(inst.kind).work(inst.fields, big.dims, load_)]
        if inst.kind == "moe":
            terms += xla_cost("router").work(inst.fields.router, big.dims, load_)
        dense = sum(t.weight_bytes for t in terms if isinstance(t, Gemm) and t.weight_dtype == "bfloat16")
        # Gains, convolutions and decays are no products.
        assert dense * layers[inst.name] == pytest.approx(arrays[inst.name], rel=2e-3)
    experts = [t for t in xla_cost("moe").work(big.blocks()["moe"].fields, big.dims, load_) if isinstance(t, Gemm)]
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


def test_rounds_of_a_kernel_overlap_within_chips_and_between_them() -> None:
    """Bytes on the links as the compiler's; what the first batch does within its chip runs beside nothing."""
    everyone, whole = span_of(AXES_DP8, ("data",), 2), _call("reduce-scatter", 8192)
    run = 8192 // 8 * 4096 * 2
    rounds = (Round("D2D", 4 * run), Round("ICI", 2 * run), Round("ICI", run))
    for batches in (2, 16):
        seconds, link = MACHINE.collective_seconds(replace(whole, rounds=rounds, batches=batches), everyone)
        alone = 4 * run / 600e9 / batches
        assert link == "ICI"
        assert seconds == pytest.approx(MACHINE.collective_seconds(whole, everyone)[0] + alone)
    shared = replace(whole, rounds=(Round("ICI", 2 * run, devices=2),))
    assert MACHINE.collective_seconds(shared, everyone)[0] == pytest.approx(13.2e-6 + 4 * run / 89.25e9)
    pair = replace(whole, rounds=(Round("D2D", run),), batches=2)
    seconds, link = MACHINE.collective_seconds(pair, span_of(AXES_DP4_TP2, ("tensor",), 2))
    assert link == "D2D" and seconds == pytest.approx(2e-6 + run / 600e9)


@pytest.mark.parametrize("beside", [1e3, 1e10])
def test_collectives_of_one_operator_run_beside_its_other_terms(beside: float) -> None:
    mesh = MeshPlan(axes=AXES_DP8, attention_dp=("data",), attention_tp=(), expert_ep=("data",), expert_tp=())
    call = replace(_call("reduce-scatter", 2048), op="back")
    (op,) = price(MACHINE, mesh, "moe", 1, [call, call, Stream("back", beside, beside)])
    one = MACHINE.collective_seconds(call, span_of(AXES_DP8, ("data",), 2))[0]
    assert [(message.call, message.seconds) for message in op.messages] == [(call, one)] * 2
    assert op.seconds == max(2 * one, MACHINE.memory_seconds(beside, beside))
    assert op.binding == ("ICI" if beside < 1e6 else "HBM")


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


def test_cached_keys_are_charged_as_the_variant_gathers_them(big: Graph) -> None:
    """Pages are read, written to a copy and read again, by decode rows as by blocks of prefill tokens."""
    load_ = replace(decode_load(8, 64, 4096), prefill_tokens=1024, prefill_context=4096)
    terms = xla_cost("attention").work(big.blocks()["gqa"].fields, big.dims, load_)
    token = 2 * 2 * 256  # float8
    streams = {t.op: t.bytes for t in terms if isinstance(t, Stream)}
    assert streams["attend decode"] == 8 * 4096 * token * 3
    assert streams["attend prefill"] == 1024 / 128 * 4096 * token * 3


def test_row_blocks_end_where_the_target_says(big: Graph) -> None:
    fields, busy = big.blocks()["moe"].fields, replace(decode_load(8, 512, 1), prefill_tokens=4096)
    tuning = xla_cost("moe").tuning(fields, big.dims, {"idle": decode_load(8, 8, 1), "busy": busy})
    assert tuning == {"block_rows.idle": 16, "block_rows.busy": 256}
    tuning = xla_cost("moe").tuning(fields, big.dims, {"busy": replace(busy, row_full=128)})
    assert tuning == {"block_rows.busy": 128}


def test_float32_logits_are_priced_as_a_float32_product(big: Graph) -> None:
    fields, load_ = big.blocks()["moe"].fields, decode_load(8, 512, 1)
    sharp = fields.model_copy(update={"router": fields.router.model_copy(update={"logits_dtype": "float32"})})
    routes = [xla_cost("router").work(one.router, big.dims, load_)[0] for one in (fields, sharp)]
    assert [(route.op, route.dtype, route.weight_dtype) for route in routes] == [
        ("route", "bfloat16", "bfloat16"),
        ("route", "float32", "bfloat16"),
    ]
    # Six passes, as the target says.
    plain, wide = (MACHINE.matrix_seconds([route]) for route in routes)
    assert wide == pytest.approx(6 * plain, rel=0.01)
