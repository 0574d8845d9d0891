"""The short convolution's own options; what it shares with other recurrent mixers is in test_recurrent_mixers.py."""

from dataclasses import replace
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from moec.blocks.core.batch import index_rows
from moec.blocks.core.declare import ModelDims, NormFields
from moec.blocks.core.emission import Site
from moec.blocks.core.work import Collective, Degrees, Dtypes, Load
from moec.blocks.short_conv import block, cost, ref, xla
from moec.blocks.short_conv.emit import emit
from moec.compiler.emit.render import render

DIMS = ModelDims(4, 8, NormFields())
FIELDS = block.Fields(kind="short_conv", channels=4, conv_kernel=3)


@pytest.mark.parametrize("short_conv", [ref.short_conv, xla.short_conv])
def test_by_hand(short_conv: Any, make_batch) -> None:
    """Identity projections: y_t = h_t * (taps . squares of the last three), the window holds the last two squares."""
    batch = make_batch(
        [(5, 2)], num_decode=0, num_tokens=2, num_rows=1, pages_per_seq=1, page_size=256, num_pages=2, num_slots=2,
        seed=0,
    )  # fmt: skip
    h, taps = jnp.asarray([[1.0, 2, 3, 4], [5, 6, 7, 8]]), jnp.asarray([[100.0, 10, 1]] * 4)
    w = dict.fromkeys(("w_b", "w_c", "w_x", "w_o"), jnp.eye(4)) | {"conv": taps}
    pool = jnp.arange(16.0).reshape(1, 2, 8)
    out, pool = short_conv(h, w, pool, batch, index_rows(batch), pool_layer=0, conv_kernel=3, max_q=2)
    old = np.arange(8.0, 16).reshape(2, 4)
    first = 100 * old[0] + 10 * old[1] + np.square([1, 2, 3, 4])
    second = 100 * old[1] + 10 * np.square([1, 2, 3, 4]) + np.square([5, 6, 7, 8])
    np.testing.assert_array_equal(out, np.asarray(h) * [first, second])
    np.testing.assert_array_equal(pool[0, 1], np.square(np.arange(1.0, 9)))


def site(tp: int) -> Site:
    return Site(
        name="conv", variant=replace(block.VARIANTS[0], module="m"),
        collectives="c", dims=DIMS, dp=1, tp=tp, ep=1, etp=1, shared_sharded=False,
        mlp_sharded=False, scaled=False, tuning={},
    )  # fmt: skip


def test_emitted_call_shows_only_options_in_use() -> None:
    plain = render("short_conv/call.j2", **emit(FIELDS, site(1)).fields)
    assert "bias" not in plain and "all_reduce" not in plain and "b_o" not in plain
    text = render("short_conv/call.j2", **emit(FIELDS.model_copy(update={"bias": True}), site(2)).fields)
    assert "    bias=True,\n" in text
    assert text.index("all_reduce(y_TD, TENSOR)") < text.index('+ w["conv"]["b_o"]')


@pytest.mark.parametrize("tp", [1, 2])
def test_cut_channels_are_summed_once(tp: int) -> None:
    dtypes = Dtypes("bfloat16", "bfloat16", "bfloat16", "bfloat16", "float32", "bfloat16")
    load = Load(96, 64, 60.0, 100.0, 200.0, 32.0, 100.0, 256, Degrees(tp=tp), dtypes, 8, 256)
    messages = [term for term in cost.work(FIELDS, DIMS, load) if isinstance(term, Collective)]
    assert [m.shape for m in messages] == [(96, 4)] * (tp > 1)
