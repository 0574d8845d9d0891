"""Checks at the graph's border: the checkpoint table against the weights, and the graph's own invariants."""

import re
from collections.abc import Collection, Iterator
from math import gcd

from moec.blocks.core.array_info import PACKED, SCALED
from moec.blocks.core.declare import Weight, divisors

from ..problems import Problem
from ..spec.marks import KeyPath, dotted
from ..spec.schema import Checkpoint, TensorRule
from ..spec.suggest import closest
from ..spec.validate import Finding
from .build import rule_targets, single_rules
from .ir import Graph, TensorMap
from .sources import out_size, sources
from .weights import all_weights, layer_weights, table_key

_TABLE: KeyPath = ("model", "checkpoint", "tensors")
_WAYS = ("into", "either", "split", "interleave")
_NOT_IN_NAMES = frozenset("\"'\\{}")
_PLACEHOLDER = re.compile(r"\{([^{}]*)\}")

# Key of the table -> (key of a block instance that shares its lines, its weight).
Instances = dict[str, list[tuple[str, Weight]]]


def check_table(table: Checkpoint, graph: Graph, unused: Collection[str] = ()) -> list[Finding]:
    """Every line names known weights and fits them; every weight has a line.

    unused: declared blocks no layer uses; that was said, so lines for them are passed over.
    """
    weights = {table_key(graph, key): weight for key, weight in all_weights(graph).items()}
    instances: Instances = {key: [] for key in weights}
    for key, weight in all_weights(graph).items():
        instances[table_key(graph, key)].append((key, weight))
    findings: list[Finding] = []
    findings += _check_names(table)
    if not table.prefix and any("{prefix}" in name for name in (*table.tensors, *table.ignore)):
        findings.append(Finding(_TABLE[:-1], "patterns use {prefix}, but there is no 'prefix'", "prefix: [model.]"))
    bases = {inst.name: inst.base for inst in graph.blocks().values() if inst.base not in ("", inst.name)}
    lines = [(pattern, line, one) for pattern, line in table.tensors.items() for one in single_rules(line)]
    for pattern, line, rule in lines:
        if not any(into.partition(".")[0] in {*unused} - {*bases} for into in rule_targets(rule)[0]):
            findings += _check_way(pattern, line)
            findings += _check_line(pattern, rule, weights, bases)
            findings += _check_storage(pattern, rule, instances)
    for pattern, line in table.tensors.items():
        findings += _check_either(pattern, line, graph)
    given = {into for _, _, rule in lines for into in rule_targets(rule)[0]}
    missing = [key for key in weights if key not in given]
    if missing:
        findings.append(Finding(_TABLE, f"no tensor gives {', '.join(missing)}"))
    return list(dict.fromkeys(findings))


def _check_names(table: Checkpoint) -> Iterator[Finding]:
    """Names of tensors and their parts go into the program as they are."""
    top = _TABLE[:-1]
    for part, names in (("prefix", table.prefix), ("ignore", table.ignore)):
        for index, name in enumerate(names):
            if wrong := _name_problem(name if part == "prefix" else name.replace("{prefix}", "")):
                yield Finding((*top, part, index), *wrong)
    if table.scales and (wrong := _name_problem(table.scales.suffix)):
        yield Finding((*top, "scales", "suffix"), *wrong)
    if table.scales and not table.scales.suffix:
        yield Finding((*top, "scales", "suffix"), "the suffix is empty: a tensor cannot hold its own scales")
    for pattern in table.tensors:
        if wrong := _name_problem(_PLACEHOLDER.sub("", pattern)):
            yield Finding((*_TABLE, pattern), *wrong, at_key=True)
        elif not pattern or (pattern == "{prefix}" and "" in table.prefix):
            yield Finding((*_TABLE, pattern), "the tensor's name is empty", at_key=True)


def _name_problem(text: str) -> tuple[str, str] | None:
    """(text, hint) when the text between placeholders has characters no tensor's name may have."""
    odd = sorted({sign for sign in text if sign in _NOT_IN_NAMES or not (sign.isascii() and sign.isprintable())})
    if not odd:
        return None
    signs = " ".join(sign if sign.isascii() else ascii(sign)[1:-1] for sign in odd)
    return f"a tensor's name cannot hold {signs}", "printable ASCII without quotes, backslashes and stray braces"


def _check_way(pattern: str, rule: TensorRule) -> Iterator[Finding]:
    """A rule says in one way what its tensor holds."""
    path = (*_TABLE, pattern)
    ways = [way for way in _WAYS if getattr(rule, way) is not None]
    if len(ways) != 1:
        got = f"got {' and '.join(ways)}" if ways else "got none"
        yield Finding(path, f"expected exactly one of {', '.join(_WAYS)}, {got}")
    elif ways != ["into"] and len(getattr(rule, ways[0])) < 2:
        yield Finding((*path, ways[0]), f"{ways[0]} needs two or more weights, got {len(getattr(rule, ways[0]))}")
    elif ways != ["into"] and len(set(getattr(rule, ways[0]))) < len(getattr(rule, ways[0])):
        yield Finding((*path, ways[0]), f"{ways[0]} names a weight twice")


def _check_either(pattern: str, rule: TensorRule, graph: Graph) -> Iterator[Finding]:
    """Of the weights that stand for one another, no layer has two."""
    for index, layer in graph.distinct_layers() if rule.either else ():
        both = {table_key(graph, key) for key in layer_weights(graph, layer)} & set(rule.either or ())
        if len(both) > 1:
            text = f"layer {index} has {' and '.join(sorted(both))}: a tensor can be one of them"
            yield Finding((*_TABLE, pattern, "either"), text, "split or interleave, if it holds both")
            return


def _check_line(pattern: str, rule: TensorRule, weights: dict[str, Weight], bases: dict[str, str]) -> Iterator[Finding]:
    """One line of the table. bases: what blocks are like, whose lines are theirs too."""
    path = (*_TABLE, pattern)
    into, op = rule_targets(rule)
    if not into or (op != "whole" and len(into) < 2):
        return  # _check_way says so
    unknown = [index for index, name in enumerate(into) if name not in weights]
    for index in unknown:
        place = (*path, "into") if op == "whole" else (*path, op, index)
        if into[index] == "head.w":
            yield Finding(place, "there is no 'head.w': the head is tied to embed.table", "put the tensor under ignore")
        elif (name := into[index].partition(".")[0]) in bases:
            hint = f"the lines of '{bases[name]}' are those of '{name}' too"
            yield Finding(place, f"no weight is called '{into[index]}'", hint)
        else:
            yield Finding(place, f"no weight is called '{into[index]}'", closest(into[index], weights))
    if not unknown:
        yield from _check_fit(path, into, op, weights)
        flat = [name for name in into if len(weights[name].shape) - weights[name].stacked < 2]
        if rule.transpose and flat:
            text = f"only a matrix can be transposed, {flat[0]} is {list(weights[flat[0]].shape)}"
            yield Finding((*path, "transpose"), text, "leave transpose out")
        yield from _check_placeholders(pattern, into, weights)


def _check_fit(path: KeyPath, into: tuple[str, ...], op: str, weights: dict[str, Weight]) -> Iterator[Finding]:
    """Weights that share a tensor must have equal other dims; interleaved ones equal sizes."""
    first = weights[into[0]]
    for name in into[1:]:
        other = weights[name]
        alike = (first.linear, first.stacked, len(first.shape)) == (other.linear, other.stacked, len(other.shape))
        if not alike or _kept(first, op) != _kept(other, op):
            shapes = f"{into[0]} {list(first.shape)} and {name} {list(other.shape)}"
            yield Finding((*path, op), f"{shapes} cannot share a tensor by {op}")


def _kept(weight: Weight, op: str) -> tuple[int, ...]:
    """The dims that weights of one tensor have in common: all, or all but the out dim that split cuts."""
    out = len(weight.shape) - 1 if weight.linear else int(weight.stacked)
    return weight.shape if op == "interleave" else weight.shape[:out] + weight.shape[out + 1 :]


def _check_storage(pattern: str, rule: TensorRule, instances: Instances) -> Iterator[Finding]:
    """groups, flat and packed, against every block instance that shares the line."""
    path = (*_TABLE, pattern)
    members = [one for name in rule_targets(rule)[0] for one in instances.get(name, ())]
    if rule.groups and rule.split is None:
        yield Finding((*path, "groups"), "groups are what split cuts, and there is no split", "split: [...]")
    elif rule.groups:
        sizes = {key: out_size(weight, TensorMap(pattern, (key,), transpose=rule.transpose)) for key, weight in members}
        odd = [f"{key} has {rows}" for key, rows in sizes.items() if rows % rule.groups]
        if odd:
            text = f"{rule.groups} groups do not divide the rows: {', '.join(odd)}"
            valid = ", ".join(map(str, divisors(gcd(*sizes.values()))[1:])) or "no groups"
            yield Finding((*path, "groups"), text, f"valid: {valid}")
    if rule.flat:
        yield from _check_flat(pattern, members)
    if rule.packed:
        yield from _check_packed(pattern, rule, rule.packed, members)


def _check_flat(pattern: str, members: list[tuple[str, Weight]]) -> Iterator[Finding]:
    """Only experts' matrices can lie one below the other."""
    path = (*_TABLE, pattern)
    if "{expert}" in pattern:
        yield Finding((*path, "flat"), "a tensor with {expert} in its name holds one expert", "leave flat out")
    for key, weight in members:
        if not weight.stacked or len(weight.shape) < 3:
            text = f"only experts' matrices are stored flat, {key} is {list(weight.shape)}"
            yield Finding((*path, "flat"), text, "leave flat out")


def _check_packed(pattern: str, rule: TensorRule, packed: str, members: list[tuple[str, Weight]]) -> Iterator[Finding]:
    """Packed values run along the in dim of a stored [out, in], a whole number of blocks."""
    path, form = (*_TABLE, pattern), PACKED[packed]
    block = SCALED[form.dtype].rows
    if not pattern.endswith(form.values):
        beside = " and ".join(f"...{ending}" for ending in (form.scales, form.shape) if ending)
        text = f"the name of a tensor of {packed} values ends in '{form.values}'"
        yield Finding(path, text, f"name that one; the loader finds {beside} beside it", at_key=True)
    if rule.transpose is False:
        text = f"{packed} values run along the in dim, so their matrix is stored as [out, in]"
        yield Finding((*path, "transpose"), text, "leave transpose out")
    for key, weight in members:
        if not weight.linear:
            text = f"only matrices stored as [out, in] can be packed, {key} is {list(weight.shape)}"
            yield Finding((*path, "packed"), text, "leave packed out")
        elif weight.shape[-2] % block:
            text = f"{packed} has a scale per {block} values of the in dim, and {key} has {weight.shape[-2]}"
            yield Finding((*path, "packed"), text, "leave packed out")


def _check_placeholders(pattern: str, into: tuple[str, ...], weights: dict[str, Weight]) -> Iterator[Finding]:
    """{layer} for weights of layers, {expert} only for stacked ones."""
    path = (*_TABLE, pattern)
    used = set(_PLACEHOLDER.findall(pattern))
    for name in sorted(used - {"prefix", "layer", "expert"}):
        yield Finding(path, f"unknown placeholder {{{name}}}", closest(name, ("prefix", "layer", "expert")), True)
    for name in into:
        per_layer = "." in name and name.partition(".")[0] not in ("embed", "head")
        if per_layer != ("layer" in used):
            word = "needs {layer}" if per_layer else "has no layers, so {layer} cannot stand"
            yield Finding(path, f"'{name}' {word} in the tensor's name", at_key=True)
        if "expert" in used and not weights[name].stacked:
            yield Finding(
                path, f"'{name}' has no experts dim, so {{expert}} cannot stand in the tensor's name", at_key=True
            )


def verify_graph(graph: Graph) -> list[Problem]:
    """Invariants every later stage relies on; a problem here is a bug of the front end."""
    return [Problem(dotted((graph.name, *path)), text) for path, text in _broken(graph)]


def _broken(graph: Graph) -> Iterator[tuple[KeyPath, str]]:
    expected = 0
    for index, group in enumerate(graph.groups):
        if group.first_layer != expected or group.repeat < 1 or not group.layers:
            yield ("groups", index), f"starts at layer {group.first_layer}, expected {expected}"
        expected = group.first_layer + group.repeat * len(group.layers)
    if [index for index, _ in graph.layers()] != list(range(graph.num_layers)):
        yield ("groups",), "layer indices are not 0, 1, 2, ..."
    for inst in {id(one): one for _, layer in graph.layers() for one in layer.blocks}.values():
        if graph.blocks()[inst.name] != inst:
            yield (inst.name,), "two block instances with different fields share a name"
    for index, layer in graph.distinct_layers():
        if any(one.keeps_normed and one.norm is None for one in layer.additions):
            yield ("layers", index), "keeps the normed input, but norms nothing"
    for key, weight in all_weights(graph).items():
        if min(weight.shape) < 1 or len(weight.shape) != len(weight.axes):
            yield (key,), f"shape {weight.shape} does not fit axes {weight.axes}"
        if graph.checkpoint is not None and not sources(graph, key):
            yield (key,), "has no source in the checkpoint table"
