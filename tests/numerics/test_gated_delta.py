"""The XLA Gated DeltaNet against the token-by-token recurrence, and against itself over several steps.

Tolerance in float32: the chunk form reorders sums over <= 64 tokens and <= 130 recurrent steps
of values of order 1; measured errors are a few 1e-6. 1e-4 leaves room for unlucky seeds; a wrong
decay, tap, mask or slot shows as an error of order 0.1.
"""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from moec.blocks.core.batch import Batch, index_rows
from moec.blocks.gated_delta import ref, xla
from moec.blocks.gated_delta.shapes import TEST_SHAPES, GatedDeltaShape

TOLERANCE = 1e-4
LAYERS, SLOTS, TOKENS = 3, 16, 272

# (cached, new) per row; the first num_decode rows are decode rows.
MIXES = {
    "decode_only": (4, [(1, 1), (7, 1), (3, 1), (60, 1)]),
    "first_token_decode": (2, [(0, 1), (5, 1)]),
    "short_prefills": (0, [(0, 1), (0, 2), (0, 3), (9, 2), (4, 1)]),
    "mixed_chunk_edges": (3, [(16, 1), (15, 1), (0, 1), (0, 63), (0, 64), (0, 65)]),
    "continued": (1, [(33, 1), (13, 130), (64, 64), (5, 3)]),
    "one_long": (0, [(0, 130)]),
}


def geometry(shape: GatedDeltaShape) -> dict:
    return {
        "num_qk_heads": shape.num_qk_heads, "num_v_heads": shape.num_v_heads, "head_k_dim": shape.head_k_dim,
        "head_v_dim": shape.head_v_dim, "conv_kernel": shape.conv_kernel, "norm_eps": 1e-6,
    }  # fmt: skip


def draw_weights(shape: GatedDeltaShape, rng: np.random.Generator) -> dict[str, jax.Array]:
    qk, v, heads = shape.num_qk_heads * shape.head_k_dim, shape.num_v_heads * shape.head_v_dim, shape.num_v_heads
    sizes = {"w_q": qk, "w_k": qk, "w_v": v, "w_z": v, "w_b": heads, "w_a": heads}
    w = {name: rng.normal(0, shape.hidden**-0.5, (shape.hidden, size)) for name, size in sizes.items()}
    w |= {name: rng.normal(0, 0.5, (size, shape.conv_kernel)) for name, size in (("conv_q", qk), ("conv_k", qk), ("conv_v", v))}
    w |= {"a_log": rng.uniform(-3, 2, heads), "dt_bias": rng.normal(0, 1, heads), "out_norm": rng.normal(1, 0.2, shape.head_v_dim)}
    w["w_o"] = rng.normal(0, v**-0.5, (v, shape.hidden))
    return {name: jnp.asarray(value, jnp.float32) for name, value in w.items()}


def draw_pools(shape: GatedDeltaShape, rng: np.random.Generator) -> tuple[jax.Array, jax.Array]:
    """Pools full of other requests' values."""
    channels = 2 * shape.num_qk_heads * shape.head_k_dim + shape.num_v_heads * shape.head_v_dim
    conv = rng.normal(size=(LAYERS, SLOTS, (shape.conv_kernel - 1) * channels))
    state = rng.normal(size=(LAYERS, SLOTS, shape.num_v_heads, shape.head_k_dim, shape.head_v_dim))
    return jnp.asarray(conv, jnp.float32), jnp.asarray(state, jnp.float32)


@partial(jax.jit, static_argnames=("shape", "max_q", "chunk"))
def run(h, w, conv, state, batch: Batch, layer, *, shape: GatedDeltaShape, max_q: int, chunk: int = 64):
    rows = index_rows(batch)
    return xla.gated_delta(h, w, conv, state, batch, rows, pool_layer=layer, chunk=chunk, max_q=max_q, **geometry(shape))


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("mix", MIXES)
@pytest.mark.parametrize("name", TEST_SHAPES)
def test_ragged_batch_matches_reference(name: str, mix: str, seed: int, make_batch) -> None:
    shape, (num_decode, lengths) = TEST_SHAPES[name], MIXES[mix]
    rng = np.random.default_rng([seed, 12])
    batch = make_batch(
        lengths, num_decode=num_decode, num_tokens=TOKENS, num_rows=8, pages_per_seq=1,
        page_size=256, num_pages=16, num_slots=SLOTS, seed=seed,
    )  # fmt: skip
    h, w, layer = jnp.asarray(rng.normal(size=(TOKENS, shape.hidden)), jnp.float32), draw_weights(shape, rng), seed % LAYERS
    conv, state = draw_pools(shape, rng)
    rows = index_rows(batch)
    want, want_conv, want_state = ref.gated_delta(
        h, w, conv, state, batch, rows, pool_layer=layer, chunk=64, max_q=TOKENS, **geometry(shape)
    )
    got, got_conv, got_state = run(h, w, conv, state, batch, layer, shape=shape, max_q=TOKENS)
    valid = np.asarray(rows.valid)
    np.testing.assert_allclose(got[valid], want[valid], atol=TOLERANCE, rtol=0)
    # Slot 0 is the sink: anything may be there.
    np.testing.assert_allclose(got_conv[:, 1:], want_conv[:, 1:], atol=TOLERANCE, rtol=0)
    np.testing.assert_allclose(got_state[:, 1:], want_state[:, 1:], atol=TOLERANCE, rtol=0)
    print(max(float(np.abs(got[valid]-want[valid]).max()), float(np.abs(got_state[:, 1:]-want_state[:, 1:]).max())))
