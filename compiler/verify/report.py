"""What `moec verify` found: checks with numbers, as JSON and as tables."""

from collections.abc import Iterable
from typing import Literal

from pydantic import BaseModel, ConfigDict
from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

Status = Literal["pass", "fail", "skipped"]
STYLES: dict[Status, str] = {"pass": "green", "fail": "bold red", "skipped": "yellow"}
GIB = 1 << 30
MIB = 1 << 20


class Frozen(BaseModel):
    # "Infinity" as text: JSON has no such number.
    model_config = ConfigDict(frozen=True, extra="forbid", ser_json_inf_nan="strings")


class Check(Frozen):
    """One verdict. detail: what was compared, in words; numbers: what it rests on (units in names)."""

    name: str
    status: Status
    detail: str
    numbers: dict[str, float] = {}


class Section(Frozen):
    """The checks of one part, e.g. one bucket's AOT compile. facts: rows a person wants to see."""

    title: str
    facts: tuple[tuple[str, str], ...] = ()
    checks: tuple[Check, ...] = ()

    @property
    def status(self) -> Status:
        return combine(check.status for check in self.checks)


def combine(statuses: Iterable[Status]) -> Status:
    """One failure fails; nothing but skipped checks is no pass."""
    found = tuple(statuses)
    if "fail" in found:
        return "fail"
    return "pass" if "pass" in found else "skipped"


def verdict(name: str, good: bool, detail: str, **numbers: float) -> Check:
    """A check that was made."""
    return Check(name=name, status="pass" if good else "fail", detail=detail, numbers=numbers)


def skipped(name: str, detail: str) -> Check:
    """A check that could not be made; detail says why."""
    return Check(name=name, status="skipped", detail=detail)


def size_text(num_bytes: float) -> str:
    """Bytes for people: GiB from 1 GiB on, else MiB or KiB."""
    if abs(num_bytes) >= GIB:
        return f"{num_bytes / GIB:.2f} GiB"
    return f"{num_bytes / MIB:.2f} MiB" if abs(num_bytes) >= MIB else f"{num_bytes / 1024:.1f} KiB"


def render_section(section: Section) -> RenderableType:
    """A fact grid and a check table."""
    facts = Table.grid(padding=(0, 2))
    for name, text in section.facts:
        facts.add_row(Text(name, style="dim"), Text(text))
    checks = Table(show_header=True, header_style="bold", expand=False, pad_edge=False, box=None)
    for column in ("", "check", "detail"):
        checks.add_column(column, overflow="fold")
    for check in section.checks:
        checks.add_row(Text(check.status, style=STYLES[check.status]), Text(check.name), Text(check.detail))
    return Group(Text(section.title, style="bold"), facts, checks, Text(""))


def verdict_line(title: str, sections: Iterable[Section]) -> Text:
    """`verify TITLE: PASS (12 checks)`: the last line of every report."""
    parts = tuple(sections)
    checks = [check for section in parts for check in section.checks]
    status = combine(check.status for check in checks)
    failed = [f"{s.title}: {c.name}" for s in parts for c in s.checks if c.status == "fail"]
    unmade = sum(check.status == "skipped" for check in checks)
    text = f"{title}: {status.upper()} ({len(checks) - unmade} checks made"
    text += f", {unmade} skipped)" if unmade else ")"
    text += f"; failed: {'; '.join(failed)}" if failed else ""
    return Text(text, style=STYLES[status])


def render(title: str, sections: Iterable[Section], console: Console) -> None:
    """All sections and the verdict line."""
    parts = tuple(sections)
    for section in parts:
        console.print(render_section(section))
    console.print(verdict_line(title, parts))
