"""The one write of a step into a paged pool, against a loop over layers, rows and tokens."""

from itertools import pairwise

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from moec.blocks.core.batch import Batch, index_rows
from moec.blocks.core.paged import write_kv

LAYERS, PAGES, PAGE_SIZE, PAGES_PER_SEQ, TOKENS, ROWS, WIDTH = 3, 90, 8, 20, 208, 8, 12

# (cached, new) per row; the first num_decode rows are decode rows.
MIXES = {
    "decode_only": (4, [(1, 1), (7, 1), (8, 1), (60, 1)]),
    "first_tokens": (1, [(0, 1), (0, 1), (0, 3)]),
    "page_edges": (3, [(16, 1), (15, 1), (17, 1), (0, 63), (0, 64), (0, 65)]),
    "continued": (1, [(33, 1), (13, 130), (8, 64), (5, 3)]),
}


def written(pool: np.ndarray, new_LTC: np.ndarray, batch: Batch) -> np.ndarray:
    """The pool [L, pages, page_size, C] after every valid token's row went to its place in every layer."""
    pool, cu_q = pool.copy(), np.asarray(batch.cu_q).tolist()
    for row, (first, last) in enumerate(pairwise(cu_q)):
        for token in range(first, last):
            page, offset = divmod(int(batch.kv_len[row]) - (last - token), PAGE_SIZE)
            pool[:, int(batch.page_table[row, page]), offset] = new_LTC[:, token]
    return pool


@jax.jit
def write(pool, new_LTC, batch: Batch):
    return write_kv(pool, new_LTC, batch, index_rows(batch))


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize("mix", MIXES)
def test_every_token_goes_to_its_page(mix: str, dtype, make_batch) -> None:
    rng, (num_decode, lengths) = np.random.default_rng(14), MIXES[mix]
    batch = make_batch(
        lengths, num_decode=num_decode, num_tokens=TOKENS, num_rows=ROWS, seed=1,
        pages_per_seq=PAGES_PER_SEQ, page_size=PAGE_SIZE, num_pages=PAGES, num_slots=16,
    )  # fmt: skip
    pool = jnp.asarray(rng.normal(size=(LAYERS, PAGES, PAGE_SIZE, WIDTH)), dtype)
    new = jnp.asarray(rng.normal(size=(LAYERS, TOKENS, WIDTH)), jnp.float32)
    got = write(pool.reshape(LAYERS * PAGES, PAGE_SIZE, WIDTH), new, batch)
    want = written(np.asarray(pool), np.asarray(new.astype(dtype)), batch)
    assert got.dtype == dtype
    # Page 0 of each layer is the sink: padding tokens may write there, and nowhere else.
    np.testing.assert_array_equal(np.asarray(got).reshape(want.shape)[:, 1:], want[:, 1:])
