"""The checkpoint table of a recipe, cut down to what the model has, and to what a checkpoint holds that is at hand."""

import re
from collections.abc import Collection, Iterable, Mapping
from fnmatch import fnmatchcase
from typing import Any

from ..graph.build import expand_prefix
from ..graph.ir import Graph
from ..graph.weights import all_weights, table_key
from .fill import Tree, omitted, plain

Stored = Mapping[str, tuple[int, ...]]  # stored tensor -> shape


_PARTS = ("prefix", "ignore", "scales", "tensors")


def choose_lines(table: Tree, graph: Graph, stored: Stored | None) -> Tree:
    """The table with the lines whose weights exist; with a checkpoint only those that name a tensor of it."""
    if omitted(table) or not isinstance(table, dict):
        return table
    weights = {table_key(graph, key): number for number, key in enumerate(all_weights(graph))}
    owners = {key: number for number, key in enumerate(dict.fromkeys(map(owner, weights)))}
    lines = {one: _fitting(rule, weights.keys()) for one, rule in table.get("tensors", {}).items()}
    fitting = {one: rule for one, rule in lines.items() if rule is not None}
    prefixes = _prefixes(table, fitting, stored)
    held = [pattern for pattern in fitting if stored is None or _holds(pattern, prefixes, stored)]
    held.sort(key=lambda pattern: owners[owner(targets(plain(fitting[pattern]))[0])])
    chosen = {**table, "tensors": {pattern: fitting[pattern] for pattern in held}}
    if "prefix" in table:
        chosen["prefix"] = [one for one in table["prefix"] if plain(one) in prefixes]
        if not any("{prefix}" in one for one in (*held, *map(str, plain(table.get("ignore", []))))):
            del chosen["prefix"]
    return {part: chosen[part] for part in _PARTS if part in chosen}


def _fitting(rule: Tree, weights: Collection[str]) -> Tree | None:
    """The rule when its weights exist; of a list, one of which a layer has, those that do."""
    if not isinstance(rule, list):
        return rule if set(targets(plain(rule))) <= set(weights) else None
    known = [name for name in rule if plain(name) in weights]
    return known if len(known) > 1 else known[0] if known else None


def owner(key: str) -> str:
    """What a weight belongs to: its block, or the model around the blocks."""
    block = key.partition(".")[0]
    return "model" if block in ("embed", "head", "final_norm", "final_norm_bias", "layer") else block


def targets(rule: Any) -> list[str]:
    """The weights a rule names."""
    if isinstance(rule, str | list):
        return targets_of(rule)
    return [one for key in ("into", "either", "split", "interleave") for one in targets_of(rule.get(key))]


def targets_of(value: Any) -> list[str]:
    """One name or several."""
    return [value] if isinstance(value, str) else list(value or ())


def _prefixes(table: Mapping[str, Tree], patterns: Iterable[str], stored: Stored | None) -> tuple[str, ...]:
    """The prefixes under which the checkpoint has tensors of the table."""
    given = tuple(str(plain(one)) for one in table.get("prefix", ()))
    if stored is None:
        return given
    lines = [one for one in patterns if "{prefix}" in one]
    found = tuple(one for one in given if any(_holds(line, (one,), stored) for line in lines))
    return found or given


def _holds(pattern: str, prefixes: tuple[str, ...], stored: Stored) -> bool:
    matchers = [name_matcher(one) for one in expand_prefix(pattern, prefixes)]
    return any(matcher.fullmatch(name) for matcher in matchers for name in stored)


def name_matcher(pattern: str) -> re.Pattern[str]:
    """Stored names that a line of the table means."""
    parts = re.split(r"(\{layer\}|\{expert\})", pattern)
    return re.compile("".join(r"\d+" if part in ("{layer}", "{expert}") else re.escape(part) for part in parts))


def unnamed(table: Tree, stored: Stored) -> list[str]:
    """Stored tensors that the table has no line for."""
    data = plain(table) or {}
    prefixes = tuple(data.get("prefix", ()))
    matchers = [name_matcher(one) for pattern in data.get("tensors", {}) for one in expand_prefix(pattern, prefixes)]
    ignored = [one for pattern in data.get("ignore", ()) for one in expand_prefix(pattern, prefixes)]
    return [
        name
        for name in stored
        if not any(m.fullmatch(name) for m in matchers) and not any(fnmatchcase(name, one) for one in ignored)
    ]


def questions_about(names: Iterable[str], stored: Stored) -> list[str]:
    """What these tensors are, alike ones once, with the layers they are in where those are few."""
    layers = {number for name in stored if (number := _layer(name)) is not None}
    found: dict[str, set[int]] = {}
    for name in names:
        text = f"what is {_NUMBER.sub('N', name)}, shape {list(stored[name])}"
        found.setdefault(text, set()).update({number} if (number := _layer(name)) is not None else ())
    return [f"{text}{_where(inside, layers)}?" for text, inside in found.items()]


_NUMBER = re.compile(r"(?<=[.])[0-9]+(?=[.])")
_FEW = 4  # layers that are named one by one


def _layer(name: str) -> int | None:
    """The first number in a name."""
    match = _NUMBER.search(name)
    return int(match.group()) if match and len(match.group()) < 6 else None


def _where(inside: Collection[int], layers: Collection[int]) -> str:
    if not inside or len(inside) == len(layers) or len(inside) > _FEW:
        return ""
    return f" (N = {', '.join(map(str, sorted(inside)))} only)"
