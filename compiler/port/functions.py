"""What expressions of recipes compute with: operators by syntax node, and functions.

PLAIN functions take values. LAZY ones take the syntax trees of their arguments, the scope, and what walks a tree.
"""

import ast
import math
import operator
from collections.abc import Callable
from typing import Any

from .config import MissingFieldError, shown
from .scope import Scope

Walk = Callable[[ast.AST, Scope], Any]
MAX_ITEMS = 100_000  # of a list or text


def matches(name: str, pattern: str) -> bool:
    """Whether a stored name ends with the pattern; `*` in it is one part between dots."""
    words, parts = name.split("."), pattern.split(".")
    if len(words) < len(parts):
        return False
    return all(part in ("*", word) for word, part in zip(words[-len(parts) :], parts, strict=True))


def finite(value: Any) -> Any:
    return value if is_number(value) and math.isfinite(value) else None


def integer(value: Any) -> Any:
    """A float without fraction as an integer; rounds towards zero."""
    return int(value) if is_number(value) and math.isfinite(value) else value


def real(value: Any) -> float:
    """A number as a float. Text is no number, whatever it says."""
    if not is_number(value):
        raise ValueError(f"expected a number, got {shown(value)}")
    return float(value)


def count(items: Any, value: Any) -> int:
    return list(items).count(value)


def number_range(*args: Any) -> list[int]:
    numbers = range(*args)
    if len(numbers) > MAX_ITEMS:
        raise ValueError(f"more than {MAX_ITEMS} numbers")
    return list(numbers)


def is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


OPERATORS: dict[type[ast.AST], Callable[..., Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
    ast.Pow: operator.pow,
    ast.USub: operator.neg,
    ast.UAdd: operator.pos,
    ast.Not: operator.not_,
    ast.And: lambda left, right: left and right,
    ast.Or: lambda left, right: left or right,
    ast.Eq: operator.eq,
    ast.NotEq: operator.ne,
    ast.Lt: operator.lt,
    ast.LtE: operator.le,
    ast.Gt: operator.gt,
    ast.GtE: operator.ge,
    ast.Is: operator.is_,
    ast.IsNot: operator.is_not,
    ast.In: lambda item, items: item in items,
    ast.NotIn: lambda item, items: item not in items,
}
PLAIN: dict[str, Callable[..., Any]] = {
    "len": len,
    "min": min,
    "max": max,
    "sum": sum,
    "abs": abs,
    "sqrt": math.sqrt,
    "log": math.log,
    "int": integer,
    "float": real,
    "str": str,
    "round": round,
    "finite": finite,
    "count": count,
    "range": number_range,
}


def _get(args: list[ast.expr], scope: Scope, walk: Walk) -> Any:
    """The first argument that is there and not null; the last one is taken as it is.

    Where none is there and the last is a field too, the first is missing: the others are its other names.
    """
    missing = ""
    for part in args[:-1]:
        with scope.config.recording(keep=False) as reads:
            try:
                value = walk(part, scope)
            except MissingFieldError as error:
                value, missing = None, missing or error.path
        if value is not None:
            scope.config.note(reads)
            return value
        scope.config.seen.nulls.update(reads)  # looked at, though the value comes from elsewhere
    try:
        return walk(args[-1], scope)
    except MissingFieldError as error:
        named = isinstance(args[-1], ast.Name | ast.Attribute)
        raise MissingFieldError(missing if named and missing else error.path) from error


def _has(args: list[ast.expr], scope: Scope, walk: Walk) -> bool:
    return _get([*args, ast.Constant(None)], scope, walk) is not None


def _shape(args: list[ast.expr], scope: Scope, walk: Walk) -> list[int] | None:
    """Shape of the first stored tensor whose name matches; null when there is none, or no checkpoint was given."""
    pattern = str(walk(args[0], scope))
    matching = (shape for name, shape in (scope.stored or {}).items() if matches(name, pattern))
    found = next(matching, None)
    return None if found is None else list(found)


def _stored(args: list[ast.expr], scope: Scope, walk: Walk) -> bool:
    """Whether the checkpoint has such a tensor; without arguments: whether there is a checkpoint."""
    return scope.stored is not None if not args else _shape(args, scope, walk) is not None


LAZY: dict[str, Callable[[list[ast.expr], Scope, Walk], Any]] = {
    "get": _get,
    "has": _has,
    "shape": _shape,
    "stored": _stored,
}
FUNCTIONS: tuple[str, ...] = (*LAZY, *PLAIN)
