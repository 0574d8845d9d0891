"""Findings to problems: where in the files or on the command line a composed path was written."""

from dataclasses import dataclass, field, replace
from typing import Any

from ..problems import Problem
from .files import COMMAND_LINE
from .limits import as_key
from .marks import Document, KeyPath, Mark, dotted
from .suggest import step
from .validate import Finding


@dataclass
class Locator:
    """Knows every written place.

    documents: by root. arguments: override paths with their argument numbers, in order.
    unresolved: the composed document before interpolation.
    """

    documents: dict[str, Document]
    arguments: list[tuple[KeyPath, int]] = field(default_factory=list)
    unresolved: Any = None

    def problem(self, finding: Finding) -> Problem:
        """The finding with its position, its interpolation's origin and the other places that take part."""
        for path in finding.together:
            if (mark := self.place(path)) and mark.file == COMMAND_LINE:
                return self.problem(replace(finding, path=path, together=()))
        place = self.place(finding.path, finding.at_key)
        others = [str(other) for path in finding.also if (other := self.place(path)) and other != place]
        text = finding.text + ("" if "${" in finding.text else self._origin(finding.path))
        hint = "; ".join([finding.hint] * bool(finding.hint) + [f"see {other}" for other in others])
        file, line, col = (place.file, place.line, place.col) if place else ("", 0, 0)
        return Problem(dotted(finding.path), text, hint, file, line, col)

    def located(self, problem: Problem) -> Problem:
        """A problem of a later stage, where the first of its paths ("a.b, a.c") was written; the others are named."""
        if problem.file or not problem.path:
            return problem
        first, *others = [self._decided(tuple(path.split("."))) for path in problem.path.split(", ")]
        if first is None:
            return problem
        see = [f"see {other}" for other in dict.fromkeys(others) if other and other != first]
        hint = "; ".join([problem.hint] * bool(problem.hint) + see)
        return replace(problem, hint=hint, file=first.file, line=first.line, col=first.col)

    def _decided(self, path: KeyPath) -> Mark | None:
        """Where a key below a root was written; a pin may be the model's, a dtype the target's."""
        if len(path) < 2:
            return None
        if place := self.place(path):
            return place
        elsewhere = (("model", "mesh", *path[1:]), ("target", *path[1:])) if path[0] == "plan" else ()
        for other in elsewhere:
            document = self.documents.get(str(other[0]))
            if document is not None and other in document.values:
                return self.place(other)
        return None

    def place(self, path: KeyPath, at_key: bool = False) -> Mark | None:
        """The override that set the path, else the nearest written place in its file."""
        for prefix, number in reversed(self.arguments):
            if path[: len(prefix)] == prefix:
                return Mark(COMMAND_LINE, 0, number)
        document = self.documents.get(str(path[0])) if path else None
        written = document is not None and path in document.values
        for prefix, number in reversed(self.arguments):
            if not written and prefix[: len(path)] == path:  # the override brought the path into being
                return Mark(COMMAND_LINE, 0, number)
        if document is None:
            return None
        for length in range(len(path), 0, -1):
            mark = self._written(document, path[:length], at_key and length == len(path))
            if mark:
                return mark
        return Mark(document.file, 0, 0)

    def _written(self, document: Document, path: KeyPath, at_key: bool) -> Mark | None:
        """The key when it is meant or leads to a collection, else the value."""
        value: Any = document.data
        for key in path[1:]:
            value = step(value, key)
        if (at_key or isinstance(value, (dict, list))) and path in document.keys:
            return document.keys[path]
        return document.values.get(path)

    def _origin(self, path: KeyPath) -> str:
        """For a value that came by interpolation: the expression and where its source is written."""
        value = self.unresolved
        for index, key in enumerate(path):
            value = step(value, key)
            if isinstance(value, str) and "${" in value:
                return f" (from {value}{self._source(value, path[: index + 1])})"
        return ""

    def _source(self, expression: str, path: KeyPath) -> str:
        """Position of the key an interpolation of one plain key names."""
        source = interpolated_path(expression, path)
        place = self.place(source) if source else None
        return f", set at {place}" if place else ""


def interpolated_path(expression: str, path: KeyPath) -> KeyPath | None:
    """The absolute path of `${a.b}` or the relative `${.b}` / `${..b}`; None for anything else."""
    inner = expression.removeprefix("${").removesuffix("}")
    if expression != f"${{{inner}}}" or any(sign in inner for sign in "${}:"):
        return None
    dots = len(inner) - len(inner.lstrip("."))
    base = path[:-dots] if dots else ()
    return (*base, *map(as_key, inner.lstrip(".").split(".")))
