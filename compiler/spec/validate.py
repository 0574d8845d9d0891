"""Types and keys: pydantic's verdict as findings in our own words, with as much left to check as can be.

A document with a bad part still yields a spec in which that part is a stand-in, so that
semantics.py can look at the rest in the same pass; `poisoned` says what not to trust.
"""

import copy
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from moec.blocks.core.declare import BlockFields
from moec.blocks.registry import BLOCKS

from ..graph.build import merge
from .marks import KeyPath
from .schema import ModelSpec
from .suggest import annotation_at, children, closest, listing, step

T = TypeVar("T", bound=BaseModel)

_EXPECTED = {
    "int_type": "an integer",
    "int_from_float": "an integer",
    "float_type": "a number",
    "bool_type": "true or false",
    "string_type": "text",
    "tuple_type": "a list",
    "dict_type": "a mapping",
    "model_type": "a mapping",
    "is_instance_of": "a mapping",
}
# Errors of several fields together: all that take part.
_SHAPE = (("topology", "num_devices"), ("topology", "num_chips"), ("topology", "dims"))
_TOGETHER: dict[str, tuple[KeyPath, ...]] = {"devices": (("devices_per_chip", "value"), *_SHAPE), "chips": _SHAPE}
_STAND_IN: dict[str, Any] = {
    "spec_version": 1,
    "name": "unnamed",
    "hidden_size": 1,
    "vocab_size": 1,
    "max_context": 1,
    "layers": [{"pattern": [{"mixer": "none", "ffn": "none"}]}],
}


@dataclass(frozen=True)
class Finding:
    """A problem before it has a position.

    path: in the composed document. at_key: the key itself is wrong, not its value.
    also: other places that take part. together: the same, of which one from the command line is to blame.
    about_form: a list or mapping is expected, worth saying even of a scalar that was found ambiguous.
    """

    path: KeyPath
    text: str
    hint: str = ""
    at_key: bool = False
    also: tuple[KeyPath, ...] = ()
    about_form: bool = False
    together: tuple[KeyPath, ...] = ()


@dataclass(frozen=True)
class Parsed:
    """A model as far as it can be trusted.

    spec: None when nothing is usable. poisoned: top-level keys that are stand-ins.
    declared: block names in the document, valid or not; spec.blocks has those that can be used.
    """

    spec: ModelSpec | None
    poisoned: frozenset[str]
    declared: tuple[str, ...]
    findings: list[Finding] = field(default_factory=list)


def parse(kind: type[T], data: Mapping[str, Any], root: KeyPath) -> tuple[T | None, list[Finding]]:
    """Validate a whole document: the value, or every error in it."""
    try:
        return kind.model_validate(data), []
    except ValidationError as error:
        return None, error_findings(error, kind, data, root)


def parse_model(data: Mapping[str, Any]) -> Parsed:
    """Validate a model document; what is sound of it can be checked further."""
    doc = spread_sugar(data)
    blocks, findings = _parse_blocks(doc.get("blocks"))
    declared = tuple(doc["blocks"]) if isinstance(doc.get("blocks"), Mapping) else ()
    trial = {**doc, "blocks": blocks} if declared else dict(doc)
    spec, more = parse(ModelSpec, trial, ("model",))
    # A table of blocks that are all bad has been reported block by block.
    findings += [one for one in more if not (declared and one.path == ("model", "blocks"))]
    if spec:
        return Parsed(spec, frozenset(), declared, findings)
    poisoned = {str(one.path[1]) for one in findings if len(one.path) > 1 and not one.at_key}
    trial = _without(trial, [one.path[1:] for one in more if one.at_key])
    sound = {key: value for key, value in trial.items() if key not in poisoned or (key == "blocks" and blocks)}
    missing = {key: value for key, value in _STAND_IN.items() if key not in sound}
    stand_in = {"blocks": blocks or {"none": BlockFields()}}
    spec, _ = parse(ModelSpec, {**stand_in, **missing, **sound}, ("model",))
    untrusted = {*poisoned, *missing} - {"blocks"}
    if not declared:
        untrusted.add("blocks")
    return Parsed(spec, frozenset(untrusted), declared, findings)


def spread_sugar(data: Mapping[str, Any]) -> dict[str, Any]:
    """The document with shorthand written out: names in patterns, bare residual forms and checkpoint targets."""
    doc = copy.deepcopy(dict(data))
    _spread(doc.get("defaults"), "residual", lambda form: {"form": form})
    for group in _items(doc.get("layers")):
        _spread(group, "ffn", lambda name: [name])
        if isinstance(group, dict) and isinstance(group.get("pattern"), list):
            group["pattern"] = [{"mixer": one} if isinstance(one, str) else one for one in group["pattern"]]
            for entry in group["pattern"]:
                _spread(entry, "ffn", lambda name: [name])
                _spread(entry, "residual", lambda form: {"form": form})
    table = doc.get("checkpoint")
    if isinstance(table, dict) and isinstance(table.get("tensors"), dict):
        rules = table["tensors"]
        table["tensors"] = {key: _rule(one) for key, one in rules.items()}
    return doc


def _rule(value: Any) -> Any:
    """A line of the checkpoint table: a weight, a list of weights of which a layer has one, or the rule itself."""
    if isinstance(value, list):
        return {"either": value}
    return {"into": value} if isinstance(value, str) else value


def _spread(mapping: Any, key: str, full: Callable[[str], Any]) -> None:
    """Replace a bare word at `key` by what it stands for."""
    if isinstance(mapping, dict) and isinstance(mapping.get(key), str):
        mapping[key] = full(mapping[key])


def _items(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []


def _parse_blocks(blocks: Any) -> tuple[dict[str, BlockFields], list[Finding]]:
    """Each declared block by its own Fields; a bad optional field is left out, so that the rest can be checked."""
    parsed: dict[str, BlockFields] = {}
    findings: list[Finding] = []
    for name in blocks if isinstance(blocks, Mapping) else ():
        path = ("model", "blocks", name)
        body = _with_base(name, blocks, findings)
        if body is None:
            continue
        fields = _block_type(body, path, findings)
        if fields is None:
            continue
        block, found = parse(fields, body, path)
        findings += found
        if block is None:
            block, _ = parse(fields, _without(body, [one.path[3:] for one in found if len(one.path) > 3]), path)
        if block is not None:
            parsed[name] = block
    return parsed, findings


def _with_base(name: str, blocks: Mapping[str, Any], findings: list[Finding]) -> Any:
    """The block's body on top of the one it is like; `like` then names the first of the chain. None with a finding."""
    body, chain = blocks[name], [name]
    while isinstance(body, Mapping) and isinstance(body.get("like"), str):
        base, path = body["like"], ("model", "blocks", name, "like")
        if base in chain:
            findings.append(Finding(path, f"'{name}' is like itself ({' -> '.join([*chain, base])})"))
            return None
        if base not in blocks:
            findings.append(Finding(path, f"no block is called '{base}'", closest(base, blocks)))
            return None
        chain.append(base)
        own = {key: value for key, value in body.items() if key != "like"}
        body = merge(blocks[base], own)
    return {**body, "like": chain[-1]} if len(chain) > 1 and isinstance(body, Mapping) else body


def _block_type(body: Any, path: KeyPath, findings: list[Finding]) -> type[BlockFields] | None:
    """The Fields of the block's kind, or None with a finding."""
    if not isinstance(body, Mapping):
        findings.append(Finding(path, f"expected a mapping with a 'kind', got {shown(body)}"))
        return None
    kind = body.get("kind")
    if isinstance(kind, str) and kind in BLOCKS:
        return BLOCKS[kind]().Fields
    if "kind" in body:
        hint = _or_a_new_block(path, closest(str(kind), BLOCKS))
        findings.append(Finding((*path, "kind"), f"unknown block kind {shown(kind)}", hint))
    else:
        findings.append(Finding(path, "missing key 'kind'", listing(BLOCKS)))
    return None


def _without(data: Any, paths: list[KeyPath]) -> dict[str, Any]:
    """A copy with the given keys removed."""
    result = copy.deepcopy(dict(data))
    for *parents, last in paths:
        place: Any = result
        for key in parents:
            place = step(place, key)
        if isinstance(place, dict):
            place.pop(last, None)
    return result


def error_findings(error: ValidationError, kind: Any, data: Any, root: KeyPath) -> list[Finding]:
    """Every pydantic error as a finding."""
    errors = [one for one in error.errors() if one["type"] != "default_factory_not_called"]
    # A list whose items are bad counts as empty: only the items are worth a word.
    errors = [one for one in errors if not (one["type"] == "too_short" and one["input"])]
    return [_finding(one, kind, data, root) for one in errors]


def _finding(error: ErrorDetails, kind: Any, data: Any, root: KeyPath) -> Finding:
    loc, sort = tuple(error["loc"]), error["type"]
    path = (*root, *loc)
    if sort == "extra_forbidden":
        known = children(*annotation_at(kind, data, loc[:-1])) or {}
        hint = _or_a_new_block(path, closest(str(loc[-1]), map(str, known)))
        return Finding(path, f"unknown key '{loc[-1]}'", hint, at_key=True)
    if sort == "missing":
        return Finding(path[:-1], f"missing key '{loc[-1]}'")
    if sort == "literal_error":
        expected = annotation_at(kind, data, loc)[0]
        hint = _or_a_new_block(path, _literal_hint(error["input"], expected))
        return Finding(path, f"got {shown(error['input'])}", hint)
    if sort in _EXPECTED:
        text = f"expected {_EXPECTED[sort]}, got {shown(error['input'])}"
        form = _EXPECTED[sort] in ("a list", "a mapping")
        return Finding(path, text, _form_hint(sort, kind, data, loc), about_form=form)
    if sort == "too_short":
        return Finding(path, "needs at least one entry")
    if sort in _TOGETHER:
        return Finding(path, error["msg"], together=tuple((*root, *part) for part in _TOGETHER[sort]))
    text = error["msg"].replace("Input should", "must").replace("String should", "must")
    return Finding(path, f"{text}, got {shown(error['input'])}")


def _or_a_new_block(path: KeyPath, hint: str) -> str:
    """What nothing near is known of may be meant: then the architecture needs code that is not there."""
    if path[:2] != ("model", "blocks") or not hint.startswith("valid"):
        return hint
    return f"{hint}; no block computes anything else, docs/playbooks/add-a-block.md says what a new one takes"


def _literal_hint(value: Any, expected: Any) -> str:
    options = list(getattr(expected, "__args__", ()))
    if isinstance(value, str) and all(isinstance(option, str) for option in options):
        near = closest(value, options)
        return near if near.startswith("valid") else f"{near} {listing(options)}"
    return listing(str(option) for option in options)


def _form_hint(sort: str, kind: Any, data: Any, loc: KeyPath) -> str:
    """For a mapping that should be there: its keys; for a list: the schema's example."""
    if sort == "tuple_type":
        parent = annotation_at(kind, data, loc[:-1])[0]
        field = getattr(parent, "model_fields", {}).get(loc[-1])
        return f"e.g. {field.examples[0]}" if field and field.examples else ""
    if sort != "model_type":
        return ""
    known = children(annotation_at(kind, data, loc)[0], None) or {}
    return f"keys: {', '.join(map(str, known))}" if known else ""


def shown(value: Any) -> str:
    """A value as it goes into a message: short, and with its sort when that is not plain to see."""
    if isinstance(value, str):
        return f"'{value if len(value) <= 60 else value[:57] + '...'}'"
    if isinstance(value, bool) or value is None:
        return {True: "true", False: "false", None: "null"}[value]
    if isinstance(value, Mapping):
        return f"a mapping with keys {', '.join(map(str, value))}" if value else "an empty mapping"
    if isinstance(value, (list, tuple)):
        return f"a list of {len(value)}"
    return str(value)
