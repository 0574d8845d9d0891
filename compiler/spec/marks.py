"""YAML text to plain data with the position of every key and value.

Plain scalars are read by YAML 1.2 rules. What YAML 1.1 (and so most Python readers)
would silently turn into something else (`3:1` into 181, `on` into true, `010` into 8)
is a problem, not a value.
"""

import math
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from ..problems import Problem
from .limits import MAX_DEPTH, MAX_NODES, name_problem, number_problem

Key = str | int
KeyPath = tuple[Key, ...]

_NULLS = {"", "~", "null", "Null", "NULL"}
_BOOLS = {"true": True, "True": True, "TRUE": True, "false": False, "False": False, "FALSE": False}
_INT = re.compile(r"[-+]?(0|[1-9][0-9]*)$")
_FLOAT = re.compile(r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?$")
_TAG = "tag:yaml.org,2002:"
_READ_AS = {"int": "the number", "float": "the number", "bool": "the truth value", "timestamp": "the date"}


@dataclass(frozen=True)
class Mark:
    """Where something was written: line and column from 1; line 0 = argument number `col`, or the whole file."""

    file: str
    line: int
    col: int

    def __str__(self) -> str:
        if self.line:
            return f"{self.file}:{self.line}:{self.col}"
        return f"{self.file}:arg{self.col}" if self.col else self.file


@dataclass
class Document:
    """One YAML file: data, marks, and what is wrong with it.

    keys: mark of the key that leads to a path; values: mark of the value there.
    poisoned: paths whose value could not be read; later checks skip them.
    fatal: nothing could be read at all.
    """

    file: str
    data: Any = None
    keys: dict[KeyPath, Mark] = field(default_factory=dict)
    values: dict[KeyPath, Mark] = field(default_factory=dict)
    problems: list[Problem] = field(default_factory=list)
    poisoned: set[KeyPath] = field(default_factory=set)
    fatal: bool = False


def dotted(path: KeyPath) -> str:
    """`model.layers.0.repeat`; keys that hold dots are quoted in brackets."""
    text = ""
    for key in path:
        plain = isinstance(key, int) or re.fullmatch(r"[^.\[\]]+", key)
        text += (f".{key}" if text else str(key)) if plain else f'["{key}"]'
    return text


def under(path: KeyPath, places: Iterable[KeyPath]) -> bool:
    """Whether the path is one of the places or below one."""
    return any(path[: len(place)] == place for place in places)


def walk(data: Any, path: KeyPath = ()) -> Iterator[tuple[KeyPath, Any]]:
    """Every path below, with its value, parents first."""
    pairs = data.items() if isinstance(data, Mapping) else enumerate(data) if isinstance(data, list) else ()
    for key, value in pairs:
        yield (*path, key), value
        yield from walk(value, (*path, key))


def texts(data: Any) -> Iterator[tuple[KeyPath, str]]:
    """Every text in the data with its path."""
    return ((path, value) for path, value in walk(data) if isinstance(value, str))


def read_document(path: Path, root: Key, shown: str) -> Document:
    """Read one YAML file whose content sits under `root` in the composed document."""
    document = Document(shown)
    try:
        text = path.read_text(encoding="utf-8")
        node = yaml.compose(text, Loader=yaml.SafeLoader)
    except (OSError, UnicodeDecodeError) as error:
        return _fatal(document, root, f"cannot be read: {getattr(error, 'strerror', None) or error}")
    except yaml.MarkedYAMLError as error:
        return _fatal(document, root, _syntax_text(error), error.problem_mark or error.context_mark)
    except (yaml.YAMLError, RecursionError) as error:
        return _fatal(document, root, f"YAML syntax: {' '.join(str(error).split()) or 'nested too deeply'}")
    if not isinstance(node, yaml.MappingNode):
        mark = node.start_mark if node else None
        return _fatal(document, root, "expected a mapping of keys to values at the top of the file", mark)
    try:
        document.data = _Reader(document).build(node, (root,), ())
    except _TooMuchError as error:
        return _fatal(document, root, str(error), error.mark)
    return document


class _TooMuchError(Exception):
    """The file holds more than any spec."""

    def __init__(self, text: str, mark: yaml.Mark):
        super().__init__(text)
        self.mark = mark


def _fatal(document: Document, root: Key, text: str, mark: yaml.Mark | None = None) -> Document:
    """The document with one problem and no data."""
    line, col = (mark.line + 1, mark.column + 1) if mark else (0, 0)
    document.problems.append(Problem(str(root), text, file=document.file, line=line, col=col))
    document.data, document.fatal = {}, True
    return document


def _syntax_text(error: yaml.MarkedYAMLError) -> str:
    """PyYAML's own words on one line."""
    parts = [part for part in (error.context, error.problem) if part]
    return f"YAML syntax: {', '.join(parts)}"


class _Reader:
    """Builds data from a node tree and records marks; one use per document."""

    def __init__(self, document: Document):
        self.document = document
        self.resolver = yaml.SafeLoader("")
        self.nodes = 0

    def build(self, node: yaml.Node, path: KeyPath, parents: tuple[yaml.Node, ...]) -> Any:
        """The data of a node; children recurse with the node among their parents."""
        self._count(node, len(parents))
        self.document.values[path] = self._mark(node)
        if any(parent is node for parent in parents):
            return self._poison(node, path, "an anchor cannot contain itself")
        if isinstance(node, yaml.MappingNode):
            return self._mapping(node, path, (*parents, node))
        if isinstance(node, yaml.SequenceNode):
            return [self.build(child, (*path, i), (*parents, node)) for i, child in enumerate(node.value)]
        return self._scalar(node, path)

    def _count(self, node: yaml.Node, depth: int) -> None:
        """Stop at what would fill the stack or, by aliases of aliases, the memory."""
        self.nodes += 1
        if depth > MAX_DEPTH:
            raise _TooMuchError(f"nested too deeply: more than {MAX_DEPTH} levels", node.start_mark)
        if self.nodes > MAX_NODES:
            raise _TooMuchError(f"too large: more than {MAX_NODES} values, aliases included", node.start_mark)

    def _mapping(self, node: yaml.MappingNode, path: KeyPath, parents: tuple[yaml.Node, ...]) -> dict[str, Any]:
        data: dict[str, Any] = {}
        first: dict[str, yaml.Node] = {}
        for key_node, value_node in node.value:
            if not isinstance(key_node, yaml.ScalarNode):
                self._poison(key_node, path, "a key must be a word, not a list or mapping")
                continue
            if key_node.tag == _TAG + "merge":
                self._poison(key_node, path, "merge keys (<<) are not part of the spec language", "repeat the keys")
                continue
            key = key_node.value
            if wrong := name_problem(key):
                self._poison(key_node, path, *wrong)
                continue
            here = (*path, key)
            if key in first:
                before = self._mark(first[key])
                self._problem(key_node, here, f"duplicate key '{key}'", f"first written at {before}")
                continue
            self._check_plain(key_node, here, "key")
            first[key] = key_node
            self.document.keys[here] = self._mark(key_node)
            data[key] = self.build(value_node, here, parents)
        return data

    def _scalar(self, node: yaml.Node, path: KeyPath) -> Any:
        assert isinstance(node, yaml.ScalarNode)
        text: str = node.value
        implicit = self.resolver.resolve(yaml.ScalarNode, text, (node.style is None, node.style is not None))
        if node.tag not in (implicit, _TAG + "str"):
            return self._poison(node, path, f"YAML tags are not accepted, got {node.tag}")
        if node.style is not None or node.tag != implicit:
            return text
        if self._check_plain(node, path, "value"):
            self.document.poisoned.add(path)
            return text
        if _INT.match(text) and (wrong := number_problem(text)):
            return self._poison(node, path, *wrong)
        return _plain_value(text)

    def _check_plain(self, node: yaml.ScalarNode, path: KeyPath, what: str) -> bool:
        """True, with a problem, when YAML 1.1 reads a plain scalar as what it does not look like."""
        kind = node.tag.removeprefix(_TAG)
        if node.style is not None or kind not in _READ_AS or not _is_text(node.value):
            return False
        meant = _read_as(node)
        text = f"plain {what} {node.value} is ambiguous: YAML 1.1 reads it as {_READ_AS[kind]} {meant}"
        better = f"write {meant}, or " if _is_number(meant) else ""
        self._problem(node, path, text, f"{better}quote it if you mean the text '{node.value}'")
        return True

    def _poison(self, node: yaml.Node, path: KeyPath, text: str, hint: str = "") -> None:
        self._problem(node, path, text, hint)
        self.document.poisoned.add(path)

    def _problem(self, node: yaml.Node, path: KeyPath, text: str, hint: str = "") -> None:
        mark = self._mark(node)
        self.document.problems.append(Problem(dotted(path), text, hint, mark.file, mark.line, mark.col))

    def _mark(self, node: yaml.Node) -> Mark:
        return Mark(self.document.file, node.start_mark.line + 1, node.start_mark.column + 1)


def _plain_value(text: str) -> Any:
    """A plain scalar by YAML 1.2 rules; what is no null, truth value or finite number is text."""
    if text in _NULLS:
        return None
    if text in _BOOLS:
        return _BOOLS[text]
    if _INT.match(text):
        return int(text)
    # "1e5" and "1.0" are numbers; "010" is neither an int nor, with digits only, a float.
    if _FLOAT.match(text) and not text.lstrip("+-").isdigit() and math.isfinite(float(text)):
        return float(text)
    return text


def _is_text(text: str) -> bool:
    return not _INT.match(text) and isinstance(_plain_value(text), str)


def _is_number(text: str) -> bool:
    return bool(_INT.match(text)) or isinstance(_plain_value(text), bool | float)


def _read_as(node: yaml.ScalarNode) -> str:
    """What a YAML 1.1 reader makes of the scalar."""
    try:
        value = yaml.SafeLoader("").construct_object(node)
        return str(value).lower() if isinstance(value, bool) else str(value)
    except (ValueError, OverflowError):
        return "(invalid)"
