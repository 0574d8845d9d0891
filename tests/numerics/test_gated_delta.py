"""The XLA Gated DeltaNet against the token-by-token recurrence, and against itself over several steps.

Tolerance in float32: the chunk form reorders sums over <= 64 tokens and <= 130 recurrent steps
of values of order 1; measured errors are a few 1e-6. 1e-4 leaves room for unlucky seeds; a wrong
decay, tap, mask or slot shows as an error of order 0.1.
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

TOLERANCE = 1e-4
LAYERS, SLOTS, TOKENS, ROWS = 3, 16, 272, 8

# (cached, new) per row; the first num_decode rows are decode rows.
MIXES = {
    "decode_only": (4, [(1, 1), (7, 1), (3, 1), (60, 1)]),
    "first_token_decode": (2, [(0, 1), (5, 1)]),
    "short_prefills": (0, [(0, 1), (0, 2), (0, 3), (9, 2), (4, 1)]),
    "mixed_chunk_edges": (3, [(16, 1), (15, 1), (0, 1), (0, 63), (0, 64), (0, 65)]),
    "continued": (1, [(33, 1), (13, 130), (64, 64), (5, 3)]),
    "one_long": (0, [(0, 130)]),
}


def geometry(shape: GatedDeltaShape) -> dict[str, Any]:
    return {
        "num_qk_heads": shape.num_qk_heads, "num_v_heads": shape.num_v_heads, "head_k_dim": shape.head_k_dim,
        "head_v_dim": shape.head_v_dim, "conv_kernel": shape.conv_kernel, "norm_eps": 1e-6,
        "norm_zero_centered": False, "channel_decay": shape.decay.per == "channel",
        "decay_lower_bound": shape.decay.lower_bound, "gate_activation": shape.gate.activation,
        "negative_eigenvalues": shape.negative_eigenvalues,
    }  # fmt: skip


def draw_weights(shape: GatedDeltaShape, rng: np.random.Generator) -> dict[str, jax.Array]:
    """Decays from nearly none to nearly total per token (a_log up to 2)."""
    qk, v, heads = shape.num_qk_heads * shape.head_k_dim, shape.num_v_heads * shape.head_v_dim, shape.num_v_heads
    rates = heads * (shape.head_k_dim if shape.decay.per == "channel" else 1)
    widths = {"w_q": (shape.hidden, qk), "w_k": (shape.hidden, qk), "w_v": (shape.hidden, v)}
    widths |= projection("w_z", "g", shape.hidden, shape.gate.rank, v) | {"w_b": (shape.hidden, heads)}
    widths |= projection("w_a", "f", shape.hidden, shape.decay.rank, rates)
    w = {name: rng.normal(0, size[0] ** -0.5, size) for name, size in widths.items()}
    channels = {"conv_q": qk, "conv_k": qk, "conv_v": v}
    w |= {name: rng.normal(0, 0.5, (width, shape.conv_kernel)) for name, width in channels.items()}
    w |= {"a_log": rng.uniform(-3, 2, heads), "dt_bias": rng.normal(0, 1, rates)}
    w |= {"out_norm": rng.normal(1, 0.2, shape.head_v_dim), "w_o": rng.normal(0, v**-0.5, (v, shape.hidden))}
    return {name: jnp.asarray(value, jnp.float32) for name, value in w.items()}


def projection(whole: str, halves: str, hidden: int, rank: int | None, width: int) -> dict[str, tuple[int, int]]:
    if rank is None:
        return {whole: (hidden, width)}
    return {f"{halves}_a": (hidden, rank), f"{halves}_b": (rank, width)}


def draw_pools(shape: GatedDeltaShape, rng: np.random.Generator) -> tuple[jax.Array, jax.Array]:
    """Every slot full of some request's values."""
    channels = 2 * shape.num_qk_heads * shape.head_k_dim + shape.num_v_heads * shape.head_v_dim
    conv = normal(rng, LAYERS, SLOTS, (shape.conv_kernel - 1) * channels)
    return conv, normal(rng, LAYERS, SLOTS, shape.num_v_heads, shape.head_k_dim, shape.head_v_dim)


def normal(rng: np.random.Generator, *size: int) -> jax.Array:
    return jnp.asarray(rng.normal(size=size), jnp.float32)


@pytest.fixture
def batch_of(make_batch) -> Callable[..., Batch]:
    return partial(make_batch, pages_per_seq=1, page_size=256, num_pages=16, num_slots=SLOTS)


@partial(jax.jit, static_argnames=("shape", "max_q", "chunk"))
def mix_tokens(h, w, pools, batch: Batch, layer, *, shape: GatedDeltaShape, max_q: int = TOKENS, chunk: int = 64):
    """One layer; the layer index is traced, as in a scan over layers. pools = (conv, state)."""
    rows = index_rows(batch)
    return xla.gated_delta(h, w, *pools, batch, rows, pool_layer=layer, chunk=chunk, max_q=max_q, **geometry(shape))


def both(h, w, pools, batch: Batch, layer: int, shape: GatedDeltaShape, chunk: int, max_q: int):
    """(out, conv, state) of the variant and of the reference, without padding tokens and the sink slot."""
    rows = index_rows(batch)
    options = geometry(shape) | {"pool_layer": layer, "chunk": chunk, "max_q": max_q}
    want = ref.gated_delta(h, w, *pools, batch, rows, **options)
    got = mix_tokens(h, w, pools, batch, layer, shape=shape, max_q=max_q, chunk=chunk)
    assert [x.dtype for x in got] == [h.dtype, pools[0].dtype, pools[1].dtype]

    def kept(out, conv, state) -> tuple[np.ndarray, ...]:
        arrays = (out[np.asarray(rows.valid)], conv[:, 1:], state[:, 1:])
        return tuple(np.asarray(x, np.float32) for x in arrays)

    return kept(*got), kept(*want)


def assert_matches_reference(h, w, pools, batch, layer, shape, max_q: int = TOKENS, chunk: int = 64) -> None:
    for got, want in zip(*both(h, w, pools, batch, layer, shape, chunk, max_q), strict=True):
        np.testing.assert_allclose(got, want, atol=TOLERANCE, rtol=0)


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("mix", MIXES)
@pytest.mark.parametrize("name", TEST_SHAPES)
def test_ragged_batch_matches_reference(name: str, mix: str, seed: int, batch_of) -> None:
    """Rows without history reuse slots full of other requests' values; untouched slots and layers stay."""
    shape, (num_decode, lengths) = TEST_SHAPES[name], MIXES[mix]
    rng = np.random.default_rng([seed, 12])
    batch = batch_of(lengths, num_decode=num_decode, num_tokens=TOKENS, num_rows=ROWS, seed=seed)
    h, w, pools = normal(rng, TOKENS, shape.hidden), draw_weights(shape, rng), draw_pools(shape, rng)
    assert_matches_reference(h, w, pools, batch, seed % LAYERS, shape)


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("chunk", [16, 48, 128])
def test_any_chunk_size_matches_reference(chunk: int, seed: int, batch_of) -> None:
    shape, rng, (num_decode, lengths) = (
        TEST_SHAPES["shared_keys"],
        np.random.default_rng([seed, 21]),
        MIXES["continued"],
    )
    batch = batch_of(lengths, num_decode=num_decode, num_tokens=TOKENS, num_rows=ROWS, seed=seed)
    h, w, pools = normal(rng, TOKENS, shape.hidden), draw_weights(shape, rng), draw_pools(shape, rng)
    assert_matches_reference(h, w, pools, batch, 1, shape, chunk=chunk)


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("rows", [1, 5])
@pytest.mark.parametrize("name", TEST_SHAPES)
def test_decode_bucket_matches_reference(name: str, rows: int, seed: int, batch_of) -> None:
    """max_q = 1: only the decode path exists; the last rows are padding when there is more than one."""
    shape, rng = TEST_SHAPES[name], np.random.default_rng([seed, 13])
    lengths = [(int(old), 1) for old in rng.integers(0, 3, max(1, rows - 2))]
    batch = batch_of(lengths, num_decode=len(lengths), num_tokens=rows, num_rows=rows, seed=seed)
    h, w, pools = normal(rng, rows, shape.hidden), draw_weights(shape, rng), draw_pools(shape, rng)
    assert_matches_reference(h, w, pools, batch, seed % LAYERS, shape, max_q=1)


class Sequence:
    """One sequence fed piece by piece beside another row."""

    def __init__(self, shape: GatedDeltaShape, length: int, seed: int, batch_of: Callable[..., Batch]) -> None:
        rng = np.random.default_rng([seed, 15])
        self.shape, self.batch_of, self.rng = shape, batch_of, rng
        self.w, self.pools, self.h = draw_weights(shape, rng), draw_pools(shape, rng), normal(rng, length, shape.hidden)
        self.slot, self.other = rng.permutation(np.arange(1, SLOTS))[:2]

    def feed(self, start: int, count: int, *, as_decode: bool = False) -> np.ndarray:
        """The outputs of tokens start .. start+count; the state stays in the pools."""
        mine, other = (start, count), (3, 1) if as_decode else (3, 2)
        lengths, slots = (
            ([mine, other], [self.slot, self.other]) if as_decode else ([other, mine], [self.other, self.slot])
        )
        batch = self.batch_of(
            lengths, num_decode=2 * as_decode, num_tokens=TOKENS, num_rows=ROWS, seed=start, slots=np.asarray(slots)
        )  # fmt: skip
        first = 0 if as_decode else 2
        h = normal(self.rng, TOKENS, self.shape.hidden).at[first : first + count].set(self.h[start : start + count])
        out, *self.pools = mix_tokens(h, self.w, tuple(self.pools), batch, 1, shape=self.shape)
        return np.asarray(out[first : first + count])

    def state(self) -> np.ndarray:
        return np.asarray(self.pools[1][1, self.slot])


@pytest.mark.parametrize("pieces", [(64, 66), (8, 8, 114), (1, 2, 3, 63, 61), (13, 50, 67)])
@pytest.mark.parametrize("name", ["shared_keys", "one_key_two_taps", "channel_decay_low_rank"])
def test_prefill_in_pieces_equals_prefill_at_once(name: str, pieces: tuple[int, ...], batch_of) -> None:
    whole, cut = (Sequence(TEST_SHAPES[name], 130, len(pieces), batch_of) for _ in range(2))
    want = whole.feed(0, 130)
    starts = np.cumsum([0, *pieces[:-1]]).tolist()
    got = np.concatenate([cut.feed(start, count) for start, count in zip(starts, pieces, strict=True)])
    np.testing.assert_allclose(got, want, atol=TOLERANCE, rtol=0)
    np.testing.assert_allclose(cut.state(), whole.state(), atol=TOLERANCE, rtol=0)


def test_cut_at_a_chunk_edge_gives_the_same_bits(batch_of) -> None:
    """With a float32 state pool a cached prefix of whole chunks cannot be told from one prefill."""
    whole, cut = (Sequence(TEST_SHAPES["shared_keys"], 130, 5, batch_of) for _ in range(2))
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
    shape, rng, (num_decode, lengths) = TEST_SHAPES["shared_keys"], np.random.default_rng(17), MIXES[mix]
    batch = batch_of(lengths, num_decode=num_decode, num_tokens=TOKENS, num_rows=ROWS, seed=1)
    h, w, pools = normal(rng, TOKENS, shape.hidden), draw_weights(shape, rng), draw_pools(shape, rng)
    mine = np.zeros((LAYERS, SLOTS), bool)
    mine[1, np.asarray(batch.slot)[: len(lengths)]] = [old > 0 for old, _ in lengths]
    dirty = tuple(jnp.where(mine.reshape(LAYERS, SLOTS, *[1] * (x.ndim - 2)), x, jnp.nan) for x in pools)
    used = sum(new for _, new in lengths)
    clean = mix_tokens(h, w, pools, batch, 1, shape=shape)
    got = mix_tokens(h.at[used:].set(jnp.nan), w, dirty, batch, 1, shape=shape)
    np.testing.assert_array_equal(got[0][:used], clean[0][:used])
    slots = np.asarray(batch.slot)[: len(lengths)]
    for a, b in zip(got[1:], clean[1:], strict=True):
        np.testing.assert_array_equal(a[1, slots], b[1, slots])


def test_a_row_does_not_read_the_next_row(batch_of) -> None:
    """The last chunk of a row covers tokens of the row behind it: their NaN must stay there."""
    shape, rng = TEST_SHAPES["shared_keys"], np.random.default_rng(22)
    batch = batch_of([(0, 70), (0, 9)], num_decode=0, num_tokens=TOKENS, num_rows=ROWS, seed=0)
    h, w, pools = normal(rng, TOKENS, shape.hidden), draw_weights(shape, rng), draw_pools(shape, rng)
    clean = mix_tokens(h, w, pools, batch, 0, shape=shape)
    got = mix_tokens(h.at[70:79].set(jnp.nan), w, pools, batch, 0, shape=shape)
    np.testing.assert_array_equal(got[0][:70], clean[0][:70])
    assert np.isnan(got[0][70:79]).all()
    np.testing.assert_array_equal(got[2][0, batch.slot[0]], clean[2][0, batch.slot[0]])


@pytest.mark.parametrize(
    ("name", "tp"), [("shared_keys", 2), ("channel_decay_low_rank", 2), ("channel_decay_bounded", 3)]
)
def test_head_shards_add_up(name: str, tp: int, batch_of) -> None:
    """Partial outputs of the devices sum to the whole, and each holds its heads' state. Weights are cut as declared."""
    shape, rng, (num_decode, lengths) = TEST_SHAPES[name], np.random.default_rng(18), MIXES["mixed_chunk_edges"]
    batch = batch_of(lengths, num_decode=num_decode, num_tokens=TOKENS, num_rows=ROWS, seed=2)
    h, w = normal(rng, TOKENS, shape.hidden), draw_weights(shape, rng)
    conv, state = draw_pools(shape, rng)
    want, _, want_state = mix_tokens(h, w, (conv, state), batch, 0, shape=shape)
    width, taps = shape.num_qk_heads * shape.head_k_dim, shape.conv_kernel - 1
    q_k_v = jnp.split(conv.reshape(LAYERS, SLOTS, taps, -1), [width, 2 * width], axis=-1)
    local = replace(shape, num_qk_heads=shape.num_qk_heads // tp, num_v_heads=shape.num_v_heads // tp)
    declared = block.weights(fields_of(shape), ModelDims(shape.hidden, 8, NormFields()))
    assert {key: x.shape for key, x in w.items()} == {key: weight.shape for key, weight in declared.items()}
    total, states = jnp.zeros_like(want), []
    for part in range(tp):
        mine = {key: shard(x, declared[key].axes, tp, part) for key, x in w.items()}
        window = jnp.concatenate([jnp.split(x, tp, axis=-1)[part] for x in q_k_v], axis=-1).reshape(LAYERS, SLOTS, -1)
        out, _, new = mix_tokens(h, mine, (window, jnp.split(state, tp, axis=2)[part]), batch, 0, shape=local)
        total, states = total + out, [*states, new]
    used = sum(new for _, new in lengths)
    np.testing.assert_allclose(total[:used], want[:used], atol=TOLERANCE, rtol=0)
    np.testing.assert_allclose(jnp.concatenate(states, axis=2)[:, 1:], want_state[:, 1:], atol=TOLERANCE, rtol=0)


def shard(x: jax.Array, axes: tuple[str | None, ...], tp: int, part: int) -> jax.Array:
    """The part-th of tp pieces along the one axis that is cut, or all of x."""
    cut = [axis for axis, name in enumerate(axes) if name]
    return jnp.split(x, tp, axis=cut[0])[part] if cut else x


def fields_of(shape: GatedDeltaShape) -> block.Fields:
    return block.Fields(
        kind="gated_delta", num_v_heads=shape.num_v_heads, num_qk_heads=shape.num_qk_heads,
        head_dim=shape.head_k_dim, head_v_dim=shape.head_v_dim, conv_kernel=shape.conv_kernel,
        decay=shape.decay, gate=shape.gate, negative_eigenvalues=shape.negative_eigenvalues,
    )  # fmt: skip


@pytest.mark.parametrize("gated_delta", [ref.gated_delta, xla.gated_delta])
def test_zero_centred_output_gain_is_an_offset_from_one(gated_delta, batch_of) -> None:
    shape, rng = TEST_SHAPES["shared_keys"], np.random.default_rng(24)
    batch = batch_of([(0, 9)], num_decode=0, num_tokens=16, num_rows=2, seed=0)
    h, w, pools = normal(rng, 16, shape.hidden), draw_weights(shape, rng), draw_pools(shape, rng)
    options = geometry(shape) | {"pool_layer": 0, "chunk": 64, "max_q": 16}
    plain = gated_delta(h, w, *pools, batch, index_rows(batch), **options)[0]
    w["out_norm"] -= 1
    centred = gated_delta(h, w, *pools, batch, index_rows(batch), **options | {"norm_zero_centered": True})[0]
    np.testing.assert_allclose(centred[:9], plain[:9], atol=TOLERANCE, rtol=0)


def site_of(dims: ModelDims, tp: int = 1) -> Site:
    return Site(
        name="gdn", module="m", collectives="c", dims=dims, dp=1, tp=tp, ep=1, etp=1, shared_sharded=False,
        mlp_sharded=False, scaled=False, tuning={"chunk": 64},
    )  # fmt: skip


@pytest.mark.parametrize("zero_centered", [False, True])
def test_output_norm_follows_the_default_unless_overridden(zero_centered: bool, batch_of) -> None:
    """In the emitted call and in the float32 interpreter."""
    shape, rng = TEST_SHAPES["shared_keys"], np.random.default_rng(25)
    declared = {"kind": "gated_delta", "num_v_heads": 4, "num_qk_heads": 2, "head_dim": 16, "conv_kernel": 4}
    inherits = block.Fields(**declared)
    overrides = block.Fields(**declared, out_norm=NormOverride(zero_centered=zero_centered))
    same, other = (ModelDims(shape.hidden, 8, NormFields(zero_centered=z)) for z in (zero_centered, not zero_centered))
    batch = batch_of([(0, 9)], num_decode=0, num_tokens=9, num_rows=1, seed=0, slots=np.zeros(1, int))
    h, w, pools = normal(rng, 9, shape.hidden), draw_weights(shape, rng), draw_pools(shape, rng)
    options = geometry(shape) | {"pool_layer": 0, "chunk": 64, "max_q": 9, "norm_zero_centered": zero_centered}
    want = ref.gated_delta(h, w, *pools, batch, index_rows(batch), **options)[0]
    for fields, dims in ((inherits, same), (overrides, other)):
        site = site_of(dims)
        call = render("gated_delta/call.j2", **emit(fields, site).fields)
        assert f"    norm_zero_centered={zero_centered},\n" in call
        np.testing.assert_array_equal(reference.apply(fields, dims, h, w, batch, index_rows(batch), h, 0), want)


@pytest.mark.parametrize("chunk", [64, 128])
@pytest.mark.parametrize("case", ["same_key_full_write", "total_decay", "growing_decay"])
def test_extreme_gates_stay_accurate(case: str, chunk: int, batch_of) -> None:
    """One token repeated with beta near 1 and hardly any decay (powers of the chunk matrix reach 1e18), and
    decays that underflow (e^-8000 over a chunk, whose inverse is infinite)."""
    shape, rng = TEST_SHAPES["shared_keys"], np.random.default_rng([chunk, 23])
    batch = batch_of([(0, 130)], num_decode=0, num_tokens=TOKENS, num_rows=ROWS, seed=3)
    h, w, pools = normal(rng, TOKENS, shape.hidden), draw_weights(shape, rng), draw_pools(shape, rng)
    if case == "same_key_full_write":
        h, w["w_b"] = jnp.tile(h[:1], (TOKENS, 1)), w["w_b"] + 4 * h[0, :, None] / jnp.sum(h[0] ** 2) * 3
        w["a_log"] = w["a_log"] - 20
    elif case == "total_decay":
        w["a_log"] = jnp.full_like(w["a_log"], 4.0)
    else:
        w["a_log"] = jnp.linspace(-8.0, 4.0, shape.num_v_heads)
    assert_matches_reference(h, w, pools, batch, 0, shape, chunk=chunk)


@pytest.mark.parametrize("name", ["channel_decay_low_rank", "channel_decay_bounded"])
@pytest.mark.parametrize("lengths", [(1, 2, 3, 15, 16, 17, 33), (63, 64, 65), (127,), (200,)])
def test_wild_channel_decays_stay_accurate(lengths: tuple[int, ...], name: str, batch_of) -> None:
    """Log decays of neighbouring tokens and channels from -20 to nearly 0: e^-sum over a chunk is infinite."""
    shape, rng = TEST_SHAPES[name], np.random.default_rng([len(lengths), 26])
    shape = replace(shape, decay=replace_field(shape.decay, lower_bound=-40.0 if shape.decay.lower_bound else None))
    rows = [(7 * (row % 2), length) for row, length in enumerate(lengths)]
    batch = batch_of(rows, num_decode=0, num_tokens=TOKENS, num_rows=ROWS, seed=4)
    h, w, pools = normal(rng, TOKENS, shape.hidden), draw_weights(shape, rng), draw_pools(shape, rng)
    last = "w_a" if shape.decay.rank is None else "f_b"
    w[last], w["a_log"] = 12 * w[last], jnp.zeros_like(w["a_log"])
    rates = h @ w["w_a"] if shape.decay.rank is None else h @ w["f_a"] @ w["f_b"]
    log_decay = ref._log_decay(
        np.asarray(rates + w["dt_bias"]).reshape(TOKENS, shape.num_v_heads, -1), np.zeros(shape.num_v_heads),
        shape.decay.lower_bound,
    )  # fmt: skip
    assert log_decay.min() < -20 and log_decay.max() > -1e-3
    assert_matches_reference(h, w, pools, batch, 1, shape)


@pytest.mark.parametrize("chunk", [1, 2, 16, 48, 64])
def test_decayed_products_against_float64(chunk: int) -> None:
    """1e-7 is measured; differences of float32 running sums, which reach -440 here, would be off by 8e-6."""
    rng = np.random.default_rng([chunk, 27])
    q, k, wild = rng.normal(size=(3, 2, chunk, 16)) / 4
    g = -np.logaddexp(0, 48 * wild)
    total = np.cumsum(g, axis=1)
    i, j = np.arange(chunk)[:, None], np.arange(chunk)[None]
    decay = np.exp(np.where((i >= j)[..., None], total[:, :, None] - total[:, None], -np.inf))
    got = xla._gdn_decayed_products(*(jnp.asarray(x, jnp.float32) for x in (q, k, g)))
    for x, row, product in ((q, i, got[0]), (k, np.where(i == j, -1, i), got[1])):
        want = np.where(row >= j, np.einsum("vik,vjk,vijk->vij", x, k, decay), 0)
        np.testing.assert_allclose(product, want, atol=1e-6, rtol=0)


def replace_field(decay: block.Decay, **fields: float | None) -> block.Decay:
    return decay.model_copy(update=fields)


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


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize(
    ("activation", "pool", "tolerance"),
    [(jnp.bfloat16, jnp.float32, 1e-2), (jnp.bfloat16, jnp.bfloat16, 1e-2), (jnp.float32, jnp.bfloat16, 1e-4)],
)
def test_narrow_dtypes_stay_close(activation, pool, tolerance: float, seed: int, batch_of) -> None:
    """Root mean square of the output error, and the largest state error.

    bfloat16 activations round inputs, gates and outputs to 2^-9 relative: 3e-3 is measured at outputs of
    order 0.5. Not the largest error: the output norm blows up the rounding of a token whose output was
    nearly zero. The state, at most 4.5, may round to the next bfloat16 (2^-6 there), no further.
    """
    shape, (num_decode, lengths) = TEST_SHAPES["shared_keys"], MIXES["continued"]
    rng = np.random.default_rng([seed, 19])
    batch = batch_of(lengths, num_decode=num_decode, num_tokens=TOKENS, num_rows=ROWS, seed=seed)
    h, w = normal(rng, TOKENS, shape.hidden).astype(activation), draw_weights(shape, rng)
    w = {name: value if name in ("a_log", "dt_bias") else value.astype(activation) for name, value in w.items()}
    conv, state = draw_pools(shape, rng)
    pools = (conv.astype(activation), state.astype(pool))
    got, want = both(h, w, pools, batch, 1, shape, 64, TOKENS)
    assert np.sqrt(np.mean((got[0] - want[0]) ** 2)) < tolerance
    np.testing.assert_allclose(got[1], want[1], atol=1e-6, rtol=float(jnp.finfo(activation).eps))
    np.testing.assert_allclose(got[2], want[2], atol=2**-6, rtol=0)
