"""A filled spec as YAML that reads like the model's paper: short mappings on one line, sources behind the values."""

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from .fill import Tree, plain, reads
from .scope import Value
from .table import owner, targets

WIDTH = 110  # columns a line may have with its comment before its mapping is spread over lines
COMMENT_AT = 58  # columns up to which comments of a section are aligned
_PLAIN = re.compile(r"[A-Za-z_][A-Za-z0-9_.-]*")
_NOT_TEXT = {"null", "true", "false", "yes", "no", "on", "off", "y", "n"}
_SPREAD = {("defaults",), ("blocks",), ("checkpoint",)}  # never on one line


@dataclass(frozen=True)
class Line:
    """One line of YAML; a comment goes behind it, or stands alone where there is no text."""

    text: str
    comment: str = ""


@dataclass(frozen=True)
class Style:
    """What stands beside the data.

    source: config paths -> the words of a comment. notes, asks: by dotted spec path, behind and above a key.
    """

    source: Callable[[Sequence[str]], str]
    notes: Mapping[str, str] = field(default_factory=dict)
    asks: Mapping[str, Sequence[str]] = field(default_factory=dict)


def render(sections: Sequence[Sequence[str]], spec: Mapping[str, Tree], style: Style) -> str:
    """The keys of each section in order, a blank line between sections."""
    parts = []
    for keys in sections:
        lines = [line for key in keys if key in spec for line in _entry((key,), spec[key], style)]
        if lines:
            parts.append("\n".join(_aligned(lines)))
    return "\n\n".join(parts) + "\n"


def _aligned(lines: Sequence[Line]) -> list[str]:
    """Comments below each other."""
    lengths = [len(line.text) for line in lines if line.comment and 0 < len(line.text) <= COMMENT_AT]
    column = max(lengths, default=0) + 2
    return [
        line.text if not line.comment else f"{line.text:<{column - 2}}  # {line.comment}" if line.text else line.comment
        for line in lines
    ]


def _entry(path: tuple[str, ...], tree: Tree, style: Style) -> list[Line]:
    """`key: value` with its comment, on one line or several."""
    pad, name = "  " * (len(path) - 1), ".".join(path)
    above = [Line("", f"{pad}# QUESTION: {ask}") for ask in style.asks.get(name, ())]
    if path == ("layers",):
        return [*above, *_layers(tree, style)]
    if path == ("checkpoint", "tensors"):
        return [*above, Line(f"{pad}tensors:"), *_tensors(tree)]
    note = style.notes.get(name, "")
    comment = "; ".join(part for part in (style.source(reads(tree)), note) if part)
    text = f"{pad}{key_text(path[-1])}: {flow(tree)}"
    asked = any(place.startswith(f"{name}.") for place in style.asks)
    short = len(text) + (len(comment) + 4 if comment else 0) <= WIDTH
    if not isinstance(tree, dict) or not tree or (short and not asked and not _spread(path)):
        return [*above, Line(text, comment)]
    inside = [line for key, item in tree.items() for line in _entry((*path, key), item, style)]
    return [*above, Line(f"{pad}{key_text(path[-1])}:", note), *inside]


def _spread(path: tuple[str, ...]) -> bool:
    return path in _SPREAD or (path[0] == "blocks" and len(path) == 2)


def _layers(groups: Tree, style: Style) -> list[Line]:
    """Groups one below the other; patterns on one line, or entry by entry where that is too long."""
    found = [Line("layers:", style.source(reads(groups)))]
    for group in groups:
        start = "  - "
        for key in ("repeat", "ffn", "pattern"):
            if key in group:
                text = f"{start}{key}: {flow(group[key])}"
                found += _long(group[key], start) if key == "pattern" and len(text) > WIDTH else [Line(text)]
                start = "    "
    return found


def _long(pattern: Tree, start: str) -> list[Line]:
    return [Line(f"{start}pattern:"), *(Line(f"      - {flow(entry)}") for entry in plain(pattern))]


def _tensors(table: Mapping[str, Tree]) -> list[Line]:
    """Lines of the table, those of one block together."""
    found: list[Line] = []
    before = ""
    for pattern, rule in table.items():
        block = owner(targets(plain(rule))[0])
        if before and block != before:
            found.append(Line(""))
        before = block
        found.append(Line(f"    {json.dumps(pattern)}: {flow(rule)}"))
    return found


def key_text(key: str) -> str:
    """A key, quoted where it must be."""
    return _scalar(key)


def flow(tree: Tree) -> str:
    """Data on one line."""
    value = tree.value if isinstance(tree, Value) else tree
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{key_text(key)}: {flow(item)}" for key, item in value.items()) + "}"
    if isinstance(value, list):
        return f"[{', '.join(map(flow, value))}]"
    return _scalar(value)


def _scalar(value: Any) -> str:
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    if isinstance(value, float):
        return _float(value)
    if isinstance(value, int):
        return str(value)
    text = str(value)
    return text if _PLAIN.fullmatch(text) and text.lower() not in _NOT_TEXT else json.dumps(text)


def _float(value: float) -> str:
    """1.0e7, 1.0e-6, 0.25: shortest digits, always with a point."""
    if value and not 1e-3 <= abs(value) < 1e5:
        mantissa, _, exponent = f"{value!r}".partition("e")
        if not exponent:
            digits = f"{value:.17e}"
            mantissa, _, exponent = next(
                text.partition("e") for text in (f"{value:.{n}e}" for n in range(18)) if float(text) == float(digits)
            )
        mantissa = mantissa if "." in mantissa else f"{mantissa}.0"
        return f"{mantissa}e{int(exponent)}"
    return repr(value)
