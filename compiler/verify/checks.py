"""Judges a compile against the plan: memory, donation, collectives, kernels. Pure functions on records."""

import math
from collections import Counter
from collections.abc import Iterable, Mapping
from typing import NamedTuple

from ..emit.package import plan_digest
from ..plan.plan import BucketPlan, CollectivePlan, Plan
from .collectives import Collective
from .kernels import Kernel
from .measured import Measured, Memory
from .report import GIB, Check, size_text, skipped, verdict

# How far the plan's bytes may be from the compiler's, for programs of at least 1 GiB: a plan that fills a
# 95 GiB chip to 90 % still fits when it is 2 % off.
TOTAL_TOLERANCE = 0.02
ARGUMENT_TOLERANCE = 0.02
JUDGED_BYTES = GIB
# Temporaries are a fraction of a percent of the total, so the bound on the total would hide any error of theirs.
# 0.13 to 0.56 GiB in targets/tpu7x/evidence/aot_memory.json: half a GiB catches a buffer that was forgotten.
TEMP_TOLERANCE_BYTES = GIB // 2
# Below this XLA may turn small gathers and scatters into all-reduces; the plan prices what was asked for.
JUDGED_TOKENS = 8
# XLA:CPU has no 16-bit collectives: it widens them.
CPU_WIDENED = ("bfloat16", "float16")
STEP = "step"


class Key(NamedTuple):
    """What makes two collectives the same. elements: of the full array, as XLA may reshape it."""

    scope: str
    op: str
    dtype: str
    elements: int
    axes: tuple[str, ...]

    def text(self, count: int) -> str:
        where = self.scope or "an unnamed place"
        return f"{count} x {self.op} {self.dtype}[{self.elements}] over {','.join(self.axes) or '?'} in {where}"


def check_bucket(
    measured: Measured, plan: Plan, layers: Mapping[str, int], kernels: Mapping[str, int], backend: str
) -> tuple[Check, ...]:
    """All checks of one compiled bucket. layers: how many layers use each block instance. kernels: launches per step
    that the plan's variants imply, by name."""
    first = (*check_digest(measured, plan), check_compiled(measured))
    if measured.memory is None:
        return first
    bucket = next(b for b in plan.buckets if b.name == measured.bucket)
    return (
        *first,
        *check_memory(measured.memory, plan, measured.bucket, backend),
        check_donation(measured),
        *check_collectives(measured.collectives, plan, bucket, layers, backend),
        check_kernels(measured.kernels, kernels),
    )


def check_digest(measured: Measured, plan: Plan) -> tuple[Check, ...]:
    """The compiled program was emitted from this plan; nothing to say when the worker died before it knew."""
    wanted = plan_digest(plan)
    if not measured.plan_digest:
        return ()
    same = measured.plan_digest == wanted
    text = f"plan.json {wanted}" if same else f"program of plan {measured.plan_digest}, plan.json is {wanted}"
    return (verdict("same plan", same, text),)


def check_compiled(measured: Measured) -> Check:
    """The compiler took the program; an HBM verdict comes with its numbers."""
    if measured.outcome == "compiled":
        times = f"{measured.compile_s:.1f} s wall, {measured.compile_cpu_s:.1f} s CPU"
        return verdict("compiles", True, times, wall_s=measured.compile_s, cpu_s=measured.compile_cpu_s)
    if measured.oom:
        needed, available = measured.oom.needed, measured.oom.available
        text = f"out of HBM: needs {size_text(needed)} of {size_text(available)} per device"
        return verdict("compiles", False, text, needed_bytes=needed, available_bytes=available)
    return verdict("compiles", False, measured.message.strip() or "the compiler gave no message")


def check_memory(memory: Memory, plan: Plan, bucket: str, backend: str) -> tuple[Check, ...]:
    """Arguments, temporaries and total against the plan; total and reserve against the chip."""
    planned, temporaries = plan.memory.arguments_bytes, plan.memory.temp_bytes[bucket]
    if memory.total < JUDGED_BYTES:
        text = f"program of {size_text(memory.total)} per device; judged from {size_text(JUDGED_BYTES)} on"
        compared = tuple(skipped(name, text) for name in ("arguments", "temporaries", "total memory"))
    else:
        compared = (
            _within("arguments", memory.argument, planned, ARGUMENT_TOLERANCE),
            _temporaries(memory.temp, temporaries),
            _within("total memory", memory.total, planned + temporaries, TOTAL_TOLERANCE),
        )
    if backend == "cpu":
        return (*compared, skipped("fits", "host memory has no per-device limit"))
    return (*compared, _fits(memory, plan))


def check_donation(measured: Measured) -> Check:
    """Every state array is updated in place, so alias bytes cover the whole state."""
    assert measured.memory is not None
    lost = [array.name for array in measured.state if not array.aliased]
    state, alias = sum(array.bytes for array in measured.state), measured.memory.alias
    # Alias bytes may exceed the state's: they include the chip's tile padding.
    text = f"aliased {size_text(alias)}, state {size_text(state)}"
    text += f"; not aliased: {', '.join(lost)}" if lost else f", {len(measured.state)} arrays"
    return verdict("donation", not lost and alias >= state, text, alias_bytes=alias, state_bytes=state)


def check_collectives(
    found: Iterable[Collective], plan: Plan, bucket: BucketPlan, layers: Mapping[str, int], backend: str
) -> tuple[Check, ...]:
    """Collectives per step against the plan's: those of the layers, then those once per step."""
    order = tuple(name for name, _ in plan.mesh.axes)
    expected = _expected([c for c in plan.collectives if c.bucket == bucket.name], layers, order, backend)
    counted, unknown = _found(found, layers)
    if unknown:
        names = ", ".join(f"{c.op} {c.name}" for c in unknown)
        return (verdict("collectives", False, f"loops without a static trip count hold {names}"),)
    left, extra = expected - counted, counted - expected
    _settle_unscoped(left, extra)
    rewritten = _take_rewritten(left, extra)
    parts = (
        ("collectives per layer", tuple(sorted({*layers, ""})), bucket.tokens_per_rank >= JUDGED_TOKENS),
        ("collectives per step", (STEP,), False),
    )
    return tuple(
        _judge(name, *(_within_scopes(c, scopes) for c in (expected, left, extra, rewritten)), strict=strict)
        for name, scopes, strict in parts
    )


def check_kernels(found: Iterable[Kernel], planned: Mapping[str, int]) -> Check:
    """The program launches the kernels that the plan's variants imply, each as often, and no other."""
    expected, counted = Counter(planned), Counter[str]()
    found = tuple(found)
    unknown = sorted({one.name for one in found if one.count is None})
    if unknown:
        return verdict("kernels", False, f"loops without a static trip count hold {', '.join(unknown)}")
    for one in found:
        counted[one.name] += one.count or 0
    left, extra = expected - counted, counted - expected
    notes = [f"missing {count} x {name}" for name, count in sorted(left.items())]
    notes += [f"unplanned {count} x {name}" for name, count in sorted(extra.items())]
    summary = ", ".join(f"{count} {name}" for name, count in sorted(expected.items())) or "none"
    text = f"as planned: {summary}" if not notes else f"planned: {summary}; " + "; ".join(notes)
    numbers = {"planned": expected.total(), "missing": left.total(), "unplanned": extra.total()}
    return verdict("kernels", not notes, text, **numbers)


def scope_of(collective: Collective, layers: Mapping[str, int]) -> str:
    """Innermost block instance in the path of named scopes, else "step"; "" when an optimisation lost the path."""
    named = [part for part in collective.op_name.split("/") if part in layers]
    if named:
        return named[-1]
    return STEP if collective.op_name and not collective.in_loop else ""


def _within(name: str, compiler: int, planned: int, tolerance: float) -> Check:
    off = abs(planned - compiler) / compiler
    text = f"plan {size_text(planned)}, compiler {size_text(compiler)}: {off:.2%} apart, bound {tolerance:.0%}"
    return verdict(name, off <= tolerance, text, planned_bytes=planned, compiler_bytes=compiler, relative=off)


def _temporaries(compiler: int, planned: int) -> Check:
    off = abs(planned - compiler)
    text = f"plan {size_text(planned)}, compiler {size_text(compiler)}: {size_text(off)} apart, "
    text += f"bound {size_text(TEMP_TOLERANCE_BYTES)}"
    numbers = {"planned_bytes": planned, "compiler_bytes": compiler, "apart_bytes": off}
    return verdict("temporaries", off <= TEMP_TOLERANCE_BYTES, text, **numbers)


def _fits(memory: Memory, plan: Plan) -> Check:
    usable, reserve = plan.memory.usable_bytes, plan.memory.reserve_bytes
    text = f"needs {size_text(memory.total)} + reserve {size_text(reserve)} of {size_text(usable)} per device"
    numbers = {"needed_bytes": memory.total, "reserve_bytes": reserve, "usable_bytes": usable}
    return verdict("fits", memory.total + reserve <= usable, text, **numbers)


def _expected(
    planned: Iterable[CollectivePlan], layers: Mapping[str, int], order: tuple[str, ...], backend: str
) -> Counter[Key]:
    counts: Counter[Key] = Counter()
    for entry in planned:
        dtype = "float32" if backend == "cpu" and entry.dtype in CPU_WIDENED else entry.dtype
        axes = tuple(name for name in order if name in entry.axes)
        key = Key(entry.scope, entry.op, dtype, math.prod(entry.shape), axes)
        counts[key] += 1 if entry.scope == STEP else layers[entry.scope]
    return counts


def _found(found: Iterable[Collective], layers: Mapping[str, int]) -> tuple[Counter[Key], tuple[Collective, ...]]:
    counts: Counter[Key] = Counter()
    unknown = []
    for c in found:
        if c.count is None:
            unknown.append(c)
        else:
            counts[Key(scope_of(c, layers), c.op, c.dtype, c.elements, c.axes)] += c.count
    return counts, tuple(unknown)


def _settle_unscoped(left: Counter[Key], extra: Counter[Key]) -> None:
    """A collective that lost its scope name to an optimisation stands for one that is missing."""
    for key in list(left):
        bare = key._replace(scope="")
        settled = min(left[key], extra[bare])
        left[key] -= settled
        extra[bare] -= settled


def _take_rewritten(left: Counter[Key], extra: Counter[Key]) -> Counter[Key]:
    """Missing gathers and scatters that XLA expresses as all-reduces of the full array; they leave both sides."""
    taken: Counter[Key] = Counter()
    for key in list(left):
        for scope in (key.scope, ""):
            other = key._replace(scope=scope, op="all-reduce")
            if key.op in ("all-gather", "reduce-scatter") and (count := min(left[key], extra[other])):
                left[key] -= count
                extra[other] -= count
                taken[key] += count
    return taken


def _within_scopes(counts: Counter[Key], scopes: tuple[str, ...]) -> Counter[Key]:
    return Counter({key: count for key, count in counts.items() if key.scope in scopes and count})


def _judge(
    name: str,
    planned: Counter[Key],
    left: Counter[Key],
    extra: Counter[Key],
    rewritten: Counter[Key],
    *,
    strict: bool,
) -> Check:
    """One verdict. strict: a collective that XLA expresses otherwise is a failure."""
    notes = [f"missing {key.text(count)}" for key, count in left.items()]
    notes += [f"unplanned {key.text(count)}" for key, count in extra.items()]
    notes += [f"XLA made an all-reduce of {key.text(count)}" for key, count in rewritten.items()]
    by_op: Counter[str] = Counter()
    for key, count in planned.items():
        by_op[key.op] += count
    summary = ", ".join(f"{count} {op}" for op, count in sorted(by_op.items())) or "none"
    text = f"as planned: {summary}" if not notes else f"planned: {summary}; " + "; ".join(notes)
    numbers = {"planned": sum(planned.values()), "missing": sum(left.values()), "unplanned": sum(extra.values())}
    return verdict(name, not left and not extra and not (strict and rewritten), text, **numbers)
