"""What expressions of recipes compute in: names, values with their sources, and what can go wrong."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from .config import Config


class ExpressionError(Exception):
    """An expression that is not accepted, or that cannot be computed from this file."""


class WrongValueError(ExpressionError):
    """A field whose value the recipe does not know. path: the field, several with commas, "" when none is to blame."""

    def __init__(self, text: str, path: str = ""):
        super().__init__(text)
        self.path = path


@dataclass(frozen=True)
class Scope:
    """What names mean. lets: expressions by name, computed where they are used. stored: shapes of a checkpoint.

    open: lets that are being computed: inside its own text a let's name is the field.
    """

    config: Config
    lets: Mapping[str, Any] = field(default_factory=dict)
    local: Mapping[str, Any] = field(default_factory=dict)
    stored: "Mapping[str, tuple[int, ...]] | None" = None
    open: tuple[str, ...] = ()

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
