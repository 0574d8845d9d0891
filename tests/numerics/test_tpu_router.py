"""The fused router and the counting sort, in TPU interpret mode, against the plain-JAX variants.

Indices and places are compared exactly. Weights are at most 3 and differ by a few float32 roundings, 1e-6 of their
scale; in bfloat16 by one rounding, 2^-8. Logits are small integers over powers of two where both must round the same.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import Array, lax
from jax.experimental.pallas import tpu as pltpu

from moec.blocks.core.chip import ChipLimits
from moec.blocks.core.declare import ModelDims, NormFields
from moec.blocks.core.work import Degrees, Dtypes, Load
from moec.blocks.moe.tpu_dispatch import Dispatch, dispatch
from moec.blocks.moe.tpu_dispatch_cost import dispatch_refuse
from moec.blocks.moe.xla import _moe_sort
from moec.blocks.router import tpu_cost, xla
from moec.blocks.router.router_fields import Router
from moec.blocks.router.tpu_fused import route_fused, route_packed_fused

CHIP = ChipLimits(vmem_bytes=64 << 20, lanes=128, sublanes=8, mxu_dtypes=("bfloat16",))
TILES: dict[str, Any] = {"chip": CHIP, "route_tokens": 64, "route_hidden": 128}
HIDDEN = 256


def interpreted(function: Callable[..., Any], *args: Any, **options: Any) -> Any:
    with pltpu.force_tpu_interpret_mode(pltpu.InterpretParams()):
        return jax.jit(lambda *a: function(*a, **options))(*args)


def draw(tokens: int, experts: int, dtype: Any, matrix_dtype: Any = None, seed: int = 0) -> tuple[Array, Array]:
    """Hidden and matrix whose products are exact in float32 in any order: small integers over a power of two."""
    rng = np.random.default_rng(seed)
    h, w = (rng.integers(-8, 9, shape) / 16 for shape in ((tokens, HIDDEN), (HIDDEN, experts)))
    return jnp.asarray(h, dtype), jnp.asarray(w, matrix_dtype or dtype)


def vector(experts: int, seed: int) -> Array:
    return jnp.asarray(0.3 * np.random.default_rng(seed).standard_normal(experts), jnp.float32)


def check_route(h: Array, w: Array, **options: Any) -> None:
    index, weight = interpreted(route_fused, h, w, **options, **TILES)
    with jax.default_matmul_precision("highest"):
        want_index, want_weight = xla.route(h, w, **options)
    assert (index.dtype, weight.dtype) == (want_index.dtype, want_weight.dtype)
    np.testing.assert_array_equal(index, want_index)
    weight, want_weight = (np.asarray(x, np.float32) for x in (weight, want_weight))
    rounded = h.dtype == jnp.bfloat16 and options.get("cast", True)
    np.testing.assert_allclose(
        weight, want_weight, rtol=2**-8 if rounded else 1e-6, atol=1e-6 * np.abs(want_weight).max()
    )


def test_odd_tokens_and_experts_in_bfloat16() -> None:
    """Two blocks, the second one partly filled; a partly filled vector of experts; logits rounded, so with ties."""
    check_route(*draw(70, 160, jnp.bfloat16), top_k=4)


@pytest.mark.slow
def test_deepseek_groups_in_float32() -> None:
    """A float32 matrix times bfloat16 tokens: three exact products, where rounding either would change the order."""
    rng = np.random.default_rng(1)
    h, _ = draw(16, 64, jnp.bfloat16)
    w = jnp.asarray(rng.integers(-(2**20), 2**20, (HIDDEN, 64)) / 2**22, jnp.float32)
    options = {"score": "sigmoid", "num_groups": 8, "keep_groups": 4, "scale": 2.5, "cast": False}
    check_route(h, w, top_k=4, logits_dtype="float32", correction_E=vector(64, 2), **options)


def test_packed_masks_and_carries_the_bits() -> None:
    h, w = draw(9, 48, jnp.bfloat16, seed=3)
    valid = jnp.arange(9) % 4 != 1
    packed = interpreted(
        lambda h, w, v: route_packed_fused(h, w, valid_T=v, top_k=4, score="sigmoid", **TILES), h, w, valid
    )
    index, weight = xla.route(h, w, top_k=4, score="sigmoid")
    assert packed.shape == (9, 8) and packed.dtype == jnp.int32
    np.testing.assert_array_equal(packed[:, :4], jnp.where(valid[:, None], index, -1))
    got = np.asarray(lax.bitcast_convert_type(packed[:, 4:], jnp.float32))
    np.testing.assert_array_equal(got, got.astype(jnp.bfloat16).astype(np.float32))
    np.testing.assert_allclose(got, np.asarray(weight, np.float32), rtol=2**-8)


OPTIONS: dict[str, dict[str, Any]] = {
    "softmax_512": {},
    "sigmoid_of_selected": {"score": "none", "weights": "sigmoid", "renormalize": False},
    "softmax_of_selected": {"score": "none", "weights": "softmax", "renormalize": False, "bias_E": 3},
    "groups_by_max": {"num_groups": 6, "keep_groups": 2, "group_metric": "max", "group_masked": "zero"},
    "corrected_logits": {"score": "sigmoid", "correction_E": 4, "correct": "logit", "renorm_eps": 0.0},
    "sqrt_softplus": {"score": "sqrt_softplus", "correction_E": 5, "scale": 1.5},
    "euclidean_minimum": {"correction_E": 6, "renorm_power": 2.0, "renorm_min": 0.75, "renorm_eps": 1e-6},
    "own_norm": {"norm_D": 7, "logits_scale": 0.125, "expert_scale_E": 8},
    "softcapped": {"logits_softcap": 1.5, "bias_E": 9, "score": "sigmoid"},
}


@pytest.mark.slow
@pytest.mark.parametrize("name", OPTIONS)
def test_each_option(name: str) -> None:
    experts = 512 if name == "softmax_512" else 48
    sizes = {"norm_D": HIDDEN}
    found = {
        key: vector(sizes.get(key, experts), value) if key.endswith(("_E", "_D")) else value
        for key, value in OPTIONS[name].items()
    }
    check_route(*draw(33, experts, jnp.float32), top_k=10 if experts == 512 else 3, **found)


@pytest.mark.slow
@pytest.mark.parametrize(("tokens", "experts"), [(1, 128), (130, 384)])
def test_sizes(tokens: int, experts: int) -> None:
    check_route(*draw(tokens, experts, jnp.bfloat16), top_k=8)


@pytest.mark.slow
def test_equal_scores_take_the_lower_expert() -> None:
    """Every expert ties with two others, in other lanes and another vector; in a row of zeros all do. Where the
    shares of softmax underflow, all but a few are zero: the first experts follow, whatever their logits."""
    h, w = draw(8, 64, jnp.float32)
    h = h.at[3].set(0.0).at[4:].multiply(100.0)
    check_route(h, jnp.concatenate([w, w, w], axis=1), top_k=7, renormalize=False)


def check_dispatch(index: np.ndarray, first: int, num_local: int) -> Dispatch:
    index_TK = jnp.asarray(index, jnp.int32)
    found = interpreted(
        lambda i, f: dispatch(i, first_expert=f, num_local=num_local, chip=CHIP), index_TK, jnp.int32(first)
    )
    want_token, _, want_start = _moe_sort(index_TK, jnp.ones(index.shape), first, num_local)
    rows = int(want_start[-1])
    np.testing.assert_array_equal(found.start_E, want_start)
    assert found.token_P.shape == found.choice_P.shape == (index.size,)
    np.testing.assert_array_equal(found.token_P[:rows], want_token[:rows])
    assert not np.asarray(found.token_P[rows:]).any()
    local = index.reshape(-1) - first
    is_local = (local >= 0) & (local < num_local)
    place = np.asarray(found.place_TK).reshape(-1)
    assert found.place_TK.shape == index.shape
    assert (place[~is_local] == -1).all()
    # A choice's place holds the choice, so each has a place of its own; its expert owns the place.
    choice, start = np.asarray(found.choice_P), np.asarray(found.start_E)
    np.testing.assert_array_equal(choice[place[is_local]], np.flatnonzero(is_local))
    assert (place[is_local] >= start[local[is_local]]).all() and (place[is_local] < start[local[is_local] + 1]).all()
    return found


def choices(tokens: int, top_k: int, experts: int, seed: int = 0) -> np.ndarray:
    return np.argsort(np.random.default_rng(seed).random((tokens, experts)), axis=1)[:, :top_k]


def test_dispatch_orders_local_experts() -> None:
    """Two blocks of tokens, padding, other ranks' experts, experts without tokens."""
    index = choices(300, 10, 64)
    index[::7] = -1
    index[index == 20] = 0
    check_dispatch(index, 16, 16)


@pytest.mark.slow
def test_dispatch_with_everything_on_one_expert() -> None:
    """More rows than one product fills, and counts that a bfloat16 does not hold."""
    check_dispatch(np.full((520, 1), 5), 3, 4)


@pytest.mark.slow
def test_dispatch_of_padding_only() -> None:
    found = check_dispatch(np.full((5, 2), -1), 0, 1)
    assert not np.asarray(found.start_E).any()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("index", "first", "num_local"),
    [
        pytest.param(choices(600, 10, 512), 64, 64, id="one of eight ranks"),
        pytest.param(choices(130, 3, 200), 0, 200, id="all experts local"),
        pytest.param(np.full((40, 3), 5), 5, 1, id="an expert several times"),
        pytest.param(choices(1, 4, 8), 2, 3, id="one token"),
        pytest.param(choices(1024, 10, 10), 0, 10, id="more places than a product fills"),
    ],
)
def test_dispatch_sizes(index: np.ndarray, first: int, num_local: int) -> None:
    check_dispatch(index, first, num_local)


DIMS = ModelDims(4096, 128, NormFields())


def load(tokens: int, chip: ChipLimits = CHIP) -> Load:
    dtypes = Dtypes("bfloat16", "bfloat16", "float8_e4m3fn", "bfloat16", "float32", "bfloat16")
    return Load(tokens, tokens, tokens, 4096, 8192, 0, 0, 256, Degrees(dp=8, ep=8), dtypes, 8, 256, 128, chip)


def test_cost_serves_the_shapes_and_says_what_it_does_not() -> None:
    router = Router(num_experts=512, top_k=10)
    for tokens in (1, 64, 512, 8192):
        assert tpu_cost.refuse(router, DIMS, load(tokens)) == []
        assert tpu_cost.vmem_bytes(router, DIMS, load(tokens)) <= CHIP.vmem_bytes // 2
    assert tpu_cost.tuning(router, DIMS, {"d64": load(64)}) == {"route_tokens.d64": 64, "route_hidden.d64": 4096}
    assert tpu_cost.tiles(router, DIMS, load(8192)) == (512, 4096)
    odd = Router(num_experts=512, top_k=80, weights="sparsemixer", renormalize=False)
    assert [text.split(":")[0] for text in tpu_cost.refuse(odd, DIMS, load(64))] == ["weights sparsemixer", "top_k 80"]
    cubic = Router(num_experts=512, top_k=10, renorm_power=3.0)
    assert tpu_cost.refuse(cubic, DIMS, load(64)) == ["renorm_power 3.0: the kernel takes 1 or 2"]
    small = ChipLimits(vmem_bytes=1 << 20, lanes=128, sublanes=8, mxu_dtypes=())
    assert "vector memory" in tpu_cost.refuse(router, DIMS, load(64, small))[0]
    assert dispatch_refuse(8192, 10, 64, load(1024)) == []
    assert "vector memory" in dispatch_refuse(65536, 10, 64, load(8192))[0]
    assert "counts below" in dispatch_refuse(2**22, 10, 64, load(2**19))[0]


@pytest.mark.parametrize(
    ("tokens", "hidden", "reason"), [(64, 96, "in pieces of 96"), (128, 128, "blocks of 128"), (48, 128, "of 64")]
)
def test_tiles_are_taken_as_they_are_or_not_at_all(tokens: int, hidden: int, reason: str) -> None:
    h, w = draw(9, 48, jnp.bfloat16)
    with pytest.raises(AssertionError, match=reason):
        route_fused(h, w, top_k=4, chip=CHIP, route_tokens=tokens, route_hidden=hidden)


@pytest.mark.parametrize("hidden", [200, 384, 4096, 7168, 20480])
@pytest.mark.parametrize("tokens", [1, 64, 700, 8192])
def test_tuning_gives_tiles_the_kernel_takes(tokens: int, hidden: int) -> None:
    dims = ModelDims(hidden, 128, NormFields())
    rows, piece = tpu_cost.tiles(Router(num_experts=512, top_k=10), dims, load(tokens))
    assert rows % 64 == 0 and rows < tokens + 64 and hidden % piece == 0 and (piece % 128 == 0 or piece == hidden)


def test_nothing_is_sorted() -> None:
    """From hidden to the experts' rows: no sort, no top-k, no gather or scatter of single words outside the kernels."""

    def run(h: Array, w: Array, valid: Array) -> Dispatch:
        packed = route_packed_fused(h, w, top_k=10, valid_T=valid, **TILES)
        return dispatch(packed[:, :10], first_expert=64, num_local=64, chip=CHIP)

    h, w = draw(64, 512, jnp.bfloat16)
    traced = jax.make_jaxpr(run)(h, w, jnp.ones(64, bool))
    found = {equation.primitive.name for equation in traced.jaxpr.eqns}
    assert "pallas_call" in found
    assert not found & {"sort", "top_k", "gather", "scatter"}
