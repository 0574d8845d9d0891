"""Problems: what is wrong with a user's input, collected and returned, never thrown one by one."""

from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True)
class Problem:
    """One thing wrong with the input.

    path: dotted path in the composed document, e.g. "model.blocks.moe.router.top_k".
    file, line, col: where it was written; line 0 when there is no position (a command-line
        override has file "<command line>" and col = its argument number).
    text: what is wrong, with the value; hint: valid values or "did you mean ...?".
    """

    path: str
    text: str
    hint: str = ""
    file: str = ""
    line: int = 0
    col: int = 0

    def __str__(self) -> str:
        where = f"{self.file}: " if self.file else ""
        if self.line:
            where = f"{self.file}:{self.line}:{self.col}: "
        elif self.col:
            where = f"{self.file}:arg{self.col}: "
        path = f"{self.path}: " if self.path else ""
        hint = f" ({self.hint})" if self.hint else ""
        return f"{where}error: {path}{self.text}{hint}"


class ProblemsError(Exception):
    """Carries problems to the command line, which prints them all and exits with 2."""

    def __init__(self, problems: Iterable[Problem]):
        self.problems = tuple(problems)
        super().__init__("\n".join(map(str, self.problems)))
