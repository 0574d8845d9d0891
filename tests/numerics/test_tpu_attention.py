"""The ragged attention kernels in TPU interpret mode against the reference and the XLA variant, and their cost model.

The interpreter's memory starts as NaN, every pool entry that is no cached token is NaN too, and page tables name other
rows' pages behind a row's end: reading anything that is not a row's own shows.

Tolerances, relative to the largest output. Float32: 1e-4, as in test_attention.py (3e-7 is measured). bfloat16: the
XLA variant rounds queries, probabilities and outputs to 8 bits where the kernel does, in another order: 1e-2. A float8
cache is compared with the XLA variant over the same cache, so the cache's own rounding is in both. What the kernel adds
is that of two float8 terms: none for queries (a bfloat16 is their sum, test_two_float8_terms_hold_a_bfloat16), and
2^-8 of each probability or 2^-17 of the largest, whichever is more: no more than bfloat16's, so 1e-2 again.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from types import MappingProxyType
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import tpu as pltpu

from moec.blocks.attention import cost, ref, xla
from moec.blocks.attention.block import Fields
from moec.blocks.attention.tpu_cost import refuse, shape_key, tuning, vmem_bytes, work
from moec.blocks.attention.tpu_ragged import attention_ragged
from moec.blocks.attention.tpu_ragged_kernel import RpaShape, rpa_split
from moec.blocks.attention.tpu_ragged_prefill import rpa_prefill
from moec.blocks.core.batch import Batch, index_rows
from moec.blocks.core.chip import ChipLimits
from moec.blocks.core.declare import ModelDims, NormFields
from moec.blocks.core.rope_spec import Rope
from moec.blocks.core.work import Degrees, Dtypes, Gemm, Load, Stream

CHIP = ChipLimits(
    vmem_bytes=64 << 20, lanes=128, sublanes=8, mxu_dtypes=("bfloat16", "float8_e4m3fn"), smem_bytes=1 << 20
)
LAYERS, LAYER, HIDDEN = 2, 1, 32
TOLERANCE = {"float32": 1e-4, "bfloat16": 1e-2}
TILES = {"q_block": 64, "kv_block": 128, "decode_block": 256, "decode_tail": 128, "decode_slots": 4}

# Cached tokens of decode rows: none, tile, page, step and block edges, more blocks than the ring has slots.
DECODE = (0, 1, 31, 32, 255, 256, 600, 1400)
# (cached, new): decode rows, then a first chunk, chunks of several items behind histories, a chunk of one token.
MIXED = ((40, 1), (0, 1), (13, 130), (0, 5), (100, 64), (33, 1))


def draw(heads: int, kv_heads: int, dim: int, dtype: Any, rng: np.random.Generator) -> dict[str, jax.Array]:
    widths = {"w_q": heads * dim, "w_k": kv_heads * dim, "w_v": kv_heads * dim}
    w = {name: rng.normal(0, HIDDEN**-0.5, (HIDDEN, width)) for name, width in widths.items()}
    w |= {"w_o": rng.normal(0, (heads * dim) ** -0.5, (heads * dim, HIDDEN)), "sinks": rng.normal(0, 1, heads)}
    return {name: jnp.asarray(value, dtype) for name, value in w.items()}


def cached_rows(batch: Batch, lengths: Sequence[tuple[int, int]], page_size: int) -> tuple[np.ndarray, np.ndarray]:
    """Page and row of every cached token, and of every new one, in the batch's order: each [2, tokens]."""
    table, places = np.asarray(batch.page_table), ([], [])
    for row, (old, new) in enumerate(lengths):
        for found, position in zip(places, (np.arange(old), np.arange(old, old + new)), strict=True):
            found.append(np.stack([table[row, position // page_size], position % page_size]))
    old, new = (np.concatenate(found, axis=1) for found in places)
    return old, new


def check(
    make_batch: Callable[..., Batch], lengths: Sequence[tuple[int, int]], num_decode: int, *, page_size: int,
    cache: str, activation: str, heads: int = 4, kv_heads: int = 2, dim: int = 128, tokens: int, rows: int, max_q: int,
    chip: ChipLimits = CHIP, tiles: Mapping[str, int] = MappingProxyType({}), copies: Any = "on_wait", **options: Any,
) -> None:  # fmt: skip
    """Outputs and every sequence's cache rows after one layer; the other layer's pages stay bit for bit."""
    rng = np.random.default_rng([page_size, heads, max_q, len(options)])
    pages = max(2, -(-max(sum(pair) for pair in lengths) // page_size) + 1)
    num_pages = 1 + sum(-(-sum(pair) // page_size) for pair in lengths)
    batch = make_batch(
        lengths, num_decode=num_decode, num_tokens=tokens, num_rows=rows, pages_per_seq=pages, page_size=page_size,
        num_pages=num_pages, num_slots=rows + 1, seed=len(lengths),
    )  # fmt: skip
    w, h = draw(heads, kv_heads, dim, activation, rng), jnp.asarray(rng.normal(size=(tokens, HIDDEN)), activation)
    old, new = cached_rows(batch, lengths, page_size)
    clean = np.zeros((LAYERS, num_pages, page_size, 2 * kv_heads * dim), np.float32)
    clean[:, *old] = rng.normal(size=(LAYERS, old.shape[1], clean.shape[-1]))
    dirty = np.full_like(clean, np.nan)
    dirty[:, *old] = clean[:, *old]
    clean, dirty = (jnp.asarray(x.reshape(-1, *x.shape[2:])).astype(cache) for x in (clean, dirty))
    common = {"pool_layer": LAYER, "num_pages": num_pages, "num_q_heads": heads, "num_kv_heads": kv_heads}
    common |= {"head_dim": dim, "scale": dim**-0.5, "max_q": max_q, "rope": Rope(64, 1e4)} | options

    index = index_rows(batch)
    if activation == cache == "float32":
        want, want_new = ref.attention(h, w, clean, batch, index, q_block=1, kv_block=1, **common)
    else:
        reference = jax.jit(partial(xla.attention, q_block=32, kv_block=2 * page_size, **common))
        want, want_new = reference(h, w, clean, batch, index)
    with pltpu.force_tpu_interpret_mode(pltpu.InterpretParams(dma_execution_mode=copies)):
        kernel = jax.jit(partial(attention_ragged, chip=chip, **(TILES | dict(tiles)), **common))
        got, pool = kernel(h, w, dirty, batch, index)
        got, pool = np.asarray(got, np.float32), np.asarray(pool)

    used = new.shape[1]
    want = np.asarray(want, np.float32)[:used]
    assert np.isfinite(got).all() and (got[used:] == 0).all()
    np.testing.assert_allclose(got[:used], want, atol=TOLERANCE[activation] * np.abs(want).max(), rtol=0)
    before, after = (np.asarray(x).reshape(LAYERS, num_pages, page_size, -1) for x in (dirty, pool))
    np.testing.assert_array_equal(after[0].view(np.uint8), before[0].view(np.uint8))
    np.testing.assert_array_equal(after[LAYER, *old], before[LAYER, *old])
    wrote, want_new = (np.asarray(x, np.float32) for x in (after[LAYER, *new], want_new))
    np.testing.assert_allclose(wrote, want_new[:used], atol=1e-5, rtol=0)


def check_decode(make_batch: Callable[..., Batch], cached: Sequence[int], **options: Any) -> None:
    """A decode-only bucket with two padding rows."""
    size = len(cached) + 2
    lengths = [(old, 1) for old in cached]
    check(make_batch, lengths, len(cached), tokens=size, rows=size, max_q=1, **options)


def check_mixed(make_batch: Callable[..., Batch], lengths: Sequence[tuple[int, int]], num_decode: int, **options: Any):
    """A bucket with padding rows and padding tokens."""
    tokens = sum(new for _, new in lengths) + 9
    check(make_batch, lengths, num_decode, tokens=tokens, rows=len(lengths) + 1, max_q=130, **options)


def test_decode_with_a_float8_cache(make_batch) -> None:
    """The longest row has more blocks than the ring has slots; copies land as early as they may."""
    options = {"page_size": 32, "cache": "float8_e4m3fn", "activation": "bfloat16", "copies": "eager"}
    check_decode(make_batch, (0, 31, 256, 800), tiles={"decode_block": 128}, **options)


@pytest.mark.slow
def test_mixed_rows_in_float32(make_batch) -> None:
    """Window that ends inside tiles, sinks; a decode row, a chunk with history and one without."""
    lengths = ((40, 1), (13, 70), (0, 5))
    options = {"page_size": 16, "cache": "float32", "activation": "float32", "window": 37, "sinks": True}
    check_mixed(make_batch, lengths, 1, **options)


DECODE_CASES = {
    "bf16_window_pages_of_16": {"page_size": 16, "cache": "bfloat16", "activation": "bfloat16", "window": 300},
    "f32_chunk_sinks": {
        "page_size": 128, "cache": "float32", "activation": "float32", "chunk": 100, "sinks": True, "copies": "eager",
    },
    "fp8_softcap_odd_group": {
        "page_size": 64, "cache": "float8_e4m3fn", "activation": "bfloat16", "softcap": 5.0, "sinks": True,
        "heads": 10, "kv_heads": 1,
    },
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("name", DECODE_CASES)
def test_decode(name: str, make_batch) -> None:
    check_decode(make_batch, DECODE, **DECODE_CASES[name])


@pytest.mark.slow
def test_mixed_rows_with_a_float8_cache(make_batch) -> None:
    options = {"page_size": 32, "cache": "float8_e4m3fn", "activation": "bfloat16", "chunk": 50, "copies": "eager"}
    check_mixed(make_batch, MIXED, 2, **options)


def test_two_float8_terms_hold_a_bfloat16() -> None:
    """Every bfloat16 in [2^-2, 256) exactly; a float32 within 2^-8 of it, or one smallest float8 (both terms round)."""
    every = np.arange(1 << 15, dtype=np.uint16).view(jnp.bfloat16).astype(np.float32)
    every = every[(every >= 0.25) & (every < 256)].reshape(8, -1)
    both = np.asarray(rpa_split(jnp.asarray(np.concatenate([every, -every]))), np.float32)
    np.testing.assert_array_equal(both[:16] + both[16:], np.concatenate([every, -every]))
    p = np.exp2(np.random.default_rng(1).uniform(-20, 8, (8, 4096))).astype(np.float32)
    both = np.asarray(rpa_split(jnp.asarray(p)), np.float32)
    assert (np.abs(both[:8] + both[8:] - p) <= np.maximum(p * 2.0**-8, 2.0**-9)).all()


DIMS = ModelDims(4096, 8, NormFields())
FLAGSHIP = {"kind": "attention", "num_q_heads": 32, "num_kv_heads": 2, "head_dim": 256}


def load(
    cache: str = "float8_e4m3fn", activation: str = "bfloat16", page_size: int = 256, context: float = 8192,
    prefill: float = 0, seqs: int = 64, chip: ChipLimits = CHIP, tp: int = 1, pages_per_seq: int = 64,
) -> Load:  # fmt: skip
    dtypes = Dtypes(activation, "bfloat16", "bfloat16", cache, "float32", "bfloat16")
    tokens = int(seqs + prefill)
    return Load(
        tokens, seqs, seqs, context, 2 * context, prefill, context, page_size, Degrees(tp=tp), dtypes, 8, 256, 128,
        chip, pages_per_seq=pages_per_seq,
    )  # fmt: skip


REFUSED = {
    "head_dim 64: the kernels take multiples of 128": ({"head_dim": 64}, {}),
    "v_head_dim 128": ({"v_head_dim": 128}, {}),
    "page size 16: the kernels take multiples of 32 with a cache in float8_e4m3fn": ({}, {"page_size": 16}),
    "cache in float8_e5m2": ({}, {"cache": "float8_e5m2"}),
    "activations in float16": ({}, {"activation": "float16"}),
    # Contexts as they are, in a table with room for 131,072 tokens a row.
    "page tables of 1048576 bytes: the kernels hold 917504": ({}, {"page_size": 32, "pages_per_seq": 4096}),
    "page tables of 16384 bytes: the kernels hold 8192": ({}, {"chip": replace(CHIP, smem_bytes=136 << 10)}),
    "bytes of vector memory: the chip has 4194304": ({}, {"chip": replace(CHIP, vmem_bytes=4 << 20)}),
    "memory tiles of 1 x 1 values": ({}, {"chip": ChipLimits(0, 1, 1, ())}),
}  # fmt: skip


@pytest.mark.parametrize("reason", REFUSED)
def test_what_the_kernels_do_not_take_is_refused(reason: str) -> None:
    changes, options = REFUSED[reason]
    found = refuse(Fields(**(FLAGSHIP | changes)), DIMS, load(**options))
    assert len(found) == 1 and reason in found[0]


@pytest.mark.parametrize("page_size", [16, 48, 256, 512])
@pytest.mark.parametrize("cache", ["bfloat16", "float32", "float8_e4m3fn"])
@pytest.mark.parametrize("changes", [{}, {"window": 128}, {"num_q_heads": 64, "num_kv_heads": 64}])
def test_tiles_are_legal_and_fit(changes: dict[str, int], cache: str, page_size: int) -> None:
    fields, given = Fields(**(FLAGSHIP | changes)), load(cache=cache, page_size=page_size, prefill=960)
    tiles = tuning(fields, DIMS, {"mixed": given})
    assert tiles["decode_block"] % page_size == tiles["kv_block"] % page_size == 0
    assert tiles["decode_block"] % tiles["decode_tail"] == tiles["decode_tail"] % 128 == tiles["kv_block"] % 128 == 0
    assert vmem_bytes(fields, DIMS, given) <= CHIP.vmem_bytes or refuse(fields, DIMS, given)


@pytest.mark.parametrize("tokens", [5, 64, 1024])
@pytest.mark.parametrize("heads", [(32, 2), (32, 32), (24, 1), (64, 1), (640, 1)])
def test_items_of_a_chunk_are_whole_tiles_of_the_largest_step(heads: tuple[int, int], tokens: int) -> None:
    """Heads of one key/value head in whole tiles of 16; items of 64 tokens, or fewer where no step has as many."""
    fields = Fields(**FLAGSHIP | {"num_q_heads": heads[0], "num_kv_heads": heads[1]})
    loads = {name: replace(load(prefill=tokens), tokens=size) for name, size in (("decode", 4), ("mixed", tokens))}
    tile = max(256 // (-(-heads[0] // heads[1] // 16) * 16), 1)
    found = tuning(fields, DIMS, loads)["q_block"]
    assert found % tile == 0 and found - tile < min(tokens, 64) <= found


def test_items_that_are_no_whole_tiles_are_not_taken() -> None:
    """With 16 queries of each key/value head, 16 tokens are multiplied at a time."""
    shape = RpaShape(
        num_kv_heads=2, group=16, head_dim=128, page_size=16, pages_per_seq=2, block=128, slots=2, tail=128,
        tile_rows=16, split=False, window=None, chunk=None, softcap=None,
    )  # fmt: skip
    q, pool = jnp.zeros((64, 2, 16, 128), jnp.bfloat16), jnp.zeros((2, 16, 512), jnp.bfloat16)
    nothing: Any = None
    with pytest.raises(AssertionError, match="20 tokens in tiles of 16"):
        rpa_prefill(
            q, nothing, None, pool, nothing, nothing, nothing, 1.0, shape=shape, q_block=20, chip=CHIP
        )  # fmt: skip


def test_flagship_is_taken_with_blocks_of_two_mebibytes() -> None:
    fields = Fields(**FLAGSHIP)
    for cache, block in (("float8_e4m3fn", 2048), ("bfloat16", 1024)):
        given = load(cache=cache, prefill=960)
        assert refuse(fields, DIMS, given) == [] and tuning(fields, DIMS, {"": given})["decode_block"] == block
    cut = "q_heads=4,kv_heads=1,head_dim=256,page=256,kv=float8_e4m3fn,reach=all"
    assert shape_key(fields, DIMS, load(tp=8)).partition(",")[2] == cut


def test_decode_reads_each_key_once() -> None:
    """Bytes grow with the rows' average, not with the longest; the XLA variant reads a copy twice more."""
    fields, row = Fields(**FLAGSHIP), 2 * 2 * 256

    def read(module: Any, context: float) -> float:
        terms = module(fields, DIMS, load(context=context))
        return sum(term.bytes for term in terms if isinstance(term, Stream) and term.op == "attend decode")

    assert read(work, 8192) == 64 * row * (8192 + 128 + 32)
    assert read(work, 4096) < 0.52 * read(work, 8192) < read(cost.work, 8192) / 5
    ops = {term.op for term in work(fields, DIMS, load())}
    assert "attend prefill" not in ops and "write cache" not in ops
    assert {"project in", "attend decode", "project out"} <= ops
    mixed = work(fields, DIMS, load(prefill=960))
    assert sum(term.count for term in mixed if isinstance(term, Gemm) and term.op == "attend prefill") == 4
