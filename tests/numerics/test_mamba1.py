"""Mamba's own options; what it shares with other recurrent mixers is in test_recurrent_mixers.py.

Tolerance: float32, at most 130 steps (see there).
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from moec.blocks.core.batch import Batch, index_rows
from moec.blocks.core.declare import ModelDims, NormFields, NormOverride
from moec.blocks.core.emission import Site
from moec.blocks.core.work import Collective, Degrees, Dtypes, Load
from moec.blocks.mamba1 import block, cost, ref, xla
from moec.blocks.mamba1.emit import emit
from moec.compiler.emit.render import render
from moec.compiler.verify.random_checkpoint import random_weight

TOLERANCE = 1e-4
HIDDEN, TOKENS = 16, 130
FIELDS = block.Fields(kind="mamba1", inner_size=12, state_size=5, dt_rank=2, conv_kernel=4, input_norms=NormOverride())
DIMS = ModelDims(HIDDEN, 8, NormFields())
OPTIONS: dict[str, Any] = {"pool_layer": 0, "conv_kernel": 4, "chunk": 32, "max_q": TOKENS, "norm_eps": 1e-6}


@pytest.fixture
def batch(make_batch) -> Batch:
    """One prompt of 130 tokens."""
    return make_batch(
        [(0, TOKENS)], num_decode=0, num_tokens=TOKENS, num_rows=1, pages_per_seq=1, page_size=256, num_pages=2,
        num_slots=2, seed=0,
    )  # fmt: skip


def draw(seed: int) -> tuple[jax.Array, dict[str, jax.Array], list[jax.Array]]:
    rng = np.random.default_rng([seed, 41])
    w = {name: jnp.asarray(random_weight(one, rng)) for name, one in block.weights(FIELDS, DIMS).items()}
    pools = [jnp.zeros((1, 2, *one.shape)) for one in block.state(FIELDS, DIMS)]
    return jnp.asarray(rng.normal(size=(TOKENS, HIDDEN)), jnp.float32), w, pools


@pytest.mark.parametrize("case", ["total_decay", "growing_decay"])
def test_extreme_decays_stay_accurate(case: str, batch: Batch) -> None:
    """Decays that underflow within a token, and such beside states that keep nearly everything."""
    h, w, pools = draw(1)
    rates = [6.0] * 5 if case == "total_decay" else np.linspace(-8.0, 6.0, 5)
    w["a_log"] = jnp.tile(jnp.asarray(rates, jnp.float32), (12, 1))
    want = ref.mamba1(h, w, *pools, batch, index_rows(batch), **OPTIONS)
    got = jitted_xla(h, w, *pools, batch, index_rows(batch), **OPTIONS)
    for a, b in zip((got[0], got[2][:, 1]), (want[0], want[2][:, 1]), strict=True):
        np.testing.assert_allclose(a, b, atol=TOLERANCE, rtol=0)


LEAN = {"xla_backend_optimization_level": 0}  # half the time to compile the same program
jitted_xla = jax.jit(xla.mamba1, static_argnames=(*OPTIONS, "norm_zero_centered"), compiler_options=LEAN)


@pytest.mark.parametrize("mamba1", [ref.mamba1, jitted_xla])
def test_norms_are_a_choice(mamba1: Callable[..., Any], batch: Batch) -> None:
    """Without them the gains do not matter; with them the scale of x_dt, x_b and x_c does not."""
    h, w, pools = draw(2)

    def run(w: dict[str, jax.Array], eps: float | None, zero_centered: bool = False) -> np.ndarray:
        options = OPTIONS | {"norm_eps": eps, "norm_zero_centered": zero_centered}
        return np.asarray(mamba1(h, w, *pools, batch, index_rows(batch), **options)[0])

    scaled = w | {name: 3 * w[name] for name in ("x_dt", "x_b", "x_c")}
    gained = w | {name: 3 * w[name] for name in ("dt_norm", "b_norm", "c_norm")}
    np.testing.assert_array_equal(run(gained, None), run(w, None))
    np.testing.assert_allclose(run(scaled, 1e-9), run(w, 1e-9), atol=TOLERANCE, rtol=0)
    offset = w | {name: w[name] - 1 for name in ("dt_norm", "b_norm", "c_norm")}
    np.testing.assert_allclose(run(offset, 1e-9, True), run(w, 1e-9), atol=TOLERANCE, rtol=0)
    assert np.abs(run(gained, 1e-9) - run(w, 1e-9)).max() > 0.1


def site(tp: int, zero_centered: bool = False) -> Site:
    return Site(
        name="ssm", variant=replace(block.VARIANTS[0], module="m"),
        collectives="c", dims=ModelDims(HIDDEN, 8, NormFields(zero_centered=zero_centered)),
        dp=1, tp=tp, ep=1, etp=1, shared_sharded=False, mlp_sharded=False, scaled=False, tuning={"chunk": 32},
    )  # fmt: skip


def test_emitted_call_shows_only_options_in_use() -> None:
    plain = render("mamba1/call.j2", **emit(FIELDS.model_copy(update={"input_norms": None}), site(1, True)).fields)
    for word in ("norm", "bias", "sum_axes", "all_reduce", "b_o"):
        assert word not in plain
    fields = FIELDS.model_copy(update={"conv_bias": True, "proj_bias": True})
    text = render("mamba1/call.j2", **emit(fields, site(4, True)).fields)
    for word in (
        "norm_eps=1e-06", "norm_zero_centered=True", "conv_bias=True", "proj_bias=True", "sum_axes=TENSOR",
    ):  # fmt: skip
        assert f"    {word},\n" in text
    assert text.index("all_reduce(y_TD, TENSOR)") < text.index('+ w["ssm"]["b_o"]')


@pytest.mark.parametrize("tp", [1, 4])
def test_cut_channels_cost_a_second_message(tp: int) -> None:
    dtypes = Dtypes("bfloat16", "bfloat16", "bfloat16", "bfloat16", "float32", "bfloat16")
    load = Load(96, 64, 60.0, 100.0, 200.0, 32.0, 100.0, 256, Degrees(tp=tp), dtypes, 8, 256)
    messages = [term for term in cost.work(FIELDS, DIMS, load) if isinstance(term, Collective)]
    assert [m.shape for m in messages] == ([(96, 12), (96, HIDDEN)] if tp > 1 else [])


def test_norms_must_be_rms_where_there_are_any() -> None:
    layer = ModelDims(HIDDEN, 8, NormFields(kind="layer"))
    assert [one.path for one in block.check(FIELDS, layer)] == [("input_norms",)]
    assert not block.check(FIELDS.model_copy(update={"input_norms": None}), layer)
