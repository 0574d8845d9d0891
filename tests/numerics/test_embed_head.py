"""Embedding and head, whole and cut over data, tensor or both.

A lookup moves bits (each row comes from one shard, the others add zeros), so it is exact in any
dtype. Logits are float32 sums of 96 products of order 1: 1e-4 is about 50 times their rounding.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from moec.blocks.embed import ref as embed_ref
from moec.blocks.embed import xla as embed
from moec.blocks.head import ref as head_ref
from moec.blocks.head import xla as head

TOLERANCE = 1e-4
VOCABULARY, HIDDEN = 48, 96

# mesh sizes, dp_axes, tp_axes
CUTS = {
    "dp4_tp2": ({"data": 4, "tensor": 2}, ("data",), ("tensor",)),
    "dp2_tp4": ({"data": 2, "tensor": 4}, ("data",), ("tensor",)),
    "dp8": ({"data": 8}, ("data",), ()),
    "tp8": ({"tensor": 8}, (), ("tensor",)),
    "dp2x2_tp2": ({"data": 2, "inner": 2, "tensor": 2}, ("data", "inner"), ("tensor",)),
    "tp_only_of_two": ({"data": 4, "tensor": 2}, (), ("tensor",)),
}


def on_mesh(cut: str, call: Callable, rows: jax.Array, matrix: jax.Array, vocabulary_dim: int) -> jax.Array:
    """call(rows, matrix piece, dp_axes, tp_axes): rows cut over dp, the vocabulary over tp + dp."""
    sizes, dp, tp = CUTS[cut]
    mesh = Mesh(np.asarray(jax.devices()[:8]).reshape(tuple(sizes.values())), tuple(sizes))
    piece = P(*[None] * vocabulary_dim, (*tp, *dp))
    rows_spec = P(dp) if dp else P()
    step = jax.shard_map(
        lambda r, m: call(r, m, dp, tp), mesh=mesh, in_specs=(rows_spec, piece), out_specs=rows_spec, check_vma=False
    )
    return jax.jit(step)(rows, matrix)


def draw(seed: int, *shape: int) -> jax.Array:
    return jnp.asarray(np.random.default_rng(seed).standard_normal(shape), jnp.float32)


# Ids outside the vocabulary are clipped: padding tokens may hold anything.
def draw_tokens(count: int) -> jax.Array:
    tokens = np.random.default_rng(2).integers(0, VOCABULARY, count)
    tokens[:4] = [0, VOCABULARY - 1, -1, VOCABULARY + 5]
    return jnp.asarray(tokens, jnp.int32)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_lookup_takes_rows(dtype: type) -> None:
    table, tokens = draw(0, VOCABULARY, HIDDEN).astype(dtype), draw_tokens(13)
    found = embed.lookup(table, tokens)
    assert found.dtype == dtype
    np.testing.assert_array_equal(found.astype(jnp.float32), embed_ref.lookup(table, tokens))


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize("cut", CUTS)
def test_sharded_lookup_is_exact(cut: str, dtype: type) -> None:
    table, tokens = draw(0, VOCABULARY, HIDDEN).astype(dtype), draw_tokens(40)
    found = on_mesh(cut, lambda t, m, dp, tp: embed.lookup_sharded(m, t, dp, tp), tokens, table, 0)
    assert found.dtype == dtype
    np.testing.assert_array_equal(found.astype(jnp.float32), embed_ref.lookup(table, tokens))


def test_logits_match_the_reference() -> None:
    h, w = draw(3, 5, HIDDEN), draw(4, HIDDEN, VOCABULARY) / 8
    with jax.default_matmul_precision("highest"):
        found = head.logits(h, w)
    np.testing.assert_allclose(found, head_ref.logits(h, w), atol=TOLERANCE, rtol=0)


@pytest.mark.parametrize("cut", CUTS)
def test_sharded_logits_match_the_reference(cut: str) -> None:
    h, w = draw(3, 16, HIDDEN), draw(4, HIDDEN, VOCABULARY) / 8
    with jax.default_matmul_precision("highest"):
        found = on_mesh(cut, head.logits_sharded, h, w, 1)
    assert found.shape == (16, VOCABULARY)
    np.testing.assert_allclose(found, head_ref.logits(h, w), atol=TOLERANCE, rtol=0)


@pytest.mark.parametrize("cut", ["dp4_tp2", "dp8"])
def test_bfloat16_logits_accumulate_in_float32(cut: str) -> None:
    """Products of bfloat16 values are exact in float32, so only the order of sums differs."""
    h, w = (a.astype(jnp.bfloat16) for a in (draw(3, 16, HIDDEN), draw(4, HIDDEN, VOCABULARY) / 8))
    found = on_mesh(cut, head.logits_sharded, h, w, 1)
    assert found.dtype == jnp.float32
    np.testing.assert_allclose(found, head_ref.logits(h, w), atol=TOLERANCE, rtol=0)


def test_an_uncut_vocabulary_has_its_own_functions() -> None:
    with pytest.raises(AssertionError, match="lookup"):
        embed.lookup_sharded(jnp.zeros((4, 2)), jnp.zeros(3, jnp.int32), (), ())
    with pytest.raises(AssertionError, match="logits"):
        head.logits_sharded(jnp.zeros((3, 2)), jnp.zeros((2, 4)), (), ())
