"""What a user handed to the runtime is wrong: one exception carries every message, the command line exits with 2."""

import re
from collections.abc import Iterable

MAX_ALIKE = 8  # messages that differ only in numbers and are still printed one by one


class InputError(Exception):
    """Base of the runtime's user errors: `messages` holds each problem on its own line, str() folds long runs."""

    def __init__(self, messages: Iterable[str]):
        self.messages = tuple(messages)
        super().__init__("\n".join(fold(self.messages)))


class CheckpointError(InputError):
    """The checkpoint cannot fill the program's weights; every message starts with a tensor or file name."""


class ProgramError(InputError):
    """The folder is not an emitted program."""


class RequestError(InputError):
    """A prompt or its sampling parameters cannot be served by the program."""


class TokenizerError(InputError):
    """The checkpoint brings no usable tokenizer."""


def fold(messages: Iterable[str]) -> list[str]:
    """Runs of messages that differ only in numbers, shortened to the first few and a count."""
    alike: dict[str, list[str]] = {}
    for message in messages:
        alike.setdefault(re.sub(r"\d+", "#", message), []).append(message)
    return [line for group in alike.values() for line in _fold_group(group)]


def _fold_group(group: list[str]) -> list[str]:
    if len(group) <= MAX_ALIKE:
        return group
    return [*group[: MAX_ALIKE - 1], f"... and {len(group) - MAX_ALIKE + 1} more like this, the last: {group[-1]}"]
