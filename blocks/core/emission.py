"""How a block tells the emitter what to write: constants with reasons, imports, and the fields of its call.j2.

Each `blocks/<kind>/emit.py` turns (fields, site) into an Emission. The site is what the plan
decided about this block; call.j2 only places the text computed there. No jax.
"""

import textwrap
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from .declare import ModelDims, Variant

_LINE = 98  # columns of arguments inside a call


@dataclass(frozen=True)
class Constant:
    """`NAME = text  # reason` at the top of the emitted program."""

    name: str
    text: str
    reason: str

    @property
    def line(self) -> str:
        """The assignment; where its text has several lines, the reason stands behind the first."""
        first, *others = self.text.splitlines()
        return "\n".join([f"{self.name} = {first}  # {self.reason}", *others])


@dataclass(frozen=True)
class Site:
    """What the plan decided about one block instance.

    name: Python identifier of the block. variant: the chosen one; collectives: import path of the collectives;
    returns: the kernel through which tokens return to their rank, None = the collectives' own; returns_tuning: its
    tiles; parts: the chosen variants of the other parts that the variant names.
    dp, tp: attention data/tensor degrees; ep, etp: expert degrees. shared_sharded, mlp_sharded:
    the shared expert, dense MLPs are cut over the whole mesh. scaled: expert weights carry block scales.
    tuning: this block's tuned values, e.g. {"chunk": 64} or {"block_rows": {"decode": 16}}.
    layers: absolute indices of the layers with this block, in order. gathers_float8: hidden states travel so;
    """

    name: str
    variant: Variant
    collectives: str
    dims: ModelDims
    dp: int
    tp: int
    ep: int
    etp: int
    shared_sharded: bool
    mlp_sharded: bool
    scaled: bool
    tuning: dict[str, Any]
    layers: tuple[int, ...] = ()
    parts: Mapping[str, Variant] = field(default_factory=dict)
    gathers_float8: bool = False
    returns: Variant | None = None
    returns_tuning: Mapping[str, Any] = field(default_factory=dict)

    @property
    def prefix(self) -> str:
        """Prefix of this block's constants."""
        return self.name.upper()

    def function(self, name: str) -> tuple[str, str]:
        """The import of the block's function `name` in the chosen variant."""
        return self.variant.module, self.variant.function(name)


@dataclass(frozen=True)
class Emission:
    """What one block adds to the emitted program.

    imports: (module, name) pairs. fields: what call.j2 places; the rendered lines go from
    `h_TD` (the block's input) to `y_TD` (its output), both in the activation dtype.
    reads_residual: the lines also read `x_TD`, the residual stream before the norm.
    """

    imports: tuple[tuple[str, str], ...]
    constants: tuple[Constant, ...]
    doc: str
    fields: dict[str, Any]
    reads_residual: bool = False


def tile_constants(site: Site) -> tuple[Constant, ...]:
    """The tuned arguments of the functions of the variant and its parts, by bucket where they differ."""
    return tuple(
        constant
        for variant in (site.variant, *site.parts.values())
        for constant in variant_constants(site.prefix, variant, site.tuning)
    )


def variant_constants(prefix: str, variant: Variant, tuning: Mapping[str, Any]) -> tuple[Constant, ...]:
    """The tiles of one variant."""
    return tuple(tile_constant(f"{prefix}_{name.upper()}", tuning[name], what) for name, what in variant.tiles)


def tile_constant(name: str, value: int | Mapping[str, int], what: str) -> Constant:
    """A tuned value: one number, or one per bucket where buckets differ."""
    if isinstance(value, int):
        return Constant(name, str(value), what)
    if not by_bucket(value):
        return Constant(name, str(next(iter(value.values()))), what)
    return Constant(name, "{" + ", ".join(f'"{bucket}": {n}' for bucket, n in value.items()) + "}", what)


def by_bucket(value: int | Mapping[str, int]) -> str:
    """What follows a constant's name where it is used."""
    return "[bucket]" if not isinstance(value, int) and len(set(value.values())) > 1 else ""


def tile_lines(site: Site, part: str = "") -> tuple[str, ...]:
    """Keyword arguments of a variant's function beyond the block's own: its tiles, and a kernel's chip.

    part: whose function, "" for the block's own. As many on a line as fit.
    """
    variant = site.parts[part] if part else site.variant
    found = [tile_argument(site, name) for name, _ in variant.tiles]
    lines = textwrap.wrap(", ".join(found + ["chip=CHIP"] * variant.kernel), _LINE)
    return tuple(line.removesuffix(",") for line in lines)


def tile_argument(site: Site, name: str) -> str:
    """A tuned value handed to the argument of its name."""
    return f"{name}={site.prefix}_{name.upper()}{by_bucket(site.tuning[name])}"


def cache_name(site: Site) -> str:
    """What a block with pages gives back beside its output: its updated pool, or the rows to be written into it."""
    return "kv_pool" if site.variant.updates_pages else "new_kv_TC"


def share(total: int, degree: int, what: str, axis: str = "tp") -> tuple[str, str]:
    """Text and reason of a per-device size: ("8", "16 heads / tp 2")."""
    if degree == 1:
        return str(total), f"{what}, not cut"
    assert total % degree == 0, (total, degree, what)
    return str(total // degree), f"{total} {what} / {axis} {degree}"


def sum_over_heads(site: Site, bias: str | None = None) -> tuple[tuple[tuple[str, str], ...], tuple[str, ...]]:
    """Imports and lines that complete a mixer's output: the sum when its heads are cut, then, once, the bias.

    bias: the output projection's bias among the block's weights; None = there is none.
    """
    imports, lines = list[tuple[str, str]](), list[str]()
    if site.tp > 1:
        imports.append((site.collectives, "all_reduce"))
        lines.append("y_TD = all_reduce(y_TD, TENSOR)  # each device adds the share of its own heads")
    if bias is not None:
        lines.append(f'y_TD = y_TD + w["{site.name}"]["{bias}"].astype(y_TD.dtype)')
    return tuple(imports), tuple(lines)
