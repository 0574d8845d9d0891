"""Reads the compiler's HBM verdict and its memory-usage report."""

import re

from .measured import Buffer, Oom
from .report import GIB, MIB

TOP_BUFFERS = 12
_UNITS = {"B": 1, "K": 1 << 10, "KiB": 1 << 10, "M": MIB, "MiB": MIB, "G": GIB, "GiB": GIB, "T": GIB << 10}
# The two wordings of libtpu's HBM verdict.
_OOM = (
    re.compile(r"memory required for .*?\((?P<n>[\d.]+)(?P<nu>\w)\) exceeds available HBM \((?P<a>[\d.]+)(?P<au>\w)\)"),
    re.compile(r"Used (?P<n>[\d.]+)(?P<nu>\w) of (?P<a>[\d.]+)(?P<au>\w) hbm"),
)
_BUFFER = re.compile(r"^\s*[\d.]+\w+\(\s*\d+%\);\s*([\d.]+)(\w+);\s*\d+;\s*\d+; (.*)$", re.MULTILINE)


def parse_oom(message: str, report: str) -> Oom | None:
    """Needed and available HBM from the error; the dump's report has the needed bytes exactly."""
    match = next((m for pattern in _OOM if (m := pattern.search(message))), None)
    if match is None:
        return None
    exact = re.search(r"Total bytes: (\d+)", report)
    needed = float(match["n"]) * _UNITS[match["nu"]]
    if exact and abs(int(exact.group(1)) - needed) < 0.01 * needed:
        needed = int(exact.group(1))
    return Oom(needed=int(needed), available=int(float(match["a"]) * _UNITS[match["au"]]))


def top_buffers(report: str) -> tuple[Buffer, ...]:
    """The largest buffers of the memory-usage report."""
    rows = [Buffer(bytes=int(float(n) * _UNITS[u]), shapes=shapes[:200]) for n, u, shapes in _BUFFER.findall(report)]
    return tuple(sorted(rows, key=lambda row: -row.bytes)[:TOP_BUFFERS])
