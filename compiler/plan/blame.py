"""Refusals of blocks as problems: each reason once, with the pins to blame for it and the shardings it is said of."""

import re
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from ..problems import Problem
from ..spec.schema import PlanPins
from .dtypes import check_dtypes, resolve_dtypes
from .evaluate import Placed, Question, Rejected, place
from .space import Option
from .variants import Broken

_NUMBER = re.compile(r"\d+(?:\.\d+)?")
_BUCKET = re.compile(r" \(bucket \w+\)")
_LARGE = re.compile(r"\b(\d{7,})\b( bytes)?")


@dataclass
class _Refusal:
    """One reason, where it was said first, and of which shardings."""

    option: Option
    broken: Broken
    reason: str
    shardings: set[str] = field(default_factory=set)
    texts: set[str] = field(default_factory=set)


def refusal_problems(question: Question, rejected: Sequence[Rejected], path: str, left: Sequence[str]) -> list[Problem]:
    """What blocks say of the loads. path: where no pin is to blame; left: every sharding within the pins."""
    found: dict[tuple[str, str, str], _Refusal] = {}
    for one in rejected:
        for broken in one.broken:
            for reason in broken.reasons:
                # A part is pinned in all blocks, and numbers of a reason are those of a sharding.
                key = broken.pin, broken.lead if broken.pin else broken.place, _masked(reason)
                refusal = found.setdefault(key, _Refusal(one.option, broken, reason))
                refusal.shardings.add(sharding(one.option))
                refusal.texts.add(reason)
    return [_problem(question, one, path, left) for one in found.values()]


def sharding(option: Option) -> str:
    """E.g. "DP8 with EP8"."""
    return f"{option.attention} with {option.experts}"


def shardings_text(some: Collection[str], left: Sequence[str]) -> str:
    """Some of the shardings within the pins, briefly: all of them, all of one attention, or by name."""
    if set(some) == set(left) and len(left) > 1:
        return f"all {len(left)} shardings"
    of = {one: [other for other in left if other.split(" ")[0] == one.split(" ")[0]] for one in some}
    whole = {one: len(group) > 1 and set(group) <= set(some) for one, group in of.items()}
    return ", ".join(dict.fromkeys(one.split(" ")[0] if whole[one] else one for one in left if one in some))


def _problem(question: Question, refusal: _Refusal, path: str, left: Sequence[str]) -> Problem:
    own = [f"plan.variants.{refusal.broken.pin}"] if refusal.broken.pin else []
    pins = dict(_pins(question.pins))
    blamed = [name for name in pins if name not in own and _cures(question, refusal, name)]
    places = f"for {shardings_text(refusal.shardings, left)} on {question.target.name}"
    numbers = f", numbers of {sharding(refusal.option)}" if len(refusal.texts) > 1 else ""
    text = f"UNSUPPORTED: {refusal.broken.lead}: {with_mib(refusal.reason)} ({places}{numbers})"
    usable = [
        choice.variant
        for choice in question.variants(refusal.option).choices
        if choice.scope == refusal.broken.place and choice.verdict != "REFUSED"
    ]
    hints = [f"valid: {', '.join(usable)}"] if own and usable else []
    hints += [f"leave out {name}={pins[name]}" for name in blamed]
    return Problem(", ".join((*own, *blamed)) or path, text, "; or ".join(hints))


def _pins(pins: PlanPins) -> Iterator[tuple[str, Any]]:
    """Every pin but those that a sharding says all of: dotted path and value."""
    for name in ("page_size", "max_batched_tokens", "max_seqs"):
        if (value := getattr(pins, name)) is not None:
            yield f"plan.{name}", value
    yield from ((f"plan.dtypes.{name}", value) for name, value in vars(pins.dtypes).items() if value is not None)
    yield from ((f"plan.variants.{name}", value) for name, value in pins.variants.items())


def _without(pins: PlanPins, path: str) -> PlanPins:
    _, part, *rest = path.split(".")
    if not rest:
        return pins.model_copy(update={part: None})
    if part == "dtypes":
        return pins.model_copy(update={part: pins.dtypes.model_copy(update={rest[0]: None})})
    return pins.model_copy(update={part: {key: value for key, value in pins.variants.items() if key != rest[0]}})


def _cures(question: Question, refusal: _Refusal, path: str) -> bool:
    """Whether the reason is gone, at the same sharding, once a pin is left out."""
    pins = _without(question.pins, path)
    dtypes = resolve_dtypes(question.graph, question.target, pins)
    if check_dtypes(question.graph, question.target, dtypes):  # the pin holds others up: no plan without it
        return False
    found = place(replace(question, pins=pins, dtypes=dtypes, _weights={}, _variants={}), refusal.option)
    if isinstance(found, Placed):
        return True
    left = [reason for one in found.broken if one.place == refusal.broken.place for reason in one.reasons]
    return bool(found.broken) and _masked(refusal.reason) not in map(_masked, left)


def _masked(reason: str) -> str:
    """The rule behind a reason, whatever its numbers and its bucket."""
    return _NUMBER.sub("#", _BUCKET.sub("", reason))


def with_mib(text: str) -> str:
    """Large numbers of bytes also in MiB."""
    return _LARGE.sub(lambda one: f"{one[0]} ({int(one[1]) / 2**20:.4g} MiB)", text) if " bytes" in text else text
