"""RMS norm and rope against float64 formulas.

Tolerance 1e-5 in float32: one reduction over <= 64 values, angles up to 500 rad (float32 keeps
them to 3e-5 rad at worst, so rope gets 1e-4). A wrong pairing or frequency is of order 1.
"""

import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from moec.blocks.core.norm import rms_norm
from moec.blocks.core.rope import rope


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("zero_centered", [False, True])
def test_rms_norm_is_the_formula(zero_centered: bool, seed: int) -> None:
    rng = np.random.default_rng(seed)
    x, w = rng.normal(size=(3, 5, 64)) * 10.0 ** rng.integers(-3, 4), rng.normal(size=64)
    want = x / np.sqrt(np.mean(x * x, axis=-1, keepdims=True) + 1e-5) * (1 + w if zero_centered else w)
    got = rms_norm(jnp.asarray(x, jnp.float32), jnp.asarray(w, jnp.float32), eps=1e-5, zero_centered=zero_centered)
    np.testing.assert_allclose(got, want, atol=1e-5, rtol=0)


def test_epsilon_is_inside_the_root() -> None:
    got = rms_norm(jnp.full((1, 4), 1e-3), jnp.ones(4), eps=1e-6, zero_centered=False)
    np.testing.assert_allclose(got, 1 / np.sqrt(2), rtol=1e-5)


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("zero_centered", [False, True])
def test_rms_norm_rounds_where_checkpoints_expect(zero_centered: bool, seed: int) -> None:
    """bfloat16: plain gain multiplies the rounded value, zero-centred gain multiplies before the one rounding."""
    rng, bf16 = np.random.default_rng(seed), ml_dtypes.bfloat16
    x, w = rng.normal(size=(7, 32)).astype(bf16), rng.normal(size=32).astype(bf16)
    x64, w64 = x.astype(np.float64), w.astype(np.float64)
    normed = x64 / np.sqrt(np.mean(x64 * x64, axis=-1, keepdims=True) + 1e-6)
    want = (
        (normed * (1 + w64)).astype(bf16)
        if zero_centered
        else (normed.astype(bf16).astype(np.float64) * w64).astype(bf16)
    )
    got = rms_norm(jnp.asarray(x), jnp.asarray(w), eps=1e-6, zero_centered=zero_centered)
    assert got.dtype == jnp.bfloat16
    # Equal bit for bit but where the float32 mean falls on the other side of a rounding edge.
    assert np.mean(np.asarray(got) == want) > 0.98


def rotate(
    x_TNH: np.ndarray, positions: np.ndarray, dim: int, theta: float, pairs: list[tuple[int, int]]
) -> np.ndarray:
    out = x_TNH.copy()
    for i, (a, b) in enumerate(pairs):
        angle = positions[:, None] * theta ** (-2 * i / dim)
        out[..., a] = x_TNH[..., a] * np.cos(angle) - x_TNH[..., b] * np.sin(angle)
        out[..., b] = x_TNH[..., b] * np.cos(angle) + x_TNH[..., a] * np.sin(angle)
    return out


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("pairing", ["half", "interleaved"])
@pytest.mark.parametrize("dim", [2, 8, 16])
def test_rope_rotates_its_pairs_and_passes_the_rest(dim: int, pairing: str, seed: int) -> None:
    rng = np.random.default_rng([seed, dim])
    x, positions = rng.normal(size=(9, 3, 16)), rng.integers(0, 500, 9)
    pairs = [(i, i + dim // 2) if pairing == "half" else (2 * i, 2 * i + 1) for i in range(dim // 2)]
    got = rope(jnp.asarray(x, jnp.float32), jnp.asarray(positions, jnp.int32), dim=dim, theta=1e4, pairing=pairing)
    np.testing.assert_allclose(got, rotate(x, positions, dim, 1e4, pairs), atol=1e-4, rtol=0)
    np.testing.assert_array_equal(got[..., dim:], x[..., dim:].astype(np.float32))


def test_rope_of_no_dims_changes_nothing() -> None:
    x = jnp.asarray(np.random.default_rng(0).normal(size=(4, 2, 8)), jnp.float32)
    np.testing.assert_array_equal(rope(x, jnp.arange(4), dim=0, theta=1e4, pairing="half"), x)


@pytest.mark.parametrize("pairing", ["half", "interleaved"])
def test_scores_depend_on_the_distance_alone(pairing: str) -> None:
    rng = np.random.default_rng(1)
    q, k = (jnp.asarray(rng.normal(size=(1, 1, 32)), jnp.float32) for _ in range(2))

    def score(q_position: int, k_position: int) -> float:
        turned = [
            rope(x, jnp.asarray([p]), dim=32, theta=1e4, pairing=pairing) for x, p in ((q, q_position), (k, k_position))
        ]
        return float(jnp.sum(turned[0] * turned[1]))

    assert score(7, 3) == pytest.approx(score(1007, 1003), abs=1e-3)
    assert abs(score(7, 3) - score(7, 4)) > 1e-2


def test_bfloat16_is_rotated_in_float32() -> None:
    """At position 300 a bfloat16 angle would be off by up to 1 rad."""
    x = np.random.default_rng(2).normal(size=(1, 2, 8)).astype(ml_dtypes.bfloat16)
    got = rope(jnp.asarray(x), jnp.asarray([301]), dim=8, theta=1e4, pairing="half")
    want = rotate(x.astype(np.float64), np.asarray([301]), 8, 1e4, [(i, i + 4) for i in range(4)])
    assert got.dtype == jnp.bfloat16
    np.testing.assert_allclose(np.asarray(got, np.float32), want, atol=2**-7 * 4, rtol=0)
