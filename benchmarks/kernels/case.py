"""What a kernel case is: one function at one shape, compiled for a chip that is not there (fields: README.md)."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from jax.sharding import AbstractMesh

from moec.blocks.core.chip import ChipLimits

Tiles = Mapping[str, int]
Trips = Mapping[str, Mapping[str, float]]


class Refused(Exception):
    """Raised by a case's build: this chip or this shape is refused, and why."""


@dataclass(frozen=True)
class Arg:
    """An abstract array. spec: mesh axis of each dim (None = whole), as in PartitionSpec."""

    shape: tuple[int, ...]
    dtype: str
    spec: tuple[str | None, ...] = ()


@dataclass(frozen=True)
class Case:
    """One function, its shapes, and how its work is counted.

    build(chip, mesh, tiles) returns the function to jit; it is called in the worker process only. mesh has no devices.
    args: one pytree of Arg per argument of that function. unit, units: what one call works on, e.g.
    ("sequence", 64). floor_bytes: HBM bytes one device must read and write per call. trips: a case with a grid computes
    them of its tiles.
    """

    name: str
    block: str
    variant: str
    build: Callable[[ChipLimits, AbstractMesh, Tiles], Callable[..., Any]]
    args: tuple[Any, ...]
    unit: str
    units: float
    floor_bytes: int
    donate: tuple[int, ...] = ()
    devices: Literal["one", "all"] = "one"
    knows_chip: bool = False
    options: Mapping[str, Any] = field(default_factory=dict)
    kernels: tuple[str, ...] = ()
    trips: Trips | Callable[[Tiles], Trips] = field(default_factory=dict)
    tiles: Tiles = field(default_factory=dict)
    grid: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    shape: str = ""
    peer: str = ""
    bar: float | None = None
    limit_s: float = 60.0

    def trips_at(self, tiles: Tiles) -> Trips:
        """Average trips of dynamic loops by module and node, with these tiles."""
        return self.trips(tiles) if callable(self.trips) else self.trips
