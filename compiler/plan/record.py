"""The chosen option as a Plan: everything the emitter needs, and every prediction with its provenance."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from moec.blocks.core.work import Load
from moec.blocks.registry import COSTS

from ..spec.schema import Request
from .cost import BAND_PCT, OpCost, floor_seconds
from .evaluate import GIB, Priced, Question
from .memory import BAND_PCT as MEMORY_BAND_PCT
from .memory import available_bytes, streamed_bytes
from .plan import Candidate, CollectivePlan, DtypePlan, Estimate, Plan, StepTerm, Traffic
from .steps import DECODE, MIXED
from .variants import pick_variants

if TYPE_CHECKING:
    from .choose import Judged

STEP = "step"
_ONCE = ("embed", "head")  # scopes outside the layers


def build_plan(request: Request, question: Question, chosen: Priced, judged: "Sequence[Judged]") -> Plan:
    """The decision record."""
    option, steps, dtypes = chosen.option, chosen.steps, question.dtypes
    loads = question.loads(option, steps)
    workload = question.workload
    return Plan(
        model=request.model.name,
        model_source=request.model_source,
        target=question.target.name,
        workload=workload.name,
        workload_source=request.workload_source or workload.name,
        digests=request.digests,
        overrides=request.overrides,
        mesh=chosen.mesh,
        dtypes=DtypePlan(**vars(dtypes)),
        matmul_precision="highest" if dtypes.activation == "float32" else "default",
        embed=option.embed,
        head=option.head,
        shared_expert=option.shared_expert,
        variants=pick_variants(question.graph, question.target),
        tuning=_tuning(question, loads),
        page_size=steps.page_size,
        pages_per_rank=steps.num_pages,
        slots_per_rank=steps.num_slots,
        max_context=workload.max_context,
        buckets=steps.buckets(),
        collectives=tuple(_collective(chosen, name, op) for name, op in _calls(chosen)),
        memory=chosen.memory,
        estimates=_estimates(question, chosen, loads[DECODE]),
        candidates=tuple(_candidate(one) for one in judged),
        compile_options=question.target.compile_options,
        traffic=Traffic(isl=workload.isl, osl=workload.osl, concurrency=workload.concurrency),
        breakdown=_breakdown(chosen),
        notes=_notes(question),
    )


def significant(value: float) -> float:
    """Six significant digits, so that plan.json does not depend on the last bit of a logarithm."""
    return float(f"{value:.6g}")


def _tuning(question: Question, loads: dict[str, Load]) -> dict[str, int]:
    """What each block tunes, under the instance's name."""
    found = {}
    for inst in question.graph.blocks().values():
        tuned = COSTS[inst.kind]().tuning(inst.fields, loads)
        found.update({f"{inst.name}.{key}": value for key, value in tuned.items()})
    return found


def _calls(chosen: Priced) -> list[tuple[str, OpCost]]:
    return [(name, op) for name, cost in chosen.costs.items() for op in cost.collectives()]


def _collective(chosen: Priced, bucket: str, op: OpCost) -> CollectivePlan:
    call = op.collective
    assert call is not None
    return CollectivePlan(
        bucket=bucket,
        scope=STEP if op.scope in _ONCE else op.scope,
        op=call.kind,
        axes=tuple(name for role in call.axes for name in getattr(chosen.mesh, role)),
        dtype=call.dtype,
        shape=call.shape,
        what=call.what,
        bytes=call.payload_bytes,
        predicted_us=significant(op.seconds * 1e6),
    )


def _breakdown(chosen: Priced) -> tuple[StepTerm, ...]:
    return tuple(
        StepTerm(
            bucket=name,
            scope=op.scope,
            op=op.op,
            layers=op.layers,
            us=significant(op.seconds * 1e6),
            binding=op.binding,
        )
        for name, cost in chosen.costs.items()
        for op in cost.ops
    )


def _candidate(one: "Judged") -> Candidate:
    option = one.option
    return Candidate(
        attention=option.attention,
        experts=option.experts,
        embed=option.embed,
        head=option.head,
        shared_expert=option.shared_expert,
        kv_dtype=option.kv_dtype,
        verdict=one.verdict,
        why=one.why,
        numbers={key: significant(value) for key, value in one.numbers.items()},
    )


def _estimates(question: Question, chosen: Priced, decode: Load) -> dict[str, Estimate]:
    """Predictions by name; terms are milliseconds per scope."""
    workload, steps, chips = question.workload, chosen.steps, question.target.topology.num_chips
    seconds = {name: cost.seconds for name, cost in chosen.costs.items()}
    output = steps.served / chosen.token_seconds
    prefill = (steps.mixed_tokens - steps.seqs) * chosen.option.dp / seconds[MIXED]
    floor = floor_seconds(streamed_bytes(question.graph, decode), question.target)
    model = f"analytic: roofline and alpha-beta with the numbers of targets/{question.target.chip}"
    layout = "analytic: padded array sizes, calibrated formula for temporaries"
    return {
        "decode_step": _estimate(seconds[DECODE] * 1e3, "ms", model, _scopes(chosen, DECODE)),
        "mixed_step": _estimate(seconds[MIXED] * 1e3, "ms", model, _scopes(chosen, MIXED)),
        "decode_floor": _bound(floor * 1e3, "ms", "lower bound: bytes streamed once at nameplate HBM bandwidth"),
        "tpot": _estimate(chosen.token_seconds * 1e3, "ms", model),
        "mixed_steps_per_token": _bound(
            chosen.share, "1", "workload: prompt tokens per output token over a step's room"
        ),
        "output_tokens_per_s_chip": _estimate(output / chips, "tokens/s/chip", model),
        "total_tokens_per_s_chip": _estimate(
            output / chips * (1 + workload.isl / workload.osl), "tokens/s/chip", model
        ),
        "prefill_tokens_per_s": _estimate(prefill, "tokens/s", model),
        "hbm_headroom": _estimate((available_bytes(chosen.memory) - chosen.hbm_bytes) / GIB, "GiB", layout),
        "max_sequences": _estimate(question.max_sequences(chosen.option), "sequences", layout),
    }


def _estimate(value: float, unit: str, provenance: str, terms: dict[str, float] | None = None) -> Estimate:
    band = MEMORY_BAND_PCT if unit in ("GiB", "sequences") else BAND_PCT
    return Estimate(value=significant(value), unit=unit, band_pct=band, provenance=provenance, terms=terms or {})


def _bound(value: float, unit: str, provenance: str) -> Estimate:
    """A number that follows exactly from its inputs."""
    return Estimate(value=significant(value), unit=unit, band_pct=0, provenance=provenance)


def _scopes(chosen: Priced, bucket: str) -> dict[str, float]:
    return {scope: significant(seconds * 1e3) for scope, seconds in chosen.costs[bucket].by_scope().items()}


def _notes(question: Question) -> tuple[str, ...]:
    """Assumptions a reader must know to judge the predictions."""
    target, workload = question.target, question.workload
    context = workload.isl + workload.osl // 2
    return (
        f"Steady state: every row decodes (mean context {context}), each output token brings "
        f"{workload.isl / workload.osl:g} prompt tokens, prefill is spread evenly over ranks.",
        "Routing is uniform; experts count by the share the step's tokens are expected to touch.",
        "Collectives do not overlap with anything; devices of one chip take data in once.",
        f"Fixed cost per layer: {target.layer_overhead_us.value:g} us ({target.layer_overhead_us.kind}: "
        f"{target.layer_overhead_us.source}).",
        f"HBM per device: {target.hbm_gib.value:g} GiB ({target.hbm_gib.kind}), minus "
        f"{target.hbm_reserve_gib.value:g} GiB for the runtime ({target.hbm_reserve_gib.kind}).",
    )
