"""What a path may be: the keys the schema knows at each place, and the nearest one to a wrong key."""

import difflib
import types
from collections.abc import Iterable, Mapping
from typing import Annotated, Any, Union, get_args, get_origin

from pydantic import BaseModel

from moec.blocks.core.declare import BlockFields
from moec.blocks.registry import BLOCKS

from .marks import Key, KeyPath, dotted

_SHOWN = 12


def closest(word: str, options: Iterable[str]) -> str:
    """`did you mean 'x'?` for the nearest option, else the list of valid ones."""
    known = list(dict.fromkeys(options))
    near = difflib.get_close_matches(word, known, n=1, cutoff=0.6)
    if not near:
        lower = {option.lower(): option for option in known}
        near = [lower[one] for one in difflib.get_close_matches(word.lower(), lower, n=1, cutoff=0.6)]
    return f"did you mean '{near[0]}'?" if near else listing(known)


def closest_path(path: str, options: Iterable[str]) -> str | None:
    """The nearest dotted path whose last key is near too; None when there is none."""
    last = path.rpartition(".")[2]
    for option in difflib.get_close_matches(path, list(options), n=5, cutoff=0.6):
        if difflib.SequenceMatcher(None, last, option.rpartition(".")[2]).ratio() >= 0.6:
            return option
    return None


def listing(options: Iterable[str]) -> str:
    """`valid: a, b, c`, cut when long."""
    known = list(options)
    if not known:
        return ""
    rest = f", ... ({len(known)} in all)" if len(known) > _SHOWN else ""
    return f"valid: {', '.join(known[:_SHOWN])}{rest}"


def unwrap(annotation: Any, value: Any) -> Any:
    """The type behind Annotated and Optional; a block's own Fields where its kind is known."""
    if get_origin(annotation) is Annotated:
        return unwrap(get_args(annotation)[0], value)
    if get_origin(annotation) in (Union, types.UnionType):
        members = [member for member in get_args(annotation) if member is not type(None)]
        return unwrap(members[0], value)
    if annotation is BlockFields:
        kind = value.get("kind") if isinstance(value, Mapping) else None
        return BLOCKS[kind]().Fields if isinstance(kind, str) and kind in BLOCKS else Any
    return annotation


def children(annotation: Any, value: Any) -> dict[Key, Any] | None:
    """Types of the keys that may follow, given the value there; None = a leaf."""
    kind = unwrap(annotation, value)
    if isinstance(kind, type) and issubclass(kind, BaseModel):
        return {name: field.annotation for name, field in kind.model_fields.items()}
    if get_origin(kind) is dict:
        return {key: get_args(kind)[1] for key in value} if isinstance(value, Mapping) else {}
    if get_origin(kind) is tuple:
        members = get_args(kind)
        items = range(len(value)) if isinstance(value, list) else ()
        return {i: members[0] if members[-1] is Ellipsis else members[min(i, len(members) - 1)] for i in items}
    if isinstance(value, Mapping):  # Any: whatever the document has
        return dict.fromkeys(value, Any)
    return None


def is_open(annotation: Any, value: Any, adding: bool) -> bool:
    """Whether new keys may be put here: into free-form fields and tables of words always, of more when adding."""
    kind = unwrap(annotation, value)
    free_form = get_origin(kind) is dict and get_args(kind)[1] in (Any, str)
    return free_form or (adding and (get_origin(kind) is dict or kind is Any))


def step(value: Any, key: Key) -> Any:
    """The value one key further, None when there is none."""
    if isinstance(value, Mapping):
        return value.get(key)
    if isinstance(value, list) and isinstance(key, int) and key < len(value):
        return value[key]
    return None


def unknown_key(annotation: Any, value: Any, path: KeyPath, adding: bool = False) -> int | None:
    """Index of the first key of the path the schema does not know; None when all are known.

    adding: a key of an open table may be new; what follows it is checked by validation.
    """
    for index, key in enumerate(path):
        known = children(annotation, value)
        if key not in (known or {}) and is_open(annotation, value, adding):
            return None
        if known is None or key not in known:
            return index
        annotation, value = known[key], step(value, key)
    return None


def all_paths(annotation: Any, value: Any, prefix: KeyPath = ()) -> list[str]:
    """Every dotted path below, for did-you-mean over whole paths."""
    found = []
    for key, child in (children(annotation, value) or {}).items():
        path = (*prefix, key)
        found.append(dotted(path))
        found += all_paths(child, step(value, key), path)
    return found


def annotation_at(annotation: Any, value: Any, path: KeyPath) -> tuple[Any, Any]:
    """Type and value at a known path (Any below unknown keys)."""
    for key in path:
        known = children(annotation, value) or {}
        annotation, value = known.get(key, Any), step(value, key)
    return unwrap(annotation, value), value
