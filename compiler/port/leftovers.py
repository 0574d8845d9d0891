"""What nothing in the spec comes from: every field of config.json that was not used, with the reason if known."""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

from .config import Config, leaves, shown

UNKNOWN = ""


@dataclass(frozen=True)
class Leftover:
    """One field. reason: why it is not used; UNKNOWN: the recipe does not say."""

    path: str
    value: Any
    reason: str

    def __str__(self) -> str:
        return f"{self.path} = {shown(self.value)}"


def leftovers(config: Config, ignored: Mapping[str, str], unread: Mapping[str, str]) -> tuple[Leftover, ...]:
    """Fields that are neither used nor null, in the order of the file.

    ignored: fnmatch pattern of a path (from the root, or from the file's top) -> reason; what is below goes
    with it. unread: path -> the block that would have used it, had a layer used the block.
    """
    used = config.seen.reads.keys() | config.seen.nulls.keys()
    found = []
    for path, value in leaves(config.top):
        if path in used or value is None or value == {}:
            continue
        reason = next((why for pattern, why in ignored.items() if _covers(pattern, path, config.root)), UNKNOWN)
        if not reason and path in unread:
            reason = f"only block {unread[path]} needs it, which no layer uses"
        found.append(Leftover(path, value, reason))
    return tuple(found)


def _covers(pattern: str, path: str, root: str) -> bool:
    """Whether the pattern means the field or a mapping around it."""
    inside = path.removeprefix(f"{root}.") if root else path
    return any(fnmatchcase(place, pattern) for whole in {path, inside} for place in _around(whole))


def _around(path: str) -> Iterator[str]:
    words = path.split(".")
    return (".".join(words[:n]) for n in range(1, len(words) + 1))


def comment(left: Iterable[Leftover], root: str) -> list[str]:
    """The report as comment lines: what is not understood one by one, the rest together by reason.

    root: what comes before most paths, left out where it does.
    """
    left = list(left)
    open_ones = [one for one in left if one.reason == UNKNOWN]
    lines = [f"# UNUSED: {one} (the recipe does not know this field: does it change the model?)" for one in open_ones]
    reasons = dict.fromkeys(one.reason for one in left if one.reason != UNKNOWN)
    for reason in reasons:
        names = [one.path.removeprefix(f"{root}.") for one in left if one.reason == reason]
        lines += _wrapped(f"# Not used, {reason}: ", _shortened(names))
    return lines


def _shortened(names: list[str]) -> list[str]:
    """Three fields or more of one mapping as that mapping."""
    found: dict[str, list[str]] = {}
    for name in names:
        found.setdefault(name.partition(".")[0], []).append(name)
    return [one for top, below in found.items() for one in (below if len(below) < 3 else [f"{top}.*"])]


def _wrapped(start: str, names: list[str], width: int = 116) -> list[str]:
    lines, line = [], start
    for index, name in enumerate(names):
        piece = name + ("," if index + 1 < len(names) else "")
        if len(line) + len(piece) > width and line not in (start, "#   "):
            lines.append(line.rstrip())
            line = "#   "
        line += f"{piece} "
    return [*lines, line.rstrip()]
