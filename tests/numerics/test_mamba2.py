"""Mamba-2's own options; what it shares with other recurrent mixers is in test_recurrent_mixers.py.

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
from moec.blocks.mamba2 import block, cost, ref, xla
from moec.blocks.mamba2.emit import emit
from moec.compiler.emit.render import render
from moec.compiler.verify.random_checkpoint import random_weight

TOLERANCE = 1e-4
HIDDEN, TOKENS = 16, 130
FIELDS = block.Fields(kind="mamba2", num_heads=4, num_groups=2, head_dim=8, state_size=12, conv_kernel=4)
DIMS = ModelDims(HIDDEN, 8, NormFields())
OPTIONS: dict[str, Any] = {
    "pool_layer": 0, "num_heads": 4, "num_groups": 2, "head_dim": 8, "state_size": 12, "conv_kernel": 4,
    "norm_eps": 1e-6, "chunk": 64, "max_q": TOKENS,
}  # fmt: skip
Arrays = dict[str, jax.Array]


@pytest.fixture
def batch(make_batch) -> Batch:
    """One prompt of 130 tokens."""
    return make_batch(
        [(0, TOKENS)], num_decode=0, num_tokens=TOKENS, num_rows=1, pages_per_seq=1, page_size=256, num_pages=2,
        num_slots=2, seed=0,
    )  # fmt: skip


def draw(seed: int) -> tuple[jax.Array, Arrays, list[jax.Array]]:
    rng = np.random.default_rng([seed, 31])
    w = {name: jnp.asarray(random_weight(one, rng)) for name, one in block.weights(FIELDS, DIMS).items()}
    pools = [jnp.zeros((1, 2, *one.shape)) for one in block.state(FIELDS, DIMS)]
    return jnp.asarray(rng.normal(size=(TOKENS, HIDDEN)), jnp.float32), w, pools


LEAN = {"xla_backend_optimization_level": 0}  # half the time to compile the same program
STATIC = (*OPTIONS, "norm_zero_centered", "time_step_min", "time_step_max")
jitted_xla = jax.jit(xla.mamba2, static_argnames=STATIC, compiler_options=LEAN)


@pytest.mark.parametrize("chunk", [64, 128])
@pytest.mark.parametrize("case", ["total_decay", "growing_decay", "long_memory"])
def test_extreme_decays_stay_accurate(case: str, chunk: int, batch: Batch) -> None:
    """Decays that underflow (e^-8000 over a chunk, whose inverse is infinite), and a memory that is wiped once
    (e^-170000) and then kept: there a difference of running sums would be off by 1 %."""
    h, w, pools = draw(1)
    if case == "total_decay":
        w["a_log"] = jnp.full_like(w["a_log"], 5.0)
    elif case == "growing_decay":
        w["a_log"] = jnp.linspace(-8.0, 5.0, 4)
    else:
        h = h.at[:, 0].set(0).at[3, 0].set(60)
        w |= {name: w[name].at[0].set(0) for name in ("w_z", "w_x", "w_b", "w_c")}
        w |= {"w_dt": jnp.zeros_like(w["w_dt"]).at[0].set(1), "dt_bias": jnp.full(4, -12.0), "a_log": jnp.full(4, 8.0)}
    options = OPTIONS | {"chunk": chunk}
    want = ref.mamba2(h, w, *pools, batch, index_rows(batch), **options)
    got = jitted_xla(h, w, *pools, batch, index_rows(batch), **options)
    np.testing.assert_allclose(got[0], want[0], atol=TOLERANCE, rtol=0)
    np.testing.assert_allclose(got[3][:, 1], want[3][:, 1], atol=1e-6, rtol=1e-4)
    assert case != "long_memory" or np.abs(want[3]).max() > 1  # there is something left to be wrong about


@pytest.mark.parametrize("mamba2", [ref.mamba2, jitted_xla])
def test_limits_of_the_time_step(mamba2: Callable[..., Any], batch: Batch) -> None:
    """Both limits at one value fix every step, whatever the projection says; limits nothing reaches change nothing."""
    h, w, pools = draw(2)

    def run(w: Arrays, **limits: float) -> np.ndarray:
        return np.asarray(mamba2(h, w, *pools, batch, index_rows(batch), **OPTIONS, **limits)[0])

    fixed = w | {"w_dt": jnp.zeros_like(w["w_dt"]), "dt_bias": jnp.log(jnp.expm1(jnp.full(4, 0.3)))}
    np.testing.assert_allclose(
        run(w, time_step_min=0.3, time_step_max=0.30001), run(fixed), atol=TOLERANCE, rtol=0
    )  # fmt: skip
    assert np.abs(run(w) - run(fixed)).max() > 0.1
    np.testing.assert_array_equal(run(w, time_step_min=1e-6, time_step_max=1e6), run(w))


@pytest.mark.parametrize("mamba2", [ref.mamba2, jitted_xla])
def test_zero_centred_output_gain_is_an_offset_from_one(mamba2: Callable[..., Any], batch: Batch) -> None:
    h, w, pools = draw(3)
    plain = mamba2(h, w, *pools, batch, index_rows(batch), **OPTIONS)[0]
    w["out_norm"] -= 1
    centred = mamba2(h, w, *pools, batch, index_rows(batch), **OPTIONS, norm_zero_centered=True)[0]
    np.testing.assert_allclose(centred, plain, atol=TOLERANCE, rtol=0)


def site(tp: int, norm: NormFields | None = None) -> Site:
    return Site(
        name="ssm", variant=replace(block.VARIANTS[0], module="m"),
        collectives="c", dims=ModelDims(HIDDEN, 8, norm or NormFields()), dp=1, tp=tp, ep=1,
        etp=1, shared_sharded=False, mlp_sharded=False, scaled=False, tuning={"chunk": 64},
    )  # fmt: skip


def test_emitted_call_shows_only_options_in_use() -> None:
    plain = render("mamba2/call.j2", **emit(FIELDS, site(1)).fields)
    for word in ("zero_centered", "time_step", "bias", "sum_axes", "norm_groups", "all_reduce", "b_o"):
        assert word not in plain
    fields = FIELDS.model_copy(
        update={
            "conv_bias": True, "proj_bias": True, "time_step": block.TimeStep(min=0.001, max=2.0),
            "out_norm": NormOverride(zero_centered=True, eps=1e-5),
        }
    )  # fmt: skip
    text = render("mamba2/call.j2", **emit(fields, site(4)).fields)
    for word in (
        "norm_eps=1e-05", "norm_zero_centered=True", "time_step_min=0.001", "time_step_max=2.0", "conv_bias=True",
        "proj_bias=True", "sum_axes=TENSOR", "norm_groups=2",
    ):  # fmt: skip
        assert f"    {word},\n" in text
    assert text.index("all_reduce(y_TD, TENSOR)") < text.index('+ w["ssm"]["b_o"]')


@pytest.mark.parametrize(("tp", "groups", "shared"), [(1, "2", False), (2, "1", False), (4, "1", True)])
def test_only_shared_groups_cost_a_message(tp: int, groups: str, shared: bool) -> None:
    emitted = emit(FIELDS, site(tp))
    constants = {constant.name: constant.text for constant in emitted.constants}
    assert (constants["SSM_HEADS"], constants["SSM_GROUPS"]) == (str(4 // tp), groups)
    dtypes = Dtypes("bfloat16", "bfloat16", "bfloat16", "bfloat16", "float32", "bfloat16")
    load = Load(96, 64, 60.0, 100.0, 200.0, 32.0, 100.0, 256, Degrees(tp=tp), dtypes, 8, 256)
    messages = [term for term in cost.work(FIELDS, DIMS, load) if isinstance(term, Collective)]
    assert [m.shape for m in messages] == [(96, 2)] * shared + [(96, HIDDEN)] * (tp > 1)
    assert shared == ("sum_axes=TENSOR" in emitted.fields["options"])


def test_problems_name_their_field() -> None:
    wrong = FIELDS.model_copy(update={"num_groups": 3, "time_step": block.TimeStep(min=0.5, max=0.1)})
    layer = ModelDims(HIDDEN, 8, NormFields(kind="layer"))
    assert [one.path for one in block.check(wrong, layer)] == [("num_groups",), ("time_step", "max"), ("out_norm",)]
    assert not block.check(FIELDS, DIMS)
