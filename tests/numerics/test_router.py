"""The router in XLA against its float32 reference, the options one by one and together, and what is emitted for it.

Tolerance: weights are at most 3 and differ by a few float32 roundings, 1e-5; the experts and their
order must be the same.
"""

import inspect
from collections.abc import Callable
from functools import cache, partial
from typing import Any, get_args

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from moec.blocks.core.declare import ModelDims, NormFields
from moec.blocks.core.norm import rms_norm
from moec.blocks.router import ref, xla
from moec.blocks.router.emit import ORDER, SAME, route_arguments
from moec.blocks.router.names import Score
from moec.blocks.router.reference import apply_router
from moec.blocks.router.router_fields import Router, check_router, router_weights

NUM_EXPERTS, HIDDEN = 48, 64
DIMS = ModelDims(HIDDEN, 128, NormFields())
# As a spec declares them: what known models use, then rarer combinations.
ROUTERS: dict[str, dict[str, Any]] = {
    "softmax": {},
    "softmax_plain": {"renormalize": False},
    "sigmoid": {"score": "sigmoid", "scale": 2.5},
    "sigmoid_plain": {"score": "sigmoid", "renormalize": False},
    "of_selected_logits": {"score": "none", "bias": True, "weights": "softmax", "renormalize": False},
    "corrected_groups": {
        "logits_dtype": "float32",
        "score": "sigmoid",
        "correction": "score",
        "groups": {"num": 8, "keep": 3},
        "scale": 2.5,
        "cast": False,
    },
    "groups_by_max": {"groups": {"num": 6, "keep": 2, "metric": "max", "masked": "zero"}, "renormalize": False},
    "corrected_logits": {"score": "sigmoid", "correction": "logit", "renorm_eps": 0.0},
    "sqrt_softplus": {"score": "sqrt_softplus", "correction": "score", "scale": 1.5},
    "minimum": {"correction": "score", "renorm_min": 0.75, "renorm_eps": 0.0},
    "euclidean": {"renorm_power": 2.0, "renorm_eps": 1e-6},
    "own_norm": {"in_norm": {"eps": 1e-5, "zero_centered": True}, "logits_scale": 0.125, "expert_scale": True},
    "softcapped": {"logits_softcap": 1.5, "bias": True, "score": "sigmoid"},
    "sparsemixer": {"score": "none", "weights": "sparsemixer", "jitter": 0.2, "renormalize": False},
    "sigmoid_of_selected": {"score": "none", "weights": "sigmoid", "renormalize": False, "apply": "input"},
}


def router_of(name: str, top_k: int = 5) -> Router:
    router = Router(num_experts=NUM_EXPERTS, top_k=top_k, **ROUTERS[name])
    assert not check_router(router, DIMS)
    return router


def draw(router: Router, seed: int, tokens: int = 37) -> tuple[jax.Array, dict[str, jax.Array]]:
    """Tokens and the router's weights; gains near 1, vectors of order 0.3."""
    rng = np.random.default_rng(seed)
    found = {}
    for name, weight in router_weights(router, DIMS).items():
        value = rng.standard_normal(weight.shape)
        value = value / 4 if len(weight.shape) == 2 else 1 + 0.2 * value if weight.init == "gain" else 0.3 * value
        found[name] = jnp.asarray(value, jnp.float32)
    return jnp.asarray(rng.standard_normal((tokens, HIDDEN)), jnp.float32), found


def run(router: Router, h: jax.Array, w: dict[str, jax.Array], x: jax.Array | None = None):
    """route() with the arguments an emitted program passes."""
    arguments = ", ".join(route_arguments(router, DIMS, "own", "TOP_K"))
    with jax.default_matmul_precision("highest"):
        return compiled_call(arguments, router.top_k)(h, x, w)


@cache
def compiled_call(arguments: str, top_k: int) -> Callable:
    """One program per emitted call, for all tests."""
    names = {"route": xla.route, "TOP_K": top_k}
    return jax.jit(lambda h, x, w: eval(f"route({arguments})", names | {"w": {"own": w}, "h_TD": h, "x_TD": x}))


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("name", ROUTERS)
def test_emitted_call_matches_the_reference(name: str, seed: int) -> None:
    router = router_of(name)
    h, w = draw(router, seed)
    index, weight = run(router, h, w)
    want_index, want_weight = apply_router(router, DIMS, h, h * jnp.nan, w)
    assert (index.dtype, weight.dtype) == (jnp.int32, jnp.float32)
    np.testing.assert_array_equal(index, want_index)
    np.testing.assert_allclose(weight, want_weight, atol=1e-5, rtol=0)
    assert (np.sort(index)[:, 1:] > np.sort(index)[:, :-1]).all(), "an expert twice"


@pytest.mark.parametrize("name", ROUTERS)
def test_bfloat16_rounds_logits_and_weights(name: str) -> None:
    """Exact products and sums (small integers), so both round the same logits, ties included."""
    router = router_of(name)
    rng = np.random.default_rng(5)
    _, w = draw(router, 5)
    w = {key: value if key == "router_correction" else value.astype(jnp.bfloat16) for key, value in w.items()}
    h, w["router"] = (jnp.asarray(rng.integers(-16, 17, s) / 64, jnp.bfloat16) for s in ((33, HIDDEN), (HIDDEN, 48)))
    index, weight = run(router, h, w)
    want_index, want_weight = apply_router(router, DIMS, h, h, w)
    exact = h.astype(jnp.float32) @ w["router"].astype(jnp.float32)
    assert (exact != exact.astype(jnp.bfloat16).astype(jnp.float32)).any(), "nothing was rounded"
    assert weight.dtype == (jnp.bfloat16 if router.cast else jnp.float32)
    np.testing.assert_array_equal(index, want_index)
    np.testing.assert_allclose(weight.astype(jnp.float32), want_weight.astype(jnp.float32), rtol=2**-8)


def test_both_functions_have_the_same_signature_and_defaults_that_mean_off() -> None:
    """Defaults of route() are those of the fields, so that what is not emitted is off."""
    arguments = inspect.signature(xla.route).parameters
    assert str(inspect.signature(ref.route)) == str(inspect.signature(xla.route))
    assert tuple(arguments)[2:] == ORDER
    assert {name: arguments[name].default for name in SAME} == {
        name: Router.model_fields[name].default for name in SAME
    }
    plain = Router(num_experts=NUM_EXPERTS, top_k=2)
    assert route_arguments(plain, DIMS, "moe", "TOP_K") == ("h_TD", 'w["moe"]["router"]', "top_k=TOP_K")


def test_the_three_files_name_the_same_scores_in_the_same_order() -> None:
    assert tuple(ref.SCORES) == tuple(xla._SCORES) == get_args(Score)


@pytest.mark.parametrize("score", get_args(Score))
def test_equal_scores_take_the_lower_expert(score: Score) -> None:
    h, w = draw(router_of("softmax"), 6)
    # Expert e and e + 24 always tie.
    matrix = jnp.concatenate([w["router"][:, :24], w["router"][:, :24]], axis=1)
    index, _ = xla.route(h, matrix, top_k=6, score=score, renormalize=False)
    pairs = np.asarray(index).reshape(-1, 3, 2)
    np.testing.assert_array_equal(pairs[..., 0] + 24, pairs[..., 1])


def test_softmax_runs_over_all_experts() -> None:
    """Without renormalisation the chosen weights are shares of all experts' mass."""
    h, w = draw(router_of("softmax"), 7)
    index, weight = xla.route(h, w["router"], top_k=4, renormalize=False)
    scores = jax.nn.softmax(jnp.dot(h, w["router"], precision="highest"), axis=-1)
    np.testing.assert_allclose(weight, jnp.take_along_axis(scores, index, axis=1), atol=1e-5, rtol=0)
    assert float(weight.sum(axis=1).max()) < 0.999


def test_sigmoid_scores_that_all_underflow_give_zeros() -> None:
    h, w = jnp.full((2, 4), 100.0), jnp.full((4, 8), -100.0)
    _, weight = xla.route(h, w, top_k=2, score="sigmoid", renormalize=True)
    assert not np.asarray(weight).any()


@pytest.mark.parametrize("correct", ["score", "logit"])
def test_the_correction_moves_the_choice_and_never_the_weights(correct: str) -> None:
    h, w = draw(router_of("softmax"), 8)
    correction = jnp.zeros(NUM_EXPERTS).at[jnp.array([7, 30])].set(100.0)
    options = {"top_k": 2, "score": "sigmoid", "renormalize": False}
    index, weight = xla.route(h, w["router"], **options, correction_E=correction, correct=correct)
    assert set(np.asarray(index).ravel().tolist()) == {7, 30}
    scores = jax.nn.sigmoid(jnp.dot(h, w["router"], precision="highest"))
    np.testing.assert_allclose(weight, jnp.take_along_axis(scores, index, axis=1), atol=1e-5, rtol=0)


@pytest.mark.parametrize(("metric", "kept"), [("max", 0), ("top2_sum", 2)])
def test_groups_are_kept_by_the_metric(metric: str, kept: int) -> None:
    """Group 0 holds the best expert, group 2 the best pair; all selected experts are of the kept group."""
    logits = np.full(12, -5.0)
    logits[[0, 8, 9]] = [3.0, 2.5, 2.0]
    h, w = jnp.ones((1, 1)), jnp.asarray(logits[None], jnp.float32)
    options = {"num_groups": 3, "keep_groups": 1, "group_metric": metric}
    index, _ = xla.route(h, w, top_k=3, score="sigmoid", **options)
    assert set((np.asarray(index)[0] // 4).tolist()) == {kept}
    np.testing.assert_array_equal(index, ref.route(h, w, top_k=3, score="sigmoid", **options)[0])


def test_masked_with_zero_a_group_still_beats_negative_values() -> None:
    """Zero is a value like others: with a correction below zero a masked expert can be selected."""
    h, w = jnp.ones((1, 1)), jnp.asarray([[1.0, 0.5, -1.0, -2.0]], jnp.float32)
    options = {"num_groups": 2, "keep_groups": 1, "group_masked": "zero", "correction_E": jnp.full(4, -2.0)}
    index, _ = xla.route(h, w, top_k=2, score="sigmoid", **options)
    np.testing.assert_array_equal(index, [[2, 3]])
    np.testing.assert_array_equal(index, ref.route(h, w, top_k=2, score="sigmoid", **options)[0])


def test_float32_logits_are_a_float32_product() -> None:
    """A router in bfloat16 cannot tell these experts apart; float32 logits of the same operands can."""
    h = jnp.ones((1, 8), jnp.bfloat16)
    w = jnp.ones((8, 2), jnp.bfloat16).at[0, 1].set(1 + 2**-7)
    assert int(xla.route(h, w, top_k=1)[0][0, 0]) == 0
    assert int(xla.route(h, w, top_k=1, logits_dtype="float32")[0][0, 0]) == 1


def test_the_router_may_read_the_residual_stream() -> None:
    router = Router(num_experts=NUM_EXPERTS, top_k=3, input="residual", in_norm={})
    h, w = draw(router, 9)
    x = 5 * jnp.flip(h, axis=0)
    index, weight = run(router, h * jnp.nan, w, x)
    want = partial(ref.route, w_router=w["router"], top_k=3)(
        rms_norm(x, w["router_norm"], eps=1e-6, zero_centered=False)
    )
    np.testing.assert_array_equal(index, want[0])
    np.testing.assert_allclose(weight, want[1], atol=1e-5, rtol=0)


@pytest.mark.parametrize(
    ("fields", "path"),
    [
        ({"top_k": 49}, ("top_k",)),
        ({"groups": {"num": 7, "keep": 2}}, ("groups", "num")),
        ({"groups": {"num": 8, "keep": 9}}, ("groups", "keep")),
        ({"groups": {"num": 8, "keep": 8}}, ("groups", "keep")),
        ({"groups": {"num": 1, "keep": 1}}, ("groups", "num")),
        ({"groups": {"num": 48, "keep": 9}}, ("groups", "metric")),
        ({"top_k": 9, "groups": {"num": 8, "keep": 1}}, ("groups", "keep")),
        ({"in_norm": {"kind": "layer"}}, ("in_norm",)),
        ({"weights": "sparsemixer"}, ("renormalize",)),
        ({"jitter": 0.02}, ("jitter",)),
        ({"renormalize": False, "renorm_power": 2.0}, ("renorm_power",)),
        ({"renormalize": False, "renorm_min": 0.5}, ("renorm_min",)),
        ({"renormalize": False, "renorm_eps": 1e-6}, ("renorm_eps",)),
        ({"score": "sigmoid", "correction": "logit", "weights": "sigmoid"}, ("score",)),
    ],
)
def test_impossible_routers_and_options_without_effect_are_problems(
    fields: dict[str, Any], path: tuple[str, ...]
) -> None:
    router = Router(**{"num_experts": NUM_EXPERTS, "top_k": 4} | fields)
    assert [problem.path for problem in check_router(router, DIMS)] == [path]
