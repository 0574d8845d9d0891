"""Lightning attention's own options; what it shares with other recurrent mixers is in test_recurrent_mixers.py."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from moec.blocks.core.batch import index_rows
from moec.blocks.core.declare import ModelDims, NormFields, NormOverride
from moec.blocks.core.emission import Site
from moec.blocks.core.work import Collective, Degrees, Dtypes, Load
from moec.blocks.lightning import block, cost, ref, reference, xla
from moec.blocks.lightning.emit import emit, index_text
from moec.blocks.lightning.shapes import TEST_SHAPES, LightningShape
from moec.compiler.emit.render import render
from moec.compiler.verify.random_checkpoint import random_weight


def fields_of(shape: LightningShape, **changed: Any) -> block.Fields:
    declared = {"num_heads": shape.num_heads, "head_dim": shape.head_dim, "decay_layers": shape.num_layers}
    return block.Fields(kind="lightning", **declared | changed)


@pytest.mark.parametrize("activation", ["silu", "relu"])
@pytest.mark.parametrize("zero_centered", [False, True])
def test_interpreter_and_call_follow_the_fields(zero_centered: bool, activation: str, make_batch) -> None:
    """The norm follows the default unless overridden; the decay is that of the absolute layer."""
    shape, rng = TEST_SHAPES["spread_layers"], np.random.default_rng(25)
    inherits = fields_of(shape, activation=activation)
    overrides = fields_of(shape, activation=activation, out_norm=NormOverride(zero_centered=zero_centered))
    same, other = (ModelDims(shape.hidden, 8, NormFields(zero_centered=z)) for z in (zero_centered, not zero_centered))
    batch = make_batch(
        [(0, 9)], num_decode=0, num_tokens=9, num_rows=1, pages_per_seq=1, page_size=256, num_pages=2, num_slots=2,
        seed=0, slots=np.zeros(1, int),
    )  # fmt: skip
    h = rng.normal(size=(9, shape.hidden)).astype(np.float32)
    w = {name: random_weight(weight, rng) for name, weight in block.weights(inherits, same).items()}
    pool = np.zeros((len(shape.layers), 2, shape.num_heads, shape.head_dim, shape.head_dim), np.float32)
    options: dict[str, Any] = {
        "slopes_LG": xla.lightning_slopes(shape.num_heads, shape.layers, shape.num_layers), "norm_eps": 1e-6,
        "num_heads": shape.num_heads, "head_dim": shape.head_dim, "norm_zero_centered": zero_centered, "chunk": 64,
        "max_q": 9, "activation": activation,
    }  # fmt: skip
    for fields, dims in ((inherits, same), (overrides, other)):
        call = render("lightning/call.j2", **emit(fields, site_of(dims, shape.layers)).fields)
        assert f"    norm_zero_centered={zero_centered},\n" in call
        assert ('activation="relu"' in call) == (activation == "relu") and "sum_axes" not in call
        for ordinal, layer in enumerate(shape.layers):
            want = ref.lightning(h, w, pool, batch, index_rows(batch), pool_layer=ordinal, **options)[0]
            got = reference.apply(fields, dims, h, w, batch, index_rows(batch), h, layer)
            np.testing.assert_allclose(got, want, atol=1e-6, rtol=0)


def site_of(dims: ModelDims, layers: tuple[int, ...], tp: int = 1) -> Site:
    return Site(
        name="lin", variant=replace(block.VARIANTS[0], module="m"),
        collectives="c", dims=dims, dp=1, tp=tp, ep=1, etp=1, shared_sharded=False,
        mlp_sharded=False, scaled=False, tuning={"chunk": 64}, layers=layers,
    )  # fmt: skip


@pytest.mark.parametrize("layers", [(3,), (0, 1, 2), (1, 3, 5), (0, 1, 5), (1, 2, 5, 6, 9, 10), tuple(range(80))])
def test_index_text_names_the_layers(layers: tuple[int, ...]) -> None:
    assert tuple(eval(index_text(layers))) == layers


def test_emitted_slopes_are_those_of_the_absolute_layers() -> None:
    """Every eighth of 80 layers is another kind: one short line, and a cut call sums its squares."""
    layers = tuple(i for i in range(80) if i % 8 != 7)
    dims = ModelDims(16, 8, NormFields())
    emitted = emit(fields_of(LightningShape(16, 64, 8, layers, 80)), site_of(dims, layers, tp=2))
    text = next(constant.text for constant in emitted.constants if constant.name == "LIN_SLOPES")
    assert text == "lightning_slopes(64, [8 * i + j for i in range(10) for j in range(7)], 80)"
    slopes = eval(text, {"lightning_slopes": xla.lightning_slopes})
    np.testing.assert_allclose(slopes, ref.lightning_slopes(64, layers, 80), rtol=1e-6, atol=0)
    assert "    sum_axes=TENSOR,\n" in render("lightning/call.j2", **emitted.fields)


def test_the_norm_of_cut_heads_is_a_collective() -> None:
    dtypes = Dtypes("bfloat16", "bfloat16", "bfloat16", "bfloat16", "float32", "bfloat16")
    fields, dims = fields_of(TEST_SHAPES["first_layers"]), ModelDims(24, 8, NormFields())
    for tp, names in ((1, []), (2, ["norm heads", "combine heads"])):
        load = Load(32, 8, 4, 100, 100, 28, 50, 64, Degrees(tp=tp), dtypes, 8, 128)
        assert [term.op for term in cost.work(fields, dims, load) if isinstance(term, Collective)] == names


@pytest.mark.parametrize(
    ("default", "own"), [({"kind": "layer"}, {}), ({"bias": True}, {}), ({}, {"kind": "layer"})]
)  # fmt: skip
def test_an_output_norm_that_is_no_rms_norm_is_refused(default: dict[str, Any], own: dict[str, Any]) -> None:
    fields = fields_of(TEST_SHAPES["first_layers"], out_norm=NormOverride(**own))
    (problem,) = block.check(fields, ModelDims(16, 8, NormFields(**default)))
    assert problem.path == ("out_norm",)


def test_every_layer_decays() -> None:
    """Of 8 layers the last would grow if the decays were spread over 7."""
    fields = fields_of(TEST_SHAPES["first_layers"])
    dims = ModelDims(24, 8, NormFields(), num_layers=8)
    assert not block.check(fields, dims)
    (problem,) = block.check(fields.model_copy(update={"decay_layers": 7}), dims)
    assert problem.path == ("decay_layers",)
    assert (xla.lightning_slopes(4, range(8), 8) > 0).all() and (xla.lightning_slopes(4, range(8), 7)[-1] < 0).all()
