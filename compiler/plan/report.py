"""The plan as a person reads it: the same sections as a terminal page (rich) and as Markdown.

Every predicted number is shown with its error band and where it comes from; none is a measurement.
"""

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import replace

from rich.console import Console
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from .plan import Candidate, Estimate, Plan, ScaleChoice, StepTerm
from .sections import GIB, Column, Section, cache, kernels, size_text

_BAR = 24
_WIDE = 110  # columns that every table fits in
_SHOWN_SHARDINGS = 20
_STYLES = {
    "CHOSEN": "bold green",
    "TIE": "cyan",
    "DOMINATED": "yellow",
    "HBM": "red",
    "INDIVISIBLE": "red",
    "UNSUPPORTED": "red",
    "PINNED": "magenta",
}


def sections(plan: Plan) -> tuple[Section, ...]:
    """All tables, in reading order."""
    return (
        _decisions(plan),
        _predictions(plan),
        _memory(plan),
        _steps(plan),
        *cache(plan),
        *kernels(plan),
        *_scales(plan),
        _collectives(plan),
        _shardings(plan),
        _placements(plan),
    )


def headline(plan: Plan) -> str:
    """One line: what runs where."""
    mesh = " x ".join(f"{name} {size}" for name, size in plan.mesh.axes)
    chosen = _chosen(plan)
    devices = "1 device" if plan.mesh.num_devices == 1 else f"{plan.mesh.num_devices} devices"
    return f"attention {chosen.attention}, experts {chosen.experts} on {devices} (mesh {mesh})"


def _chosen(plan: Plan) -> Candidate:
    return next(one for one in plan.candidates if one.verdict == "CHOSEN")


def _decisions(plan: Plan) -> Section:
    d = plan.dtypes
    rows = [
        ("mesh", " x ".join(f"{name} {size}" for name, size in plan.mesh.axes)),
        ("attention, experts", f"{_chosen(plan).attention}, {_chosen(plan).experts}"),
        (
            "placement",
            f"embed {plan.embed}, head {plan.head}, shared expert {plan.shared_expert}, dense MLPs {plan.mlp}",
        ),
        ("dtypes", f"activation {d.activation}, weight {d.weight}, expert {d.expert}{_scaled(plan)}"),
        ("cache dtypes", f"kv {d.kv}, state {d.state}, conv {d.conv}; matmul precision {plan.matmul_precision}"),
        *(
            (f"bucket {b.name}", f"{b.tokens_per_rank} tokens, {b.seqs_per_rank} sequences per rank")
            for b in plan.buckets
        ),
        ("pages per rank", f"{plan.pages_per_rank} of {plan.page_size} tokens, up to {plan.max_context} per sequence"),
        ("slots per rank", f"{plan.slots_per_rank}, slot 0 is the sink"),
        ("variants", ", ".join(f"{name} {variant}" for name, variant in plan.variants.items())),
        ("tuning", ", ".join(f"{name} {value}" for name, value in plan.tuning.items()) or "none"),
        ("compile options", ", ".join(f"{k}={v}" for k, v in plan.compile_options.items()) or "none"),
    ]
    return Section("Decisions", (Column("what"), Column("chosen")), tuple(rows), note=f"Why: {_chosen(plan).why}.")


def _scaled(plan: Plan) -> str:
    return f", one scale per {plan.dtypes.scale_block} x {plan.dtypes.scale_block}" if plan.scale_choices else ""


def _scales(plan: Plan) -> tuple[Section, ...]:
    """Granularities of float8 experts' scales: what the others would change, and what they would cost in precision."""
    if not plan.scale_choices:
        return ()
    names = [bucket.name for bucket in plan.buckets]
    rows = tuple(
        (
            f"{one.edge} x {one.edge}",
            one.verdict,
            *(f"{one.delta_us[name]:+,.1f} us" if name in one.delta_us else "" for name in names),
            size_text(one.scale_bytes) if one.scale_bytes else "",
            "" if one.verdict == "REFUSED" else _error_text(one),
            one.why,
        )
        for one in plan.scale_choices
    )
    columns = (
        *(Column("one scale per"), Column("verdict")),
        *(Column(f"{name} step", "right") for name in names),
        *(Column("scales", "right"), Column("error when loaded"), Column("why")),
    )
    note = "Step times are predicted, over the chosen one's. Loading says what error it did add."
    return (Section("Block scales of float8 experts", columns, rows, note=note),)


def _error_text(one: ScaleChoice) -> str:
    if not one.relative_error:
        return "none: stored bits"
    return f"a value by at most {one.relative_error:.2%} or {one.absolute_error:.1e} of its block's largest"


def _predictions(plan: Plan) -> Section:
    rows = tuple((_spoken(name), _number(e), _band(e), e.provenance) for name, e in plan.estimates.items())
    columns = (Column("predicted"), Column("value", "right"), Column("band", "right"), Column("from"))
    return Section("Predictions, never measured", columns, rows, note="\n".join(f"- {note}" for note in plan.notes))


def _band(estimate: Estimate) -> str:
    return f"±{estimate.band_pct:g} %" if estimate.band_pct else estimate.band_from


def _spoken(name: str) -> str:
    return name.replace("_per_s_chip", " per chip").replace("_", " ")


def _number(estimate: Estimate) -> str:
    value = f"{estimate.value:,.0f}" if estimate.value >= 1000 else f"{estimate.value:.4g}"
    return value if estimate.unit == "1" else f"{value} {estimate.unit}"


def _memory(plan: Plan) -> Section:
    memory = plan.memory
    usable = memory.usable_bytes
    small = {name: size for name, size in memory.components.items() if size < 0.01 * GIB}
    parts = [(name, size) for name, size in memory.components.items() if name not in small]
    parts.sort(key=lambda part: -part[1])
    parts.append(("all else", sum(small.values())))
    parts.append(("arguments", memory.arguments_bytes))
    parts += [(f"temporaries, {name}", size) for name, size in memory.temp_bytes.items()]
    parts.append(("runtime reserve", memory.reserve_bytes))
    needed = memory.arguments_bytes + max(memory.temp_bytes.values()) + memory.reserve_bytes
    parts += [("needed", needed), ("free", usable - needed)]
    rows = tuple((name, size_text(size), f"{size / usable:.1%}", _bar(size / usable)) for name, size in parts)
    strong = frozenset(i for i, (name, *_) in enumerate(rows) if name in ("arguments", "needed", "free"))
    columns = (Column("per device"), Column("size", "right"), Column("of usable", "right"), Column(""))
    title = f"Memory per device, {usable / GIB:.2f} GiB usable"
    needs = plan.estimates["hbm_needed"]
    note = f"Arguments are counted array by array, temporaries come from a formula: {_band(needs)} ({needs.band_from})."
    return Section(title, columns, rows, strong, note)


def _bar(share: float) -> str:
    filled = round(max(0.0, min(share, 1.0)) * _BAR)
    return "█" * filled + "░" * (_BAR - filled)


def _steps(plan: Plan) -> Section:
    """Milliseconds per step and binding limit of each operator, per bucket."""
    names = [bucket.name for bucket in plan.buckets]
    rows: list[tuple[str, ...]] = []
    strong: list[int] = []
    for scope, ops in _by_scope(plan.breakdown).items():
        strong.append(len(rows))
        rows.append((scope, "", *(cell for name in names for cell in (_ms(_of(ops, name)), _share(plan, ops, name)))))
        for op in dict.fromkeys(term.op for term in ops):
            found = [[term for term in ops if term.op == op and term.bucket == name] for name in names]
            layers = next(term.layers for term in ops if term.op == op)
            cells = [cell for terms in found for cell in (_ms(terms), ", ".join(term.binding for term in terms))]
            rows.append((f"  {op}", f"x{layers}", *cells))
    strong.append(len(rows))
    totals = [[term for term in plan.breakdown if term.bucket == name] for name in names]
    rows.append(("step", "", *(cell for terms in totals for cell in (_ms(terms), ""))))
    columns = (
        Column("operator"),
        Column("calls", "right"),
        *(c for name in names for c in (Column(f"{name} ms", "right"), Column("bound by"))),
    )
    band = plan.estimates["decode_step"].band_pct
    return Section("Predicted time of a step", columns, tuple(rows), frozenset(strong), f"Predicted, ±{band:g} %.")


def _by_scope(terms: Iterable[StepTerm]) -> dict[str, list[StepTerm]]:
    found: dict[str, list[StepTerm]] = {}
    for term in terms:
        found.setdefault(term.scope, []).append(term)
    return found


def _of(terms: Iterable[StepTerm], bucket: str) -> list[StepTerm]:
    return [term for term in terms if term.bucket == bucket]


def _total_ms(terms: Iterable[StepTerm]) -> float:
    return sum(term.layers * term.us for term in terms) / 1e3


def _ms(terms: Sequence[StepTerm]) -> str:
    return f"{_total_ms(terms):.2f}" if terms else ""


def _share(plan: Plan, terms: list[StepTerm], bucket: str) -> str:
    return f"{_total_ms(_of(terms, bucket)) / _total_ms(_of(plan.breakdown, bucket)):.0%} of step"


def _collectives(plan: Plan) -> Section:
    rows = tuple(
        (
            c.bucket,
            c.scope,
            c.op,
            ", ".join(c.axes),
            f"{c.dtype}{list(c.shape)}",
            size_text(c.bytes),
            f"{c.predicted_us:.1f}",
        )
        for c in plan.collectives
    )
    columns = (
        *(Column(name) for name in ("bucket", "per", "collective", "over", "array")),
        *(Column(name, "right") for name in ("size", "us")),
    )
    note = "A block's collectives run once per layer that uses it. Times are predicted (alpha-beta), one call each."
    return Section("Collectives", columns, rows, note=note if rows else "None: nothing is exchanged.")


def _shardings(plan: Plan) -> Section:
    """The best candidate of each attention x experts pair."""
    best: dict[tuple[str, str], Candidate] = {}
    for one in sorted(plan.candidates, key=_rank):
        best.setdefault((one.attention, one.experts), one)
    counts = Counter(one.verdict for one in plan.candidates)
    summary = ", ".join(f"{count} {verdict}" for verdict, count in counts.most_common())
    shown = list(best.values())[:_SHOWN_SHARDINGS]
    rest = f" {len(best) - len(shown)} more shardings are in plan.json." if len(best) > len(shown) else ""
    note = f"{len(plan.candidates)} plans enumerated: {summary}. Each row is the best placement of its sharding.{rest}"
    return _candidates("Shardings considered", shown, note)


def _rank(one: Candidate) -> tuple[bool, float, float]:
    """Chosen first, then by predicted time, then by how much would fit."""
    return one.verdict != "CHOSEN", one.numbers.get("tpot_ms", float("inf")), -one.numbers.get("max_concurrency", 0.0)


def _placements(plan: Plan) -> Section:
    """All placements of the chosen sharding."""
    chosen = _chosen(plan)
    same = [c for c in plan.candidates if (c.attention, c.experts) == (chosen.attention, chosen.experts)]
    return _candidates(f"Placements of {chosen.attention} with {chosen.experts}", sorted(same, key=_rank), "")


def _candidates(title: str, found: Sequence[Candidate], note: str) -> Section:
    rows = tuple(
        (
            one.attention,
            one.experts,
            "/".join(place[0].upper() for place in (one.embed, one.head, one.shared_expert, one.mlp)),
            one.verdict,
            *(f"{one.numbers[key]:.2f}" if key in one.numbers else "" for key in ("tpot_ms", "decode_ms", "mixed_ms")),
            _candidate_size(one),
            one.why,
        )
        for one in found
    )
    numbers = ("token ms", "decode ms", "mixed ms", "HBM")
    columns = (
        *(Column(name) for name in ("attention", "experts", "E/H/S/M", "verdict")),
        *(Column(name, "right") for name in numbers),
        Column("why"),
    )
    legend = "E/H/S/M: embedding, head, shared expert, dense MLPs Replicated or Sharded. Times are predicted."
    return Section(title, columns, rows, note=f"{note} {legend}".strip())


def _candidate_size(one: Candidate) -> str:
    found = one.numbers.get("hbm_gib", one.numbers.get("needed_gib"))
    return "" if found is None else size_text(found * GIB)


def render_plan(plan: Plan, console: Console) -> None:
    """The terminal page."""
    workload = f"{plan.workload}"
    if plan.traffic:
        t = plan.traffic
        workload += f": {t.concurrency} sequences at once, {t.isl} tokens in, {t.osl} out"
    body = Text.assemble((headline(plan), "bold green"), "\n", (workload, "dim"))
    console.print(Panel(body, title=f"[bold]{plan.model}[/bold] on [bold]{plan.target}[/bold]", expand=False))
    for section in sections(plan):
        console.print()
        console.print(_rich_table(_fitted(section, console.width)))
        if section.note:
            console.print(Text(section.note, style="dim"))


def _fitted(section: Section, width: int) -> Section:
    """On a narrow terminal reasons matter more than the two step times behind the token time."""
    names = [column.name for column in section.columns]
    if width >= _WIDE or "why" not in names:
        return section
    kept = [i for i, name in enumerate(names) if name not in ("decode ms", "mixed ms")]
    rows = tuple(tuple(row[i] for i in kept) for row in section.rows)
    return replace(section, columns=tuple(section.columns[i] for i in kept), rows=rows)


def _rich_table(section: Section) -> Table:
    table = Table(title=section.title, title_justify="left", title_style="bold", header_style="dim", box=None)
    for column in section.columns:
        fixed = column.align == "right" or column.name in ("verdict", "attention", "experts", "E/H/S/M")
        table.add_column(column.name, justify=column.align, no_wrap=fixed)
    for index, row in enumerate(section.rows):
        cells = [Text(cell, style=_STYLES.get(cell, "")) for cell in row]
        table.add_row(*cells, style="bold" if index in section.strong else "")
    return table


def plan_markdown(plan: Plan) -> str:
    """The plan as README.md of the emitted program."""
    lines = [f"# {plan.model} on {plan.target}", "", f"{headline(plan)}.", ""]
    if plan.traffic:
        t = plan.traffic
        lines += [f"Workload {plan.workload}: {t.concurrency} sequences at once, {t.isl} tokens in, {t.osl} out.", ""]
    chip = plan.target.partition(":")[0]
    lines += [f"Predictions come from formulas and the numbers of targets/{chip}; nothing here was measured.", ""]
    for section in sections(plan):
        lines += [f"## {section.title}", "", *_markdown_table(section), ""]
        if section.note:
            lines += [section.note, ""]
    return "\n".join(lines).rstrip("\n") + "\n"


def _markdown_table(section: Section) -> list[str]:
    head = "| " + " | ".join(column.name for column in section.columns) + " |"
    rule = "|" + "|".join("---:" if column.align == "right" else "---" for column in section.columns) + "|"
    return [head, rule, *(_markdown_row(row, index in section.strong) for index, row in enumerate(section.rows))]


def _markdown_row(row: Sequence[str], strong: bool) -> str:
    """Leading blanks mark operators inside a block; Markdown would drop them."""
    cells = [cell.replace("|", "\\|") for cell in row]
    cells[0] = (
        f"**{cells[0]}**" if strong else cells[0].replace("  ", "&emsp;", 1) if cells[0].startswith("  ") else cells[0]
    )
    return "| " + " | ".join(cells) + " |"
