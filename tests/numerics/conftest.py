"""Ragged batches for the block tests (decode rows, prefill rows, padding), and callbacks at a bearable price."""

from collections.abc import Callable, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from jax._src import callback as jax_callback

from moec.blocks.core.batch import Batch, Sampling

MakeBatch = Callable[..., Batch]


def pass_numpy() -> None:
    """Have io_callback hand its arguments over as they arrive, as NumPy arrays.

    jax 0.10.2 first puts each of them (of the interpreter's: ten or so integers) on a device: 2 ms of every callback,
    four fifths of what a kernel takes in the interpreter. Nothing it computes depends on it. The name is private to
    jax; where it is gone this fails, and the tests only need more time without it.
    """
    assert callable(jax_callback.io_callback_impl)
    jax_callback.io_callback_impl = _call


def _call(*args: Any, callback: Callable[..., Any], **_: Any) -> list[np.ndarray]:
    return [np.asarray(value) for value in callback(*map(np.asarray, args))]


pass_numpy()


@pytest.fixture(scope="session")
def make_batch() -> MakeBatch:
    return _make_batch


def _make_batch(
    lengths: Sequence[tuple[int, int]],
    *,
    num_decode: int,
    num_tokens: int,
    num_rows: int,
    pages_per_seq: int,
    page_size: int,
    num_pages: int,
    num_slots: int,
    seed: int,
    tables: np.ndarray | None = None,
    slots: np.ndarray | None = None,
) -> Batch:
    """A batch of rows (cached tokens, tokens of this step), the first num_decode of them decode rows.

    Pages and slots are random, never shared and never 0 unless given: tables [rows, pages_per_seq],
    slots [rows]. Table entries past a row's end name other rows' pages, so that reading them shows.
    """
    rng = np.random.default_rng(seed)
    old_S, new_S = (np.zeros(num_rows, np.int32) for _ in range(2))
    old_S[: len(lengths)], new_S[: len(lengths)] = zip(*lengths, strict=True)
    assert new_S.sum() <= num_tokens and (new_S[:num_decode] == 1).all()
    table_SP = np.zeros((num_rows, pages_per_seq), np.int32)
    slot_S = np.zeros(num_rows, np.int32)
    table_SP[: len(lengths)] = (
        _random_tables([sum(row) for row in lengths], pages_per_seq, page_size, num_pages, rng)
        if tables is None
        else tables
    )
    slot_S[: len(lengths)] = rng.permutation(np.arange(1, num_slots))[: len(lengths)] if slots is None else slots
    positions = np.concatenate([old + np.arange(new) for old, new in lengths])
    zeros = jnp.zeros(num_rows, jnp.float32)
    return Batch(
        tokens=jnp.zeros(num_tokens, jnp.int32),
        positions=jnp.asarray(np.pad(positions, (0, num_tokens - len(positions))), jnp.int32),
        cu_q=jnp.asarray(np.concatenate([[0], np.cumsum(new_S)]), jnp.int32),
        kv_len=jnp.asarray(old_S + new_S),
        page_table=jnp.asarray(table_SP),
        slot=jnp.asarray(slot_S),
        has_state=jnp.asarray(old_S > 0),
        distribution=jnp.asarray([num_decode, len(lengths), len(lengths)], jnp.int32),
        sampling=Sampling(zeros, zeros.astype(jnp.int32), zeros, zeros.astype(jnp.uint32)),
    )


def _random_tables(
    lengths: Sequence[int], pages_per_seq: int, page_size: int, num_pages: int, rng: np.random.Generator
) -> np.ndarray:
    """Distinct pages for each row's tokens, then entries that must never be read."""
    free = rng.permutation(np.arange(1, num_pages)).tolist()
    tables = rng.integers(1, num_pages, (len(lengths), pages_per_seq))
    for row, length in enumerate(lengths):
        for entry in range(-(-length // page_size)):
            tables[row, entry] = free.pop()
    return tables
