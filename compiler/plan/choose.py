"""The exact search: every option gets one verdict with its numbers, and the best one becomes the plan.

Options whose predicted times differ by less than a threshold are ties. A fixed order
decides between them: fewer collectives per layer, less HBM, the simpler plan.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from moec.targets.target import Topology, read_topologies

from ..problems import Problem, ProblemsError
from ..spec.schema import PlanPins, Request
from .blame import refusal_problems, sharding
from .checks import check_placements, check_room, check_sizes
from .dtypes import check_dtypes, resolve_dtypes
from .evaluate import GIB, Placed, Priced, Question, Rejected, evaluate, place
from .memory import BAND_PCT as MEMORY_BAND_PCT
from .memory import available_bytes
from .plan import Plan, Reason
from .record import build_plan
from .space import Option, enumerate_options, factor_pairs
from .tuned import check_tuned
from .variants import check_variants

# Predicted times this close are a tie. Assumed: what two options share cancels in their ratio, so it is narrower
# than the error of one time (target.bands), but no pair of options was ever compared on a machine.
TIE_PCT = 15.0


@dataclass(frozen=True)
class Judged:
    """An option and what became of it. result: Rejected only for hard constraints."""

    option: Option
    verdict: Reason
    why: str
    numbers: dict[str, float]
    result: Priced | Rejected


@dataclass(frozen=True)
class Rule:
    """One step of the order between ties: the smallest key wins, and keys at most `slack` above it."""

    name: str
    key: Callable[[Priced], Any]
    show: Callable[[Priced], str]
    slack: Callable[[Priced], float] | None = None


def _hbm_slack(priced: Priced) -> float:
    """Differences of a few percent of the device's memory change nothing for the user, nor can the model see them."""
    return MEMORY_BAND_PCT / 100 * available_bytes(priced.memory)


RULES = (
    Rule("collectives per layer", lambda p: p.collectives_per_layer, lambda p: f"{p.collectives_per_layer:g}"),
    Rule("HBM", lambda p: p.hbm_bytes, lambda p: f"{p.hbm_bytes / GIB:.1f} GiB", _hbm_slack),
    Rule("simplicity", lambda p: p.complexity, lambda p: "{} cut, expert TP{}, {} mesh axes".format(*p.complexity)),
    Rule("predicted time", lambda p: p.token_seconds, lambda p: f"{p.token_seconds * 1e3:.2f} ms"),
)


def make_plan(request: Request) -> Plan:
    """The plan of a request; raises ProblemsError when the machine or the pins allow none."""
    question = ask(request)
    judged = judge(question)
    chosen = next((one.result for one in judged if one.verdict == "CHOSEN"), None)
    if not isinstance(chosen, Priced):
        raise ProblemsError(map(request.locate, explain_infeasible(question, judged)))
    return build_plan(request, question, chosen, judged)


def ask(request: Request) -> Question:
    """The question in a request; raises ProblemsError when it cannot be asked."""
    if request.target is None or request.workload is None:
        missing = "target" if request.target is None else "workload"
        raise ProblemsError([Problem(missing, f"planning needs a {missing}", f"name one with --{missing}")])
    dtypes = resolve_dtypes(request.graph, request.target, request.pins)
    problems = check_dtypes(request.graph, request.target, dtypes) + check_variants(request.graph, request.target)
    problems += check_room(request.target) + check_tuned(request.target)
    problems += check_placements(request.graph, request.target, request.pins)
    problems += check_sizes(request.workload, request.pins)
    if problems:
        raise ProblemsError(map(request.locate, problems))
    return Question(request.graph, request.target, request.workload, request.pins, dtypes)


def judge(question: Question) -> tuple[Judged, ...]:
    """Every option with its verdict, in the order of enumeration."""
    options = tuple(enumerate_options(question.graph, question.target.num_devices))
    results = [evaluate(question, option) for option in options]
    allowed = [one for one in results if isinstance(one, Priced) and not violated_pin(question.pins, one.option)]
    lost = eliminate(allowed) if allowed else {}
    judged = tuple(_verdict(one, allowed, lost, question.pins) for one in results)
    rejected = sum(one.verdict != "CHOSEN" for one in judged)
    assert rejected + bool(allowed) == len(options), (rejected, len(options))
    return judged


def eliminate(allowed: Sequence[Priced]) -> dict[Option, tuple[Reason, str]]:
    """Verdict and reason of every option that may run; exactly one is chosen."""
    fastest = min(allowed, key=lambda one: one.token_seconds)
    limit = fastest.token_seconds * (1 + TIE_PCT / 100)
    lost: dict[Option, tuple[Reason, str]] = {}
    left = []
    for one in allowed:
        if one.token_seconds <= limit:
            left.append(one)
        else:
            more = (one.token_seconds - fastest.token_seconds) * 1e3
            lost[one.option] = ("DOMINATED", f"{more:+.2f} ms per output token ({_behind(one, fastest)})")
    for rule in RULES:
        left, out, best = _apply(rule, left)
        for one in out:
            reason = f"{rule.name}: {rule.show(one)} against {rule.show(best)}"
            lost[one.option] = ("TIE", f"{_behind(one, fastest)}, a tie within {TIE_PCT:g} %; loses on {reason}")
    winner, *equal = left
    lost.update((one.option, ("TIE", "equal in every number; enumerated later")) for one in equal)
    lost[winner.option] = ("CHOSEN", _why_chosen(winner, fastest, len(allowed)))
    return lost


def _apply(rule: Rule, tied: list[Priced]) -> tuple[list[Priced], list[Priced], Priced]:
    """(survivors, losers, the best) of one rule."""
    best = min(tied, key=rule.key)
    limit = rule.key(best) + rule.slack(best) if rule.slack else rule.key(best)
    kept = [one for one in tied if rule.key(one) <= limit]
    return kept, [one for one in tied if rule.key(one) > limit], best


def _behind(one: Priced, fastest: Priced) -> str:
    if one is fastest:
        return "the fastest"
    return f"{(one.token_seconds / fastest.token_seconds - 1) * 100:.1f} % behind the fastest"


def _why_chosen(winner: Priced, fastest: Priced, number: int) -> str:
    if winner is fastest:
        return f"fastest of {number} plans that may run"
    return (
        f"{_behind(winner, fastest)} of {number} plans that may run, a tie; first by {', '.join(r.name for r in RULES)}"
    )


def violated_pin(pins: PlanPins, option: Option) -> str | None:
    """The first pin the option does not satisfy, as the user wrote it."""
    return next((text for text, wanted, got in _pinned(pins, option) if wanted != got), None)


def _pinned(pins: PlanPins, option: Option) -> list[tuple[str, Any, Any]]:
    """(text, wanted, got) of every pin that restricts the search space."""
    found = (
        ("attention.dp", pins.attention.dp, option.dp),
        ("attention.tp", pins.attention.tp, option.tp),
        ("experts.ep", pins.experts.ep, option.ep),
        ("experts.tp", pins.experts.tp, option.etp),
        ("embed", pins.embed, option.embed),
        ("head", pins.head, option.head),
        ("shared_expert", pins.shared_expert, option.shared_expert),
        ("mlp", pins.mlp, option.mlp),
    )
    return [(f"plan.{key}={wanted}", wanted, got) for key, wanted, got in found if wanted is not None]


def _pinned_sizes(pins: PlanPins) -> list[str]:
    """Pins that restrict the sizes of a step, as the user wrote them."""
    found = (
        ("page_size", pins.page_size),
        ("max_batched_tokens", pins.max_batched_tokens),
        ("max_seqs", pins.max_seqs),
    )
    return [f"plan.{key}={value}" for key, value in found if value is not None]


def _verdict(
    one: Priced | Rejected, allowed: Sequence[Priced], lost: dict[Option, tuple[Reason, str]], pins: PlanPins
) -> Judged:
    if isinstance(one, Rejected):
        return Judged(one.option, one.verdict, one.why, one.numbers, one)
    numbers = one.numbers()
    if allowed:
        best = min(other.token_seconds for other in allowed)
        numbers["behind_pct"] = (one.token_seconds / best - 1) * 100
    if pin := violated_pin(pins, one.option):
        return Judged(one.option, "PINNED", f"excluded by {pin}", numbers, one)
    verdict, why = lost[one.option]
    return Judged(one.option, verdict, why, numbers, one)


def explain_infeasible(question: Question, judged: Sequence[Judged]) -> list[Problem]:
    """Why no plan can run: the constraint and its numbers for each sharding the pins leave."""
    pinned = [text for text, _, _ in _pinned(question.pins, judged[0].option)]
    left = [one for one in judged if not violated_pin(question.pins, one.option)]
    path = ", ".join(text.partition("=")[0] for text in (*pinned, *_pinned_sizes(question.pins))) or "plan"
    if not left:
        pairs = ", ".join(f"{a}x{b}" for a, b in factor_pairs(question.target.num_devices))
        text = f"no sharding of {question.target.num_devices} devices satisfies {', '.join(pinned)}"
        return [Problem(path, text, f"dp x tp and ep x tp are each one of: {pairs}")]
    names = tuple(dict.fromkeys(sharding(one.option) for one in left))
    results = [one.result for one in left if isinstance(one.result, Rejected)]
    problems = refusal_problems(question, results, path, names)
    # A sharding that cannot be cut evenly is no news beside pins that no block keeps in the others.
    aside = ("INDIVISIBLE",) if problems else ()
    rest = [one for one in left if one.verdict not in aside and not getattr(one.result, "broken", ())]
    hint = "" if problems else _nearest(question, judged, left)
    return problems + _explain_rest(question, rest, path, hint)


def _explain_rest(question: Question, left: Sequence[Judged], path: str, hint: str) -> list[Problem]:
    """What is not refused by a block: the option of each sharding that is closest, shardings of one reason together."""
    closest: dict[tuple[str, Reason], Judged] = {}
    for one in sorted(left, key=_shortfall):
        closest.setdefault((one.option.attention, one.verdict), one)
    same: dict[tuple[Reason, str], list[str]] = {}
    for one in closest.values():
        same.setdefault((one.verdict, _reason(one)), []).append(sharding(one.option))
    where = f"on {question.target.name}"
    return [
        Problem(path, f"{verdict}: {', '.join(shardings)} {where} {reason}", hint if index == 0 else "")
        for index, ((verdict, reason), shardings) in enumerate(same.items())
    ]


def _shortfall(one: Judged) -> tuple[float, float]:
    """How far a rejected option is from running: sequences it would hold, then GiB it lacks, in steps of 0.1."""
    return -one.numbers.get("max_concurrency", -1), round(one.numbers.get("needed_gib", 0), 1)


def _reason(one: Judged) -> str:
    return one.why if one.verdict == "HBM" else f"cannot run: {one.why}"


def _nearest(question: Question, judged: Sequence[Judged], left: Sequence[Judged]) -> str:
    """What would be feasible: the fastest plan without pins, or the most sequences a plan within the pins holds."""
    free = [one.result for one in judged if isinstance(one.result, Priced)]
    if free:
        best = min(free, key=lambda one: one.token_seconds)
        return f"without the pins {best.option.attention} with {best.option.experts} would run"
    short = [one for one in left if one.verdict == "HBM"]
    if not short:
        return ""
    best_fit = min(short, key=_shortfall)
    most = int(best_fit.numbers["max_concurrency"])
    more = larger_topology(question)
    if not most:
        return _too_large(question.pins, short, more)
    fits = f"workload.concurrency={most}"
    if question.pins.max_seqs:
        fits = f"plan.max_seqs={most // best_fit.option.dp}"
    whole = f"; {more} would hold it as it is" if more else ""
    return f"{fits} fits, with {best_fit.option.attention} and {best_fit.option.experts}{whole}"


def _too_large(pins: PlanPins, short: Sequence[Judged], more: str) -> str:
    """What to make smaller when not one sequence per rank fits. more: the topology that would hold it, if any."""
    if all(one.numbers["weights_gib"] >= one.numbers["available_gib"] for one in short):
        devices = f"{more} would hold it" if more else "no listed topology of this chip is large enough"
        return f"the weights alone do not fit; {devices}, or smaller dtypes might do"
    devices = f"; {more} would hold it" if more else ""
    sizes = [text for text in _pinned_sizes(pins) if not text.startswith("plan.max_seqs")]
    if sizes:
        return f"the weights fit, not one sequence beside them: smaller than {', '.join(sizes)}{devices}"
    return f"the weights fit, not one sequence beside them: shorten workload.max_context{devices}"


def larger_topology(question: Question) -> str:
    """Name of the chip's smallest larger topology on which some plan within the pins may run, "" when none is."""
    listed = (Topology.model_validate(entry) for entry in read_topologies(question.target.chip).values())
    for topology in sorted(listed, key=lambda one: one.num_devices):
        target = question.target.model_copy(update={"topology": topology})
        other = Question(question.graph, target, question.workload, question.pins, question.dtypes)
        if topology.num_devices > question.target.num_devices and _some_plan(other):
            return topology.name
    return ""


def _some_plan(question: Question) -> bool:
    """Whether any option within the pins may run; prices nothing."""
    for option in enumerate_options(question.graph, question.target.num_devices):
        placed = None if violated_pin(question.pins, option) else place(question, option)
        if isinstance(placed, Placed) and placed.fits:
            return True
    return False
