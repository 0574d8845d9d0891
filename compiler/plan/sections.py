"""Tables of the report, and those about what a program uses: pages and slots, variants of its blocks."""

from collections import Counter
from dataclasses import dataclass, field
from typing import Literal

from .plan import Plan
from .tuned import ANALYTIC

GIB = 2**30
MIB = 2**20

Align = Literal["left", "right"]


@dataclass(frozen=True)
class Column:
    name: str
    align: Align = "left"


@dataclass(frozen=True)
class Section:
    """A titled table; strong: indices of rows that are totals; note: one line below."""

    title: str
    columns: tuple[Column, ...]
    rows: tuple[tuple[str, ...], ...]
    strong: frozenset[int] = field(default_factory=frozenset)
    note: str = ""


def right(*names: str) -> tuple[Column, ...]:
    """First column left, the others right."""
    return (Column(names[0]), *(Column(name, "right") for name in names[1:]))


def size_text(num_bytes: float) -> str:
    if abs(num_bytes) >= 0.01 * GIB:
        return f"{num_bytes / GIB:.2f} GiB"
    return f"{num_bytes / MIB:.2f} MiB" if abs(num_bytes) >= MIB / 100 else f"{num_bytes / 1024:.2f} KiB"


def cache(plan: Plan) -> tuple[Section, ...]:
    """Pages and slots in one budget: per entry, per sequence of full length, in all."""
    if not plan.cache:
        return ()
    rows, each, whole = [], 0.0, 0.0
    for pool in plan.cache:
        sequence, total = pool.per_sequence * pool.padded_bytes, pool.entries * pool.padded_bytes
        each, whole = each + sequence, whole + total
        padding = pool.padded_bytes / pool.bytes - 1
        rows.append(
            (
                pool.key,
                f"{pool.entries} {pool.kind}",
                size_text(pool.bytes),
                f"{padding:.1%}",
                size_text(sequence),
                size_text(total),
            )
        )
    rows.append(("in all", "", "", "", size_text(each), size_text(whole)))
    columns = right("pool", "entries", "one entry", "tile padding", "a full sequence", "per device")
    note = f"Pages and slots are one budget; one slot takes as much as the pages of {_slot_tokens(plan):,.0f} tokens."
    return (Section("Cache", columns, tuple(rows), frozenset({len(rows) - 1}), note if _slot_tokens(plan) else ""),)


def _slot_tokens(plan: Plan) -> float:
    """Tokens whose pages take what one sequence's slots do; 0 without pages."""
    pages = sum(pool.padded_bytes for pool in plan.cache if pool.kind == "pages") / plan.page_size
    slots = sum(pool.padded_bytes for pool in plan.cache if pool.kind == "slots" and pool.key != "sampled")
    return slots / pages if pages else 0.0


def _origins(tiles_from: dict[str, str]) -> str:
    """Tiles that are not the variant's own, each with where it is from."""
    found = [f"{tile} {origin}" for tile, origin in tiles_from.items() if origin != ANALYTIC]
    return f"; tuned {', '.join(found)}" if found else ""


def kernels(plan: Plan) -> tuple[Section, ...]:
    """What was chosen among, where a place has more than one variant; refusals with their reasons."""
    numbers = Counter(one.scope for one in plan.variant_choices)
    found = [one for one in plan.variant_choices if numbers[one.scope] > 1]
    if not found:
        return ()
    buckets = [bucket.name for bucket in plan.buckets]
    rows = tuple(
        (
            one.scope,
            one.variant,
            one.verdict,
            *(f"{one.us[bucket]:,.1f} us" if bucket in one.us else "" for bucket in buckets),
            f"{one.vmem_bytes / MIB:.1f} MiB" if one.vmem_bytes else "",
            one.why + _origins(one.tiles_from),
        )
        for one in found
    )
    times = tuple(Column(f"{bucket}, one layer", "right") for bucket in buckets)
    columns = (Column("block"), Column("variant"), Column("verdict"), *times, Column("VMEM", "right"), Column("why"))
    return (Section("Variants, times predicted", columns, rows),)
