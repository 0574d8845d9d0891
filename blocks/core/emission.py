"""How a block tells the emitter what to write: constants with reasons, imports, and the fields of its call.j2.

Each `blocks/<kind>/emit.py` turns (fields, site) into an Emission. The site is what the plan
decided about this block; call.j2 only places the text computed there. No jax.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from .declare import ModelDims


@dataclass(frozen=True)
class Constant:
    """`NAME = text  # reason` at the top of the emitted program."""

    name: str
    text: str
    reason: str


@dataclass(frozen=True)
class Site:
    """What the plan decided about one block instance.

    name: Python identifier of the block. module: import path of the chosen variant;
    collectives: that of the collectives; parts: those of the other parts that the variant names.
    dp, tp: attention data/tensor degrees; ep, etp: expert degrees. shared_sharded, mlp_sharded:
    the shared expert, dense MLPs are cut over the whole mesh. scaled: expert weights carry block scales.
    tuning: this block's tuned values, e.g. {"chunk": 64} or {"block_rows": {"decode": 16}}.
    layers: absolute indices of the layers with this block, in order.
    """

    name: str
    module: str
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
    parts: Mapping[str, str] = field(default_factory=dict)

    @property
    def prefix(self) -> str:
        """Prefix of this block's constants."""
        return self.name.upper()


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
