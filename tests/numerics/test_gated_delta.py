"""Gated DeltaNet's own options; what it shares with other recurrent mixers is in test_recurrent_mixers.py.

Tolerance: float32, at most 200 steps (see there).
"""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from moec.blocks.core.batch import Batch, index_rows
from moec.blocks.core.declare import ModelDims, NormFields, NormOverride
from moec.blocks.core.emission import Site
from moec.blocks.gated_delta import block, ref, reference, xla
from moec.blocks.gated_delta.emit import emit
from moec.blocks.gated_delta.shapes import TEST_SHAPES, GatedDeltaShape
from moec.compiler.emit.render import render
from moec.compiler.verify.random_checkpoint import random_weight

TOLERANCE = 1e-4
SLOTS, TOKENS, ROWS = 8, 208, 8
LEAN = {"xla_backend_optimization_level": 0}  # half the time to compile the same program
Arrays = dict[str, np.ndarray]


def geometry(shape: GatedDeltaShape) -> dict[str, Any]:
    return {
        "num_qk_heads": shape.num_qk_heads, "num_v_heads": shape.num_v_heads, "head_k_dim": shape.head_k_dim,
        "head_v_dim": shape.head_v_dim, "conv_kernel": shape.conv_kernel, "norm_eps": 1e-6,
        "norm_zero_centered": False, "channel_decay": shape.decay.per == "channel",
        "decay_lower_bound": shape.decay.lower_bound, "gate_activation": shape.gate.activation,
        "negative_eigenvalues": shape.negative_eigenvalues,
    }  # fmt: skip


def fields_of(shape: GatedDeltaShape) -> block.Fields:
    return block.Fields(
        kind="gated_delta", num_v_heads=shape.num_v_heads, num_qk_heads=shape.num_qk_heads,
        head_dim=shape.head_k_dim, head_v_dim=shape.head_v_dim, conv_kernel=shape.conv_kernel,
        decay=shape.decay, gate=shape.gate, negative_eigenvalues=shape.negative_eigenvalues,
    )  # fmt: skip


def draw(shape: GatedDeltaShape, tokens: int, seed: int) -> tuple[np.ndarray, Arrays, tuple[np.ndarray, ...]]:
    """Inputs, weights and pools full of some request's values."""
    rng, fields, dims = np.random.default_rng([seed, 23]), fields_of(shape), ModelDims(shape.hidden, 8, NormFields())
    weights = {name: random_weight(weight, rng) for name, weight in block.weights(fields, dims).items()}
    pools = tuple(normal(rng, 1, SLOTS, *state.shape) for state in block.state(fields, dims))
    return normal(rng, tokens, shape.hidden), weights, pools


def normal(rng: np.random.Generator, *size: int) -> np.ndarray:
    return rng.normal(size=size).astype(np.float32)


@pytest.fixture
def batch_of(make_batch) -> Callable[..., Batch]:
    return partial(make_batch, num_decode=0, pages_per_seq=1, page_size=256, num_pages=16, num_slots=SLOTS, seed=0)


@partial(jax.jit, static_argnames=("shape", "chunk", "zero_centered"), compiler_options=LEAN)
def jitted_xla(h, w, pools, batch: Batch, *, shape: GatedDeltaShape, chunk: int = 64, zero_centered: bool = False):
    options = geometry(shape) | {"chunk": chunk, "norm_zero_centered": zero_centered}
    return xla.gated_delta(h, w, *pools, batch, index_rows(batch), max_q=h.shape[0], pool_layer=0, **options)


def meaning(h, w, pools, batch: Batch, *, shape: GatedDeltaShape, chunk: int = 64, zero_centered: bool = False):
    options = geometry(shape) | {"chunk": chunk, "norm_zero_centered": zero_centered}
    return ref.gated_delta(h, w, *pools, batch, index_rows(batch), max_q=h.shape[0], pool_layer=0, **options)


def assert_matches_reference(h, w, pools, batch: Batch, used: int, **options: Any) -> None:
    """Outputs and all pools without the sink slot."""
    got, want = (tuple(map(np.asarray, run(h, w, pools, batch, **options))) for run in (jitted_xla, meaning))
    np.testing.assert_allclose(got[0][:used], want[0][:used], atol=TOLERANCE, rtol=0)
    for a, b in zip(got[1:], want[1:], strict=True):
        np.testing.assert_allclose(a[:, 1:], b[:, 1:], atol=TOLERANCE, rtol=0)


@pytest.mark.parametrize("gated_delta", [meaning, jitted_xla])
def test_zero_centred_output_gain_is_an_offset_from_one(gated_delta, batch_of) -> None:
    shape, batch = TEST_SHAPES["shared_keys"], batch_of([(0, 9)], num_tokens=16, num_rows=2)
    h, w, pools = draw(shape, 16, 24)
    plain = np.asarray(gated_delta(h, w, pools, batch, shape=shape)[0])
    w["out_norm"] -= 1
    centred = np.asarray(gated_delta(h, w, pools, batch, shape=shape, zero_centered=True)[0])
    np.testing.assert_allclose(centred[:9], plain[:9], atol=TOLERANCE, rtol=0)


def site_of(dims: ModelDims, tp: int = 1) -> Site:
    return Site(
        name="gdn", variant=replace(block.VARIANTS[0], module="m"),
        collectives="c", dims=dims, dp=1, tp=tp, ep=1, etp=1, shared_sharded=False,
        mlp_sharded=False, scaled=False, tuning={"chunk": 64},
    )  # fmt: skip


@pytest.mark.parametrize("zero_centered", [False, True])
def test_output_norm_follows_the_default_unless_overridden(zero_centered: bool, batch_of) -> None:
    """In the emitted call and in the float32 interpreter."""
    shape = TEST_SHAPES["shared_keys"]
    inherits = fields_of(shape)
    overrides = inherits.model_copy(update={"out_norm": NormOverride(zero_centered=zero_centered)})
    same, other = (ModelDims(shape.hidden, 8, NormFields(zero_centered=z)) for z in (zero_centered, not zero_centered))
    batch = batch_of([(0, 9)], num_tokens=9, num_rows=1, slots=np.zeros(1, int))
    h, w, pools = draw(shape, 9, 25)
    want = meaning(h, w, pools, batch, shape=shape, zero_centered=zero_centered)[0]
    for fields, dims in ((inherits, same), (overrides, other)):
        call = render("gated_delta/call.j2", **emit(fields, site_of(dims)).fields)
        assert f"    norm_zero_centered={zero_centered},\n" in call
        np.testing.assert_array_equal(reference.apply(fields, dims, h, w, batch, index_rows(batch), h, 0), want)


@pytest.mark.parametrize("chunk", [64, 128])
def test_extreme_gates_stay_accurate(chunk: int, batch_of) -> None:
    """One token repeated with beta near 1 and hardly any decay (powers of the chunk matrix reach 1e18), and
    decays that underflow (e^-8000 over a chunk, whose inverse is infinite), alone and beside slow ones."""
    shape, batch = TEST_SHAPES["shared_keys"], batch_of([(0, 130)], num_tokens=TOKENS, num_rows=ROWS)
    h, w, pools = draw(shape, TOKENS, chunk)
    for rates in (np.full_like(w["a_log"], 4.0), np.linspace(-8.0, 4.0, shape.num_v_heads, dtype=np.float32)):
        assert_matches_reference(h, w | {"a_log": rates}, pools, batch, 130, shape=shape, chunk=chunk)
    same = {"w_b": w["w_b"] + 12 * h[0, :, None] / np.sum(h[0] ** 2), "a_log": w["a_log"] - 20}
    assert_matches_reference(np.tile(h[:1], (TOKENS, 1)), w | same, pools, batch, 130, shape=shape, chunk=chunk)


@pytest.mark.parametrize("name", ["channel_decay_low_rank", "channel_decay_bounded"])
def test_wild_channel_decays_stay_accurate(name: str, batch_of) -> None:
    """Log decays of neighbouring tokens and channels from -20 to nearly 0: e^-sum over a chunk is infinite."""
    shape = TEST_SHAPES[name]
    bound = -40.0 if shape.decay.lower_bound else None
    shape = replace(shape, decay=shape.decay.model_copy(update={"lower_bound": bound}))
    h, w, pools = draw(shape, TOKENS, 26)
    last = "w_a" if shape.decay.rank is None else "f_b"
    w[last], w["a_log"] = 12 * w[last], np.zeros_like(w["a_log"])
    rates = h @ w["w_a"] if shape.decay.rank is None else h @ w["f_a"] @ w["f_b"]
    a_TVk, zeros_V = (rates + w["dt_bias"]).reshape(TOKENS, shape.num_v_heads, -1), np.zeros(shape.num_v_heads)
    log_decay = ref._log_decay(a_TVk, zeros_V, shape.decay.lower_bound)
    assert log_decay.min() < -20 and log_decay.max() > -1e-3
    for lengths in ((1, 2, 3, 15, 16, 17, 33), (63, 64, 65), (127,), (200,)):
        rows = [(7 * (row % 2), length) for row, length in enumerate(lengths)]
        batch = batch_of(rows, num_tokens=TOKENS, num_rows=ROWS)
        assert_matches_reference(h, w, pools, batch, sum(lengths), shape=shape)


decayed_products = jax.jit(xla._gdn_decayed_products, compiler_options=LEAN)


@pytest.mark.parametrize("chunk", [1, 2, 16, 48, 64])
def test_decayed_products_against_float64(chunk: int) -> None:
    """1e-7 is measured; differences of float32 running sums, which reach -440 here, would be off by 8e-6."""
    rng = np.random.default_rng([chunk, 27])
    q, k, wild = rng.normal(size=(3, 2, chunk, 16)) / 4
    g = -np.logaddexp(0, 48 * wild)
    total = np.cumsum(g, axis=1)
    i, j = np.arange(chunk)[:, None], np.arange(chunk)[None]
    decay = np.exp(np.where((i >= j)[..., None], total[:, :, None] - total[:, None], -np.inf))
    got = decayed_products(*(jnp.asarray(x, jnp.float32) for x in (q, k, g)))
    for x, row, product in ((q, i, got[0]), (k, np.where(i == j, -1, i), got[1])):
        want = np.where(row >= j, np.einsum("vik,vjk,vijk->vij", x, k, decay), 0)
        np.testing.assert_allclose(product, want, atol=1e-6, rtol=0)


def test_call_names_only_options_in_use() -> None:
    dims = ModelDims(16, 8, NormFields())
    plain, bounded = (
        render("gated_delta/call.j2", **emit(fields_of(TEST_SHAPES[name]), site_of(dims)).fields)
        for name in ("shared_keys", "channel_decay_bounded")
    )
    options = ["channel_decay=True", "decay_lower_bound=-5.0", 'gate_activation="sigmoid"']
    extra = [line for line in bounded.splitlines() if line not in plain.splitlines()]
    assert extra == [f"    {option}," for option in options]
    assert set(plain.splitlines()) < set(bounded.splitlines())


@pytest.mark.parametrize(
    "changed", [{"norm": {"kind": "layer"}}, {"norm": {"bias": True}}, {"out_norm": {"kind": "layer"}}]
)
def test_a_gated_norm_that_is_no_rms_norm_is_refused(changed: dict[str, Any]) -> None:
    fields = fields_of(TEST_SHAPES["shared_keys"])
    fields = fields.model_copy(update={"out_norm": NormOverride(**changed.get("out_norm", {}))})
    (problem,) = block.check(fields, ModelDims(16, 8, NormFields(**changed.get("norm", {}))))
    assert problem.path == ("out_norm",)
