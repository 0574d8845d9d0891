"""Text to token ids and back with the checkpoint's tokenizer.json; streaming never splits a UTF-8 character."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from .errors import TokenizerError

UNFINISHED = "\N{REPLACEMENT CHARACTER}"  # what the bytes of a part of a character decode to
CONFIGS = ("generation_config.json", "config.json")


def load_tokenizer(directory: str | Path) -> Tokenizer:
    """The `tokenizers` object of DIR/tokenizer.json."""
    path = Path(directory) / "tokenizer.json"
    if not path.is_file():
        raise TokenizerError([f"{directory}: holds no tokenizer.json; use --ids to pass token ids"])
    try:
        return Tokenizer.from_file(str(path))
    except Exception as error:  # tokenizers raises bare Exception for every malformed file
        raise TokenizerError([f"{path}: not a tokenizer ({error}); use --ids to pass token ids"]) from error


def encode(tokenizer: Tokenizer, text: str) -> list[int]:
    """Token ids, with the special tokens that the tokenizer's own template adds."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise TokenizerError([f"prompt {text!r}: not valid UTF-8"]) from error
    return list(tokenizer.encode(text).ids)


def stop_ids(directory: str | Path) -> tuple[int, ...]:
    """End-of-sequence ids: those of generation_config.json, else of config.json or its text_config."""
    for name in CONFIGS:
        config = _config(Path(directory) / name)
        text = config.get("text_config")
        for source in (config, text if isinstance(text, dict) else {}):
            found = source.get("eos_token_id")
            if found is None:
                continue
            ids = tuple(found) if isinstance(found, list) else (found,)
            if not all(isinstance(token, int) and not isinstance(token, bool) and token >= 0 for token in ids):
                text = f"eos_token_id {json.dumps(found)}: must be a token id or a list of them"
                raise TokenizerError([f"{Path(directory) / name}: {text}"])
            return ids
    return ()


def _config(path: Path) -> dict[str, Any]:
    try:
        if not path.is_file():
            return {}
        document = json.loads(path.read_bytes())
    except OSError as error:
        raise TokenizerError([f"{path}: cannot be read ({error.strerror})"]) from error
    except (ValueError, RecursionError) as error:
        raise TokenizerError([f"{path}: unreadable JSON ({error})"]) from error
    return document if isinstance(document, dict) else {}


class TextStream:
    """Turns one completion's ids into text as they come; the parts join to the text of all ids.

    Decoding starts a few tokens back, because a token's text may depend on the ones before it
    (spaces, byte pieces), and holds text back that ends within a character.
    """

    def __init__(self, tokenizer: Tokenizer, prompt: Sequence[int] = ()):
        self._tokenizer = tokenizer
        self._ids = list(prompt)
        self._context = max(len(prompt) - 5, 0)  # where decoding starts
        self._shown = len(prompt)  # ids whose text was given out

    def push(self, token: int) -> str:
        """The text that this id completes; "" while a character is unfinished."""
        self._ids.append(token)
        text = self._new_text()
        if not text or text.endswith(UNFINISHED):
            return ""
        self._context, self._shown = self._shown, len(self._ids)
        return text

    def end(self) -> str:
        """What is left when no more ids come; a character cut short shows as U+FFFD."""
        text = self._new_text()
        self._context = self._shown = len(self._ids)
        return text

    def _new_text(self) -> str:
        shown = self._tokenizer.decode(self._ids[self._context : self._shown])
        return self._tokenizer.decode(self._ids[self._context :])[len(shown) :]
