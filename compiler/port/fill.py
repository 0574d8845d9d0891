"""A recipe's tree with its expressions computed: plain data whose leaves know the config fields they came from.

In a recipe's tree, text that begins with `=` is an expression, a value that turns out null is left out,
and three kinds of mappings are special: `{when: CONDITION, ...}` is left out unless the condition holds,
`{use: TEMPLATE, ARGUMENT: ...}` is the template with these locals, `{case: VALUE, A: ..., B: ...}` is one
of its entries. In a block that is `like` another, a null undoes what the other says (`on_top`).
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from ..problems import Problem
from ..spec.marks import KeyPath, dotted
from .config import MissingFieldError, shown
from .expressions import evaluate
from .scope import ExpressionError, Scope, Value, WrongValueError

Tree = Any  # dict[str, Tree] | list[Tree] | Value
OMITTED = Value(None)


@dataclass
class Filler:
    """Fills trees and collects what goes wrong.

    missing: config path -> the spec paths that need it. broken: spec paths without a value because of a problem.
    nulls: spec paths whose value is null, with the fields that made it so.
    """

    templates: Mapping[str, Any]
    missing: dict[str, list[str]] = field(default_factory=dict)
    wrong: list[tuple[str, str]] = field(default_factory=list)
    broken: set[KeyPath] = field(default_factory=set)
    nulls: dict[KeyPath, tuple[str, ...]] = field(default_factory=dict)

    def fill(self, tree: Any, scope: Scope, path: KeyPath = (), *, keep: bool = False) -> Tree:
        """The tree with values; a Value of None where there is nothing to write. keep: mappings keep null values."""
        if isinstance(tree, Mapping):
            return self._mapping(tree, scope, path, keep)
        if isinstance(tree, list):
            items = [self.fill(item, scope, (*path, index), keep=keep) for index, item in enumerate(tree)]
            return [item for item in items if not omitted(item)]
        if isinstance(tree, str) and tree.startswith("="):
            return self.value(tree[1:], scope, path)
        return Value(tree)

    def value(self, text: str, scope: Scope, path: KeyPath, *, place: bool = False) -> Value:
        """One expression; its problems are kept."""
        try:
            value = evaluate(text, scope, place=place)
            if value.value is None:
                self.nulls[path] = value.reads
            return value
        except MissingFieldError as error:
            self.missing.setdefault(error.path, []).append(dotted(path))
        except WrongValueError as error:
            self.wrong.append((error.path, str(error)))
        except ExpressionError as error:
            self.wrong.append(("", f"{error} (for {dotted(path)})"))
        self.broken.add(path)
        return OMITTED

    def _mapping(self, tree: Mapping[str, Any], scope: Scope, path: KeyPath, keep: bool) -> Tree:
        if "when" in tree and not self._holds(tree["when"], scope, path):
            return OMITTED
        tree = {key: item for key, item in tree.items() if key != "when"}
        if "use" in tree:
            return self._use(tree, scope, path, keep)
        if "case" in tree:
            return self._case(tree, scope, path, keep)
        filled = {key: self.fill(item, scope, (*path, key), keep=keep) for key, item in tree.items()}
        return {key: item for key, item in filled.items() if keep or not omitted(item)}

    def _holds(self, condition: Any, scope: Scope, path: KeyPath) -> bool:
        value = self.fill(condition, scope, path)
        if isinstance(value.value, str):
            self._refuse(path, f"expected true or false, got {shown(value.value)}", next(iter(value.reads), ""))
        return bool(value.value)

    def _use(self, tree: Mapping[str, Any], scope: Scope, path: KeyPath, keep: bool) -> Tree:
        """A template, its arguments being locals. A mapping of the config is passed as it is, to be looked into."""
        name = tree["use"]
        if name not in self.templates:
            return self._refuse(path, f"the recipe has no template '{name}'")
        local = {key: self._argument(item, scope, path) for key, item in tree.items() if key != "use"}
        return self.fill(self.templates[name], scope.inner(**local), path, keep=keep)

    def _argument(self, item: Any, scope: Scope, path: KeyPath) -> Any:
        if isinstance(item, str) and item.startswith("="):
            return self.value(item[1:], scope, path, place=True)
        return item

    def _case(self, tree: Mapping[str, Any], scope: Scope, path: KeyPath, keep: bool) -> Tree:
        chosen = self.fill(tree["case"], scope, path)
        options = {key: item for key, item in tree.items() if key != "case"}
        name = chosen.value if isinstance(chosen.value, str) else shown(chosen.value)
        if path in self.broken:
            return OMITTED
        if name not in options:
            text = f"{shown(chosen.value)} cannot be expressed for {dotted(path)} (known: {', '.join(options)})"
            return self._refuse(path, text, next(reversed(chosen.reads), ""))
        return self.fill(options[name], scope, path, keep=keep)

    def _refuse(self, path: KeyPath, text: str, field_path: str = "") -> Value:
        self.wrong.append((field_path, text))
        self.broken.add(path)
        return OMITTED

    def problems(self, file: str) -> list[Problem]:
        """What is missing, field by field, then what is wrong."""
        found = []
        for path, needed in self.missing.items():
            places = list(dict.fromkeys(needed))
            more = f" and {len(places) - 3} more" if len(places) > 3 else ""
            found.append(Problem(path, "is missing", f"needed for {', '.join(places[:3])}{more}", file))
        return found + [Problem(path, text, "", file) for path, text in dict.fromkeys(self.wrong)]


def omitted(tree: Tree) -> bool:
    """Whether there is nothing to write."""
    return isinstance(tree, Value) and tree.value is None and not tree.kept


def on_top(tree: Tree, base: Tree) -> Tree:
    """What is written of a block that is like `base`: a null where it undoes something, and nowhere else.

    What differs from the base stays, also where it says a default; a mapping that says just what the base's does
    goes. tree: filled with `keep`.
    """
    if not isinstance(tree, dict):
        return tree
    found, under = {}, base if isinstance(base, dict) else {}
    for key, item in tree.items():
        below = under.get(key, OMITTED)
        if isinstance(item, Value) and plain(below) not in (None, item.value):
            item = replace(item, computed=False, kept=True)
        found[key] = on_top(item, below)
        if isinstance(item, dict) and plain(found[key]) == plain(below):
            del found[key]
    return {key: item for key, item in found.items() if not omitted(item)}


def plain(tree: Tree) -> Any:
    """The data of a filled tree."""
    if isinstance(tree, Value):
        return tree.value
    if isinstance(tree, dict):
        return {key: plain(item) for key, item in tree.items()}
    return [plain(item) for item in tree]


def reads(tree: Tree) -> tuple[str, ...]:
    """Every config path a filled tree was made from, once, in order."""
    if isinstance(tree, Value):
        return tree.reads
    items = tree.values() if isinstance(tree, dict) else tree
    return tuple(dict.fromkeys(path for item in items for path in reads(item)))
