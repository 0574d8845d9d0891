"""The XLA attention against its reference, and against itself over several steps.

Tolerance in float32: sums over <= 200 keys in another order, values of order 1: error about
sqrt(200) * 6e-8 * a few; 1e-4 leaves room for unlucky seeds, and a wrong key, mask, page or
position shows as an error of order 0.1.
"""

from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from moec.blocks.attention import ref, xla
from moec.blocks.attention.shapes import TEST_SHAPES, AttentionShape
from moec.blocks.core.batch import Batch, index_rows

TOLERANCE = 1e-4
LAYERS, PAGES, PAGE_SIZE, SLOTS = 3, 80, 8, 16

# (cached, new) per row; the first num_decode rows are decode rows.
MIXES = {
    "decode_only_history": (4, [(1, 1), (7, 1), (8, 1), (60, 1)]),
    "first_token_decode": (2, [(0, 1), (5, 1)]),
    "short_prefills": (0, [(0, 1), (0, 2), (0, 3), (9, 2)]),
    "mixed_page_edges": (3, [(16, 1), (15, 1), (17, 1), (0, 63), (0, 64), (0, 65)]),
    "continued_prefix": (1, [(33, 1), (13, 130), (8, 64), (5, 3)]),
    "one_long": (0, [(0, 130)]),
}


def geometry(shape: AttentionShape) -> dict:
    return {
        "num_q_heads": shape.num_q_heads, "num_kv_heads": shape.num_kv_heads, "head_dim": shape.head_dim,
        "rope_dim": shape.rope_dim, "rope_theta": shape.rope_theta, "rope_pairing": shape.rope_pairing,
        "qk_norm_eps": 1e-6 if shape.qk_norm else None, "qk_norm_zero_centered": shape.zero_centered,
        "output_gate": shape.output_gate, "scale": shape.head_dim**-0.5,
    }  # fmt: skip


def draw_weights(shape: AttentionShape, rng: np.random.Generator) -> dict[str, jax.Array]:
    q, kv = shape.num_q_heads * shape.head_dim, shape.num_kv_heads * shape.head_dim
    sizes = {"w_q": (shape.hidden, q * (2 if shape.output_gate else 1)), "w_k": (shape.hidden, kv), "w_v": (shape.hidden, kv), "w_o": (q, shape.hidden)}
    w = {name: rng.normal(0, size[0] ** -0.5, size) for name, size in sizes.items()}
    if shape.qk_norm:
        w |= {name: rng.normal(0 if shape.zero_centered else 1, 0.2, shape.head_dim) for name in ("q_norm", "k_norm")}
    return {name: jnp.asarray(value, jnp.float32) for name, value in w.items()}


@partial(jax.jit, static_argnames=("shape", "max_q"))
def step(h, w, pool, batch: Batch, layer, *, shape: AttentionShape, max_q: int):
    """One layer of attention, then the write of its rows (the other layers write zeros)."""
    rows = index_rows(batch)
    out, new = xla.attention(h, w, pool, batch, rows, pool_layer=layer, num_pages=PAGES, max_q=max_q, **geometry(shape))
    return out, new


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("mix", MIXES)
@pytest.mark.parametrize("name", TEST_SHAPES)
def test_ragged_batch_matches_reference(name: str, mix: str, seed: int, make_batch) -> None:
    shape, (num_decode, lengths) = TEST_SHAPES[name], MIXES[mix]
    rng = np.random.default_rng([seed, 11])
    batch = make_batch(
        lengths, num_decode=num_decode, num_tokens=208, num_rows=8, pages_per_seq=20,
        page_size=PAGE_SIZE, num_pages=PAGES, num_slots=SLOTS, seed=seed,
    )  # fmt: skip
    h = jnp.asarray(rng.normal(size=(208, shape.hidden)), jnp.float32)
    pool = jnp.asarray(rng.normal(size=(LAYERS * PAGES, PAGE_SIZE, 2 * shape.num_kv_heads * shape.head_dim)), jnp.float32)
    w, rows = draw_weights(shape, rng), index_rows(batch)
    layer = seed % LAYERS
    want, want_new = ref.attention(h, w, pool, batch, rows, pool_layer=layer, num_pages=PAGES, max_q=208, **geometry(shape))
    got, got_new = step(h, w, pool, batch, layer, shape=shape, max_q=208)
    valid = np.asarray(rows.valid)
    np.testing.assert_allclose(got[valid], want[valid], atol=TOLERANCE, rtol=0)
    np.testing.assert_allclose(got_new[valid], want_new[valid], atol=TOLERANCE, rtol=0)
