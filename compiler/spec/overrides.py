"""Overrides against the schema, before Hydra sees them: unknown keys, wrong operations, missing roots."""

import copy
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from moec.targets.target import Target, Value

from ..problems import Problem
from .files import COMMAND_LINE
from .limits import as_key
from .marks import KeyPath, dotted, under
from .pins import not_one_pin
from .schema import ModelSpec, PlanPins, Workload
from .suggest import all_paths, annotation_at, children, closest, closest_path, listing, step, unknown_key
from .validate import shown

ROOTS = ("model", "target", "workload", "plan")


@dataclass(frozen=True)
class Change:
    """One parsed override. number: its argument number from 1. text: as the user wrote it."""

    number: int
    text: str
    operation: Literal["set", "add", "delete"]
    key: str
    value: Any = None


def schema() -> dict[str, Any]:
    """The type of each root."""
    return {"model": ModelSpec, "target": Target, "workload": Workload, "plan": PlanPins}


def check_changes(
    changes: list[Change], data: Mapping[str, Any], present: set[str], poisoned: set[KeyPath]
) -> tuple[list[tuple[KeyPath, Change]], list[Problem]]:
    """The changes that make sense, with their paths, and what is wrong with the others.

    data: the documents by root, as read. present: roots the command line gave a file for.
    """
    now = copy.deepcopy(dict(data))
    types = schema()
    good: list[tuple[KeyPath, Change]] = []
    problems: list[Problem] = []
    for change in changes:
        path = _path(change.key, now)
        problem = _check(change, path, now, types, present)
        if problem and not under(path, poisoned):
            problems.append(Problem(change.key, *problem, file=COMMAND_LINE, col=change.number))
        elif not problem:
            good.append((path, change))
            _apply(now, path, change)
    return good, problems


def _path(key: str, data: Mapping[str, Any]) -> KeyPath:
    """The key's parts; a number is an index where the document has a list."""
    path: list[str | int] = []
    value: Any = data
    for part in key.split("."):
        path.append(as_key(part) if isinstance(value, list) else part)
        value = step(value, path[-1])
    return tuple(path)


def _check(
    change: Change, path: KeyPath, data: Mapping[str, Any], types: dict[str, Any], present: set[str]
) -> tuple[str, str] | None:
    """(text, hint) of the first thing wrong with one change."""
    root = str(path[0])
    if root not in ROOTS:
        paths = [one for name in ROOTS for one in (name, *all_paths(types[name], data.get(name), (name,)))]
        near = closest_path(change.key, paths)
        hint = f"did you mean '{near}'?" if near else listing(ROOTS)
        return f"unknown override '{change.key}': no root is called '{root}'", hint
    if len(path) == 1 and not isinstance(change.value, Mapping):
        return f"'{root}' as a whole cannot be overridden", f"override keys below it: {root}.KEY=VALUE"
    if root not in present:
        return f"there is no {root} to override", f"name one with --{root}"
    if wrong_pin := not_one_pin(path):
        return wrong_pin
    wrong = unknown_key(types[root], data.get(root), path[1:], change.operation == "add")
    if wrong is not None:
        return f"unknown override '{change.key}'", _near(path, wrong + 1, data, types[root])
    if change.operation == "delete":
        return _check_delete(path, data)
    return _check_form(change, _value_at(data, path), annotation_at(types[root], data.get(root), path[1:])[0])


def _check_form(change: Change, old: Any, kind: Any) -> tuple[str, str] | None:
    """What cannot be merged into the old value, or would change nothing."""
    if isinstance(change.value, Mapping) and isinstance(old, list):
        return f"expected a list, got {shown(change.value)}", f"{change.key}=[...]"
    if isinstance(change.value, list) and isinstance(old, Mapping):
        number = isinstance(kind, type) and issubclass(kind, Value)
        return f"expected {'a number' if number else 'a mapping'}, got {shown(change.value)}", ""
    if isinstance(change.value, Mapping) and not change.value and isinstance(old, Mapping) and old:
        text = f"an empty mapping changes nothing: keys of mappings are merged, got {shown(change.value)}"
        return text, f"~{change.key}.KEY takes one out of {', '.join(map(str, old))}"
    return None


def _value_at(data: Any, path: KeyPath) -> Any:
    for key in path:
        data = step(data, key)
    return data


def _check_delete(path: KeyPath, data: Mapping[str, Any]) -> tuple[str, str] | None:
    parent = _value_at(data, path[:-1])
    if isinstance(parent, list):
        return "an item of a list cannot be deleted", f"override the list: {dotted(path[:-1])}=[...]"
    if not isinstance(parent, Mapping) or path[-1] not in parent:
        return f"'{dotted(path)}' is not set, so it cannot be deleted", ""
    return None


def _near(path: KeyPath, wrong: int, data: Mapping[str, Any], kind: Any) -> str:
    """The nearest legal path: first by the wrong key among its siblings, then over all paths of the root."""
    root = path[0]
    paths = all_paths(kind, data.get(str(root)), (root,))
    known: Any = children(kind, data.get(str(root)))
    value: Any = data.get(str(root))
    for key in path[1:wrong]:
        kind, value = (known or {}).get(key, Any), step(value, key)
        known = children(kind, value)
    siblings = {dotted((*path[:wrong], key)): key for key in known or {}}
    near = closest(str(path[wrong]), map(str, siblings.values()))
    if near.startswith("did you mean"):
        fixed = dotted((*path[:wrong], near.split("'")[1], *path[wrong + 1 :]))
        return f"did you mean '{fixed}'?" if fixed in paths else near
    far = closest_path(dotted(path), paths)
    return f"did you mean '{far}'?" if far else near


def _apply(data: dict[str, Any], path: KeyPath, change: Change) -> None:
    """Keep the document in step, so that later overrides see earlier ones."""
    place: Any = data
    for key in path[:-1]:
        if step(place, key) is None and isinstance(place, dict):
            place[key] = {}
        place = step(place, key)
    if change.operation == "delete":
        place.pop(path[-1], None)
    elif step(place, path[-1]) is not None or isinstance(place, dict):
        place[path[-1]] = change.value
