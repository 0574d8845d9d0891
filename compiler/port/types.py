"""Fields of config.json whose type a recipe states: a wrong one would choose layers or options in silence."""

from collections.abc import Callable, Mapping
from typing import Any

from ..problems import Problem
from .config import At, Config, shown
from .functions import is_number


def wrong_types(config: Config, types: Mapping[str, str]) -> list[Problem]:
    """Fields that are there, not null and not of their type. types: path below the root -> one of TYPES."""
    found = []
    for path, kind in types.items():
        place, value = _look(config, path)
        accepted, words = TYPES[kind]
        if value is not None and not accepted(value):
            found.append(Problem(place, f"expected {words}, got {shown(value)}", "", config.file))
    return found


def _look(config: Config, path: str) -> tuple[str, Any]:
    """(full path, value); None where there is no such field."""
    place: Any = config.here
    full = path
    for key in path.split("."):
        if not isinstance(place, At):
            return full, None
        full, value = place.child(key), place.data.get(key)
        place = At(full, value) if isinstance(value, Mapping) else value
    return full, place


def _whole(value: Any) -> bool:
    return is_number(value) and isinstance(value, int)


def _each(accepted: Callable[[Any], bool]) -> Callable[[Any], bool]:
    return lambda value: isinstance(value, list) and all(map(accepted, value))


TYPES: dict[str, tuple[Callable[[Any], bool], str]] = {
    "count": (lambda value: _whole(value) and value >= 0, "an integer of at least 0"),
    "period": (lambda value: _whole(value) and value >= 1, "an integer of at least 1"),
    "layers": (_each(lambda value: _whole(value) and value >= 0), "a list of layer numbers"),
    "layers_from_1": (_each(lambda value: _whole(value) and value >= 1), "a list of layer numbers, the first being 1"),
    "truth": (lambda value: isinstance(value, bool), "true or false"),
}
