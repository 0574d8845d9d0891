"""The layers of a model, one entry per layer, as the groups of a spec."""

from collections.abc import Mapping, Sequence
from typing import Any

from .config import shown
from .fill import Filler, Tree, plain, reads
from .layers import compress, rows
from .scope import Scope, Value

MAX_LAYERS = 2000
_NAMES_UP_TO = 4  # equal neighbours written out as names; more of them are {mixer: name, repeat: n}


def layer_entries(layers: dict[str, Any], filler: Filler, scope: Scope) -> tuple[list[Tree], tuple[str, ...]]:
    """One filled entry per layer, [] with a problem where the layers cannot be told; and what gave their number."""
    count = filler.fill(layers.get("count", "=num_hidden_layers"), scope, ("num_layers",))
    if filler.broken:
        return [], count.reads
    number = count.value
    if not isinstance(number, int) or isinstance(number, bool) or not 1 <= number <= MAX_LAYERS:
        text = f"expected a number of layers from 1 to {MAX_LAYERS}, got {shown(number)}"
        filler.wrong.append((next(reversed(count.reads), ""), text))
        return [], count.reads
    return _entries(layers, number, filler, scope), count.reads


def _entries(layers: dict[str, Any], number: int, filler: Filler, scope: Scope) -> list[Tree]:
    found = []
    for index in range(number):
        entry = filler.fill(layers["entry"], scope.inner(i=index, n=number), ("layers",))
        if filler.broken:
            return []
        found.append(entry)
    wrong = {path: length for path, length in scope.config.seen.lists.items() if length != number}
    filler.wrong += [(path, f"has {length} entries for {number} layers") for path, length in wrong.items()]
    return [] if wrong else found


def block_names(entries: Sequence[Tree]) -> list[str]:
    """The blocks that layers use, in order of first use."""
    found: dict[str, None] = {}
    for entry in map(plain, entries):
        for slot in ("mixer", "ffn"):
            names = entry.get(slot, [])
            found.update(dict.fromkeys([names] if isinstance(names, str) else names))
    return list(found)


def renamed(entry: Tree, names: Mapping[str, str]) -> Tree:
    """The entry with some blocks under other names."""
    if not names:
        return entry
    found = dict(entry)
    for slot in ("mixer", "ffn"):
        if slot in found:
            value = plain(found[slot])
            new = [names.get(one, one) for one in value] if isinstance(value, list) else names.get(value, value)
            found[slot] = Value(new, reads(found[slot]))
    return found


def groups(entries: Sequence[Tree]) -> list[Tree]:
    """The shortest groups; every value knows the fields that decided over the layers."""
    source = tuple(dict.fromkeys(path for entry in entries for path in reads(entry)))
    data = [plain(entry) for entry in entries]
    found: list[Tree] = []
    for run in compress(data):
        group = _group(data[run.start : run.start + run.period], run.repeat)
        found.append({key: Value(value, source if not found else ()) for key, value in group.items()})
    return found


def _group(pattern: list[dict[str, Any]], repeat: int) -> dict[str, Any]:
    group: dict[str, Any] = {"repeat": repeat} if repeat > 1 else {}
    ffns = [entry.get("ffn") for entry in pattern]
    shared = len(pattern) > 1 and ffns[0] is not None and all(one == ffns[0] for one in ffns)
    shared = shared and all("mixer" in entry for entry in pattern)
    if shared:
        group["ffn"] = ffns[0]
        pattern = [{key: value for key, value in entry.items() if key != "ffn"} for entry in pattern]
    group["pattern"] = [item for entry, times in rows(pattern) for item in _items(entry, times)]
    return group


def _items(entry: dict[str, Any], times: int) -> list[Any]:
    """One entry that stands `times` times in a row."""
    if entry.keys() == {"mixer"} and times <= _NAMES_UP_TO:
        return [entry["mixer"]] * times
    return [{**entry, "repeat": times} if times > 1 else entry]
