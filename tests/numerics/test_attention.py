"""The XLA attention against its reference, and against itself over several steps.

Tolerance in float32: sums over <= 200 keys in another order, values of order 1: error about
sqrt(200) * 6e-8 * a few; 1e-4 leaves room for unlucky seeds, and a wrong key, mask, page or
position shows as an error of order 0.1.
"""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from moec.blocks.attention import block, ref, xla
from moec.blocks.attention.cost import tuning, work
from moec.blocks.attention.shapes import TEST_SHAPES, AttentionShape
from moec.blocks.core.batch import Batch, index_rows
from moec.blocks.core.declare import FieldProblem, ModelDims, NormFields
from moec.blocks.core.paged import write_kv
from moec.blocks.core.work import Collective, Degrees, Dtypes, Load, Stream

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

# Shapes whose queries see a part of their history.
IN_REACH = [name for name, shape in TEST_SHAPES.items() if shape.window or shape.chunk]


def geometry(shape: AttentionShape) -> dict[str, Any]:
    return shape.options() | {"num_pages": PAGES}


def draw_weights(shape: AttentionShape, rng: np.random.Generator) -> dict[str, jax.Array]:
    """Matrices, then gains around what leaves values as they are, then biases and sinks of the values' order."""
    N, G, H, V = shape.num_q_heads, shape.num_kv_heads, shape.head_dim, shape.value_dim
    fused = shape.gate_width if shape.gate_stored == "fused" else 0
    widths = {"q": N * (H + fused), "k": G * H} | ({} if shape.keys_as_values else {"v": G * V})
    sizes = {f"w_{name}": (shape.hidden, width) for name, width in widths.items()} | {"w_o": (N * V, shape.hidden)}
    if shape.gate_stored == "own":
        sizes["w_g"] = (shape.hidden, N * shape.gate_width)
    w = {name: rng.normal(0, size[0] ** -0.5, size) for name, size in sizes.items()}
    gains = {"head": (H, H), "full": (N * H, G * H)}.get(shape.qk_norm, ())
    for name, size in zip(("q_norm", "k_norm"), gains, strict=False):
        w[name] = rng.normal(0 if shape.norm_zero_centered else 1, 0.2, size)
    if shape.qkv_bias:
        w |= {f"b_{name}": rng.normal(0, 0.5, width) for name, width in widths.items()}
    if shape.sinks:
        w["sinks"] = rng.normal(0, 1, N)
    return {name: jnp.asarray(value, jnp.float32) for name, value in w.items()}


def draw_pool(shape: AttentionShape, rng: np.random.Generator) -> jax.Array:
    """Every page full of some request's values."""
    return normal(rng, LAYERS * PAGES, PAGE_SIZE, shape.num_kv_heads * (shape.head_dim + shape.value_dim))


def normal(rng: np.random.Generator, *size: int) -> jax.Array:
    return jnp.asarray(rng.normal(size=size), jnp.float32)


@pytest.fixture
def batch_of(make_batch) -> Callable[..., Batch]:
    return partial(make_batch, pages_per_seq=PAGES_PER_SEQ, page_size=PAGE_SIZE, num_pages=PAGES, num_slots=16)


@partial(jax.jit, static_argnames=("shape", "max_q", "q_block", "kv_block", "sum_axes"))
def attend(
    h, w, pool, batch: Batch, layer, *, shape: AttentionShape, max_q: int = TOKENS,
    q_block: int = TILES["q_block"], kv_block: int = TILES["kv_block"], sum_axes: tuple[str, ...] = (),
):  # fmt: skip
    """One layer; the layer index is traced, as in a scan over layers."""
    options = geometry(shape) | {"q_block": q_block, "kv_block": kv_block, "max_q": max_q, "sum_axes": sum_axes}
    return xla.attention(h, w, pool, batch, index_rows(batch), pool_layer=layer, **options)


rows_of = jax.jit(index_rows)


@jax.jit
def write(pool, new_TC, batch: Batch):
    """The same rows into every layer."""
    return write_kv(pool, jnp.stack([new_TC] * LAYERS), batch, index_rows(batch))


def assert_matches_reference(
    h, w, pool, batch: Batch, layer: int, shape: AttentionShape, max_q: int, tolerance: float
) -> None:
    rows = rows_of(batch)
    options = geometry(shape) | TILES | {"pool_layer": layer, "max_q": max_q}
    want, want_new = ref.attention(h, w, pool, batch, rows, **options)
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
    shape, (num_decode, lengths) = TEST_SHAPES[name], MIXES[mix]
    seed = len(name) + len(mix)
    rng = np.random.default_rng([seed, 11])
    batch = batch_of(lengths, num_decode=num_decode, num_tokens=TOKENS, num_rows=ROWS, seed=seed)
    h, w, pool = normal(rng, TOKENS, shape.hidden), draw_weights(shape, rng), draw_pool(shape, rng)
    assert_matches_reference(h, w, pool, batch, seed % LAYERS, shape, TOKENS, TOLERANCE)


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize(("name", "rows"), [("gated_partial_rope", 5), ("window_sinks_bias", 1)])
def test_decode_bucket_matches_reference(name: str, rows: int, seed: int, batch_of) -> None:
    """max_q = 1: only the decode path exists (mixed steps have it too, in all shapes); the last of 5 are padding."""
    shape, rng = TEST_SHAPES[name], np.random.default_rng([seed, 13])
    lengths = [(int(old), 1) for old in rng.integers(0, 100, max(1, rows - 2))]
    batch = batch_of(lengths, num_decode=len(lengths), num_tokens=rows, num_rows=rows, seed=seed)
    h, w, pool = normal(rng, rows, shape.hidden), draw_weights(shape, rng), draw_pool(shape, rng)
    assert_matches_reference(h, w, pool, batch, seed % LAYERS, shape, 1, TOLERANCE)


TILE_CASES = [("gated_partial_rope", 7, 152), ("window_sinks_bias", 24, 16)]


@pytest.mark.parametrize(("name", "q_block", "kv_block"), TILE_CASES)
def test_any_tiles_match_the_reference(name: str, q_block: int, kv_block: int, batch_of) -> None:
    """Blocks that end inside and beyond rows, histories of several reads, the last one short."""
    shape, rng, (num_decode, lengths) = (
        TEST_SHAPES[name],
        np.random.default_rng([q_block, 21]),
        MIXES["continued_prefix"],
    )
    lengths = [*lengths, (90, 5)]
    batch = batch_of(lengths, num_decode=num_decode, num_tokens=TOKENS, num_rows=ROWS, seed=q_block)
    h, w, pool = normal(rng, TOKENS, shape.hidden), draw_weights(shape, rng), draw_pool(shape, rng)
    options = geometry(shape) | TILES | {"pool_layer": 1, "max_q": TOKENS}
    want = ref.attention(h, w, pool, batch, rows_of(batch), **options)[0]
    got = attend(h, w, pool, batch, 1, shape=shape, q_block=q_block, kv_block=kv_block)[0]
    used = sum(new for _, new in lengths)
    np.testing.assert_allclose(np.asarray(got)[:used], np.asarray(want)[:used], atol=TOLERANCE, rtol=0)


@pytest.mark.parametrize(("page_size", "kv_block"), [(16, 512), (48, 480), (256, 512), (512, 1024)])
def test_tuned_tiles_are_whole_pages(page_size: int, kv_block: int) -> None:
    fields = block.Fields(kind="attention", num_q_heads=4, num_kv_heads=2, head_dim=8)
    load = Load(64, 8, 8, 100, 200, 56, 100, page_size, Degrees(), Dtypes(*["bfloat16"] * 6), 8, 256)
    assert tuning(fields, ModelDims(8, 8, NormFields()), {"decode": load, "mixed": load}) == {
        "q_block": 128,
        "kv_block": kv_block,
    }


DIMS = ModelDims(32, 8, NormFields())
YARN = {"kind": "yarn", "factor": 4.0, "original_max_position": 64}
SMALL = {"kind": "attention", "num_q_heads": 4, "num_kv_heads": 2, "head_dim": 8}


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"norm": {"eps": 1e-5}, "qk_norm": "head"},
        {"norm": {"eps": 1e-5}, "v_norm": "head"},
        {"qk_norm": "l2", "qk_norm_place": "after_rope", "rope": {"dim": 4, "theta": 1e4}},
        {"v_head_dim": 6, "window": 4, "sinks": True},
        {"rope": {"dim": 8, "theta": 1e4, "scaling": YARN | {"mscale": 1.0, "mscale_all_dim": 1.0}}},
    ],
)
def test_what_has_an_effect_is_accepted(changes: dict[str, Any]) -> None:
    assert block.check(block.Fields.model_validate(SMALL | changes), DIMS) == []


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        (
            {"norm": {"eps": 1e-5}},
            FieldProblem(("norm",), "norm has no effect with qk_norm 'none'", "set qk_norm: head, or remove norm"),
        ),
        (
            {"qk_norm": "head", "norm": {"kind": "layer"}},
            FieldProblem(
                ("norm",),
                "each norm of queries, keys and values is an RMS norm without bias",
                "set {kind: rms, bias: false}",
            ),
        ),
        (
            {"qk_norm": "l2", "norm": {"zero_centered": True}},
            FieldProblem(("norm", "zero_centered"), "zero_centered has no effect on a norm without gain", "remove it"),
        ),
        (
            {"qk_norm": "head", "qk_norm_place": "after_rope"},
            FieldProblem(("qk_norm_place",), "qk_norm_place has no effect without qk_norm and rope", "remove it"),
        ),
        (
            {"window": 4, "chunk": 4},
            FieldProblem(("chunk",), "window and chunk exclude each other", "remove one of them"),
        ),
        (
            {"keys_as_values": True, "v_head_dim": 4},
            FieldProblem(
                ("v_head_dim",), "keys of 8 dims cannot be values of 4", "remove v_head_dim, or keys_as_values"
            ),
        ),
        (
            {"rope": {"dim": 10, "theta": 1e4}},
            FieldProblem(("rope", "dim"), "rope dim 10 must be even and at most head_dim 8"),
        ),
        (
            {"rope": {"dim": 8, "theta": 1e4, "scaling": YARN | {"mscale_all_dim": 1.0}}},
            FieldProblem(
                ("rope", "scaling", "mscale_all_dim"),
                "mscale_all_dim has no effect without mscale where it does not scale scores",
                "remove it",
            ),
        ),
    ],
)
def test_what_has_no_effect_is_refused(changes: dict[str, Any], problem: FieldProblem) -> None:
    assert block.check(block.Fields.model_validate(SMALL | changes), DIMS) == [problem]


@pytest.mark.parametrize(("changes", "reads"), [({}, 1000), ({"window": 64}, 64), ({"chunk": 256}, 256)])
def test_cost_counts_the_keys_in_reach(changes: dict[str, Any], reads: int) -> None:
    load = Load(64, 8, 8, 1000, 1000, 56, 1000, 16, Degrees(), Dtypes(*["bfloat16"] * 6), 8, 256)
    terms = work(block.Fields.model_validate(SMALL | changes), DIMS, load)
    row_bytes = 2 * 2 * 8 * 2
    streams = {term.op: term.bytes for term in terms if isinstance(term, Stream)}
    assert streams["attend decode"] == 3 * 8 * reads * row_bytes
    assert streams["attend prefill"] == 3 * 56 / 128 * reads * row_bytes


def test_a_norm_over_all_heads_is_summed_over_devices() -> None:
    """Where heads are cut the plan counts the message, and the emitted call names the mesh axes."""
    fields = block.Fields.model_validate(SMALL | {"qk_norm": "full"})
    for tp, found in ((1, []), (2, [("attention_tp",)])):
        load = Load(64, 8, 8, 9, 9, 56, 9, 16, Degrees(tp=tp), Dtypes(*["bfloat16"] * 6), 8, 256)
        messages = [one for one in work(fields, DIMS, load) if isinstance(one, Collective)]
        assert [one.axes for one in messages if one.op == "norm heads"] == found
        assert all(one.shape == (64, 2) for one in messages if one.op == "norm heads")


class Sequence:
    """One sequence fed piece by piece beside other rows, its pages in random order."""

    def __init__(self, shape: AttentionShape, length: int, seed: int, batch_of: Callable[..., Batch]) -> None:
        rng = np.random.default_rng([seed, 15])
        self.shape, self.batch_of, self.rng = shape, batch_of, rng
        self.w, self.pool = draw_weights(shape, rng), draw_pool(shape, rng)
        self.h = np.asarray(normal(rng, length, shape.hidden))
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
        h = np.array(normal(self.rng, TOKENS, self.shape.hidden))
        h[first : first + count] = self.h[start : start + count]
        out, new = attend(h, self.w, self.pool, batch, 1, shape=self.shape)
        self.pool = write(self.pool, new, batch)
        return np.asarray(out)[first : first + count]


@pytest.mark.parametrize("pieces", [(64, 66), (1, 2, 3, 63, 61), (13, 50, 67)])
@pytest.mark.parametrize("name", ["gated_partial_rope", "interleaved_one_kv", *IN_REACH])
def test_prefill_in_pieces_equals_prefill_at_once(name: str, pieces: tuple[int, ...], batch_of) -> None:
    whole, cut = (Sequence(TEST_SHAPES[name], 130, len(pieces), batch_of) for _ in range(2))
    want = whole.feed(0, 130)
    starts = np.cumsum([0, *pieces[:-1]]).tolist()
    got = np.concatenate([cut.feed(start, count) for start, count in zip(starts, pieces, strict=True)])
    np.testing.assert_allclose(got, want, atol=TOLERANCE, rtol=0)


@pytest.mark.parametrize("name", ["gated_partial_rope", "plain_gqa", *IN_REACH])
def test_decode_steps_equal_prefill(name: str, batch_of) -> None:
    whole, stepped = (Sequence(TEST_SHAPES[name], 40, 7, batch_of) for _ in range(2))
    want = whole.feed(0, 40)
    got = np.concatenate([stepped.feed(0, 15), *(stepped.feed(t, 1, as_decode=True) for t in range(15, 40))])
    np.testing.assert_allclose(got, want, atol=TOLERANCE, rtol=0)


def test_page_order_does_not_matter(batch_of) -> None:
    """The same history under two page tables gives the same bits."""
    shape, rng = TEST_SHAPES["gated_partial_rope"], np.random.default_rng(16)
    lengths, (w, pool) = [(37, 1), (21, 30)], (draw_weights(shape, rng), draw_pool(shape, rng))
    tables = rng.permutation(np.arange(1, PAGES))[: 4 * PAGES_PER_SEQ].reshape(2, 2, PAGES_PER_SEQ)
    moved = np.array(pool).reshape(LAYERS, PAGES, *pool.shape[1:])
    moved[:, tables[1]] = moved[:, tables[0]]
    h = normal(rng, TOKENS, shape.hidden)
    outs = []
    for table, kv in zip(tables, (pool, jnp.asarray(moved).reshape(pool.shape)), strict=True):
        batch = batch_of(lengths, num_decode=1, num_tokens=TOKENS, num_rows=ROWS, seed=0, tables=table)
        outs.append(np.asarray(attend(h, w, kv, batch, 2, shape=shape)[0])[:31])
    np.testing.assert_array_equal(*outs)


@pytest.mark.parametrize("name", ["plain_gqa", *IN_REACH])
@pytest.mark.parametrize("mix", ["mixed_page_edges", "continued_prefix"])
def test_nothing_of_other_requests_is_read(mix: str, name: str, batch_of) -> None:
    """NaN in every cache entry that no query of a row sees, and in the padding tokens, changes no bit."""
    shape, rng, (num_decode, lengths) = TEST_SHAPES[name], np.random.default_rng(17), MIXES[mix]
    batch = batch_of(lengths, num_decode=num_decode, num_tokens=TOKENS, num_rows=ROWS, seed=1)
    h, w, pool = normal(rng, TOKENS, shape.hidden), draw_weights(shape, rng), draw_pool(shape, rng)
    mine = np.zeros((PAGES, PAGE_SIZE), bool)
    for row, (old, _) in enumerate(lengths):
        position = np.arange(oldest_seen(shape, old), old)
        mine[np.asarray(batch.page_table)[row, position // PAGE_SIZE], position % PAGE_SIZE] = True
    assert mine.any() == (shape.window != 1)  # a window of 1 sees nothing cached
    dirty = np.where(np.tile(mine, (LAYERS, 1))[..., None], pool, np.nan)
    used = sum(new for _, new in lengths)
    padded = np.where(np.arange(TOKENS)[:, None] < used, h, np.nan)
    clean, got = (np.asarray(attend(*given, batch, 1, shape=shape)[0]) for given in ((h, w, pool), (padded, w, dirty)))
    np.testing.assert_array_equal(got[:used], clean[:used])


def oldest_seen(shape: AttentionShape, position: int) -> int:
    """The first position a query at `position` sees."""
    if shape.window is not None:
        return max(position - shape.window + 1, 0)
    return position // shape.chunk * shape.chunk if shape.chunk is not None else 0


@pytest.mark.parametrize(("reach", "page_size"), [(1, 1), (2, 1), (90, 1), (1, 8), (8, 8), (9, 8), (10, 8), (1000, 8)])
def test_pages_before_the_window_are_left_out(reach: int, page_size: int) -> None:
    """What is walked: the pages from the oldest key in reach to the last cached one, and never more than fit there."""
    rules = xla._AttnScoreRules(1.0, None, reach, None)
    start = np.arange(0, 20 * page_size)
    table = np.arange(1, 1 + 20 * len(start)).reshape(len(start), 20)
    oldest = np.maximum(start - reach + 1, 0)
    skip = jax.jit(xla._attn_skip, static_argnums=(3, 4))
    pages, cached, skipped = map(np.asarray, skip(table, start, oldest, page_size, rules))
    for row, position in enumerate(start):
        needed = table[row, oldest[row] // page_size : -(-position // page_size)]
        walked = pages[row, : -(-cached[row] // page_size)]
        np.testing.assert_array_equal(walked, needed)
        assert skipped[row] == oldest[row] // page_size * page_size and skipped[row] + cached[row] == max(
            position, skipped[row]
        )


def local_weights(
    w: dict[str, jax.Array], shape: AttentionShape, tp: int, part: int, copies: int
) -> dict[str, jax.Array]:
    """One device's weights: everything per query head or key/value head is cut, the latter repeated first."""

    def cut(x: jax.Array, dim: int, repeat: int = 1) -> jax.Array:
        heads = shape.num_kv_heads if repeat > 1 else 1
        parts = jnp.split(x, heads, axis=dim)
        return jnp.split(jnp.concatenate([one for one in parts for _ in range(repeat)], axis=dim), tp, axis=dim)[part]

    full = shape.qk_norm == "full"
    dims = {"w_q": 1, "w_g": 1, "w_o": 0, "b_q": 0, "sinks": 0} | ({"q_norm": 0} if full else {})
    kv_dims = {"w_k": 1, "w_v": 1, "b_k": 0, "b_v": 0} | ({"k_norm": 0} if full else {})
    mine = {name: cut(w[name], dim) for name, dim in dims.items() if name in w}
    return w | mine | {name: cut(w[name], dim, copies) for name, dim in kv_dims.items() if name in w}


def local_pool(pool: jax.Array, shape: AttentionShape, tp: int, part: int, copies: int) -> jax.Array:
    """Pages of one device: its key heads, then its value heads."""
    keys, values = jnp.split(pool, [shape.num_kv_heads * shape.head_dim], axis=-1)
    mine = []
    for half in (keys, values):
        heads = jnp.repeat(half.reshape(*half.shape[:2], shape.num_kv_heads, -1), copies, axis=2)
        mine.append(jnp.split(heads, tp, axis=2)[part].reshape(*half.shape[:2], -1))
    return jnp.concatenate(mine, axis=-1)


# Degrees that divide the query heads, and divide the key/value heads or are a multiple of them.
TP_CASES = [
    ("window_sinks_bias", 2),
    ("window_wide_values", 3),
    ("full_norm_keys_as_values", 4),
]


@pytest.mark.parametrize(("name", "tp"), TP_CASES)
def test_head_shards_add_up(name: str, tp: int, batch_of) -> None:
    """Partial outputs of tp devices sum to the whole; key/value heads are repeated where there are fewer than tp."""
    shape, rng = TEST_SHAPES[name], np.random.default_rng([tp, 18])
    num_decode, lengths = MIXES["mixed_page_edges"]
    batch = batch_of(lengths, num_decode=num_decode, num_tokens=TOKENS, num_rows=ROWS, seed=tp)
    h, w, pool = normal(rng, TOKENS, shape.hidden), draw_weights(shape, rng), draw_pool(shape, rng)
    want = attend(h, w, pool, batch, 0, shape=shape)[0]
    copies = max(1, tp // shape.num_kv_heads)
    local = replace(shape, num_q_heads=shape.num_q_heads // tp, num_kv_heads=shape.num_kv_heads * copies // tp)
    parts = [
        (local_weights(w, shape, tp, part, copies), local_pool(pool, shape, tp, part, copies)) for part in range(tp)
    ]
    if shape.qk_norm == "full":  # the only one that speaks to the other devices
        one = partial(attend, shape=local, sum_axes=("heads",))
        stacked = jax.tree.map(lambda *x: jnp.stack(x), *parts)
        outs = jax.vmap(lambda part: one(h, *part, batch, 0)[0], axis_name="heads")(stacked)
    else:
        outs = [attend(h, *part, batch, 0, shape=local)[0] for part in parts]

    used = sum(new for _, new in lengths)
    np.testing.assert_allclose(sum(map(np.asarray, outs))[:used], np.asarray(want)[:used], atol=TOLERANCE, rtol=0)


# bfloat16 rounds queries, probabilities and outputs to 2^-9 relative each; outputs here reach 1.1 and
# errors of 0.5e-2 are measured. The cache is rounded alike in both, but a difference before the rounding
# (1e-7 in float32, 2^-9 in bfloat16) can fall on two sides of an edge: one cache step in one key of a
# row, 2^-8 (bfloat16) or 2^-3 (float8) of a value that the softmax averages.
@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize(
    ("activation", "cache", "tolerance"),
    [
        (jnp.bfloat16, jnp.bfloat16, 1.5e-2),
        (jnp.bfloat16, jnp.float32, 1.5e-2),
        (jnp.bfloat16, jnp.float8_e4m3fn, 5e-2),
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
    shape, rng = TEST_SHAPES["gated_partial_rope"], np.random.default_rng(20)
    batch = batch_of([(0, 5)], num_decode=0, num_tokens=TOKENS, num_rows=ROWS, seed=0)
    h, w = 2000 * normal(rng, TOKENS, shape.hidden), draw_weights(shape, rng)
    out, new = attend(h, w, draw_pool(shape, rng).astype(jnp.float8_e4m3fn), batch, 0, shape=shape)
    assert np.isfinite(np.asarray(out)).all()
    assert np.abs(np.asarray(new, np.float32)[:5]).max() == 448
