"""The expressions of port recipes: a small part of Python's grammar, walked over its syntax tree, never run.

A name is a local of the recipe (`i`, a `let`, a template's argument) or a field of config.json; `a.b` is a
field of a field; `config` is the top of the file. docs/port.md lists what is accepted; all else is refused.
"""

import ast
import math
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

from .config import At, MissingFieldError, shown
from .functions import FUNCTIONS, LAZY, MAX_ITEMS, OPERATORS, PLAIN, is_number
from .scope import ExpressionError, Scope, Value, WrongValueError

MAX_LENGTH = 4000  # characters of an expression
MAX_VALUE = 2**63
_BLAMED = 3  # fields named where several take part


def evaluate(text: str, scope: Scope, *, place: bool = False) -> Value:
    """The value of an expression (without its leading '='). Raises ExpressionError or MissingFieldError.

    place: a mapping of the file stays one, to be looked into later; else it is read with all it holds.
    """
    tree = parse(text)
    with scope.config.recording() as reads:
        try:
            value = _walk(tree, scope)
            value = value if place else scope.config.plain(value)
        except (ArithmeticError, TypeError) as error:
            raise WrongValueError(f"'{text}' cannot be computed: {error}", _blame(reads)) from error
        _check_size(value, text, reads)
    if isinstance(value, float) and not math.isfinite(value):
        raise WrongValueError(f"{value} is no number a spec can hold", _blame(reads))
    return Value(value, tuple(reads), computed=True)


def _blame(reads: Sequence[str] | dict[str, None]) -> str:
    """The fields a problem is about."""
    return ", ".join(list(reads)[:_BLAMED])


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


def _traced(node: ast.AST, scope: Scope) -> tuple[Any, list[str]]:
    """The value, and the fields it was made from."""
    with scope.config.recording() as reads:
        value = _walk(node, scope)
    return value, list(reads)


def _operand(node: ast.AST, scope: Scope) -> Any:
    """A value to compute with, which a mapping of the file is not."""
    value = _walk(node, scope)
    if isinstance(value, At):
        raise WrongValueError(f"expected a plain value, got {shown(value)}", value.path)
    return value


def _number(node: ast.AST, scope: Scope) -> Any:
    """A side of an arithmetic operation, which null is not."""
    value, reads = _traced(node, scope)
    if isinstance(value, At) or value is None:
        path = value.path if isinstance(value, At) else _first(reads)
        raise WrongValueError(f"expected a number, got {shown(value)} (for '{ast.unparse(node)}')", path)
    return value


def _truth(node: ast.AST, scope: Scope) -> tuple[bool, Any]:
    """Whether a condition holds, and its value. Text is no condition: 'false' would hold."""
    value, reads = _traced(node, scope)
    if isinstance(value, str) and reads:
        raise WrongValueError(f"expected true or false, got {shown(value)}", reads[0])
    return bool(value.data if isinstance(value, At) else value), value


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
    scope.config.note(value.reads)
    return value.value


def _let(name: str, scope: Scope) -> Any:
    definition = scope.lets[name]
    if not (isinstance(definition, str) and definition.startswith("=")):
        return definition
    inner = Scope(scope.config, scope.lets, {}, scope.stored, (*scope.open, name))
    return _walk(parse(definition[1:]), inner)


def _attribute(node: ast.Attribute, scope: Scope) -> Any:
    try:
        place, reads = _traced(node.value, scope)
    except MissingFieldError as error:
        return scope.config.missing_under(f"{error.path}.{node.attr}")
    path = reads[-1] if reads else ""
    if place is None:  # `rope_scaling: null` has no fields
        return scope.config.missing_under(f"{path}.{node.attr}")
    if isinstance(place, dict) and node.attr in place:
        return place[node.attr]
    if isinstance(place, dict):
        raise MissingFieldError(node.attr)
    if not isinstance(place, At):
        raise WrongValueError(f"expected a mapping, got {shown(place)}", path)
    return scope.config.look(place, node.attr)


def _subscript(node: ast.Subscript, scope: Scope) -> Any:
    container, reads = _traced(node.value, scope)
    if isinstance(node.slice, ast.Slice):
        return _slice(node.slice, container, reads, scope)
    key, key_reads = _traced(node.slice, scope)
    if isinstance(container, At):
        return scope.config.look(container, str(key))
    if isinstance(container, dict):
        return _choose(container, key, key_reads or reads)
    items = _sequence(container, reads)
    if isinstance(node.slice, ast.Name) and node.slice.id == "i" and isinstance(container, list) and reads:
        scope.config.seen.lists[_first(reads)] = len(container)
    if not isinstance(key, int):
        raise WrongValueError(f"'{ast.unparse(node)}': {shown(key)} is no index", _blame(key_reads))
    if not -len(items) <= key < len(items):
        raise WrongValueError(f"has {len(items)} entries, entry {key} is needed", _first(reads))
    return items[key]


def _slice(part: ast.Slice, container: Any, reads: Sequence[str], scope: Scope) -> Any:
    bounds = [_walk(bound, scope) if bound else None for bound in (part.lower, part.upper, part.step)]
    return _sequence(container, reads)[slice(*bounds)]


def _choose(options: dict[Any, Any], key: Any, reads: Sequence[str]) -> Any:
    """One entry of a mapping written in the recipe."""
    hashable = key is None or isinstance(key, str | int | float)
    if not hashable or key not in options:
        known = ", ".join("null" if one is None else str(one) for one in options)
        path = key.path if isinstance(key, At) else _first(reads)
        raise WrongValueError(f"{shown(key)} is not known to the recipe (known: {known})", path)
    return options[key]


def _sequence(value: Any, reads: Sequence[str]) -> Any:
    if not isinstance(value, list | str):
        path = value.path if isinstance(value, At) else _first(reads)
        raise WrongValueError(f"expected a list, got {shown(value)}", path)
    return value


def _first(reads: Sequence[str]) -> str:
    """The field a wrong value most likely came from; what is read after it says how much of it is meant."""
    return next(iter(reads), "")


def _binary(node: ast.BinOp, scope: Scope) -> Any:
    left, right = _number(node.left, scope), _number(node.right, scope)
    if isinstance(node.op, ast.Pow) and not (is_number(left) and is_number(right) and abs(right) <= 64):
        raise ExpressionError(f"'{ast.unparse(node)}': only small powers of numbers")
    if isinstance(node.op, ast.Mult):
        for items, times in ((left, right), (right, left)):
            if isinstance(items, list | str) and (not isinstance(times, int) or len(items) * times > MAX_ITEMS):
                raise ExpressionError(f"'{ast.unparse(node)}': a list cannot be repeated {shown(times)} times")
    value = OPERATORS[type(node.op)](left, right)
    _check_size(value, ast.unparse(node), scope.config.seen.reads)
    return value


def _unary(node: ast.UnaryOp, scope: Scope) -> Any:
    if isinstance(node.op, ast.Not):
        return not _truth(node.operand, scope)[0]
    return OPERATORS[type(node.op)](_operand(node.operand, scope))


def _bool(node: ast.BoolOp, scope: Scope) -> Any:
    """The operand that decides; of `or` it may be text, which is then a value."""
    for part in node.values[:-1]:
        if isinstance(node.op, ast.And):
            holds, value = _truth(part, scope)
        else:
            value = _walk(part, scope)
            holds = not value
        if not holds:
            return value
    return _walk(node.values[-1], scope)


def _compare(node: ast.Compare, scope: Scope) -> bool:
    left = _operand(node.left, scope)
    for op, part in zip(node.ops, node.comparators, strict=True):
        inside = isinstance(op, ast.In | ast.NotIn)
        right = _walk(part, scope) if inside else _operand(part, scope)
        if isinstance(right, At):
            right = list(right.data)
        if not OPERATORS[type(op)](left, right):
            return False
        left = right
    return True


def _if(node: ast.IfExp, scope: Scope) -> Any:
    return _walk(node.body if _truth(node.test, scope)[0] else node.orelse, scope)


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
    items, reads = _traced(part.iter, scope)
    for item in _sequence(items, reads):
        inner = scope.inner(**{name: item})
        if all(_truth(test, inner)[0] for test in part.ifs):
            found.append(_walk(node.elt, inner))
    return found


def _call(node: ast.Call, scope: Scope) -> Any:
    assert isinstance(node.func, ast.Name)
    name = node.func.id
    if name in LAZY:
        return LAZY[name](node.args, scope, _walk)
    with scope.config.recording() as reads:
        values = [scope.config.plain(_walk(part, scope)) for part in node.args]
    try:
        return PLAIN[name](*values)
    except (ValueError, IndexError) as error:
        raise WrongValueError(f"'{ast.unparse(node)}' cannot be computed: {error}", _blame(reads)) from error


def _check_size(value: Any, text: str, reads: Sequence[str] | dict[str, None]) -> None:
    """Values stay of a size that fits a spec."""
    if isinstance(value, complex) or (isinstance(value, int) and abs(value) >= MAX_VALUE):
        raise WrongValueError(f"'{text}' is no number a spec can hold", _blame(reads))
    if isinstance(value, list | str | dict) and len(value) > MAX_ITEMS:
        raise WrongValueError(f"'{text}' has more than {MAX_ITEMS} entries", _blame(reads))


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
