"""Leaves out what says nothing: computed values that only repeat a neutral default of the spec language."""

from collections.abc import Mapping
from typing import Any

from pydantic import BaseModel

from ..spec.suggest import children, unwrap
from .fill import Tree, plain
from .scope import Value

_NEUTRAL = (False, None, "none", 1.0)


def trim(tree: Tree, kind: Any) -> Tree:
    """The tree without computed leaves that equal their default, where that default means "off"."""
    if not isinstance(tree, dict):
        return tree
    value = plain(tree)
    known = children(kind, value) or {}
    found: dict[str, Tree] = {}
    for key, item in tree.items():
        inner = trim(item, known.get(key, Any))
        if not _says_nothing(inner, unwrap(kind, value), key):
            found[key] = inner
    return found


def _says_nothing(item: Tree, kind: Any, key: str) -> bool:
    if isinstance(item, Mapping):
        return not item and _default(kind, key) is not _NO_DEFAULT
    if not isinstance(item, Value) or not item.computed:
        return False
    neutral = any(type(item.value) is type(one) and item.value == one for one in _NEUTRAL)
    return neutral and item.value == _default(kind, key)


_NO_DEFAULT: Any = object()


def _default(kind: Any, key: str) -> Any:
    if not (isinstance(kind, type) and issubclass(kind, BaseModel)) or key not in kind.model_fields:
        return _NO_DEFAULT
    field = kind.model_fields[key]
    return _NO_DEFAULT if field.is_required() else field.default
