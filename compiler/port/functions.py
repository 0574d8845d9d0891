"""What expressions of recipes compute with: operators by syntax node, and the functions of plain values."""

import ast
import math
import operator
from collections.abc import Callable
from typing import Any

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
    "float": float,
    "str": str,
    "round": round,
    "finite": finite,
    "count": count,
    "range": number_range,
}
