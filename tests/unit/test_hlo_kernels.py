"""Kernels of a compiled program against those that a plan implies.

hlo/tpu_kernels.txt is the after_optimizations dump (libtpu 0.0.52 for tpu7x:2x2x1) of the decode step of
../numerics/specs/aligned.yaml, 2048 wide, with the sums of experts' rows on the SparseCores. Cut from it: everything
but kernels, what holds them, and loop conditions; long types and operands.
"""

import ast
import itertools
from collections import Counter
from pathlib import Path

import pytest

from moec.blocks.core.declare import Variant
from moec.blocks.registry import BLOCKS, COLLECTIVES, PARTS, cost
from moec.compiler.plan.choose import make_plan
from moec.compiler.plan.plan import Plan
from moec.compiler.spec.load import load
from moec.compiler.verify import hlo
from moec.compiler.verify.checks import check_kernels
from moec.compiler.verify.kernels import Kernel, kernels, planned_kernels
from moec.compiler.verify.report import Check

HERE = Path(__file__).parent
ALIGNED = str(HERE.parent / "numerics" / "specs" / "aligned.yaml")
TARGET = "tpu7x:2x2x1"
# As the fixture was compiled: experts by kernel, summed on the SparseCores; routed by XLA.
SIZES = ("workload.concurrency=64", "workload.isl=16", "workload.osl=8", "workload.max_context=32")
SUMS = ("model.hidden_size=2048", "plan.page_size=16", "plan.dtypes.expert=bfloat16")
CHOSEN = ("plan.variants.moe=tpu_grouped", "plan.variants.router=xla", "plan.variants.unpermute=sparsecore")
COMPILED = {"gdn_decode": 3, "rpa_decode": 1, "moe_dispatch": 4, "grouped": 4, "combine_sparsecore": 4}


def text() -> str:
    return (HERE / "hlo" / "tpu_kernels.txt").read_text()


def planned(*pins: str) -> tuple[Plan, dict[str, dict[str, int]]]:
    request = load(ALIGNED, target=TARGET, workload="default", overrides=[*SIZES, *SUMS, *pins])
    plan = make_plan(request)
    return plan, planned_kernels(request.graph, plan)


def counts(found: tuple[Kernel, ...]) -> dict[str, int]:
    total: Counter[str] = Counter()
    for one in found:
        assert one.count is not None
        total[one.name] += one.count
    return dict(total)


def judged(of: str, wanted: dict[str, int]) -> Check:
    return check_kernels(kernels(hlo.parse(of)), wanted)


def test_kernels_are_counted_through_loops_and_on_sparsecores() -> None:
    """Three layers are a loop of three trips, one stands alone; sums are wrapped in async computations thrice."""
    assert counts(kernels(hlo.parse(text()))) == COMPILED


@pytest.mark.parametrize("name", ["tpu_scan", "tpu_two_axes", "cpu_scan"])
def test_custom_calls_of_the_compiler_are_no_kernels(name: str) -> None:
    found = (HERE / "hlo" / f"{name}.txt").read_text()
    assert "custom-call(" in found
    assert judged(found, {}).detail == "as planned: none"


def test_the_plan_of_the_compiled_step_passes() -> None:
    found = judged(text(), planned(*CHOSEN)[1]["decode"])
    assert (found.status, found.numbers["planned"]) == ("pass", 16), found.detail
    assert found.detail.startswith("as planned: 4 combine_sparsecore, 3 gdn_decode, ")


@pytest.mark.parametrize(
    ("pins", "bucket", "said"),
    [
        (CHOSEN, "mixed", "missing 3 x gdn_prefill; missing 1 x rpa_prefill"),
        ((*CHOSEN, "plan.variants.gdn=xla"), "decode", "unplanned 3 x gdn_decode"),
        (CHOSEN[:2], "decode", "missing 4 x combine_stream; unplanned 4 x combine_sparsecore"),
        ((CHOSEN[0], "plan.variants.router=tpu_fused", CHOSEN[2]), "decode", "missing 4 x router_fused"),
    ],
    ids=["prefill", "one block of XLA", "other cores", "router"],
)
def test_another_plan_fails_by_name(pins: tuple[str, ...], bucket: str, said: str) -> None:
    found = judged(text(), planned(*pins)[1][bucket])
    assert found.status == "fail"
    assert said in found.detail


def test_plain_xla_has_none_of_ours() -> None:
    plain = [f"plan.variants.{name}=xla" for name in ("gdn", "gqa", "moe", "router", "collectives")]
    _, wanted = planned(*plain)
    assert wanted == {"decode": {}, "mixed": {}}
    found = judged(text(), wanted["decode"])
    assert (found.status, found.numbers["unplanned"]) == ("fail", 16)


def test_a_kernel_that_was_lost_fails() -> None:
    lines = text().splitlines(keepends=True)
    without = "".join(line for line in lines if not line.lstrip().startswith("%rpa_decode"))
    assert without != text()
    found = judged(without, COMPILED)
    assert (found.status, found.detail.endswith("; missing 1 x rpa_decode")) == ("fail", True)


def test_a_loop_of_unknown_length_fails() -> None:
    endless = text().replace("direction=LT", "direction=NE")
    found = judged(endless, COMPILED)
    assert found.status == "fail"
    assert "static trip count hold combine_sparsecore, gdn_decode, grouped, moe_dispatch" in found.detail


def test_a_way_back_by_kernel_has_a_launch_per_message() -> None:
    """Four layers return one message each; a hand-made plan of two messages per layer has twice as many."""
    pins = ("plan.variants.moe=tpu_grouped", "plan.variants.collectives=tpu_hierarchical", "plan.experts.ep=8")
    request = load(ALIGNED, target=TARGET, workload="default", overrides=[*SIZES, *pins])
    plan = make_plan(request)
    assert planned_kernels(request.graph, plan)["mixed"]["reduce_scatter_hierarchical"] == 4
    back = tuple(one for one in plan.collectives if (one.scope, one.op) == ("moe", "reduce-scatter"))
    twice = plan.model_copy(update={"collectives": (*plan.collectives, *back)})
    assert planned_kernels(request.graph, twice)["mixed"]["reduce_scatter_hierarchical"] == 8


def test_sums_in_chunks_are_launched_once_per_chunk() -> None:
    plan, wanted = planned("plan.variants.moe=tpu_grouped")
    tuning = {**plan.tuning, "moe.return_chunks.decode": 1, "moe.return_chunks.mixed": 4}
    request = load(ALIGNED, target=TARGET, workload="default", overrides=[*SIZES, *SUMS])
    chunked = planned_kernels(request.graph, plan.model_copy(update={"tuning": tuning}))
    assert chunked["decode"] == wanted["decode"]
    assert chunked["mixed"]["combine_rows"] == 4 * 4
    assert "combine_stream" not in chunked["mixed"]


def variants() -> list[tuple[str, Variant]]:
    """Every kernel variant: of blocks, of parts, of the way back."""
    every = {**BLOCKS, **PARTS, "collectives": COLLECTIVES}
    return [(kind, one) for kind, module in every.items() for one in module().VARIANTS if one.kernel]


# Kernels that no emitted program launches; benchmarks do.
UNUSED = {"gather_rows_sparsecore"}


@pytest.mark.parametrize(("kind", "variant"), variants(), ids=lambda one: getattr(one, "name", one))
def test_declared_kernels_are_those_in_the_source(kind: str, variant: Variant, root: Path) -> None:
    options = itertools.product((0, 64), (0, 16), (1, 4), (False, True))
    declared = {
        name
        for stream, sparse, chunks, prefills in options
        for name in cost(kind, variant).kernels(
            {"stream_rows": stream, "sparsecore_rows": sparse, "return_chunks": chunks}, prefills=prefills
        )
    }
    trees = [ast.parse(path.read_text()) for path in (root / "blocks" / kind).glob("tpu_*.py")]
    assert declared == {name for tree in trees for name in launched(tree)} - UNUSED


def launched(tree: ast.Module) -> set[str]:
    """Names that calls of pallas_call and kernel give, up to sizes."""
    calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute)]
    given = [
        word.value
        for call in calls
        if isinstance(call.func, ast.Attribute) and call.func.attr in ("pallas_call", "kernel")
        for word in call.keywords
        if word.arg == "name"
    ]
    found: set[str] = set()
    for value in given:
        options = [value.body, value.orelse] if isinstance(value, ast.IfExp) else [value]
        for one in options:
            first = one.values[0] if isinstance(one, ast.JoinedStr) else one
            assert isinstance(first, ast.Constant) and isinstance(first.value, str), ast.unparse(value)
            found.add(first.value.rstrip("_"))
    return found
