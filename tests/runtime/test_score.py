"""Scoring given tokens: chunked in every way, the logits and hidden states are those of the whole."""

from collections.abc import Callable

import numpy as np
import pytest
from jax.sharding import Mesh

from moec.runtime.errors import RequestError
from moec.runtime.program import Program
from moec.runtime.score import score, trace

Fake = tuple[Program, Mesh]
IDS = [[5, 9, 2, 44, 1, 0, 96, 3], [7, 7, 7], [12, 80, 33, 6, 91]]


@pytest.mark.parametrize(
    "chunks",
    [
        [[8], [1, 2], [5]],
        [[3, 4, 1], [1, 1, 1], [2, 3]],  # not page borders: verification may cut anywhere
        [[1] * 8, [3], [1] * 5],
    ],
    ids=["one", "ragged", "steps"],
)
def test_chunks_do_not_change_the_logits(fake: Fake, next_token: Callable[..., int], chunks: list[list[int]]) -> None:
    program, mesh = fake
    ids = IDS if program.NUM_RANKS > 1 else IDS[:2]
    chunks = chunks[: len(ids)]
    if program.NUM_RANKS == 1 and chunks[0] == [8]:
        chunks = [[8], [1, 2]]
    found = score(program, mesh, {}, ids, chunks)
    for tokens, logits in zip(ids, found, strict=True):
        assert logits.shape == (len(tokens), 97)
        assert logits.argmax(-1).tolist() == [next_token(tokens[: n + 1]) for n in range(len(tokens))]


def test_one_chunk_is_the_default(fake: Fake) -> None:
    program, mesh = fake
    (whole,) = score(program, mesh, {}, IDS[:1])
    (cut,) = score(program, mesh, {}, IDS[:1], [[4, 4]])
    np.testing.assert_array_equal(whole, cut)


def test_trace_brings_the_hidden_states_along(fake: Fake) -> None:
    program, mesh = fake
    (found,) = trace(program, mesh, {}, IDS[:1], [[5, 3]])
    np.testing.assert_array_equal(found.logits, score(program, mesh, {}, IDS[:1])[0])
    assert found.hidden.shape == (2, 8, 1) and found.hidden.dtype == np.float32
    assert found.hidden[0, :, 0].tolist() == IDS[0] and found.hidden[1, :, 0].tolist() == list(range(8))


def test_what_cannot_be_scored_is_told_at_once(fake: Fake) -> None:
    program, mesh = fake
    with pytest.raises(RequestError) as caught:
        score(program, mesh, {}, [[1] * 40, [2] * 12, [3] * 4], [[10, 10, 10, 10], [12], [2, 1]])
    assert list(caught.value.messages) == [
        "sequence 2: chunks [2, 1] do not add up to its 4 tokens",
        "sequence 0 has 40 tokens: max_context is 32",
        "sequence 1: a chunk of 12 tokens exceeds the largest bucket's 10",
    ]
    many = [[1] * 6] * (2 * program.NUM_RANKS)
    with pytest.raises(RequestError, match="step 0: its chunks are more tokens or rows than any bucket takes"):
        score(program, mesh, {}, many)
    with pytest.raises(RequestError, match="sequences do not fit the program's cache at once"):
        score(program, mesh, {}, [[1] * 3] * (4 * program.NUM_RANKS))
