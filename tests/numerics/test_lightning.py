"""The XLA lightning attention against the token-by-token recurrence, and against itself over several steps.

Tolerance in float32: the chunk form reorders sums over <= 128 tokens and <= 130 recurrent steps of
values of order 1; measured errors of outputs are a few 1e-6. 1e-4 leaves room for unlucky seeds. States
that hardly decay are sums of up to 190 products and reach 60; they are held to 1e-5 of the largest, of
which 3e-6 is measured. A wrong decay, mask or slot shows as an error of order 0.1.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from moec.blocks.core.batch import Batch, index_rows
from moec.blocks.core.declare import ModelDims, NormFields, NormOverride
from moec.blocks.core.emission import Site
from moec.blocks.core.work import Collective, Degrees, Dtypes, Load
from moec.blocks.lightning import block, cost, ref, reference, xla
from moec.blocks.lightning.emit import emit, index_text
from moec.blocks.lightning.shapes import TEST_SHAPES, LightningShape
from moec.compiler.emit.render import render

TOLERANCE, STATE_TOLERANCE = 1e-4, 1e-5
LAYERS, SLOTS, TOKENS, ROWS = 3, 16, 272, 8

# (cached, new) per row; the first num_decode rows are decode rows.
MIXES = {
    "decode_only": (4, [(1, 1), (7, 1), (3, 1), (60, 1)]),
    "first_token_decode": (2, [(0, 1), (5, 1)]),
    "short_prefills": (0, [(0, 1), (0, 2), (0, 3), (9, 2), (4, 1)]),
    "mixed_chunk_edges": (3, [(16, 1), (15, 1), (0, 1), (0, 63), (0, 64), (0, 65)]),
    "continued": (1, [(33, 1), (13, 130), (64, 64), (5, 3)]),
}


def geometry(shape: LightningShape) -> dict[str, Any]:
    slopes = xla.lightning_slopes(shape.num_heads, shape.layers, shape.num_layers)
    return {
        "slopes_LG": slopes, "num_heads": shape.num_heads, "head_dim": shape.head_dim, "norm_eps": 1e-6,
        "norm_zero_centered": False,
    }  # fmt: skip


def fields_of(shape: LightningShape, **changed: Any) -> block.Fields:
    declared = {"num_heads": shape.num_heads, "head_dim": shape.head_dim, "decay_layers": shape.num_layers}
    return block.Fields(kind="lightning", **declared | changed)


def draw_weights(shape: LightningShape, rng: np.random.Generator) -> dict[str, jax.Array]:
    declared = block.weights(fields_of(shape), ModelDims(shape.hidden, 8, NormFields()))
    w = {name: rng.normal(0, weight.shape[0] ** -0.5, weight.shape) for name, weight in declared.items()}
    w["out_norm"] = rng.normal(1, 0.2, w["out_norm"].shape)
    return {name: jnp.asarray(value, jnp.float32) for name, value in w.items()}


def draw_pool(shape: LightningShape, rng: np.random.Generator) -> jax.Array:
    """Every slot full of some request's values."""
    return normal(rng, LAYERS, SLOTS, shape.num_heads, shape.head_dim, shape.head_dim)


def normal(rng: np.random.Generator, *size: int) -> jax.Array:
    return jnp.asarray(rng.normal(size=size), jnp.float32)


@pytest.fixture
def batch_of(make_batch) -> Callable[..., Batch]:
    return partial(make_batch, pages_per_seq=1, page_size=256, num_pages=16, num_slots=SLOTS)


@partial(jax.jit, static_argnames=("shape", "max_q", "chunk"))
def mix_tokens(h, w, pool, batch: Batch, layer, *, shape: LightningShape, max_q: int = TOKENS, chunk: int = 64):
    """One layer; the layer index is traced, as in a scan over layers."""
    options = geometry(shape) | {"chunk": chunk, "max_q": max_q}
    return xla.lightning(h, w, pool, batch, index_rows(batch), pool_layer=layer, **options)


def both(h, w, pool, batch: Batch, layer: int, shape: LightningShape, chunk: int, max_q: int):
    """(out, state) of the variant and of the reference, without padding tokens and the sink slot."""
    rows = index_rows(batch)
    options = geometry(shape) | {"pool_layer": layer, "chunk": chunk, "max_q": max_q}
    want = ref.lightning(h, w, pool, batch, rows, **options)
    got = mix_tokens(h, w, pool, batch, layer, shape=shape, max_q=max_q, chunk=chunk)
    assert [x.dtype for x in got] == [h.dtype, pool.dtype]

    def kept(out, state) -> tuple[np.ndarray, ...]:
        return tuple(np.asarray(x, np.float32) for x in (out[np.asarray(rows.valid)], state[:, 1:]))

    return kept(*got), kept(*want)


def assert_matches_reference(h, w, pool, batch, layer, shape, max_q: int = TOKENS, chunk: int = 64) -> None:
    (out, state), (want, want_state) = both(h, w, pool, batch, layer, shape, chunk, max_q)
    np.testing.assert_allclose(out, want, atol=TOLERANCE, rtol=0)
    np.testing.assert_allclose(state, want_state, atol=STATE_TOLERANCE * np.abs(want_state).max(), rtol=0)


@pytest.mark.parametrize("mix", MIXES)
@pytest.mark.parametrize("name", TEST_SHAPES)
def test_ragged_batch_matches_reference(name: str, mix: str, batch_of) -> None:
    """Rows without history reuse slots full of other requests' values; untouched slots and layers stay."""
    shape, (num_decode, lengths) = TEST_SHAPES[name], MIXES[mix]
    for layer in range(LAYERS):
        rng = np.random.default_rng([layer, 12])
        batch = batch_of(lengths, num_decode=num_decode, num_tokens=TOKENS, num_rows=ROWS, seed=layer)
        h, w, pool = normal(rng, TOKENS, shape.hidden), draw_weights(shape, rng), draw_pool(shape, rng)
        assert_matches_reference(h, w, pool, batch, layer, shape)


@pytest.mark.parametrize("chunk", [1, 16, 48, 128])
def test_any_chunk_size_matches_reference(chunk: int, batch_of) -> None:
    shape, rng, (num_decode, lengths) = TEST_SHAPES["spread_layers"], np.random.default_rng(21), MIXES["continued"]
    batch = batch_of(lengths, num_decode=num_decode, num_tokens=TOKENS, num_rows=ROWS, seed=1)
    h, w, pool = normal(rng, TOKENS, shape.hidden), draw_weights(shape, rng), draw_pool(shape, rng)
    assert_matches_reference(h, w, pool, batch, 1, shape, chunk=chunk)


@pytest.mark.parametrize("rows", [1, 5])
@pytest.mark.parametrize("name", TEST_SHAPES)
def test_decode_bucket_matches_reference(name: str, rows: int, batch_of) -> None:
    """max_q = 1: only the decode path exists; the last rows are padding when there is more than one."""
    shape = TEST_SHAPES[name]
    for seed in range(3):
        rng = np.random.default_rng([seed, 13])
        lengths = [(int(old), 1) for old in rng.integers(0, 3, max(1, rows - 2))]
        batch = batch_of(lengths, num_decode=len(lengths), num_tokens=rows, num_rows=rows, seed=seed)
        h, w, pool = normal(rng, rows, shape.hidden), draw_weights(shape, rng), draw_pool(shape, rng)
        assert_matches_reference(h, w, pool, batch, seed % LAYERS, shape, max_q=1)


class Sequence:
    """One sequence fed piece by piece beside another row."""

    def __init__(self, shape: LightningShape, length: int, seed: int, batch_of: Callable[..., Batch]) -> None:
        rng = np.random.default_rng([seed, 15])
        self.shape, self.batch_of, self.rng = shape, batch_of, rng
        self.w, self.pool, self.h = draw_weights(shape, rng), draw_pool(shape, rng), normal(rng, length, shape.hidden)
        self.slot, self.other = rng.permutation(np.arange(1, SLOTS))[:2]

    def feed(self, start: int, count: int, *, as_decode: bool = False) -> np.ndarray:
        """The outputs of tokens start .. start+count; the state stays in the pool."""
        mine, other = (start, count), (3, 1) if as_decode else (3, 2)
        lengths, slots = (
            ([mine, other], [self.slot, self.other]) if as_decode else ([other, mine], [self.other, self.slot])
        )
        batch = self.batch_of(
            lengths, num_decode=2 * as_decode, num_tokens=TOKENS, num_rows=ROWS, seed=start, slots=np.asarray(slots)
        )  # fmt: skip
        first = 0 if as_decode else 2
        h = normal(self.rng, TOKENS, self.shape.hidden).at[first : first + count].set(self.h[start : start + count])
        out, self.pool = mix_tokens(h, self.w, self.pool, batch, 1, shape=self.shape)
        return np.asarray(out[first : first + count])

    def state(self) -> np.ndarray:
        return np.asarray(self.pool[1, self.slot])


@pytest.mark.parametrize("pieces", [(64, 66), (8, 8, 114), (1, 2, 3, 63, 61), (13, 50, 67)])
@pytest.mark.parametrize("name", ["first_layers", "one_head"])
def test_prefill_in_pieces_equals_prefill_at_once(name: str, pieces: tuple[int, ...], batch_of) -> None:
    whole, cut = (Sequence(TEST_SHAPES[name], 130, len(pieces), batch_of) for _ in range(2))
    want = whole.feed(0, 130)
    starts = np.cumsum([0, *pieces[:-1]]).tolist()
    got = np.concatenate([cut.feed(start, count) for start, count in zip(starts, pieces, strict=True)])
    np.testing.assert_allclose(got, want, atol=TOLERANCE, rtol=0)
    np.testing.assert_allclose(cut.state(), whole.state(), atol=TOLERANCE, rtol=0)


def test_cut_at_a_chunk_edge_gives_the_same_bits(batch_of) -> None:
    """With a float32 state pool a cached prefix of whole chunks cannot be told from one prefill."""
    whole, cut = (Sequence(TEST_SHAPES["first_layers"], 130, 5, batch_of) for _ in range(2))
    want = whole.feed(0, 130)
    np.testing.assert_array_equal(np.concatenate([cut.feed(0, 64), cut.feed(64, 66)]), want)


@pytest.mark.parametrize("name", TEST_SHAPES)
def test_decode_steps_equal_prefill(name: str, batch_of) -> None:
    whole, stepped = (Sequence(TEST_SHAPES[name], 40, 7, batch_of) for _ in range(2))
    want = whole.feed(0, 40)
    got = np.concatenate([stepped.feed(0, 15), *(stepped.feed(t, 1, as_decode=True) for t in range(15, 40))])
    np.testing.assert_allclose(got, want, atol=TOLERANCE, rtol=0)
    np.testing.assert_allclose(stepped.state(), whole.state(), atol=TOLERANCE, rtol=0)


@pytest.mark.parametrize("mix", ["mixed_chunk_edges", "short_prefills"])
def test_nothing_of_other_requests_is_read(mix: str, batch_of) -> None:
    """NaN in every slot that is not a row's own history, and in the padding tokens, changes no bit."""
    shape, rng, (num_decode, lengths) = TEST_SHAPES["first_layers"], np.random.default_rng(17), MIXES[mix]
    batch = batch_of(lengths, num_decode=num_decode, num_tokens=TOKENS, num_rows=ROWS, seed=1)
    h, w, pool = normal(rng, TOKENS, shape.hidden), draw_weights(shape, rng), draw_pool(shape, rng)
    mine = np.zeros((LAYERS, SLOTS), bool)
    mine[1, np.asarray(batch.slot)[: len(lengths)]] = [old > 0 for old, _ in lengths]
    dirty = jnp.where(mine.reshape(LAYERS, SLOTS, 1, 1, 1), pool, jnp.nan)
    used = sum(new for _, new in lengths)
    clean, clean_pool = mix_tokens(h, w, pool, batch, 1, shape=shape)
    got, got_pool = mix_tokens(h.at[used:].set(jnp.nan), w, dirty, batch, 1, shape=shape)
    np.testing.assert_array_equal(got[:used], clean[:used])
    slots = np.asarray(batch.slot)[: len(lengths)]
    np.testing.assert_array_equal(got_pool[1, slots], clean_pool[1, slots])


def test_a_row_does_not_read_the_next_row(batch_of) -> None:
    """The last chunk of a row covers tokens of the row behind it: their NaN must stay there."""
    shape, rng = TEST_SHAPES["first_layers"], np.random.default_rng(22)
    batch = batch_of([(0, 70), (0, 9)], num_decode=0, num_tokens=TOKENS, num_rows=ROWS, seed=0)
    h, w, pool = normal(rng, TOKENS, shape.hidden), draw_weights(shape, rng), draw_pool(shape, rng)
    clean, clean_pool = mix_tokens(h, w, pool, batch, 0, shape=shape)
    got, got_pool = mix_tokens(h.at[70:79].set(jnp.nan), w, pool, batch, 0, shape=shape)
    np.testing.assert_array_equal(got[:70], clean[:70])
    assert np.isnan(got[70:79]).all()
    np.testing.assert_array_equal(got_pool[0, batch.slot[0]], clean_pool[0, batch.slot[0]])


@pytest.mark.parametrize("zero_centered", [False, True])
@pytest.mark.parametrize(("name", "tp"), [("first_layers", 2), ("first_layers", 4), ("spread_layers", 3)])
def test_head_shards_add_up(name: str, tp: int, zero_centered: bool, batch_of) -> None:
    """Each device takes its heads' slopes and state, and the norm sees the squares of all. Cut as declared."""
    shape, rng, (num_decode, lengths) = TEST_SHAPES[name], np.random.default_rng(18), MIXES["mixed_chunk_edges"]
    batch = batch_of(lengths, num_decode=num_decode, num_tokens=TOKENS, num_rows=ROWS, seed=2)
    h, w, pool = normal(rng, TOKENS, shape.hidden), draw_weights(shape, rng), draw_pool(shape, rng)
    options = geometry(shape) | {"chunk": 64, "max_q": TOKENS, "norm_zero_centered": zero_centered, "pool_layer": 1}
    cut = options | {"num_heads": shape.num_heads // tp, "sum_axes": ("tensor",)}
    want, want_pool = ref.lightning(h, w, pool, batch, index_rows(batch), **options)

    def layer(h, w, pool):
        y_TD, pool = xla.lightning(h, w, pool, batch, index_rows(batch), **cut)
        return jax.lax.psum(y_TD, "tensor"), pool

    def spec(axes: tuple[str | None, ...]) -> P:
        return P(*("tensor" if axis else None for axis in axes))

    fields, dims = fields_of(shape), ModelDims(shape.hidden, 8, NormFields())
    in_w = {key: spec(weight.axes) for key, weight in block.weights(fields, dims).items()}
    (state,) = block.state(fields, dims)
    in_pool = P(None, None, *spec(state.axes))
    mesh = Mesh(np.asarray(jax.devices()[:tp]), ("tensor",))
    run = jax.shard_map(layer, mesh=mesh, in_specs=(P(), in_w, in_pool), out_specs=(P(), in_pool), check_vma=False)
    got, got_pool = jax.jit(run)(h, w, pool)
    used = sum(new for _, new in lengths)
    np.testing.assert_allclose(got[:used], want[:used], atol=TOLERANCE, rtol=0)
    np.testing.assert_allclose(got_pool[:, 1:], want_pool[:, 1:], atol=TOLERANCE, rtol=0)


@pytest.mark.parametrize("activation", ["silu", "relu"])
@pytest.mark.parametrize("zero_centered", [False, True])
def test_interpreter_and_call_follow_the_fields(zero_centered: bool, activation: str, batch_of) -> None:
    """The norm follows the default unless overridden; the decay is that of the absolute layer."""
    shape, rng = TEST_SHAPES["spread_layers"], np.random.default_rng(25)
    inherits = fields_of(shape, activation=activation)
    overrides = fields_of(shape, activation=activation, out_norm=NormOverride(zero_centered=zero_centered))
    same, other = (ModelDims(shape.hidden, 8, NormFields(zero_centered=z)) for z in (zero_centered, not zero_centered))
    batch = batch_of([(0, 9)], num_decode=0, num_tokens=9, num_rows=1, seed=0, slots=np.zeros(1, int))
    h, w, pool = normal(rng, 9, shape.hidden), draw_weights(shape, rng), draw_pool(shape, rng)
    options = geometry(shape) | {"chunk": 64, "max_q": 9, "norm_zero_centered": zero_centered}
    for fields, dims in ((inherits, same), (overrides, other)):
        call = render("lightning/call.j2", **emit(fields, site_of(dims, shape.layers)).fields)
        assert f"    norm_zero_centered={zero_centered},\n" in call
        assert ('activation="relu"' in call) == (activation == "relu") and "sum_axes" not in call
        for ordinal, layer in enumerate(shape.layers):
            ordered = options | {"pool_layer": ordinal, "activation": activation}
            want = ref.lightning(h, w, pool, batch, index_rows(batch), **ordered)[0]
            got = reference.apply(fields, dims, h, w, batch, index_rows(batch), h, layer)
            np.testing.assert_allclose(got, want, atol=1e-6, rtol=0)


def site_of(dims: ModelDims, layers: tuple[int, ...], tp: int = 1) -> Site:
    return Site(
        name="lin", module="m", collectives="c", dims=dims, dp=1, tp=tp, ep=1, etp=1, shared_sharded=False,
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
    want = np.concatenate([ref.layer_slopes(64, layer, 80) for layer in layers])
    np.testing.assert_allclose(slopes, want, rtol=1e-6, atol=0)
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


@pytest.mark.parametrize(
    ("activation", "pool", "tolerance"),
    [(jnp.bfloat16, jnp.float32, 1e-2), (jnp.bfloat16, jnp.bfloat16, 1e-2), (jnp.float32, jnp.bfloat16, 1e-4)],
)
def test_narrow_dtypes_stay_close(activation, pool, tolerance: float, batch_of) -> None:
    """Root mean square of the output error, and the largest state error relative to the largest state.

    bfloat16 activations round inputs, gates and outputs to 2^-9 relative: 2e-3 is measured at outputs
    of order 0.5. The state sums rounded keys and values; it may round to the next bfloat16, 2^-8.
    """
    shape, (num_decode, lengths) = TEST_SHAPES["first_layers"], MIXES["continued"]
    rng = np.random.default_rng(19)
    batch = batch_of(lengths, num_decode=num_decode, num_tokens=TOKENS, num_rows=ROWS, seed=1)
    h = normal(rng, TOKENS, shape.hidden).astype(activation)
    w = {name: value.astype(activation) for name, value in draw_weights(shape, rng).items()}
    got, want = both(h, w, draw_pool(shape, rng).astype(pool), batch, 1, shape, 64, TOKENS)
    assert np.sqrt(np.mean((got[0] - want[0]) ** 2)) < tolerance
    assert np.max(np.abs(got[1] - want[1])) < 2**-8 * np.max(np.abs(want[1]))
