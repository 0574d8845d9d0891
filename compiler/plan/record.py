"""The chosen option as a Plan: everything the emitter needs, and every prediction with its provenance."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from moec.blocks.core.work import Load
from moec.targets.target import Target, origins

from ..graph.weights import block_state
from ..spec.schema import Request
from .chip import chip_limits, traced_device
from .cost import Message, OpCost, floor_seconds
from .evaluate import GIB, Priced, Question
from .memory import available_bytes, cache_pools, streamed_bytes
from .plan import Candidate, CollectivePlan, DtypePlan, Estimate, Plan, StepTerm, Traffic, VariantChoice
from .scales import scale_choices
from .steps import DECODE, MIXED
from .tuned import tiles
from .variants import Chosen, places, sparsecore_assumptions, way_back

if TYPE_CHECKING:
    from .choose import Judged

STEP = "step"
_ONCE = ("embed", "head")  # scopes outside the layers


def build_plan(request: Request, question: Question, chosen: Priced, judged: "Sequence[Judged]") -> Plan:
    """The decision record."""
    option, steps, dtypes = chosen.option, chosen.steps, question.dtypes
    loads = question.loads(option, steps)
    workload, variants = question.workload, question.variants(option)
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
        mlp=option.mlp,
        variants=variants.names(),
        variant_choices=_with_origins(question, variants, loads),
        scale_choices=scale_choices(question, chosen),
        tuning=_tuning(question, variants, loads),
        page_size=steps.page_size,
        pages_per_rank=steps.num_pages,
        slots_per_rank=steps.num_slots,
        max_context=workload.max_context,
        buckets=steps.buckets(),
        collectives=tuple(_collective(chosen, *call) for call in _calls(chosen)),
        memory=chosen.memory,
        cache=cache_pools(question.graph, option.degrees, dtypes, steps, question.target.tiling),
        estimates=_estimates(question, chosen, loads[DECODE]),
        candidates=tuple(_candidate(one) for one in judged),
        compile_options=question.target.compile_options,
        chip=vars(chip_limits(question.target)),
        device=traced_device(question.target) if "sparsecore" in variants.cores.values() else None,
        traffic=Traffic(isl=workload.isl, osl=workload.osl, concurrency=workload.concurrency),
        breakdown=_breakdown(chosen),
        notes=_notes(question, chosen),
    )


def significant(value: float) -> float:
    """Six significant digits, so that plan.json does not depend on the last bit of a logarithm."""
    return float(f"{value:.6g}")


def _tuning(question: Question, variants: Chosen, loads: dict[str, Load]) -> dict[str, int]:
    """What each place tunes; parts of a block under the block's name."""
    found = {}
    for place in (*places(question.graph), way_back(question.graph)):
        tuned = tiles(question.target, place, variants.variants[place.name], question.graph.dims, loads)
        found.update({f"{place.owner}.{key}": value for key, value in tuned.values.items()})
    return found


def _with_origins(question: Question, variants: Chosen, loads: dict[str, Load]) -> tuple[VariantChoice, ...]:
    """Every variant's verdict, with where the tiles of the chosen kernels are from."""
    origin = {
        place.name: tiles(question.target, place, variants.variants[place.name], question.graph.dims, loads).origins
        for place in (way_back(question.graph), *places(question.graph))
        if variants.variants[place.name].kernel
    }
    return tuple(
        one.model_copy(update={"tiles_from": origin[one.scope]})
        if one.verdict == "CHOSEN" and one.scope in origin
        else one
        for one in variants.choices
    )


def _calls(chosen: Priced) -> list[tuple[str, OpCost, Message]]:
    return [(name, op, one) for name, cost in chosen.costs.items() for op, one in cost.collectives()]


def _collective(chosen: Priced, bucket: str, op: OpCost, message: Message) -> CollectivePlan:
    call = message.call
    return CollectivePlan(
        bucket=bucket,
        scope=STEP if op.scope in _ONCE else op.scope,
        op=call.kind,
        axes=tuple(name for role in call.axes for name in getattr(chosen.mesh, role)),
        dtype=call.dtype,
        shape=call.shape,
        what=call.what,
        bytes=call.payload_bytes,
        predicted_us=significant(message.seconds * 1e6),
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
        mlp=option.mlp,
        verdict=one.verdict,
        why=one.why,
        numbers={key: significant(value) for key, value in one.numbers.items()},
    )


def _estimates(question: Question, chosen: Priced, decode: Load) -> dict[str, Estimate]:
    """Predictions by name; terms are milliseconds per scope."""
    workload, steps, target = question.workload, chosen.steps, question.target
    times = {name: cost.seconds * 1e3 for name, cost in chosen.costs.items()}
    output = steps.served / chosen.token_seconds / target.topology.num_chips
    prefill = (steps.mixed_tokens - steps.seqs) * chosen.option.dp / times[MIXED] * 1e3
    floor = floor_seconds(streamed_bytes(question.graph, decode), target) * 1e3
    bandwidth = target.hbm_gbps
    bound = "assumed" if bandwidth.kind == "assumption" else "lower bound"
    return {
        "decode_step": _time(target, times[DECODE], "ms", _scopes(chosen, DECODE)),
        "mixed_step": _time(target, times[MIXED], "ms", _scopes(chosen, MIXED)),
        "decode_floor": _definite(
            floor, "ms", bound, f"bytes streamed once at {bandwidth.value:g} GB/s ({bandwidth.kind})"
        ),
        "tpot": _time(target, chosen.token_seconds * 1e3, "ms"),
        "mixed_steps_per_token": _definite(
            chosen.share, "1", "definition", "workload: prompt tokens per output token over a step's room"
        ),
        "output_tokens_per_s_chip": _time(target, output, "tokens/s/chip"),
        "total_tokens_per_s_chip": _time(target, output * (1 + workload.isl / workload.osl), "tokens/s/chip"),
        "prefill_tokens_per_s": _time(target, prefill, "tokens/s"),
        **_capacities(question, chosen),
    }


def _capacities(question: Question, chosen: Priced) -> dict[str, Estimate]:
    """What is needed, what is left and how many sequences fit; the error of the first is larger beside the others."""
    weights = sum(question.weight_bytes(chosen.option.degrees).values())
    needed, available = chosen.hbm_bytes, available_bytes(chosen.memory)
    left, most = available - needed, question.max_sequences(chosen.option)
    target = question.target
    return {
        "hbm_needed": _size(target, needed / GIB, "GiB", 1.0),
        "hbm_headroom": _size(target, left / GIB, "GiB", needed / max(left, 1)),
        "max_sequences": _size(target, most, "sequences", available / (available - weights)),
    }


def _time(target: Target, value: float, unit: str, terms: dict[str, float] | None = None) -> Estimate:
    provenance = f"analytic: roofline and alpha-beta with the numbers of targets/{target.chip}"
    band = target.bands.step_time_pct
    return _estimate(value, unit, band.value, f"{band.kind}: {band.source}", provenance, terms)


def _size(target: Target, value: float, unit: str, share: float) -> Estimate:
    """share: what is needed, over `value` in the same unit."""
    hbm, band = target.hbm_gib, target.bands.memory_pct
    provenance = f"analytic: array layouts and a formula for temporaries, in {hbm.value:g} GiB ({hbm.kind})"
    return _estimate(value, unit, band.value * share, f"{band.kind}: {band.source}", provenance)


def _definite(value: float, unit: str, what: str, provenance: str) -> Estimate:
    """A number that follows from its inputs, however good those are. what: a bound, a definition."""
    return _estimate(value, unit, 0, what, provenance)


def _estimate(
    value: float, unit: str, band: float, band_from: str, provenance: str, terms: dict[str, float] | None = None
) -> Estimate:
    return Estimate(
        value=significant(value),
        unit=unit,
        band_pct=float(f"{band:.2g}"),
        band_from=band_from,
        provenance=provenance,
        terms=terms or {},
    )


def _scopes(chosen: Priced, bucket: str) -> dict[str, float]:
    return {scope: significant(seconds * 1e3) for scope, seconds in chosen.costs[bucket].by_scope().items()}


def _notes(question: Question, chosen: Priced) -> tuple[str, ...]:
    """Assumptions a reader must know to judge the predictions."""
    target, workload = question.target, question.workload
    context, overhead, bands = workload.isl + workload.osl // 2, target.layer_overhead_us, target.bands
    kinds = Counter(one.kind for one in origins(target))
    return (
        f"Steady state: every row decodes (mean context {context}), each output token brings "
        f"{workload.isl / workload.osl:g} prompt tokens, prefill is spread evenly over ranks.",
        "Routing is uniform; experts count by the share the step's tokens are expected to touch.",
        "Collectives overlap with nothing, but where sums return in chunks; devices of one chip take data in once.",
        "Rows are greedy; each row that draws reads its logits up to 96 times more, which is not counted.",
        f"Fixed cost per layer: {overhead.value:g} us ({overhead.kind}: {overhead.source}).",
        f"HBM per device: {target.hbm_gib.value:g} GiB ({target.hbm_gib.kind}), minus "
        f"{target.hbm_reserve_gib.value:g} GiB for the runtime ({target.hbm_reserve_gib.kind}).",
        f"Numbers of targets/{target.chip}: {', '.join(f'{n} {kind}' for kind, n in kinds.most_common())}.",
        f"Times may be off by {bands.step_time_pct.value:g} % ({bands.step_time_pct.kind}: "
        f"{bands.step_time_pct.source}).",
        f"Memory may be off by {bands.memory_pct.value:g} % of what is needed ({bands.memory_pct.kind}: "
        f"{bands.memory_pct.source}).",
        *_page_note(question, chosen),
        *_state_note(question, chosen),
        *_cores_note(question, chosen),
    )


def _page_note(question: Question, chosen: Priced) -> tuple[str, ...]:
    """A page size that is neither pinned nor the target's."""
    usual, size = question.target.serving.page_size, chosen.steps.page_size
    if question.pins.page_size or size == usual:
        return ()
    steps = chosen.steps
    return (
        f"Pages hold {size} tokens, not the target's {usual}: contexts end at {question.workload.max_context} tokens, "
        f"and a step of {steps.mixed_tokens} must hold a page beside {steps.seqs - 1} decode rows.",
    )


def _state_note(question: Question, chosen: Priced) -> tuple[str, ...]:
    """A recurrent state that is kept narrower than released configurations say."""
    graph, dtypes, wide = question.graph, question.dtypes, "float32"
    states = [state for inst in graph.blocks().values() for state in block_state(graph, inst)]
    if dtypes.state == wide or all(state.role != "state" for state in states):
        return ()
    asked = replace(question, dtypes=replace(dtypes, state=wide))
    more = asked.memory(chosen.option, chosen.steps).arguments_bytes - chosen.memory.arguments_bytes
    why = "pinned" if question.pins.dtypes.state else question.target.dtypes.source
    return (
        f"Recurrent state is stored in {dtypes.state} ({why}); released configurations of such models name {wide} "
        f"(mamba_ssm_dtype). plan.dtypes.state={wide} takes {more / GIB:.2f} GiB more per device.",
    )


def _cores_note(question: Question, chosen: Priced) -> tuple[str, ...]:
    """What the comparison of SparseCores with the TensorCore rests on, where both could sum experts' rows."""
    priced = [one for one in question.variants(chosen.option).choices if one.variant == "sparsecore" and one.us]
    if not priced:
        return ()
    assumed = sparsecore_assumptions(question.target)
    return (
        f"Sums of experts' rows on the SparseCores: counts are the compiler's, {assumed}. Nothing else is taken to run "
        "meanwhile.",
    )
