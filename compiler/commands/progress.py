"""What `moec run` shows while it works: progress bars on stderr, completions on stdout."""

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from .common import log

if TYPE_CHECKING:
    from types import TracebackType

    from tokenizers import Tokenizer


def load_with_progress(program: Any, mesh: Any, directory: Path) -> tuple[Any, tuple[str, ...]]:
    """The program's weights from a checkpoint, and the notes of what loading changed (also on stderr)."""
    from moec.runtime.weights import load_weights

    notes: list[str] = []
    with _bar("loading", DownloadColumn(True)) as bar:
        task = bar.add_task("weights", total=None)

        def advance(name: str, done: int, total: int) -> None:
            bar.update(task, completed=done, total=total, description=name)

        weights = load_weights(program, mesh, directory, advance, on_note=notes.append)
    for note in notes:
        log(note)
    return weights, tuple(notes)


class Printer:
    """Shows completions: one prompt streams as it comes, several are printed in order at the end.

    Text where there is a tokenizer, else ids with commas; several prompts are each headed by
    [i], with a bar of the tokens so far meanwhile. quiet: the bar only.
    """

    def __init__(
        self, prompts: Sequence[Sequence[int]], tokenizer: "Tokenizer | None", max_tokens: int, *, quiet: bool
    ):
        from moec.runtime.tokenizer import TextStream

        self._streams = [TextStream(tokenizer, prompt) for prompt in prompts] if tokenizer else None
        self._parts: list[list[str]] = [[] for _ in prompts]
        self._live = len(prompts) == 1 and not quiet
        self._quiet = quiet
        self._bar = _bar("generating", MofNCompleteColumn(), hidden=self._live)
        self._task = self._bar.add_task("tokens", total=len(prompts) * max_tokens)

    def __enter__(self) -> "Printer":
        self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, where: "TracebackType | None"
    ) -> None:
        self._bar.stop()
        if error is None and not self._quiet:
            self._finish()

    def push(self, index: int, token: int) -> None:
        """A new token of one prompt."""
        parts = self._parts[index]
        parts.append(self._text(index, token))
        self._bar.advance(self._task)
        if self._live:
            _write(parts[-1])

    def _text(self, index: int, token: int) -> str:
        if self._streams:
            return self._streams[index].push(token)
        return f",{token}" if self._parts[index] else str(token)

    def _finish(self) -> None:
        """No more tokens come: print what is still held back."""
        for index, parts in enumerate(self._parts):
            tail = self._streams[index].end() if self._streams else ""
            _write(f"{tail}\n" if self._live else f"[{index}] {''.join(parts)}{tail}\n")


def _bar(what: str, amount: Any, hidden: bool = False) -> Progress:
    """A bar on stderr that leaves no trace; none where stderr is no terminal."""
    console = Console(stderr=True)
    columns = (TextColumn(what), BarColumn(), amount, TextColumn("{task.description}"), TimeElapsedColumn())
    return Progress(*columns, console=console, transient=True, disable=hidden or not console.is_terminal)


def _write(text: str) -> None:
    sys.stdout.write(text)
    sys.stdout.flush()
