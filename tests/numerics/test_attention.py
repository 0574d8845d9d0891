"""The XLA attention against its reference, and against itself over several steps.

Tolerance in float32: sums over <= 200 keys in another order, values of order 1: error about
sqrt(200) * 6e-8 * a few; 1e-4 leaves room for unlucky seeds, and a wrong key, mask, page or
position shows as an error of order 0.1.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from moec.blocks.attention import block, ref, xla
from moec.blocks.attention.cost import tuning
from moec.blocks.attention.shapes import TEST_SHAPES, AttentionShape
from moec.blocks.core.batch import Batch, index_rows
from moec.blocks.core.declare import FieldProblem, ModelDims, NormFields, NormOverride
from moec.blocks.core.paged import write_kv
from moec.blocks.core.work import Degrees, Dtypes, Load

TOLERANCE = 1e-4
LAYERS, PAGES, PAGE_SIZE, PAGES_PER_SEQ, TOKENS, ROWS = 3, 90, 8, 20, 208, 8
TILES = {"q_block": 128, "kv_block": 512}

# (cached, new) per row; the first num_decode rows are decode rows.
MIXES = {
    "decode_only_history": (4, [(1, 1), (7, 1), (8, 1), (60, 1)]),
    "first_token_decode": (2, [(0, 1), (5, 1)]),
    "short_prefills": (0, [(0, 1), (0, 2), (0, 3), (9, 2)]),
    "mixed_page_edges": (3, [(16, 1), (15, 1), (17, 1), (0, 63), (0, 64), (0, 65)]),
    "continued_prefix": (1, [(33, 1), (13, 130), (8, 64), (5, 3)]),
    "one_long": (0, [(0, 130)]),
}


def geometry(shape: AttentionShape) -> dict[str, Any]:
    return {
        "num_pages": PAGES, "num_q_heads": shape.num_q_heads, "num_kv_heads": shape.num_kv_heads,
        "head_dim": shape.head_dim, "rope_dim": shape.rope_dim, "rope_theta": shape.rope_theta,
        "rope_pairing": shape.rope_pairing, "qk_norm_eps": 1e-6 if shape.qk_norm else None,
        "qk_norm_zero_centered": shape.zero_centered, "output_gate": shape.output_gate, "scale": shape.head_dim**-0.5,
    }  # fmt: skip


def draw_weights(shape: AttentionShape, rng: np.random.Generator) -> dict[str, jax.Array]:
    q, kv = shape.num_q_heads * shape.head_dim, shape.num_kv_heads * shape.head_dim
    sizes = {"w_q": (shape.hidden, q * (1 + shape.output_gate)), "w_k": (shape.hidden, kv), "w_v": (shape.hidden, kv)}
    sizes["w_o"] = (q, shape.hidden)
    w = {name: rng.normal(0, size[0] ** -0.5, size) for name, size in sizes.items()}
    if shape.qk_norm:
        w |= {name: rng.normal(0 if shape.zero_centered else 1, 0.2, shape.head_dim) for name in ("q_norm", "k_norm")}
    return {name: jnp.asarray(value, jnp.float32) for name, value in w.items()}


def draw_pool(shape: AttentionShape, rng: np.random.Generator) -> jax.Array:
    """Every page full of some request's values."""
    return normal(rng, LAYERS * PAGES, PAGE_SIZE, 2 * shape.num_kv_heads * shape.head_dim)


def normal(rng: np.random.Generator, *size: int) -> jax.Array:
    return jnp.asarray(rng.normal(size=size), jnp.float32)


@pytest.fixture
def batch_of(make_batch) -> Callable[..., Batch]:
    return partial(make_batch, pages_per_seq=PAGES_PER_SEQ, page_size=PAGE_SIZE, num_pages=PAGES, num_slots=16)


@partial(jax.jit, static_argnames=("shape", "max_q", "q_block", "kv_block"))
def attend(
    h, w, pool, batch: Batch, layer, *, shape: AttentionShape, max_q: int = TOKENS,
    q_block: int = TILES["q_block"], kv_block: int = TILES["kv_block"],
):  # fmt: skip
    """One layer; the layer index is traced, as in a scan over layers."""
    options = geometry(shape) | {"q_block": q_block, "kv_block": kv_block, "max_q": max_q}
    return xla.attention(h, w, pool, batch, index_rows(batch), pool_layer=layer, **options)


@jax.jit
def write(pool, new_TC, batch: Batch):
    """The same rows into every layer."""
    return write_kv(pool, jnp.stack([new_TC] * LAYERS), batch, index_rows(batch))


def assert_matches_reference(
    h, w, pool, batch: Batch, layer: int, shape: AttentionShape, max_q: int, tolerance: float
) -> None:
    rows = index_rows(batch)
    options = geometry(shape) | TILES | {"pool_layer": layer, "max_q": max_q}
    want, want_new = ref.attention(h, w, pool, batch, rows, **options)
    got, got_new = attend(h, w, pool, batch, layer, shape=shape, max_q=max_q)
    valid = np.asarray(rows.valid)
    assert got_new.dtype == pool.dtype and got.dtype == h.dtype
    np.testing.assert_allclose(np.asarray(got, np.float32)[valid], want[valid], atol=tolerance, rtol=0)
    # Anything narrower than float32 may round the other way: one step of the coarser dtype.
    step = max(float(jnp.finfo(dtype).eps) for dtype in (h.dtype, pool.dtype)) if tolerance > TOLERANCE else 0
    new, want_new = (np.asarray(x, np.float32)[valid] for x in (got_new, want_new))
    np.testing.assert_allclose(new, want_new, atol=tolerance, rtol=step)


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("mix", MIXES)
@pytest.mark.parametrize("name", TEST_SHAPES)
def test_ragged_batch_matches_reference(name: str, mix: str, seed: int, batch_of) -> None:
    shape, (num_decode, lengths) = TEST_SHAPES[name], MIXES[mix]
    rng = np.random.default_rng([seed, 11])
    batch = batch_of(lengths, num_decode=num_decode, num_tokens=TOKENS, num_rows=ROWS, seed=seed)
    h, w, pool = normal(rng, TOKENS, shape.hidden), draw_weights(shape, rng), draw_pool(shape, rng)
    assert_matches_reference(h, w, pool, batch, seed % LAYERS, shape, TOKENS, TOLERANCE)


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("rows", [1, 5])
@pytest.mark.parametrize("name", TEST_SHAPES)
def test_decode_bucket_matches_reference(name: str, rows: int, seed: int, batch_of) -> None:
    """max_q = 1: only the decode path exists; the last rows are padding when there is more than one."""
    shape, rng = TEST_SHAPES[name], np.random.default_rng([seed, 13])
    lengths = [(int(old), 1) for old in rng.integers(0, 100, max(1, rows - 2))]
    batch = batch_of(lengths, num_decode=len(lengths), num_tokens=rows, num_rows=rows, seed=seed)
    h, w, pool = normal(rng, rows, shape.hidden), draw_weights(shape, rng), draw_pool(shape, rng)
    assert_matches_reference(h, w, pool, batch, seed % LAYERS, shape, 1, TOLERANCE)


@pytest.mark.parametrize(("q_block", "kv_block"), [(16, 16), (24, 40), (7, 152), (130, 16)])
def test_any_tiles_match_the_reference(q_block: int, kv_block: int, batch_of) -> None:
    """Blocks that end inside and beyond rows, histories of several reads, the last one short."""
    shape, rng, (num_decode, lengths) = (
        TEST_SHAPES["gated_partial_rope"],
        np.random.default_rng([q_block, 21]),
        MIXES["continued_prefix"],
    )
    lengths = [*lengths, (90, 5)]
    batch = batch_of(lengths, num_decode=num_decode, num_tokens=TOKENS, num_rows=ROWS, seed=q_block)
    h, w, pool = normal(rng, TOKENS, shape.hidden), draw_weights(shape, rng), draw_pool(shape, rng)
    options = geometry(shape) | TILES | {"pool_layer": 1, "max_q": TOKENS}
    want = ref.attention(h, w, pool, batch, index_rows(batch), **options)[0]
    got = attend(h, w, pool, batch, 1, shape=shape, q_block=q_block, kv_block=kv_block)[0]
    used = sum(new for _, new in lengths)
    np.testing.assert_allclose(got[:used], want[:used], atol=TOLERANCE, rtol=0)


@pytest.mark.parametrize(("page_size", "kv_block"), [(16, 512), (48, 480), (256, 512), (512, 1024)])
def test_tuned_tiles_are_whole_pages(page_size: int, kv_block: int) -> None:
    fields = block.Fields(kind="attention", num_q_heads=4, num_kv_heads=2, head_dim=8)
    load = Load(64, 8, 8, 100, 200, 56, 100, page_size, Degrees(), Dtypes(*["bfloat16"] * 6), 8, 256)
    assert tuning(fields, {"decode": load, "mixed": load}) == {"q_block": 128, "kv_block": kv_block}


def test_a_norm_that_nothing_uses_is_refused() -> None:
    plain = block.Fields(kind="attention", num_q_heads=4, num_kv_heads=2, head_dim=8)
    dims, norm = ModelDims(32, 8, NormFields()), NormOverride(eps=1e-5)
    assert block.check(plain, dims) == []
    assert block.check(plain.model_copy(update={"norm": norm, "qk_norm": "head"}), dims) == []
    assert block.check(plain.model_copy(update={"norm": norm}), dims) == [
        FieldProblem(("norm",), "norm has no effect with qk_norm 'none'", "set qk_norm: head, or remove norm")
    ]


class Sequence:
    """One sequence fed piece by piece beside other rows, its pages in random order."""

    def __init__(self, shape: AttentionShape, length: int, seed: int, batch_of: Callable[..., Batch]) -> None:
        rng = np.random.default_rng([seed, 15])
        self.shape, self.batch_of, self.rng = shape, batch_of, rng
        self.w, self.pool, self.h = draw_weights(shape, rng), draw_pool(shape, rng), normal(rng, length, shape.hidden)
        self.table, self.other = np.split(rng.permutation(np.arange(1, PAGES))[: 2 * PAGES_PER_SEQ], 2)

    def feed(self, start: int, count: int, *, as_decode: bool = False) -> np.ndarray:
        """The outputs of tokens start .. start+count, their keys and values written to the pool."""
        mine, other = (start, count), (3, 1) if as_decode else (3, 2)
        lengths, tables = (
            ([mine, other], [self.table, self.other]) if as_decode else ([other, mine], [self.other, self.table])
        )
        batch = self.batch_of(
            lengths, num_decode=2 * as_decode, num_tokens=TOKENS, num_rows=ROWS, seed=start, tables=np.stack(tables)
        )  # fmt: skip
        first = 0 if as_decode else 2
        h = normal(self.rng, TOKENS, self.shape.hidden).at[first : first + count].set(self.h[start : start + count])
        out, new = attend(h, self.w, self.pool, batch, 1, shape=self.shape)
        self.pool = write(self.pool, new, batch)
        return np.asarray(out[first : first + count])


@pytest.mark.parametrize("pieces", [(64, 66), (8, 8, 114), (1, 2, 3, 63, 61), (13, 50, 67)])
@pytest.mark.parametrize("name", ["gated_partial_rope", "interleaved_one_kv"])
def test_prefill_in_pieces_equals_prefill_at_once(name: str, pieces: tuple[int, ...], batch_of) -> None:
    whole, cut = (Sequence(TEST_SHAPES[name], 130, len(pieces), batch_of) for _ in range(2))
    want = whole.feed(0, 130)
    starts = np.cumsum([0, *pieces[:-1]]).tolist()
    got = np.concatenate([cut.feed(start, count) for start, count in zip(starts, pieces, strict=True)])
    np.testing.assert_allclose(got, want, atol=TOLERANCE, rtol=0)


@pytest.mark.parametrize("name", ["gated_partial_rope", "plain_gqa"])
def test_decode_steps_equal_prefill(name: str, batch_of) -> None:
    whole, stepped = (Sequence(TEST_SHAPES[name], 40, 7, batch_of) for _ in range(2))
    want = whole.feed(0, 40)
    got = np.concatenate([stepped.feed(0, 15), *(stepped.feed(t, 1, as_decode=True) for t in range(15, 40))])
    np.testing.assert_allclose(got, want, atol=TOLERANCE, rtol=0)


@pytest.mark.parametrize("seed", range(2))
def test_page_order_does_not_matter(seed: int, batch_of) -> None:
    """The same history under two page tables gives the same bits."""
    shape, rng = TEST_SHAPES["gated_partial_rope"], np.random.default_rng([seed, 16])
    lengths, (w, pool) = [(37, 1), (21, 30)], (draw_weights(shape, rng), draw_pool(shape, rng))
    tables = rng.permutation(np.arange(1, PAGES))[: 4 * PAGES_PER_SEQ].reshape(2, 2, PAGES_PER_SEQ)
    moved = np.array(pool).reshape(LAYERS, PAGES, *pool.shape[1:])
    moved[:, tables[1]] = moved[:, tables[0]]
    h = normal(rng, TOKENS, shape.hidden)
    outs = []
    for table, kv in zip(tables, (pool, jnp.asarray(moved).reshape(pool.shape)), strict=True):
        batch = batch_of(lengths, num_decode=1, num_tokens=TOKENS, num_rows=ROWS, seed=0, tables=table)
        outs.append(np.asarray(attend(h, w, kv, batch, 2, shape=shape)[0][:31]))
    np.testing.assert_array_equal(*outs)


@pytest.mark.parametrize("mix", ["mixed_page_edges", "continued_prefix"])
def test_nothing_of_other_requests_is_read(mix: str, batch_of) -> None:
    """NaN in every cache entry that is not a row's own history, and in the padding tokens, changes no bit."""
    shape, rng, (num_decode, lengths) = TEST_SHAPES["plain_gqa"], np.random.default_rng(17), MIXES[mix]
    batch = batch_of(lengths, num_decode=num_decode, num_tokens=TOKENS, num_rows=ROWS, seed=1)
    h, w, pool = normal(rng, TOKENS, shape.hidden), draw_weights(shape, rng), draw_pool(shape, rng)
    mine = np.zeros((PAGES, PAGE_SIZE), bool)
    for row, (old, _) in enumerate(lengths):
        position = np.arange(old)
        mine[np.asarray(batch.page_table)[row, position // PAGE_SIZE], position % PAGE_SIZE] = True
    dirty = jnp.where(jnp.asarray(np.tile(mine, (LAYERS, 1)))[..., None], pool, jnp.nan)
    used = sum(new for _, new in lengths)
    clean = attend(h, w, pool, batch, 1, shape=shape)[0]
    got = attend(h.at[used:].set(jnp.nan), w, dirty, batch, 1, shape=shape)[0]
    np.testing.assert_array_equal(got[:used], clean[:used])


@pytest.mark.parametrize("tp", [2, 4])
def test_head_shards_add_up(tp: int, batch_of) -> None:
    """Partial outputs of tp devices sum to the whole; above 2 the 2 key/value heads are repeated."""
    shape, rng = TEST_SHAPES["gated_partial_rope"], np.random.default_rng([tp, 18])
    H, num_decode, lengths = shape.head_dim, *MIXES["mixed_page_edges"]
    batch = batch_of(lengths, num_decode=num_decode, num_tokens=TOKENS, num_rows=ROWS, seed=tp)
    h, w, pool = normal(rng, TOKENS, shape.hidden), draw_weights(shape, rng), draw_pool(shape, rng)
    want = attend(h, w, pool, batch, 0, shape=shape)[0]
    copies = max(1, tp // shape.num_kv_heads)
    local = AttentionShape(
        shape.hidden, shape.num_q_heads // tp, shape.num_kv_heads * copies // tp, H, shape.rope_dim,
        shape.rope_theta, qk_norm=True, zero_centered=True, output_gate=True,
    )  # fmt: skip

    def cut(x: jax.Array, part: int, dim: int) -> jax.Array:
        return jnp.split(x, tp, axis=dim)[part]

    def repeat_heads(x: jax.Array) -> jax.Array:
        return jnp.repeat(x.reshape(*x.shape[:-1], -1, H), copies, axis=-2).reshape(*x.shape[:-1], -1)

    total = jnp.zeros_like(want)
    for part in range(tp):
        mine = w | {"w_q": cut(w["w_q"], part, 1), "w_o": cut(w["w_o"], part, 0)}
        mine |= {name: cut(repeat_heads(w[name]), part, 1) for name in ("w_k", "w_v")}
        kv = jnp.concatenate([cut(repeat_heads(half), part, -1) for half in jnp.split(pool, 2, axis=-1)], axis=-1)
        total += attend(h, mine, kv, batch, 0, shape=local)[0]
    np.testing.assert_allclose(
        total[: sum(new for _, new in lengths)], want[: sum(new for _, new in lengths)], atol=TOLERANCE, rtol=0
    )


# bfloat16 rounds queries, probabilities and outputs to 2^-9 relative each; outputs here reach 1.1 and
# errors of 0.5e-2 are measured. The cache is rounded alike in both, but a difference before the rounding
# (1e-7 in float32, 2^-9 in bfloat16) can fall on two sides of an edge: one cache step in one key of a
# row, 2^-8 (bfloat16) or 2^-3 (float8) of a value that the softmax averages.
@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize(
    ("activation", "cache", "tolerance"),
    [
        (jnp.bfloat16, jnp.bfloat16, 1.5e-2),
        (jnp.bfloat16, jnp.float32, 1.5e-2),
        (jnp.bfloat16, jnp.float8_e4m3fn, 5e-2),
        (jnp.float32, jnp.bfloat16, 2e-3),
        (jnp.float32, jnp.float8_e4m3fn, 5e-2),
    ],
)
def test_narrow_dtypes_stay_close(activation, cache, tolerance: float, seed: int, batch_of) -> None:
    shape, rng, (num_decode, lengths) = (
        TEST_SHAPES["gated_partial_rope"],
        np.random.default_rng([seed, 19]),
        MIXES["continued_prefix"],
    )
    batch = batch_of(lengths, num_decode=num_decode, num_tokens=TOKENS, num_rows=ROWS, seed=seed)
    h, w = normal(rng, TOKENS, shape.hidden).astype(activation), draw_weights(shape, rng)
    w = {name: value.astype(activation) for name, value in w.items()}
    pool = draw_pool(shape, rng).astype(cache)
    assert_matches_reference(h, w, pool, batch, seed % LAYERS, shape, TOKENS, tolerance)


def test_float8_cache_saturates(batch_of) -> None:
    """float8_e4m3fn ends at 448; the plain cast would give NaN."""
    shape, rng = TEST_SHAPES["plain_gqa"], np.random.default_rng(20)
    batch = batch_of([(0, 5)], num_decode=0, num_tokens=TOKENS, num_rows=ROWS, seed=0)
    h, w = 2000 * normal(rng, TOKENS, shape.hidden), draw_weights(shape, rng)
    out, new = attend(h, w, draw_pool(shape, rng).astype(jnp.float8_e4m3fn), batch, 0, shape=shape)
    assert np.isfinite(np.asarray(out)).all()
    assert np.abs(np.asarray(new[:5], np.float32)).max() == 448
