"""The expressions of port recipes: a small part of Python's grammar, walked over its syntax tree, never run.

A name is a local of the recipe (`i`, a `let`, a template's argument) or a field of config.json; `a.b` is a
field of a field; `config` is the top of the file. docs/port.md lists what is accepted; all else is refused.
"""

import ast
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cache
from typing import Any

from .config import At, Config, MissingFieldError, shown
from .functions import MAX_ITEMS, OPERATORS, PLAIN, is_number, matches

MAX_LENGTH = 4000  # characters of an expression
MAX_VALUE = 2**63


class ExpressionError(Exception):
    """An expression that is not accepted, or that cannot be computed from this file."""


class WrongValueError(ExpressionError):
    """A field whose value the recipe does not know. path: the field, "" when several take part."""

    def __init__(self, text: str, path: str = ""):
        super().__init__(text)
        self.path = path


@dataclass
class Scope:
    """What names mean. lets: expressions by name, computed where they are used. stored: see functions below."""

    config: Config
    lets: Mapping[str, Any] = field(default_factory=dict)
    local: Mapping[str, Any] = field(default_factory=dict)
    stored: "Mapping[str, tuple[int, ...]] | None" = None
    open: tuple[str, ...] = ()  # lets that are being computed: inside its own text a let's name is the field

    def inner(self, **local: Any) -> "Scope":
        """The scope with more locals."""
        return Scope(self.config, self.lets, {**self.local, **local}, self.stored, self.open)


@dataclass(frozen=True)
class Value:
    """A value and the config paths it was made from. computed: by an expression, not as the recipe has it.

    kept: it is written even if it is null.
    """

    value: Any
    reads: tuple[str, ...] = ()
    computed: bool = False
    kept: bool = False


def evaluate(text: str, scope: Scope, *, place: bool = False) -> Value:
    """The value of an expression (without its leading '='). Raises ExpressionError or MissingFieldError.

    place: a mapping of the file stays one, to be looked into later; else it is read with all it holds.
    """
    tree = parse(text)
    outer, scope.config.reads = scope.config.reads, {}
    try:
        value = _walk(tree, scope)
        value = value if place else scope.config.plain(value)
    except ArithmeticError as error:
        raise ExpressionError(f"'{text}' cannot be computed: {error}") from error
    except TypeError as error:
        raise ExpressionError(f"'{text}' cannot be computed: {error}; {_given(scope)}") from error
    finally:
        reads, scope.config.reads = tuple(scope.config.reads), outer
        outer.update(dict.fromkeys(reads))
    if isinstance(value, float) and not math.isfinite(value):
        raise WrongValueError(f"{value} is no number a spec can hold", next(reversed(reads), ""))
    return Value(_checked(value, text), reads, computed=True)


def _given(scope: Scope) -> str:
    return f"it uses {', '.join(scope.config.reads) or 'no field'}"


@cache
def parse(text: str) -> ast.expr:
    """The syntax tree; ExpressionError where something is not part of the language."""
    if len(text) > MAX_LENGTH:
        raise ExpressionError(f"an expression of {len(text)} characters is too long: at most {MAX_LENGTH}")
    try:
        body = ast.parse(text.strip(), mode="eval").body
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise ExpressionError(f"'{text}' is no expression: {getattr(error, 'msg', error)}") from error
    for node in ast.walk(body):
        if wrong := _refused(node):
            raise ExpressionError(f"'{text}': {wrong}")
    return body


def _refused(node: ast.AST) -> str:
    """Why a node is not part of the language; "" when it is."""
    match node:
        case ast.expr_context() | ast.comprehension():
            return ""
        case ast.operator() | ast.unaryop() | ast.boolop() | ast.cmpop() if type(node) in OPERATORS:
            return ""
        case ast.Attribute(attr=name) if name.startswith("_"):
            return "no field begins with an underscore here"
        case ast.Call(func=ast.Name(id=name), keywords=[]) if name not in FUNCTIONS:
            return f"there is no function '{name}' (there are: {', '.join(FUNCTIONS)})"
        case ast.Call(func=ast.Name(), keywords=[]):
            return ""
        case ast.Call():
            return "only functions of the language can be called, without keywords"
        case ast.Constant(value=value) if not isinstance(value, int | float | str | None):
            return f"{value!r} is not part of the expression language"
        case _ if type(node) in _NODES:
            return ""
    return f"{type(node).__name__} is not part of the expression language"


def _walk(node: ast.AST, scope: Scope) -> Any:
    return _NODES[type(node)](node, scope)


def _constant(node: ast.Constant, scope: Scope) -> Any:
    return node.value


def _name(node: ast.Name, scope: Scope) -> Any:
    name = node.id
    if name in scope.local:
        return _local(scope.local[name], scope)
    if name == "config":
        return scope.config.top
    if name in scope.lets and name not in scope.open:
        return _let(name, scope)
    return scope.config.look(scope.config.here, name)


def _local(value: Any, scope: Scope) -> Any:
    """A template's argument brings the fields it was made from."""
    if not isinstance(value, Value):
        return value
    scope.config.reads.update(dict.fromkeys(value.reads))
    return value.value


def _let(name: str, scope: Scope) -> Any:
    definition = scope.lets[name]
    if not (isinstance(definition, str) and definition.startswith("=")):
        return definition
    inner = Scope(scope.config, scope.lets, {}, scope.stored, (*scope.open, name))
    return _walk(parse(definition[1:]), inner)


def _attribute(node: ast.Attribute, scope: Scope) -> Any:
    try:
        place = _walk(node.value, scope)
    except MissingFieldError as error:
        return scope.config.missing_under(f"{error.path}.{node.attr}")
    if place is None:  # `rope_scaling: null` has no fields
        return scope.config.missing_under(f"{_last(scope)}.{node.attr}")
    if isinstance(place, dict) and node.attr in place:
        return place[node.attr]
    if isinstance(place, dict):
        raise MissingFieldError(node.attr)
    if not isinstance(place, At):
        raise WrongValueError(f"expected a mapping, got {shown(place)}", _last(scope))
    return scope.config.look(place, node.attr)


def _subscript(node: ast.Subscript, scope: Scope) -> Any:
    container = _walk(node.value, scope)
    path = _last(scope)
    if isinstance(container, At):
        return scope.config.look(container, str(_walk(node.slice, scope)))
    if isinstance(node.slice, ast.Slice):
        bounds = [
            _walk(part, scope) if part else None for part in (node.slice.lower, node.slice.upper, node.slice.step)
        ]
        return _sequence(container, path)[slice(*bounds)]
    key = _walk(node.slice, scope)
    if isinstance(container, dict):
        return _choose(container, key, scope)
    if isinstance(node.slice, ast.Name) and node.slice.id == "i" and isinstance(container, list):
        scope.config.lists[path] = len(container)
    items = _sequence(container, path)
    if not isinstance(key, int):
        raise ExpressionError(f"'{ast.unparse(node)}': {shown(key)} is no index")
    if not -len(items) <= key < len(items):
        raise WrongValueError(f"has {len(items)} entries, entry {key} is needed", path)
    return items[key]


def _choose(options: dict[Any, Any], key: Any, scope: Scope) -> Any:
    """One entry of a mapping written in the recipe."""
    hashable = key is None or isinstance(key, str | int | float)
    if not hashable or key not in options:
        known = ", ".join("null" if one is None else str(one) for one in options)
        raise WrongValueError(f"{shown(key)} is not known to the recipe (known: {known})", _last(scope))
    return options[key]


def _sequence(value: Any, path: str) -> Any:
    if not isinstance(value, list | str):
        raise WrongValueError(f"expected a list, got {shown(value)}", path)
    return value


def _last(scope: Scope) -> str:
    """The field that was read last: the one a wrong value most likely came from."""
    return next(reversed(scope.config.reads), "")


def _binary(node: ast.BinOp, scope: Scope) -> Any:
    left, right = _walk(node.left, scope), _walk(node.right, scope)
    if isinstance(node.op, ast.Pow) and not (is_number(left) and is_number(right) and abs(right) <= 64):
        raise ExpressionError(f"'{ast.unparse(node)}': only small powers of numbers")
    if isinstance(node.op, ast.Mult):
        for items, times in ((left, right), (right, left)):
            if isinstance(items, list | str) and (not isinstance(times, int) or len(items) * times > MAX_ITEMS):
                raise ExpressionError(f"'{ast.unparse(node)}': a list cannot be repeated {shown(times)} times")
    return _checked(OPERATORS[type(node.op)](left, right), ast.unparse(node))


def _unary(node: ast.UnaryOp, scope: Scope) -> Any:
    return OPERATORS[type(node.op)](_walk(node.operand, scope))


def _bool(node: ast.BoolOp, scope: Scope) -> Any:
    value: Any = None
    for part in node.values:
        value = _walk(part, scope)
        if bool(value) != isinstance(node.op, ast.And):
            break
    return value


def _compare(node: ast.Compare, scope: Scope) -> bool:
    left = _walk(node.left, scope)
    for op, part in zip(node.ops, node.comparators, strict=True):
        right = _walk(part, scope)
        if isinstance(right, At):
            right = list(right.data)
        if not OPERATORS[type(op)](left, right):
            return False
        left = right
    return True


def _if(node: ast.IfExp, scope: Scope) -> Any:
    return _walk(node.body if _walk(node.test, scope) else node.orelse, scope)


def _list(node: ast.List | ast.Tuple, scope: Scope) -> list[Any]:
    return [_walk(part, scope) for part in node.elts]


def _dict(node: ast.Dict, scope: Scope) -> dict[Any, Any]:
    if None in node.keys:
        raise ExpressionError("a mapping cannot be spread into another")
    return {_walk(key, scope): _walk(value, scope) for key, value in zip(node.keys, node.values, strict=True) if key}


def _comprehension(node: ast.ListComp, scope: Scope) -> list[Any]:
    if len(node.generators) != 1 or not isinstance(node.generators[0].target, ast.Name):
        raise ExpressionError(f"'{ast.unparse(node)}': one plain `for` per list")
    (part,) = node.generators
    assert isinstance(part.target, ast.Name)
    name, found = part.target.id, []
    for item in _sequence(scope.config.plain(_walk(part.iter, scope)), _last(scope)):
        inner = scope.inner(**{name: item})
        if all(_walk(test, inner) for test in part.ifs):
            found.append(_walk(node.elt, inner))
    return found


def _call(node: ast.Call, scope: Scope) -> Any:
    assert isinstance(node.func, ast.Name)
    name = node.func.id
    if name in _LAZY:
        return _LAZY[name](node.args, scope)
    try:
        return FUNCTIONS[name](*(scope.config.plain(_walk(part, scope)) for part in node.args))
    except (ValueError, IndexError) as error:
        raise ExpressionError(f"'{ast.unparse(node)}' cannot be computed: {error}") from error


def _get(args: list[ast.expr], scope: Scope) -> Any:
    """The first argument that is there and not null; the last one is taken as it is."""
    for part in args[:-1]:
        before = dict(scope.config.reads)
        try:
            value = _walk(part, scope)
        except MissingFieldError:
            value = None
        if value is not None:
            return value
        null = {path: None for path in scope.config.reads if path not in before}
        scope.config.reads = before
        _seen_null(scope, null)
    return _walk(args[-1], scope)


def _seen_null(scope: Scope, paths: dict[str, None]) -> None:
    """Fields that are null were looked at, though the value comes from elsewhere."""
    scope.config.nulls.update(paths)


def _has(args: list[ast.expr], scope: Scope) -> bool:
    return _get([*args, ast.Constant(None)], scope) is not None


def _shape(args: list[ast.expr], scope: Scope) -> list[int] | None:
    """Shape of the first stored tensor whose name matches; null when there is none, or no checkpoint was given."""
    pattern = str(_walk(args[0], scope))
    matching = (shape for name, shape in (scope.stored or {}).items() if matches(name, pattern))
    found = next(matching, None)
    return None if found is None else list(found)


def _stored(args: list[ast.expr], scope: Scope) -> bool:
    """Whether the checkpoint has such a tensor; without arguments: whether there is a checkpoint."""
    return scope.stored is not None if not args else _shape(args, scope) is not None


def _checked(value: Any, text: str) -> Any:
    """Values stay of a size that fits a spec."""
    if isinstance(value, complex) or (isinstance(value, int) and abs(value) >= MAX_VALUE):
        raise ExpressionError(f"'{text}' is no number a spec can hold")
    if isinstance(value, list | str | dict) and len(value) > MAX_ITEMS:
        raise ExpressionError(f"'{text}' has more than {MAX_ITEMS} entries")
    return value


Walker = Callable[[Any, Scope], Any]
_NODES: dict[type[ast.AST], Walker] = {
    ast.Constant: _constant,
    ast.Name: _name,
    ast.Attribute: _attribute,
    ast.Subscript: _subscript,
    ast.Slice: _constant,  # only inside a subscript, which walks its bounds
    ast.BinOp: _binary,
    ast.UnaryOp: _unary,
    ast.BoolOp: _bool,
    ast.Compare: _compare,
    ast.IfExp: _if,
    ast.List: _list,
    ast.Tuple: _list,
    ast.Dict: _dict,
    ast.ListComp: _comprehension,
    ast.Call: _call,
}
# Functions that see their arguments before they are computed.
_LAZY: dict[str, Callable[[list[ast.expr], Scope], Any]] = {
    "get": _get,
    "has": _has,
    "shape": _shape,
    "stored": _stored,
}
FUNCTIONS: dict[str, Callable[..., Any]] = {**_LAZY, **PLAIN}
