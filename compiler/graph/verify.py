"""Checks at the graph's border: the checkpoint table against the weights, and the graph's own invariants."""

import re
from collections.abc import Collection, Iterator

from moec.blocks.core.declare import Weight

from ..problems import Problem
from ..spec.marks import KeyPath, dotted
from ..spec.schema import Checkpoint, TensorRule
from ..spec.suggest import closest
from ..spec.validate import Finding
from .build import rule_targets
from .ir import Graph
from .sources import sources
from .weights import all_weights, table_key

_TABLE: KeyPath = ("model", "checkpoint", "tensors")
_NOT_IN_NAMES = frozenset("\"'\\{}")
_PLACEHOLDER = re.compile(r"\{([^{}]*)\}")


def check_table(table: Checkpoint, graph: Graph, unused: Collection[str] = ()) -> list[Finding]:
    """Every line names known weights and fits them; every weight has a line.

    unused: declared blocks no layer uses; that was said, so lines for them are passed over.
    """
    weights = {table_key(graph, key): weight for key, weight in all_weights(graph).items()}
    findings: list[Finding] = []
    findings += _check_names(table)
    if not table.prefix and any("{prefix}" in name for name in (*table.tensors, *table.ignore)):
        findings.append(Finding(_TABLE[:-1], "patterns use {prefix}, but there is no 'prefix'", "prefix: [model.]"))
    for pattern, rule in table.tensors.items():
        if not any(into.partition(".")[0] in unused for into in rule_targets(rule)[0]):
            findings += _check_line(pattern, rule, weights)
    given = {into for rule in table.tensors.values() for into in rule_targets(rule)[0]}
    missing = [key for key in weights if key not in given]
    if missing:
        findings.append(Finding(_TABLE, f"no tensor gives {', '.join(missing)}"))
    return findings


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


def _check_line(pattern: str, rule: TensorRule, weights: dict[str, Weight]) -> Iterator[Finding]:
    """One line of the table."""
    path = (*_TABLE, pattern)
    ways = [way for way in ("into", "split", "interleave") if getattr(rule, way) is not None]
    if len(ways) != 1:
        got = f"got {' and '.join(ways)}" if ways else "got none"
        yield Finding(path, f"expected exactly one of into, split, interleave, {got}")
        return
    into, op = rule_targets(rule)
    if op != "whole" and len(into) < 2:
        yield Finding((*path, op), f"{op} needs two or more weights, got {len(into)}")
        return
    unknown = [index for index, name in enumerate(into) if name not in weights]
    for index in unknown:
        place = (*path, "into") if op == "whole" else (*path, op, index)
        if into[index] == "head.w":
            yield Finding(place, "there is no 'head.w': the head is tied to embed.table", "put the tensor under ignore")
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
        keep = slice(None) if op == "interleave" else slice(0, -1) if first.linear else slice(1, None)
        if not alike or first.shape[keep] != other.shape[keep]:
            shapes = f"{into[0]} {list(first.shape)} and {name} {list(other.shape)}"
            yield Finding((*path, op), f"{shapes} cannot share a tensor by {op}")


def _check_placeholders(pattern: str, into: tuple[str, ...], weights: dict[str, Weight]) -> Iterator[Finding]:
    """{layer} for weights of layers, {expert} only for stacked ones."""
    path = (*_TABLE, pattern)
    used = set(_PLACEHOLDER.findall(pattern))
    for name in sorted(used - {"prefix", "layer", "expert"}):
        yield Finding(path, f"unknown placeholder {{{name}}}", closest(name, ("prefix", "layer", "expert")), True)
    for name in into:
        per_layer = "." in name and name not in ("embed.table", "head.w")
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
    for inst in {id(one): one for _, layer in graph.layers() for one in (layer.mixer, layer.ffn)}.values():
        if graph.blocks()[inst.name] != inst:
            yield (inst.name,), "two block instances with different fields share a name"
    for key, weight in all_weights(graph).items():
        if min(weight.shape) < 1 or len(weight.shape) != len(weight.axes):
            yield (key,), f"shape {weight.shape} does not fit axes {weight.axes}"
        if graph.checkpoint is not None and not sources(graph, key):
            yield (key,), "has no source in the checkpoint table"
