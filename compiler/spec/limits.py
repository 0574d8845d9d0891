"""How large a spec and its numbers may be, and which text it may hold: far above any model, far below what hurts."""

from collections.abc import Mapping
from typing import Any

MAX_INT = 2**63 - 1
MAX_DEPTH = 32
MAX_NODES = 100_000
MAX_NAME = 256
_OPEN, _CLOSE = "[{(", "]})"


def number_problem(digits: str) -> tuple[str, str] | None:
    """(text, hint) when the integer written with these digits, all decimal, is too large."""
    plain = digits.lstrip("+-")
    if len(plain) < len(str(MAX_INT)) or (len(plain) == len(str(MAX_INT)) and plain <= str(MAX_INT)):
        return None
    got = digits if len(digits) <= 40 else f"{digits[:20]}... ({len(plain)} digits)"
    return f"the number {got} is too large", f"at most {MAX_INT}"


def value_problem(value: Any) -> tuple[str, str] | None:
    """The first number in plain data that is too large."""
    if isinstance(value, Mapping):
        value = [*value.keys(), *value.values()]
    if isinstance(value, list | tuple):
        return next((found for one in value if (found := value_problem(one))), None)
    if isinstance(value, int) and abs(value) > MAX_INT:
        return f"a number of {value.bit_length()} bits is too large", f"at most {MAX_INT}"
    return None


def name_problem(text: str) -> tuple[str, str] | None:
    """(text, hint) when a key cannot be one: all names of the language and of tensors are short printable ASCII."""
    if not (text.isascii() and text.isprintable()):
        return f"{text[:60]!a} is no name: it has characters that are not printable ASCII", ""
    if len(text) > MAX_NAME:
        return f"a name of {len(text)} characters is too long", f"at most {MAX_NAME}"
    return None


def nesting(text: str) -> int:
    """How deeply brackets nest in the text."""
    depth = deepest = 0
    for sign in text:
        depth += (sign in _OPEN) - (sign in _CLOSE)
        deepest = max(deepest, depth)
    return deepest


def uses_resolver(text: str) -> bool:
    """Whether an interpolation in the text calls a function, as in `${oc.env:HOME}`: a colon inside `${...}`."""
    depth = 0
    for index, sign in enumerate(text):
        if text.startswith("${", index):
            depth += 1
        elif sign == "}":
            depth = max(depth - 1, 0)
        elif sign == ":" and depth:
            return True
    return False


def as_key(part: str) -> str | int:
    """An index where the part is a small plain number, else the part."""
    return int(part) if part.isascii() and part.isdigit() and len(part) <= 9 else part


def printable(text: str) -> str:
    """The text with line breaks, control characters and broken Unicode escaped."""
    return "".join(sign if sign.isprintable() else ascii(sign)[1:-1] for sign in text)
