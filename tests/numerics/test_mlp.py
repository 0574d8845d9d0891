"""The dense MLP in XLA against its float32 reference, whole and cut, and its clamped forms against their formulas.

Tolerances: as in test_moe.py.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from moec.blocks.core.declare import ModelDims, NormFields
from moec.blocks.mlp import ref, xla
from moec.blocks.mlp.block import Fields, check, weights
from moec.blocks.mlp.clamp import Clamp
from moec.blocks.mlp.clamp_fields import ClampFields, clamp_of, clamp_text
from moec.blocks.mlp.shapes import TEST_SHAPES, MlpShape

F32_TOLERANCE = 1e-4
BF16_SHARE = 0.03

MATRICES, BIASES = ("w_gate", "w_up", "w_down"), ("b_gate", "b_up", "b_down")
CLAMP = Clamp(limit=0.7, alpha=1.702, up_offset=1.0)
OPTIONS: dict[str, tuple[dict[str, Any], tuple[str, ...]]] = {
    "gated": ({}, MATRICES),
    "gated_gelu": ({"activation": "gelu_tanh"}, MATRICES),
    "plain": ({"activation": "relu2"}, ("w_up", "w_down")),
    "plain_bias": ({"activation": "gelu"}, ("w_up", "w_down", "b_up", "b_down")),
    "bias": ({}, (*MATRICES, *BIASES)),
    "clamp": ({"clamp": CLAMP}, (*MATRICES, *BIASES)),
    "clamp_after": ({"clamp": Clamp(limit=0.4, place="after")}, MATRICES),
}
INNER_LAST = ("w_gate", "w_up", "b_gate", "b_up")  # arrays whose last dim is the inner one


def draw(shape: MlpShape, keys: tuple[str, ...], seed: int) -> dict[str, jax.Array]:
    """Weights that keep values of order 1."""
    rng = np.random.default_rng(seed)
    inner, outer = shape.intermediate, shape.hidden
    sizes = {"w_gate": (outer, inner), "w_up": (outer, inner), "w_down": (inner, outer)}
    sizes |= {"b_gate": (inner,), "b_up": (inner,), "b_down": (outer,)}
    scale = {key: 2 / np.sqrt(size[0]) if len(size) == 2 else 0.5 for key, size in sizes.items()}
    return {key: jnp.asarray(rng.standard_normal(sizes[key]) * scale[key], jnp.float32) for key in keys}


def draw_tokens(shape: MlpShape, seed: int) -> jax.Array:
    return jnp.asarray(np.random.default_rng(seed).standard_normal((shape.tokens, shape.hidden)), jnp.float32)


def run(module, x: jax.Array, w: dict[str, jax.Array], options: dict[str, Any]) -> jax.Array:
    """dense_mlp of either module."""
    biases = {key: w[key] for key in BIASES if key in w}
    with jax.default_matmul_precision("highest"):
        return module.dense_mlp(x, w.get("w_gate"), w["w_up"], w["w_down"], **biases, **options)


@pytest.mark.parametrize("name", TEST_SHAPES)
@pytest.mark.parametrize("option", OPTIONS)
def test_mlp_matches_the_reference(option: str, name: str) -> None:
    shape, (options, keys) = TEST_SHAPES[name], OPTIONS[option]
    x, w = draw_tokens(shape, 1), draw(shape, keys, 2)
    found, want = run(xla, x, w, options), run(ref, x, w, options)
    assert found.dtype == want.dtype == jnp.float32
    np.testing.assert_allclose(found, want, atol=F32_TOLERANCE, rtol=0)
    assert float(jnp.abs(want).max()) > 0.1


@pytest.mark.parametrize("degree", [2, 8])
@pytest.mark.parametrize("option", OPTIONS)
def test_shares_of_the_inner_dims_sum_to_the_whole(option: str, degree: int) -> None:
    """The bias of the outer dims is added by one share only."""
    shape, (options, keys) = TEST_SHAPES["odd"], OPTIONS[option]
    x, w = draw_tokens(shape, 3), draw(shape, keys, 4)
    size, total = shape.intermediate // degree, jnp.zeros_like(x)
    for part in range(degree):
        cut = slice(part * size, (part + 1) * size)
        own = {key: array[..., cut] if key in INNER_LAST else array for key, array in w.items()}
        own["w_down"] = w["w_down"][cut]
        total = total + run(xla, x, own, options | {"add_b_down": jnp.asarray(part == 0)})
    np.testing.assert_allclose(total, run(ref, x, w, options), atol=F32_TOLERANCE, rtol=0)


@pytest.mark.parametrize("option", OPTIONS)
def test_bfloat16_stays_within_its_precision(option: str) -> None:
    shape, (options, keys) = TEST_SHAPES["wide"], OPTIONS[option]
    x = draw_tokens(shape, 5).astype(jnp.bfloat16)
    w = {key: array.astype(jnp.bfloat16) for key, array in draw(shape, keys, 6).items()}
    found, want = run(xla, x, w, options), run(ref, x, w, options)
    assert found.dtype == jnp.float32
    assert float(jnp.abs(found - want).max()) <= BF16_SHARE * float(jnp.abs(want).max())


# The inner values of the clamped forms that published models use, written out.
GATE, UP = np.meshgrid(np.linspace(-12, 12, 49, dtype=np.float32), np.linspace(-12, 12, 49, dtype=np.float32))


def sigmoid(x: np.ndarray) -> np.ndarray:
    return 1 / (1 + np.exp(-x))


FORMS = {
    "before": (
        Clamp(limit=10.0),
        (g := np.minimum(GATE, 10)) * sigmoid(g) * np.clip(UP, -10, 10),
    ),
    "after": (
        Clamp(limit=7.0, place="after"),
        np.minimum(GATE * sigmoid(GATE), 7) * np.clip(UP, -7, 7),
    ),
    "sharp_with_offset": (
        Clamp(limit=7.0, alpha=1.702, up_offset=1.0),
        (np.clip(UP, -7, 7) + 1) * (g := np.minimum(GATE, 7)) * sigmoid(1.702 * g),
    ),
}


@pytest.mark.parametrize("form", FORMS)
def test_clamped_forms(form: str) -> None:
    clamp, want = FORMS[form]
    np.testing.assert_allclose(xla._mlp_gated(jnp.asarray(GATE), jnp.asarray(UP), "silu", clamp), want, rtol=2e-6)
    np.testing.assert_allclose(ref.gated(GATE, UP, "silu", clamp), want, rtol=2e-6)


@pytest.mark.parametrize("clamp", [clamp for clamp, _ in FORMS.values()], ids=str)
def test_an_emitted_clamp_is_the_declared_one(clamp: Clamp) -> None:
    fields = ClampFields(**vars(clamp))
    assert eval(clamp_text(fields), {"Clamp": Clamp}) == clamp_of(fields) == clamp
    assert clamp_text(ClampFields(limit=7.0)) == "Clamp(limit=7.0)"


def test_only_a_gated_network_is_clamped() -> None:
    dims = ModelDims(32, 64, NormFields())
    fields = Fields(kind="mlp", intermediate_size=8, gated=False, clamp=ClampFields(limit=7.0))
    assert [problem.path for problem in check(fields, dims)] == [("clamp",)]
    assert "w_gate" not in weights(fields, dims)
