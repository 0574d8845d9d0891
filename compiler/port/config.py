"""config.json as data: paths into it, what is read of it, and what is wrong with the file."""

import json
import math
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ..problems import Problem
from ..spec.limits import MAX_DEPTH, MAX_NODES, printable

_FLOATS = {"Infinity": math.inf, "-Infinity": -math.inf, "NaN": math.nan}
_ABSENT: Any = object()


@dataclass(frozen=True)
class At:
    """A mapping inside the file, with the dotted path that leads to it."""

    path: str
    data: Mapping[str, Any]

    def child(self, key: str) -> str:
        word = printable(f"[{key}]" if "." in key else key)
        return f"{self.path}.{word}" if self.path else word


class MissingFieldError(LookupError):
    """A field that the file does not have, and that no default stands for."""

    def __init__(self, path: str):
        super().__init__(path)
        self.path = path


@dataclass
class Seen:
    """What has been looked at. reads: paths whose value was used, in order; nulls: those that were null.

    defaulted: those that a default stood in for. lists: length of every list that was indexed by the layer.
    """

    reads: dict[str, None] = field(default_factory=dict)
    nulls: dict[str, None] = field(default_factory=dict)
    defaulted: set[str] = field(default_factory=set)
    lists: dict[str, int] = field(default_factory=dict)


@dataclass(frozen=True)
class Config:
    """One config.json, and a record of what was looked at.

    root: path of the mapping that bare names mean ("" = the file's top). defaults: what a field is when
    the file leaves it out.
    """

    file: str
    data: dict[str, Any]
    root: str = ""
    defaults: Mapping[str, Any] = field(default_factory=dict)
    seen: Seen = field(default_factory=Seen)

    @contextmanager
    def recording(self, *, keep: bool = True) -> Iterator[dict[str, None]]:
        """What is read inside, in order. keep: it also counts as read outside."""
        outer, inner = self.seen.reads, dict[str, None]()
        self.seen.reads = inner
        try:
            yield inner
        finally:
            self.seen.reads = outer
            if keep:
                outer.update(inner)

    def note(self, paths: Iterable[str]) -> None:
        """These count as read."""
        self.seen.reads.update(dict.fromkeys(paths))

    @property
    def top(self) -> At:
        return At("", self.data)

    @property
    def here(self) -> At:
        """The mapping that bare names mean."""
        return self.inside(self.root) or At(self.root, {})

    def inside(self, path: str) -> At | None:
        """The mapping at a path; None where there is none."""
        place = self.top
        for key in path.split(".") if path else ():
            inner = place.data.get(key)
            if not isinstance(inner, Mapping):
                return None
            place = At(place.child(key), inner)
        return place

    def look(self, place: At, key: str) -> Any:
        """The value one key further; raises MissingFieldError. Mappings stay At, all else is recorded as read."""
        path, value = place.child(key), place.data.get(key, _ABSENT)
        if value is _ABSENT:
            return self._default(path)
        if isinstance(value, Mapping):
            return At(path, value)
        self.note([path])
        return value

    def missing_under(self, path: str) -> Any:
        """What stands for a field whose parent the file lacks."""
        return self._default(path)

    def _default(self, path: str) -> Any:
        name = path.removeprefix(f"{self.root}.") if self.root else path
        if name not in self.defaults:
            raise MissingFieldError(path)
        self.note([path])
        self.seen.defaulted.add(path)
        return self.defaults[name]

    def plain(self, value: Any) -> Any:
        """The value as data; a mapping counts as read with all it holds."""
        if not isinstance(value, At):
            return value
        self.note([path for path, _ in leaves(value)] or [value.path])
        return dict(value.data)


def shown(value: Any) -> str:
    """A config value as a message or comment shows it: on one line, not too long."""
    words = {True: "true", False: "false", None: "null"}
    text = words[value] if value is None or isinstance(value, bool) else ""
    text = text or (f"'{value}'" if isinstance(value, str) else str(value.data if isinstance(value, At) else value))
    return printable(text if len(text) <= 60 else f"{text[:57]}...")


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
        return bad(f"has the key '{printable(str(error))}' twice in one object")
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
    data: dict[str, Any] = {}
    for key, value in pairs:
        if key in data:
            raise _DuplicateError(key)
        data[key] = value
    if data.keys() == {"__float__"} and isinstance(data["__float__"], str):
        return _FLOATS.get(data["__float__"], data)
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
