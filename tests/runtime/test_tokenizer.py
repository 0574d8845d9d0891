"""Text in and out: round trips, streaming that never splits a character, stop ids, clear errors."""

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer

from moec.runtime.errors import TokenizerError
from moec.runtime.tokenizer import TextStream, encode, load_tokenizer, stop_ids

FOLDER = Path(__file__).parent.parent / "fixtures" / "oracles" / "qwen3_5_moe"
TEXT = "The router weighs: naïve café, 価格 €20 😀👩‍👩‍👧 done"


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return load_tokenizer(FOLDER)


def test_ids_fit_the_tiny_models(tokenizer: Tokenizer) -> None:
    ids = encode(tokenizer, TEXT)
    assert tokenizer.get_vocab_size() == 256
    assert min(ids) >= 3 and max(ids) < 256 and len(ids) < len(TEXT.encode())
    assert tokenizer.decode(ids) == TEXT


def test_a_stream_shows_whole_characters_as_soon_as_they_are_complete(tokenizer: Tokenizer) -> None:
    stream, parts = TextStream(tokenizer), list[str]()
    ids = encode(tokenizer, "a€😀b")
    for token in ids:
        parts.append(stream.push(token))
    assert parts == ["a", "", "", "€", "", "", "", "😀", "b"] and stream.end() == ""


@given(st.text(st.characters(min_codepoint=32, exclude_categories=["Cs", "Cc"]), max_size=40))
def test_stream_parts_join_to_the_text(text: str) -> None:
    tokenizer = load_tokenizer(FOLDER)
    prompt, ids = encode(tokenizer, "The prompt is "), encode(tokenizer, text)
    stream = TextStream(tokenizer, prompt)
    parts = [stream.push(token) for token in ids]
    assert "".join(parts) + stream.end() == text
    assert not any("\N{REPLACEMENT CHARACTER}" in part for part in parts) or "\N{REPLACEMENT CHARACTER}" in text


@given(st.lists(st.integers(3, 255), max_size=30))
def test_what_a_random_model_says_is_not_lost(ids: list[int]) -> None:
    """Bytes that are no UTF-8 show as U+FFFD, exactly as decoding all at once would show them."""
    tokenizer = load_tokenizer(FOLDER)
    stream = TextStream(tokenizer)
    assert "".join(map(stream.push, ids)) + stream.end() == tokenizer.decode(ids)


def test_an_unfinished_character_shows_at_the_end(tokenizer: Tokenizer) -> None:
    stream = TextStream(tokenizer)
    ids = encode(tokenizer, "ab😀")[:-1]
    assert "".join(map(stream.push, ids)) == "ab"
    assert stream.end() == "\N{REPLACEMENT CHARACTER}"
    assert stream.end() == ""


def test_missing_and_broken_tokenizers_are_told(tmp_path: Path) -> None:
    with pytest.raises(TokenizerError) as caught:
        load_tokenizer(tmp_path)
    assert str(caught.value) == f"{tmp_path}: holds no tokenizer.json; use --ids to pass token ids"
    (tmp_path / "tokenizer.json").write_text('{"model": 3}')
    with pytest.raises(TokenizerError) as caught:
        load_tokenizer(tmp_path)
    assert str(caught.value).startswith(f"{tmp_path}/tokenizer.json: not a tokenizer (")


@pytest.mark.parametrize(
    ("files", "ids"),
    [
        ({}, ()),
        ({"generation_config.json": {"eos_token_id": [7, 8]}, "config.json": {"eos_token_id": 9}}, (7, 8)),
        ({"generation_config.json": {"eos_token_id": None}, "config.json": {"eos_token_id": 9}}, (9,)),
        ({"generation_config.json": {}, "config.json": {"text_config": {"eos_token_id": 0}}}, (0,)),
        ({"config.json": {"eos_token_id": None, "text_config": {"eos_token_id": [1]}}}, (1,)),
    ],
)
def test_stop_ids_come_from_the_first_config_that_has_them(
    tmp_path: Path, files: dict[str, dict], ids: tuple[int, ...]
) -> None:
    for name, document in files.items():
        (tmp_path / name).write_text(json.dumps(document))
    assert stop_ids(tmp_path) == ids


def test_an_unreadable_config_is_told(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(TokenizerError, match=r"config\.json: unreadable JSON"):
        stop_ids(tmp_path)


@pytest.mark.parametrize("ids", ["2", 2.0, True, -1, [1, "2"], {"id": 2}])
def test_stop_ids_of_another_type_are_told(tmp_path: Path, ids: object) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"eos_token_id": ids}))
    with pytest.raises(TokenizerError, match=r"config\.json: eos_token_id .*: must be a token id or a list of them$"):
        stop_ids(tmp_path)
