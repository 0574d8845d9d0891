"""The XLA latent attention (absorbed decode, expanded prefill) against its reference, and against itself.

Tolerance in float32: sums over <= 200 keys in another order, values of order 1, through one more product than plain
attention in either form: error about sqrt(200) * 6e-8 * a few; 1e-4 leaves room for unlucky seeds, and a wrong key,
mask, page or position shows as an error of order 0.1.
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
from moec.blocks.core.paged import write_kv
from moec.blocks.core.rope_fields import RopeFields, ScalingFields
from moec.blocks.core.work import Degrees, Dtypes, Gemm, Load, Stream
from moec.blocks.mla import block, cost, ref, reference, xla
from moec.blocks.mla.shapes import FULL_SHAPES, TEST_SHAPES, MlaShape

TOLERANCE = 1e-4
LAYERS, PAGES, PAGE_SIZE, PAGES_PER_SEQ, TOKENS, ROWS = 3, 90, 8, 20, 208, 8
TILES = {"q_block": 64, "kv_block": 32}

# (cached, new) per row; the first num_decode rows are decode rows.
MIXES = {
    "decode_only_history": (4, [(1, 1), (7, 1), (8, 1), (60, 1)]),
    "first_token_decode": (2, [(0, 1), (5, 1)]),
    "short_prefills": (0, [(0, 1), (0, 2), (0, 3), (9, 2)]),
    "mixed_page_edges": (3, [(16, 1), (15, 1), (17, 1), (0, 63), (0, 64), (0, 65)]),
    "continued_prefix": (1, [(33, 1), (13, 130), (8, 64), (5, 3)]),
    "one_long": (0, [(0, 130)]),
}

DIMS = ModelDims(64, 8, NormFields())


def geometry(shape: MlaShape) -> dict[str, Any]:
    return {
        "num_pages": PAGES, "num_heads": shape.num_heads, "kv_lora_rank": shape.kv_lora_rank,
        "qk_nope_head_dim": shape.nope, "v_head_dim": shape.v, "norm_eps": 1e-6, "rope_spec": shape.rope_spec,
        "scale": (shape.nope + shape.rope) ** -0.5, "norm_zero_centered": shape.zero_centered,
        "query_latent": shape.q_lora_rank is not None, "temperature": shape.temperature,
        "output_gate": shape.output_gate, "gate_stored": shape.gate_stored, "bias": shape.bias,
    }  # fmt: skip


def draw_weights(shape: MlaShape, rng: np.random.Generator) -> dict[str, jax.Array]:
    """Random weights of every option that is on; scores then have a spread of about 1."""
    D, N, R, rank = shape.hidden, shape.num_heads, shape.kv_lora_rank, shape.q_lora_rank
    fused = shape.gate if shape.gate_stored == "fused" else 0
    q, kv = N * (shape.nope + shape.rope + fused), N * (shape.nope + shape.v)
    sizes = {"w_kv_a": (D, shape.cached), "w_o": (N * shape.v, D)}
    sizes |= {"w_q_a": (D, rank), "w_q_b": (rank, q)} if rank else {"w_q": (D, q)}
    sizes |= {"w_g": (D, N * shape.gate)} if shape.gate > fused else {}
    w = {name: rng.normal(0, size[0] ** -0.5, size) for name, size in sizes.items()}
    w["w_kv_b"] = rng.normal(0, R**-0.5, (kv, R))
    gains = {"kv_a_norm": R} | ({"q_a_norm": rank} if rank else {})
    w |= {name: rng.normal(0 if shape.zero_centered else 1, 0.2, size) for name, size in gains.items()}
    biases = {"b_kv_a": shape.cached} | ({"b_q_a": rank} if rank else {}) if shape.bias else {}
    w |= {name: rng.normal(0, 0.5, size) for name, size in biases.items()}
    return {name: jnp.asarray(value, jnp.float32) for name, value in w.items()}


def draw_pool(shape: MlaShape, rng: np.random.Generator) -> jax.Array:
    """Every page full of some request's values; nothing may depend on what is behind them in a padded row."""
    pool = rng.normal(size=(LAYERS * PAGES, PAGE_SIZE, shape.width))
    pool[..., shape.cached :] = np.nan
    return jnp.asarray(pool, jnp.float32)


def normal(rng: np.random.Generator, *size: int) -> jax.Array:
    return jnp.asarray(rng.normal(size=size), jnp.float32)


@pytest.fixture
def batch_of(make_batch) -> Callable[..., Batch]:
    return partial(make_batch, pages_per_seq=PAGES_PER_SEQ, page_size=PAGE_SIZE, num_pages=PAGES, num_slots=16)


@partial(jax.jit, static_argnames=("shape", "max_q", "q_block", "kv_block"))
def attend(
    h, w, pool, batch: Batch, layer, *, shape: MlaShape, max_q: int = TOKENS,
    q_block: int = TILES["q_block"], kv_block: int = TILES["kv_block"],
):  # fmt: skip
    """One layer; the layer index is traced, as in a scan over layers."""
    options = geometry(shape) | {"q_block": q_block, "kv_block": kv_block, "max_q": max_q}
    return xla.mla(h, w, pool, batch, index_rows(batch), pool_layer=layer, **options)


rows_of = jax.jit(index_rows)


@jax.jit
def write(pool, new_TC, batch: Batch):
    """The same rows into every layer."""
    return write_kv(pool, jnp.stack([new_TC] * LAYERS), batch, index_rows(batch))


def assert_matches_reference(
    h, w, pool, batch: Batch, layer: int, shape: MlaShape, max_q: int, tolerance: float
) -> None:
    rows = rows_of(batch)
    options = geometry(shape) | TILES | {"pool_layer": layer, "max_q": max_q}
    want, want_new = ref.mla(h, w, pool, batch, rows, **options)
    got, got_new = attend(h, w, pool, batch, layer, shape=shape, max_q=max_q)
    valid = np.asarray(rows.valid)
    assert got_new.dtype == pool.dtype and got.dtype == h.dtype
    np.testing.assert_allclose(np.asarray(got, np.float32)[valid], np.asarray(want)[valid], atol=tolerance, rtol=0)
    # Anything narrower than float32 may round the other way: one step of the coarser dtype.
    step = max(float(jnp.finfo(dtype).eps) for dtype in (h.dtype, pool.dtype)) if tolerance > TOLERANCE else 0
    new, want_new = (np.asarray(x, np.float32)[valid] for x in (got_new, want_new))
    np.testing.assert_allclose(new, want_new, atol=tolerance, rtol=step)


@pytest.mark.parametrize("mix", MIXES)
@pytest.mark.parametrize("name", TEST_SHAPES)
def test_ragged_batch_matches_reference(name: str, mix: str, batch_of) -> None:
    shape, (num_decode, lengths), seed = TEST_SHAPES[name], MIXES[mix], [*MIXES].index(mix)
    rng = np.random.default_rng([seed, 11])
    batch = batch_of(lengths, num_decode=num_decode, num_tokens=TOKENS, num_rows=ROWS, seed=seed)
    h, w, pool = normal(rng, TOKENS, shape.hidden), draw_weights(shape, rng), draw_pool(shape, rng)
    assert_matches_reference(h, w, pool, batch, seed % LAYERS, shape, TOKENS, TOLERANCE)


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize(("name", "rows"), [("gated", 5), ("fused_gate", 1)])
def test_decode_bucket_matches_reference(name: str, rows: int, seed: int, batch_of) -> None:
    """max_q = 1: only the absorbed form exists (mixed steps have it too, in all shapes); the last of 5 are padding."""
    shape, rng = TEST_SHAPES[name], np.random.default_rng([seed, 13])
    lengths = [(int(old), 1) for old in rng.integers(0, 100, max(1, rows - 2))]
    batch = batch_of(lengths, num_decode=len(lengths), num_tokens=rows, num_rows=rows, seed=seed)
    h, w, pool = normal(rng, rows, shape.hidden), draw_weights(shape, rng), draw_pool(shape, rng)
    assert_matches_reference(h, w, pool, batch, seed % LAYERS, shape, 1, TOLERANCE)


def test_any_tiles_match_the_reference(batch_of) -> None:
    """Blocks that end inside and beyond rows, histories of several reads, the last one short."""
    q_block, kv_block = 24, 40
    shape, rng = TEST_SHAPES["query_latent_yarn"], np.random.default_rng([q_block, 21])
    num_decode, lengths = MIXES["continued_prefix"]
    batch = batch_of(
        [*lengths, (90, 5)], num_decode=num_decode, num_tokens=TOKENS, num_rows=ROWS, seed=q_block
    )  # fmt: skip
    h, w, pool = normal(rng, TOKENS, shape.hidden), draw_weights(shape, rng), draw_pool(shape, rng)
    options = geometry(shape) | TILES | {"pool_layer": 1, "max_q": TOKENS}
    want = ref.mla(h, w, pool, batch, rows_of(batch), **options)[0]
    got = attend(h, w, pool, batch, 1, shape=shape, q_block=q_block, kv_block=kv_block)[0]
    used = sum(new for _, new in lengths) + 5
    np.testing.assert_allclose(np.asarray(got)[:used], np.asarray(want)[:used], atol=TOLERANCE, rtol=0)


class Sequence:
    """One sequence fed piece by piece beside other rows, its pages in random order; position 0 may lie far out."""

    def __init__(
        self, shape: MlaShape, length: int, seed: int, batch_of: Callable[..., Batch], offset: int = 0
    ) -> None:
        rng = np.random.default_rng([seed, 15])
        self.shape, self.batch_of, self.rng, self.offset = shape, batch_of, rng, offset
        self.w, self.pool = draw_weights(shape, rng), draw_pool(shape, rng)
        self.h = np.asarray(normal(rng, length, shape.hidden))
        self.table, self.other = np.split(rng.permutation(np.arange(1, PAGES))[: 2 * PAGES_PER_SEQ], 2)

    def feed(self, start: int, count: int, *, as_decode: bool = False) -> np.ndarray:
        """The outputs of tokens start .. start+count, their rows written to the pool."""
        mine, other = (start, count), (3, 1) if as_decode else (3, 2)
        lengths, tables = (
            ([mine, other], [self.table, self.other]) if as_decode else ([other, mine], [self.other, self.table])
        )
        batch = self.batch_of(
            lengths, num_decode=2 * as_decode, num_tokens=TOKENS, num_rows=ROWS, seed=start, tables=np.stack(tables)
        )  # fmt: skip
        batch = replace(batch, positions=batch.positions + self.offset)
        first = 0 if as_decode else 2
        h = np.array(normal(self.rng, TOKENS, self.shape.hidden))
        h[first : first + count] = self.h[start : start + count]
        out, new = attend(h, self.w, self.pool, batch, 1, shape=self.shape)
        self.pool = write(self.pool, new, batch)
        return np.asarray(out)[first : first + count]


@pytest.mark.parametrize("pieces", [(64, 66), (1, 2, 3, 63, 61), (13, 50, 67)])
@pytest.mark.parametrize("name", ["query_latent_yarn", "heated_bias"])
def test_prefill_in_pieces_equals_prefill_at_once(name: str, pieces: tuple[int, ...], batch_of) -> None:
    whole, cut = (Sequence(TEST_SHAPES[name], 130, len(pieces), batch_of) for _ in range(2))
    want = whole.feed(0, 130)
    starts = np.cumsum([0, *pieces[:-1]]).tolist()
    got = np.concatenate([cut.feed(start, count) for start, count in zip(starts, pieces, strict=True)])
    np.testing.assert_allclose(got, want, atol=TOLERANCE, rtol=0)


@pytest.mark.parametrize("name", TEST_SHAPES)
def test_absorbed_decode_equals_expanded_prefill(name: str, batch_of) -> None:
    whole, stepped = (Sequence(TEST_SHAPES[name], 40, 7, batch_of) for _ in range(2))
    want = whole.feed(0, 40)
    got = np.concatenate([stepped.feed(0, 15), *(stepped.feed(t, 1, as_decode=True) for t in range(15, 40))])
    np.testing.assert_allclose(got, want, atol=TOLERANCE, rtol=0)


@pytest.mark.parametrize("name", ["query_latent_yarn", "gated"])
def test_only_relative_positions_matter(name: str, batch_of) -> None:
    """The same tokens half a million positions further give the same outputs, in both forms (no temperature)."""
    near, far = (Sequence(TEST_SHAPES[name], 60, 9, batch_of, offset) for offset in (0, 500_009))
    for start, count, as_decode in ((0, 50, False), (50, 9, False), (59, 1, True)):
        want, got = (one.feed(start, count, as_decode=as_decode) for one in (near, far))
        np.testing.assert_allclose(got, want, atol=TOLERANCE, rtol=0)


def test_temperature_grows_with_the_position(batch_of) -> None:
    """At position p queries grow by 1 + 0.3 log(1 + floor(p / 16)): as that much more scale for every token."""
    shape, rng = TEST_SHAPES["heated_bias"], np.random.default_rng(22)
    h, w, pool = normal(rng, TOKENS, shape.hidden), draw_weights(shape, rng), draw_pool(shape, rng)
    for position, factor in ((15, 1.0), (16, 1 + 0.3 * np.log(2)), (16_000_000, 1 + 0.3 * np.log(1_000_001))):
        batch = batch_of([(9, 1)], num_decode=1, num_tokens=TOKENS, num_rows=ROWS, seed=0)
        batch = replace(batch, positions=jnp.full_like(batch.positions, position))
        scale = {"scale": (shape.nope + shape.rope) ** -0.5 * factor, "temperature": None}
        options = geometry(shape) | TILES | {"pool_layer": 0, "max_q": TOKENS} | scale
        want = ref.mla(h, w, pool, batch, rows_of(batch), **options)[0][0]
        got = np.asarray(attend(h, w, pool, batch, 0, shape=shape)[0])[0]
        np.testing.assert_allclose(got, want, atol=TOLERANCE, rtol=0)


@pytest.mark.parametrize("mix", ["mixed_page_edges", "continued_prefix"])
def test_nothing_of_other_requests_is_read(mix: str, batch_of) -> None:
    """NaN in every cache entry that is not a row's own history, and in the padding tokens, changes no bit."""
    shape, rng, (num_decode, lengths) = TEST_SHAPES["gated"], np.random.default_rng(17), MIXES[mix]
    batch = batch_of(lengths, num_decode=num_decode, num_tokens=TOKENS, num_rows=ROWS, seed=1)
    h, w, pool = normal(rng, TOKENS, shape.hidden), draw_weights(shape, rng), draw_pool(shape, rng)
    mine = np.zeros((PAGES, PAGE_SIZE), bool)
    for row, (old, _) in enumerate(lengths):
        position = np.arange(old)
        mine[np.asarray(batch.page_table)[row, position // PAGE_SIZE], position % PAGE_SIZE] = True
    dirty = np.where(np.tile(mine, (LAYERS, 1))[..., None], pool, np.nan)
    used = sum(new for _, new in lengths)
    padded = np.where(np.arange(TOKENS)[:, None] < used, h, np.nan)
    clean, got = (np.asarray(attend(*given, batch, 1, shape=shape)[0]) for given in ((h, w, pool), (padded, w, dirty)))
    np.testing.assert_array_equal(got[:used], clean[:used])


@pytest.mark.parametrize(("name", "tp"), [("gated", 4), ("fused_gate", 2)])
def test_head_shards_add_up(name: str, tp: int, batch_of) -> None:
    """Partial outputs of tp devices sum to the whole; latents and cache are the same on all of them."""
    shape, rng = TEST_SHAPES[name], np.random.default_rng([tp, 18])
    num_decode, lengths = MIXES["mixed_page_edges"]
    batch = batch_of(lengths, num_decode=num_decode, num_tokens=TOKENS, num_rows=ROWS, seed=tp)
    h, w, pool = normal(rng, TOKENS, shape.hidden), draw_weights(shape, rng), draw_pool(shape, rng)
    want, want_new = attend(h, w, pool, batch, 0, shape=shape)
    cut = {
        weight: tuple(one.axes).index("q_heads")
        for weight, one in block.weights(_fields(shape), ModelDims(shape.hidden, 8, NormFields())).items()
        if "q_heads" in one.axes
    }
    assert {"w_kv_b", "w_o"} < cut.keys()
    total = np.zeros(want.shape, np.float32)
    for part in range(tp):
        mine = {
            weight: jnp.split(one, tp, axis=cut[weight])[part] if weight in cut else one for weight, one in w.items()
        }
        local = replace(shape, num_heads=shape.num_heads // tp)
        out, new = attend(h, mine, pool, batch, 0, shape=local)
        np.testing.assert_array_equal(new, want_new)
        total += np.asarray(out)
    used = sum(new for _, new in lengths)
    np.testing.assert_allclose(total[:used], np.asarray(want)[:used], atol=TOLERANCE, rtol=0)


def _fields(shape: MlaShape, **more: Any) -> block.Fields:
    """The block's fields of a shape, without its rope."""
    per, heat = "head" if shape.gate == 1 else "element", shape.temperature
    gate = {"activation": shape.output_gate, "per": per, "stored": shape.gate_stored} if shape.output_gate else None
    heat = {"floor": heat[0], "scale": heat[1], "offset": heat[2]} if heat else None
    return block.Fields.model_validate({
        "kind": "mla", "num_heads": shape.num_heads, "q_lora_rank": shape.q_lora_rank,
        "kv_lora_rank": shape.kv_lora_rank, "qk_nope_head_dim": shape.nope, "qk_rope_head_dim": shape.rope,
        "v_head_dim": shape.v, "output_gate": gate, "temperature": heat, "bias": shape.bias, **more,
    })  # fmt: skip


@pytest.mark.parametrize("name", TEST_SHAPES)
def test_declared_weights_are_what_the_kernel_reads(name: str) -> None:
    shape, dims = TEST_SHAPES[name], ModelDims(TEST_SHAPES[name].hidden, 8, NormFields())
    declared = block.weights(_fields(shape), dims)
    drawn = draw_weights(shape, np.random.default_rng(0))
    out = {"b_o": (shape.hidden,)} if shape.bias else {}  # added behind the kernel, after the sum over devices
    assert {key: one.shape for key, one in declared.items()} == {key: one.shape for key, one in drawn.items()} | out
    (pool,) = block.state(_fields(shape), dims)
    assert pool.shape == (shape.cached,) and pool.axes == (None,)


def test_graph_reference_adds_the_bias_and_resolves_the_options(batch_of) -> None:
    """Fields as a spec has them give what the kernel computes from the options spelt out."""
    shape, rng, used = TEST_SHAPES["heated_bias"], np.random.default_rng(23), 130
    dims = ModelDims(shape.hidden, 8, NormFields(eps=1e-2, zero_centered=True))
    fields = _fields(shape, rope=RopeFields(dim=6, theta=1e5), norm=NormOverride(eps=1e-6))
    batch = batch_of([(0, used)], num_decode=0, num_tokens=TOKENS, num_rows=ROWS, seed=0)
    h, w, b_o = normal(rng, TOKENS, shape.hidden), draw_weights(shape, rng), normal(rng, shape.hidden)
    want = attend(h, w, draw_pool(shape, rng), batch, 0, shape=shape)[0] + b_o
    got = reference.apply(fields, dims, h, w | {"b_o": b_o}, batch, rows_of(batch), h, 0)
    np.testing.assert_allclose(np.asarray(got)[:used], np.asarray(want)[:used], atol=TOLERANCE, rtol=0)


def test_yarn_raises_the_default_scale() -> None:
    """Twice m = 0.1 ln 40 + 1 for released sizes (arXiv:2412.19437): 192^-1/2 * 1.3689^2 = 0.1352."""
    yarn = ScalingFields(kind="yarn", factor=40.0, original_max_position=4096, mscale=1.0, mscale_all_dim=1.0)
    shape = FULL_SHAPES["128h_512"]
    fields = _fields(shape, rope=RopeFields(dim=64, theta=1e4, pairing="interleaved", scaling=yarn))
    assert block.default_scale(fields) == pytest.approx(0.135234, abs=1e-6)
    assert block.default_scale(_fields(shape)) == pytest.approx(192**-0.5)


def test_bad_fields_are_refused() -> None:
    shape, dims = TEST_SHAPES["query_latent_yarn"], ModelDims(24, 8, NormFields())
    good = _fields(shape, rope=RopeFields(dim=8, theta=1e4))
    assert block.check(good, dims) == []
    for dim in (4, 16):  # less or more than the rope dims
        (problem,) = block.check(good.model_copy(update={"rope": RopeFields(dim=dim, theta=1e4)}), dims)
        assert problem.path == ("rope", "dim")
    (problem,) = block.check(good, ModelDims(24, 8, NormFields(kind="layer")))
    assert problem.path == ("norm",)


def test_mscale_is_accepted_where_it_scales_something() -> None:
    """mscale_all_dim alone scales the scores, unless the fields say their scale."""
    shape, dims = TEST_SHAPES["query_latent_yarn"], ModelDims(24, 8, NormFields())
    yarn = ScalingFields(kind="yarn", factor=40.0, original_max_position=64, mscale_all_dim=1.0)
    fields = _fields(shape, rope=RopeFields(dim=8, theta=1e4, scaling=yarn))
    assert block.check(fields, dims) == []
    (problem,) = block.check(fields.model_copy(update={"scale": 0.1}), dims)
    assert problem.path == ("rope", "scaling", "mscale_all_dim")


@pytest.mark.parametrize(("lanes", "row"), [(1, 576), (64, 576), (128, 640), (1024, 576)])
def test_rows_are_whole_tiles_of_the_target(lanes: int, row: int) -> None:
    """Where memory has no tiles, and for rows shorter than a tile, a row is what is cached."""
    fields = _fields(FULL_SHAPES["128h_512"])
    (pool,) = block.state(fields, ModelDims(7168, 8, NormFields()))
    assert pool.shape == (576,) and pool.row(lanes) == (row,)
    assert cost.tuning(fields, DIMS, {"decode": _load(lanes=lanes)})["row"] == row


def _load(**more: Any) -> Load:
    """Of one rank with 16 decode rows and 48 prefill tokens, 128 lanes; `more` changes it."""
    base = Load(64, 16, 16, 1000, 2000, 48, 500, 256, Degrees(), Dtypes(*["bfloat16"] * 6), 8, 256, 128)
    return replace(base, **more)


def test_decode_reads_each_cached_row_once_for_all_heads() -> None:
    """Cache traffic of decode depends on the padded row of 640 values, and on no number of heads."""
    fields, dims = _fields(FULL_SHAPES["128h_512"]), ModelDims(7168, 8, NormFields())
    for tp in (1, 8):
        terms = cost.work(fields, dims, _load(degrees=Degrees(tp=tp)))
        (stream,) = [one for one in terms if isinstance(one, Stream) and one.op == "attend decode"]
        assert stream.bytes == 3 * 16 * 2000 * 640 * 2
        projections = sum(one.weight_bytes for one in terms if isinstance(one, Gemm) and one.op != "expand prefill")
        matrices = {key: one for key, one in block.weights(fields, dims).items() if len(one.shape) == 2}
        whole = {key: np.prod(one.shape) / (tp if "q_heads" in one.axes else 1) for key, one in matrices.items()}
        assert projections == pytest.approx(2 * sum(whole.values()))


@pytest.mark.parametrize(("page_size", "kv_block"), [(16, 256), (48, 240), (128, 256), (256, 512), (512, 1024)])
def test_tuned_tiles_are_whole_pages(page_size: int, kv_block: int) -> None:
    loads = {"decode": _load(page_size=page_size), "mixed": _load(page_size=page_size)}
    assert cost.tuning(_fields(TEST_SHAPES["gated"]), DIMS, loads) == {"row": 24, "q_block": 512, "kv_block": kv_block}


# bfloat16 rounds latents, queries (twice in the absorbed form), expanded keys and values, probabilities and outputs to
# 2^-9 relative each; outputs here reach 2. The cache is rounded alike in both, but a difference before the rounding can
# fall on two sides of an edge: one cache step in one value of a row, 2^-8 (bfloat16) or 2^-3 (float8) of it, which then
# reaches every head's key and value.
@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize(
    ("activation", "cache", "tolerance"),
    [
        (jnp.bfloat16, jnp.bfloat16, 4e-2),
        (jnp.bfloat16, jnp.float32, 4e-2),
        (jnp.bfloat16, jnp.float8_e4m3fn, 1e-1),
    ],
)
def test_narrow_dtypes_stay_close(activation, cache, tolerance: float, seed: int, batch_of) -> None:
    shape, rng = TEST_SHAPES["query_latent_yarn"], np.random.default_rng([seed, 19])
    num_decode, lengths = MIXES["continued_prefix"]
    batch = batch_of(lengths, num_decode=num_decode, num_tokens=TOKENS, num_rows=ROWS, seed=seed)
    h, w = normal(rng, TOKENS, shape.hidden).astype(activation), draw_weights(shape, rng)
    w = {name: value.astype(activation) for name, value in w.items()}
    pool = draw_pool(shape, rng).astype(cache)
    assert_matches_reference(h, w, pool, batch, seed % LAYERS, shape, TOKENS, tolerance)


def test_float8_cache_saturates(batch_of) -> None:
    """float8_e4m3fn ends at 448; the plain cast would give NaN. Only the shared key is not normed, so it gets there."""
    shape, rng = TEST_SHAPES["query_latent_yarn"], np.random.default_rng(20)
    batch = batch_of([(0, 5)], num_decode=0, num_tokens=TOKENS, num_rows=ROWS, seed=0)
    h = (2000 * normal(rng, TOKENS, shape.hidden)).astype(jnp.bfloat16)
    w = {name: value.astype(jnp.bfloat16) for name, value in draw_weights(shape, rng).items()}
    out, new = attend(h, w, draw_pool(shape, rng).astype(jnp.float8_e4m3fn), batch, 0, shape=shape)
    assert np.isfinite(np.asarray(out)).all()
    assert np.abs(np.asarray(new, np.float32)[:5]).max() == 448
