"""How a spec declares the clamped form of a gated MLP (clamp.py has the meaning)."""

from typing import Literal

from pydantic import Field

from ..core.declare import Declared
from .clamp import Clamp


class ClampFields(Declared):
    """limit, alpha, up_offset, place: see Clamp."""

    limit: float = Field(gt=0)
    alpha: float = Field(default=1.0, gt=0)
    up_offset: float = 0.0
    place: Literal["before", "after"] = "before"


def clamp_of(fields: ClampFields | None) -> Clamp | None:
    """The declared limits as kernels take them."""
    return Clamp(fields.limit, fields.alpha, fields.up_offset, fields.place) if fields else None


def clamp_text(fields: ClampFields) -> str:
    """The constructor call that an emitted program writes; only what differs from the defaults."""
    parts = [f"limit={fields.limit!r}"]
    parts += [f"alpha={fields.alpha!r}"] if fields.alpha != 1 else []
    parts += [f"up_offset={fields.up_offset!r}"] if fields.up_offset else []
    parts += [f'place="{fields.place}"'] if fields.place != "before" else []
    return f"Clamp({', '.join(parts)})"
