"""Sampling: filters against a sort, draws against their distribution, independence of the batch.

Kept sets and tokens are compared exactly. Log-probabilities are differences of float32 sums of
order 10, so 1e-5 is about ten roundings.
"""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from moec.blocks.core.batch import Sampling
from moec.blocks.sampling import ref, xla

sample = jax.jit(xla.sample)


def settings(rows: int, temperature=1.0, top_k=0, top_p=1.0, seed=None) -> Sampling:
    """Sampling parameters of `rows` rows; scalars apply to all, seeds count up unless given."""
    return Sampling(
        temperature=jnp.broadcast_to(jnp.asarray(temperature, jnp.float32), rows),
        top_k=jnp.broadcast_to(jnp.asarray(top_k, jnp.int32), rows),
        top_p=jnp.broadcast_to(jnp.asarray(top_p, jnp.float32), rows),
        seed=jnp.broadcast_to(jnp.arange(rows) if seed is None else jnp.asarray(seed), rows).astype(jnp.uint32),
    )


def draw_logits(rows: int, vocabulary: int, seed: int = 0) -> jax.Array:
    return jnp.asarray(3 * np.random.default_rng(seed).standard_normal((rows, vocabulary)), jnp.float32)


def positions(rows: int, start: int = 0) -> jax.Array:
    return start + jnp.arange(rows, dtype=jnp.int32)


def filtered(logits: jax.Array, sampling: Sampling) -> list[set[int]]:
    """The ids each row may draw, by the filter under test."""
    x = (logits - logits.max(axis=1, keepdims=True)) / sampling.temperature[:, None]
    kept = jax.jit(xla._sampling_filter)(x, sampling) > -jnp.inf
    return [set(np.flatnonzero(row).tolist()) for row in np.asarray(kept)]


def allowed(logits: jax.Array, sampling: Sampling) -> list[set[int]]:
    """The ids each row may draw, by sorting in float64."""
    rows = zip(logits, sampling.temperature, sampling.top_k, sampling.top_p, strict=True)
    return [set(ref.allowed(x, float(t), int(k), float(p)).tolist()) for x, t, k, p in rows]


MIXED = {
    "temperature": (1.3, 0, 1.0),
    "top_k": (0.7, 7, 1.0),
    "top_p": (0.9, 0, 0.8),
    "both": (1.1, 20, 0.6),
    "every_row_differs": ([0.5, 1, 1.5, 2, 0, 0.1], [0, 1, 5, 300, 3, 50], [0.9, 1, 0.5, 0.99, 0.1, 1]),
}


@pytest.mark.parametrize("vocabulary", [7, 509])
@pytest.mark.parametrize("case", MIXED)
def test_matches_the_reference(case: str, vocabulary: int) -> None:
    sampling, logits = settings(6, *MIXED[case]), draw_logits(6, vocabulary)
    for start in (0, 1000):
        tokens, logprob = sample(logits, sampling, positions(6, start))
        want_tokens, want_logprob = ref.sample(logits, sampling, positions(6, start))
        assert (tokens.dtype, logprob.dtype) == (jnp.int32, jnp.float32)
        np.testing.assert_array_equal(tokens, want_tokens)
        np.testing.assert_allclose(logprob, want_logprob, atol=1e-5, rtol=0)


@pytest.mark.parametrize("top_k", [1, 2, 17, 508, 509, 1000])
def test_top_k_keeps_the_k_largest(top_k: int) -> None:
    sampling, logits = settings(5, 0.8, top_k), draw_logits(5, 509)
    found = filtered(logits, sampling)
    assert found == allowed(logits, sampling)
    assert {len(ids) for ids in found} == {min(top_k, 509)}


@pytest.mark.parametrize("top_p", [0.0, 1e-6, 0.1, 0.5, 0.9, 0.999])
@pytest.mark.parametrize("top_k", [0, 40])
def test_top_p_keeps_the_shortest_prefix_with_the_mass(top_p: float, top_k: int) -> None:
    """top_p counts the mass that top_k left."""
    sampling, logits = settings(5, 1.2, top_k, top_p), draw_logits(5, 509)
    found = filtered(logits, sampling)
    assert found == allowed(logits, sampling)
    assert all(found)


@pytest.mark.parametrize("top_k", [1, 2, 3, 5, 6, 8])
def test_equal_logits_keep_the_lower_ids(top_k: int) -> None:
    logits = jnp.asarray([[1, 4, 2, 4, -3, 2, 2, 4.0], [0.0] * 8, [-0.0, 0.0] * 4], jnp.float32)
    sampling = settings(3, 1.0, top_k)
    assert filtered(logits, sampling) == allowed(logits, sampling)
    assert filtered(logits, sampling)[1:] == [set(range(top_k))] * 2


@pytest.mark.parametrize(
    ("top_p", "kept"), [(0.0, 1), (0.124, 1), (0.126, 2), (0.5, 4), (0.51, 5), (0.99, 8), (1.0, 8)]
)
def test_top_p_splits_equal_logits(top_p: float, kept: int) -> None:
    """Eight equal tokens hold an eighth each; just enough of the lowest ids stay."""
    assert filtered(jnp.full((1, 8), 3.0), settings(1, 1.0, 0, top_p)) == [set(range(kept))]


def test_rows_without_a_filter_pass_beside_rows_with_one() -> None:
    logits = draw_logits(4, 101)
    sampling = settings(4, 1.0, [0, 3, 0, 0], [1.0, 1.0, 0.3, 1.0])
    found = filtered(logits, sampling)
    assert found == allowed(logits, sampling)
    assert len(found[0]) == len(found[3]) == 101


@pytest.mark.parametrize("scale", [1e-30, 1e-3, 1e4, 1e30])
def test_thresholds_are_exact_at_any_magnitude(scale: float) -> None:
    """Tiny to huge, with infinities: the value found is one of the values given."""
    x = draw_logits(3, 201) * scale
    x = x.at[0, :5].set(-jnp.inf).at[1, 7].set(jnp.inf)
    for k in (1, 3, 100, 201):
        found = xla._sampling_threshold(x, jnp.ones_like(x), jnp.full(3, k, jnp.float32))
        np.testing.assert_array_equal(found, jnp.sort(x, axis=1)[:, -k])


def test_greedy_takes_the_lowest_of_equal_maxima() -> None:
    logits = jnp.asarray([[0, 5, 1, 5], [2, 2, 2, 2], [-jnp.inf, -4, -4, -jnp.inf]], jnp.float32)
    tokens, logprob = sample(logits, settings(3, 0.0, 1, 0.5), positions(3))
    np.testing.assert_array_equal(tokens, [1, 0, 1])
    np.testing.assert_allclose(logprob, [-np.log(2 + np.exp(-4) + np.exp(-5)), -np.log(4), -np.log(2)], atol=1e-5)


@pytest.mark.parametrize(
    ("temperature", "top_k", "top_p"), [(1, 1, 1), (1, 0, 0), (1, 0, 1e-9), (1e-30, 0, 1), (1e-4, 5, 0.9)]
)
def test_limits_of_sampling_are_greedy(temperature: float, top_k: int, top_p: float) -> None:
    logits = draw_logits(50, 64)
    tokens, _ = sample(logits, settings(50, temperature, top_k, top_p), positions(50))
    np.testing.assert_array_equal(tokens, jnp.argmax(logits, axis=1))


def test_greedy_rows_keep_their_token_beside_random_rows() -> None:
    logits = draw_logits(40, 64)
    sampling = settings(40, np.where(np.arange(40) % 3 == 0, 0.0, 2.0))
    tokens, _ = sample(logits, sampling, positions(40))
    greedy = np.asarray(jnp.argmax(logits, axis=1))
    assert (tokens[::3] == greedy[::3]).all()
    assert (np.asarray(tokens) != greedy).sum() > 10


def test_logprob_is_raw() -> None:
    """Of the unfiltered distribution at temperature 1, whatever was drawn from."""
    logits = draw_logits(30, 64)
    tokens, logprob = sample(logits, settings(30, 3.0, 20, 0.9), positions(30))
    want = jax.nn.log_softmax(logits, axis=1)[jnp.arange(30), tokens]
    np.testing.assert_allclose(logprob, want, atol=1e-5, rtol=0)


def test_banned_tokens_are_never_drawn() -> None:
    logits = jnp.zeros((2000, 16)).at[:, ::2].set(-jnp.inf)
    for top_k, top_p in ((0, 1.0), (12, 1.0), (0, 0.99), (3, 0.9)):
        tokens, logprob = sample(logits, settings(2000, 5.0, top_k, top_p), positions(2000))
        assert (tokens % 2 == 1).all()
        np.testing.assert_allclose(logprob, -np.log(8), atol=1e-5)


# Upper 0.1 % points of chi-square by degrees of freedom. Seeds are fixed: passing today is passing always.
CHI2_999 = {3: 16.27, 4: 18.47, 8: 26.12, 11: 31.26}


@pytest.mark.parametrize("vary", ["seed", "position"])
@pytest.mark.parametrize(("top_k", "top_p", "ids"), [(0, 1.0, 12), (5, 1.0, 5), (0, 0.55, 5), (5, 0.75, 4)])
def test_draws_follow_the_filtered_distribution(vary: str, top_k: int, top_p: float, ids: int) -> None:
    """20000 draws of 12 tokens; either the seed or the position changes from draw to draw."""
    count, temperature = 20000, 1.5
    row = draw_logits(1, 12, seed=7) / 3
    sampling = settings(count, temperature, top_k, top_p, seed=None if vary == "seed" else 11)
    position = positions(count) if vary == "position" else jnp.full(count, 5, jnp.int32)
    tokens, _ = sample(jnp.broadcast_to(row, (count, 12)), sampling, position)
    kept = ref.allowed(row[0], temperature, top_k, top_p)
    assert len(kept) == ids
    expected = np.exp(np.asarray(row[0], np.float64)[kept] / temperature)
    expected *= count / expected.sum()
    seen = np.bincount(tokens, minlength=12)
    assert seen[kept].sum() == count
    assert float(((seen[kept] - expected) ** 2 / expected).sum()) < CHI2_999[ids - 1]


def test_consecutive_draws_are_independent() -> None:
    """Pairs of draws at neighbouring positions, then at neighbouring seeds: uniform over the 3 x 3 table."""
    count = 18000
    for sampling, position in ((settings(count, seed=3), positions(count)), (settings(count), positions(count) * 0)):
        tokens = np.asarray(sample(jnp.zeros((count, 3)), sampling, position)[0])
        seen = np.bincount(3 * tokens[:-1] + tokens[1:], minlength=9)
        assert float(((seen - count / 9) ** 2 / (count / 9)).sum()) < CHI2_999[8]


def test_a_row_draws_the_same_in_any_batch() -> None:
    """Alone, at another place, among other rows, with other rows' filters: same seed and position, same token."""
    sampling = settings(21, [1.0, 0.0, 2.0] * 7, [0, 5, 9] * 7, [1.0, 0.7, 0.9] * 7)
    logits = draw_logits(21, 257)
    tokens, logprob = sample(logits, sampling, positions(21))
    order = np.random.default_rng(0).permutation(21)
    shuffled = jax.tree.map(lambda a: a[order], (logits, sampling, positions(21)))
    np.testing.assert_array_equal(sample(*shuffled)[0], tokens[order])
    for row in range(21):
        alone = jax.tree.map(lambda a, row=row: a[row : row + 1], (logits, sampling, positions(21)))
        found, found_logprob = sample(*alone)
        assert int(found[0]) == int(tokens[row])
        np.testing.assert_allclose(found_logprob[0], logprob[row], atol=1e-5)


def test_nothing_sorts_the_vocabulary() -> None:
    text = sample.lower(draw_logits(4, 512), settings(4), positions(4)).as_text()
    assert "stablehlo.while" in text
    assert not re.findall(r"stablehlo\.sort|top_k|topk", text)


def test_greedy_batches_enter_no_draw() -> None:
    """Noise and filters sit inside a branch of the loop over row groups, not beside it."""
    top = jax.make_jaxpr(xla.sample)(draw_logits(4, 512), settings(4), positions(4))
    (loop,) = (e for e in top.eqns if str(e.primitive) in ("while", "scan"))
    body = loop.params.get("jaxpr") or loop.params["body_jaxpr"]
    names = [str(e.primitive) for e in (*top.eqns, *body.eqns)]
    assert names.count("cond") == 1
    assert names.count("while") + names.count("scan") == 1
    assert not [name for name in names if "random" in name or "threefry" in name]
    assert "random" in str(top)
