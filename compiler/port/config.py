"""config.json as data: paths into it, what is read of it, and what is wrong with the file."""

import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ..problems import Problem
from ..spec.limits import MAX_DEPTH, MAX_NODES

_FLOATS = {"Infinity": math.inf, "-Infinity": -math.inf, "NaN": math.nan}
_ABSENT: Any = object()


@dataclass(frozen=True)
class At:
    """A mapping inside the file, with the dotted path that leads to it."""

    path: str
    data: Mapping[str, Any]

    def child(self, key: str) -> str:
        return f"{self.path}.{key}" if self.path else key


class MissingFieldError(LookupError):
    """A field that the file does not have, and that no default stands for."""

    def __init__(self, path: str):
        super().__init__(path)
        self.path = path


@dataclass
class Config:
    """One config.json.

    root: path of the mapping that bare names mean ("" = the file's top). defaults: what a field is when
    the file leaves it out; defaulted: those that stood in. reads: paths whose value was used, in order;
    nulls: those that were looked at and null. lists: length of every list that was indexed by the layer.
    count_reads: what gave the number of layers.
    """

    file: str
    data: dict[str, Any]
    root: str = ""
    defaults: Mapping[str, Any] = field(default_factory=dict)
    reads: dict[str, None] = field(default_factory=dict)
    nulls: dict[str, None] = field(default_factory=dict)
    defaulted: set[str] = field(default_factory=set)
    lists: dict[str, int] = field(default_factory=dict)
    count_reads: tuple[str, ...] = ()

    @property
    def top(self) -> At:
        return At("", self.data)

    @property
    def here(self) -> At:
        """The mapping that bare names mean."""
        place = self.top
        for key in self.root.split(".") if self.root else ():
            inner = place.data.get(key)
            place = At(place.child(key), inner if isinstance(inner, Mapping) else {})
        return place

    def look(self, place: At, key: str) -> Any:
        """The value one key further; raises MissingFieldError. Mappings stay At, all else is recorded as read."""
        path, value = place.child(key), place.data.get(key, _ABSENT)
        if value is _ABSENT:
            return self._default(path)
        if isinstance(value, Mapping):
            return At(path, value)
        self.reads[path] = None
        return value

    def missing_under(self, path: str) -> Any:
        """What stands for a field whose parent the file lacks."""
        return self._default(path)

    def _default(self, path: str) -> Any:
        name = path.removeprefix(f"{self.root}.") if self.root else path
        if name not in self.defaults:
            raise MissingFieldError(path)
        self.reads[path] = None
        self.defaulted.add(path)
        return self.defaults[name]

    def plain(self, value: Any) -> Any:
        """The value as data; a mapping counts as read with all it holds."""
        if not isinstance(value, At):
            return value
        self.reads.update((path, None) for path, _ in leaves(value))
        return dict(value.data)


def shown(value: Any) -> str:
    """A config value as a message shows it."""
    words = {True: "true", False: "false", None: "null"}
    text = words[value] if value is None or isinstance(value, bool) else ""
    text = text or (f"'{value}'" if isinstance(value, str) else str(value.data if isinstance(value, At) else value))
    return text if len(text) <= 60 else f"{text[:57]}..."


def leaves(place: At) -> Iterator[tuple[str, Any]]:
    """Every field below that is no mapping, by path; an empty mapping is one."""
    for key, value in place.data.items():
        if isinstance(value, Mapping) and value:
            yield from leaves(At(place.child(key), value))
        else:
            yield place.child(key), value


def read_config(path: Path, shown: str) -> tuple[Config | None, list[Problem]]:
    """The file, or why it is no config.json."""

    def bad(text: str, hint: str = "") -> tuple[None, list[Problem]]:
        return None, [Problem("", text, hint, shown)]

    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        return bad(f"cannot be read: {getattr(error, 'strerror', None) or error}", "name a config.json")
    try:
        data = json.loads(text, object_pairs_hook=_object)
    except json.JSONDecodeError as error:
        return None, [Problem("", f"is no JSON: {error.msg}", "", shown, error.lineno, error.colno)]
    except _DuplicateError as error:
        return bad(f"has the key '{error}' twice in one object")
    except (RecursionError, ValueError) as error:
        return bad(f"is no JSON that can be read: {str(error) or 'nested too deeply'}")
    if not isinstance(data, dict):
        return bad("holds no JSON object at its top", "a Hugging Face config.json")
    if _too_much(data):
        return bad(f"holds more than a config: over {MAX_NODES} values or {MAX_DEPTH} levels")
    return Config(shown, data), []


class _DuplicateError(ValueError):
    """A key that stands twice in one object."""


def _object(pairs: list[tuple[str, Any]]) -> Any:
    """One JSON object; `{"__float__": "Infinity"}`, as transformers 5 writes it, is that float."""
    data = dict(pairs)
    if len(data) < len(pairs):
        raise _DuplicateError(next(key for key, _ in pairs if sum(one == key for one, _ in pairs) > 1))
    if data.keys() == {"__float__"} and data["__float__"] in _FLOATS:
        return _FLOATS[data["__float__"]]
    return data


def _too_much(data: Any) -> bool:
    level: list[Any] = [data]
    count = 0
    for _ in range(MAX_DEPTH):
        below: list[Any] = []
        for one in level:
            below += one.values() if isinstance(one, dict) else one if isinstance(one, list) else ()
        count += len(below)
        if not below or count > MAX_NODES:
            break
        level = below
    else:
        return True
    return count > MAX_NODES
