"""The ragged latent-attention kernel in TPU interpret mode against the XLA variant and the float32 reference.

Tolerances are shares of the output's largest value. float32, 1e-4: the same sums in another order, as in test_mla.py.
bfloat16, 1e-2: both sides round latent queries, probabilities and means to 2^-9 each, at other places; with
independent errors of 2^-9 / sqrt(3) in a handful of places that is 3e-3 of a typical value, and the largest of some
thousand outputs is a few times a typical one. float8 pool, 1e-2 as well: the kernel and the XLA variant read the same
rounded rows and widen them exactly, so that quantisation itself adds nothing. Against the reference with an exact
cache a float8 row differs by a relative 2^-4 at most per value (3 mantissa bits): scores s then move by |ds| <=
2^-4 |q||k| scale and values by 2^-4 |v|, so weights by e^(2 ds) - 1.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import tpu as pltpu

from moec.blocks.core.batch import Batch, index_rows
from moec.blocks.core.chip import ChipLimits
from moec.blocks.core.declare import ModelDims, NormFields
from moec.blocks.core.paged import write_kv
from moec.blocks.core.rope_spec import Rope
from moec.blocks.core.work import Degrees, Dtypes, Load, Stream
from moec.blocks.mla import block, ref, tpu_cost, xla
from moec.blocks.mla.tpu_ragged import mla_ragged

CHIP = ChipLimits(
    vmem_bytes=64 << 20, lanes=128, sublanes=8, mxu_dtypes=("bfloat16", "float8_e4m3fn"), smem_bytes=1 << 20
)
DIMS = ModelDims(7168, 1024, NormFields())
LAYERS, PAGES, PAGES_PER_SEQ, ROWS = 2, 48, 16, 8
HIDDEN, LATENT, ROPE, NOPE, VALUE = 48, 128, 24, 16, 20
TILES = {"decode_keys": 128, "prefill_keys": 128, "prefill_rows": 64, "buffers": 3}

# (cached, new) per row; the first num_decode rows are decode rows. 128 keys are a step, 16 or 32 a page and a group.
MIXES = {
    "page_edges": (3, [(16, 1), (15, 1), (17, 1), (0, 31), (0, 33)]),
    "continued_prefix": (1, [(130, 1), (13, 130), (32, 20), (5, 3)]),
    "one_token_rows": (2, [(0, 1), (127, 1), (0, 1), (128, 1), (31, 2)]),
}


def _weights(heads: int, rng: np.random.Generator) -> dict[str, jax.Array]:
    sizes = {
        "w_q": (HIDDEN, heads * (NOPE + ROPE)), "w_kv_a": (HIDDEN, LATENT + ROPE), "w_o": (heads * VALUE, HIDDEN)
    }  # fmt: skip
    w = {name: rng.normal(0, size[0] ** -0.5, size) for name, size in sizes.items()}
    w["w_kv_b"] = rng.normal(0, LATENT**-0.5, (heads * (NOPE + VALUE), LATENT))
    w["kv_a_norm"] = rng.normal(1, 0.2, LATENT)
    return {name: jnp.asarray(value, jnp.float32) for name, value in w.items()}


def _options(heads: int) -> dict[str, Any]:
    return {
        "num_pages": PAGES, "num_heads": heads, "kv_lora_rank": LATENT, "qk_nope_head_dim": NOPE, "v_head_dim": VALUE,
        "norm_eps": 1e-6, "scale": (NOPE + ROPE) ** -0.5, "rope_spec": Rope(ROPE, 1e4, "interleaved"),
    }  # fmt: skip


@contextmanager
def _interpreted() -> Iterator[None]:
    """Copies start late and uninitialised memory is NaN, so that a missing wait or mask shows."""
    with pltpu.force_tpu_interpret_mode(
        pltpu.InterpretParams(dma_execution_mode="on_wait", uninitialized_memory="nan")
    ):
        yield


# Most of a test is compiling what interprets the kernel, which then runs once.
_QUICK = {"xla_backend_optimization_level": 0}


@partial(jax.jit, static_argnames=("heads", "max_q", "tiles"), compiler_options=_QUICK)
def _ragged(h, w, pool, batch: Batch, layer, *, heads: int, max_q: int, tiles: tuple[tuple[str, int], ...]):
    options = _options(heads) | dict(tiles)
    return mla_ragged(h, w, pool, batch, index_rows(batch), pool_layer=layer, max_q=max_q, chip=CHIP, **options)


@partial(jax.jit, static_argnames=("heads", "max_q", "page_size"), compiler_options=_QUICK)
def _expected(h, w, pool, batch: Batch, layer, *, heads: int, max_q: int, page_size: int):
    tiles = {"q_block": 64, "kv_block": 2 * page_size}
    rows = index_rows(batch)
    return xla.mla(h, w, pool, batch, rows, pool_layer=layer, max_q=max_q, **_options(heads), **tiles)


def _case(
    make_batch: Callable[..., Batch], mix: tuple[int, list[tuple[int, int]]], *, heads: int, tokens: int,
    page_size: int, seed: int, rows: int = ROWS,
) -> tuple[jax.Array, dict[str, jax.Array], np.ndarray, Batch]:  # fmt: skip
    """Inputs, weights, a pool with NaN wherever no row of the batch has history, and the batch."""
    num_decode, lengths = mix
    rng = np.random.default_rng([seed, 31])
    batch = make_batch(
        lengths, num_decode=num_decode, num_tokens=tokens, num_rows=rows, pages_per_seq=PAGES_PER_SEQ,
        page_size=page_size, num_pages=PAGES, num_slots=rows + 2, seed=seed,
    )  # fmt: skip
    pool = np.full((LAYERS, PAGES, page_size, LATENT + 128), np.nan, np.float32)
    for row, (old, _) in enumerate(lengths):
        position = np.arange(old)
        at = np.asarray(batch.page_table)[row, position // page_size], position % page_size
        pool[:, at[0], at[1], : LATENT + ROPE] = rng.normal(size=(LAYERS, old, LATENT + ROPE))
    h = rng.normal(size=(tokens, HIDDEN))
    h[sum(new for _, new in lengths) :] = np.nan
    return jnp.asarray(h, jnp.float32), _weights(heads, rng), pool.reshape(-1, *pool.shape[2:]), batch


def _assert_matches(
    make_batch: Callable[..., Batch], mix: tuple[int, list[tuple[int, int]]], *, heads: int, tokens: int, max_q: int,
    tolerance: float, page_size: int = 16, activation: Any = jnp.float32, cache: Any = jnp.float32, seed: int = 0,
    rows: int = ROWS, tiles: dict[str, int] = TILES,
) -> None:  # fmt: skip
    """Outputs against the XLA variant; the pool against write_kv of its rows, all other entries untouched."""
    h, w, pool, batch = _case(
        make_batch, mix, heads=heads, tokens=tokens, page_size=page_size, seed=seed, rows=rows
    )  # fmt: skip
    h, pool = h.astype(activation), jnp.asarray(pool).astype(cache)
    w, layer = {name: value.astype(activation) for name, value in w.items()}, seed % LAYERS
    want, new = _expected(h, w, pool, batch, layer, heads=heads, max_q=max_q, page_size=page_size)
    with _interpreted():
        got, got_pool = _ragged(
            h, w, pool, batch, layer, heads=heads, max_q=max_q, tiles=tuple(sorted(tiles.items()))
        )  # fmt: skip
    used = sum(count for _, count in mix[1])
    got, want = np.asarray(got, np.float32), np.asarray(want, np.float32)
    assert np.abs(got[:used] - want[:used]).max() <= tolerance * np.abs(want[:used]).max()
    np.testing.assert_array_equal(got[used:], 0)
    _assert_pool(got_pool, pool, new, batch, layer, mix[1], page_size)


def _assert_pool(
    got: jax.Array, old: jax.Array, new: jax.Array, batch: Batch, layer: int, lengths: list[tuple[int, int]], size: int
) -> None:
    """Every row's tokens hold what write_kv would leave; other rows' pages and other layers keep every bit."""
    layered = old.reshape(LAYERS, PAGES, size, -1)
    want = np.asarray(write_kv(layered[layer], new[None], batch, index_rows(batch)), np.float32)
    found = np.asarray(got, np.float32).reshape(LAYERS, PAGES, size, -1)
    mine = np.zeros((PAGES, size), bool)
    touched = np.zeros(PAGES, bool)
    for row, (start, count) in enumerate(lengths):
        position = np.arange(start + count)
        page = np.asarray(batch.page_table)[row, position // size]
        mine[page, position % size] = True
        touched[page[start:]] = True
    np.testing.assert_array_equal(found[layer][mine][:, : LATENT + ROPE], want[mine][:, : LATENT + ROPE])
    np.testing.assert_array_equal(found[layer][~touched], np.asarray(layered, np.float32)[layer][~touched])
    np.testing.assert_array_equal(found[1 - layer], np.asarray(layered, np.float32)[1 - layer])


@pytest.mark.parametrize("lengths", [[(0, 1), (127, 1), (128, 1), (15, 1), (16, 1), (200, 1)], [(5, 1)]])
def test_decode_bucket(lengths: list[tuple[int, int]], make_batch) -> None:
    """One kernel, rows of one token to several steps; the last rows are padding. Heads fill no tile."""
    _assert_matches(make_batch, (len(lengths), lengths), heads=3, tokens=7, rows=7, max_q=1, tolerance=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("mix", MIXES)
def test_mixed_bucket_float32(mix: str, make_batch) -> None:
    seed = [*MIXES].index(mix)
    _assert_matches(make_batch, MIXES[mix], heads=3, tokens=160, max_q=160, tolerance=1e-4, seed=seed)


def test_chunk_behind_history(make_batch) -> None:
    """A decode row and two chunks, one of which starts inside a page; then one chunk that fills the batch, so that the
    last block of queries is read from an earlier token on."""
    same: dict[str, Any] = {"heads": 3, "tokens": 21, "max_q": 21, "tolerance": 1e-4}
    _assert_matches(make_batch, (1, [(40, 1), (21, 12), (0, 7)]), **same)
    _assert_matches(make_batch, (0, [(3, 21)]), **same)


@pytest.mark.slow
@pytest.mark.parametrize("cache", [jnp.bfloat16, jnp.float8_e4m3fn])
def test_mixed_bucket_narrow(cache: Any, make_batch) -> None:
    _assert_matches(
        make_batch, MIXES["continued_prefix"], heads=16, tokens=160, max_q=160, tolerance=1e-2, page_size=32,
        activation=jnp.bfloat16, cache=cache, tiles=TILES | {"prefill_rows": 256},
    )  # fmt: skip


@pytest.mark.slow
def test_decode_matches_the_float32_reference(make_batch) -> None:
    """ref.py writes every head's keys and values out; a whole page of 64 rows, four buffers."""
    lengths = [(0, 1), (63, 1), (64, 1), (300, 1)]
    h, w, pool, batch = _case(make_batch, (4, lengths), heads=8, tokens=4, page_size=64, seed=3, rows=4)
    options = _options(8) | {"pool_layer": 1, "max_q": 1}
    want, _ = ref.mla(h, w, jnp.asarray(pool), batch, index_rows(batch), q_block=1, kv_block=128, **options)
    with _interpreted():
        tiles = TILES | {"decode_keys": 256, "buffers": 4}
        got, _ = _ragged(
            h, w, jnp.asarray(pool), batch, 1, heads=8, max_q=1, tiles=tuple(sorted(tiles.items()))
        )  # fmt: skip
    np.testing.assert_allclose(np.asarray(got), np.asarray(want), atol=1e-4 * np.abs(want).max(), rtol=0)


def _fields(**more: Any) -> block.Fields:
    sizes = {"kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128}
    return block.Fields(**{"kind": "mla", "num_heads": 128, "q_lora_rank": 1536} | sizes | more)


def _load(kv: str = "bfloat16", **more: Any) -> Load:
    given: dict[str, Any] = {
        "tokens": 64, "seqs": 64, "decode_rows": 64, "decode_context": 4096, "decode_longest": 8192,
        "prefill_tokens": 0, "prefill_context": 0, "page_size": 256, "degrees": Degrees(), "row_tile": 16,
        "row_full": 256, "lanes": 128, "chip": CHIP, "pages_per_seq": 32,
    }  # fmt: skip
    return Load(**given | more, dtypes=Dtypes("bfloat16", "bfloat16", "bfloat16", kv, "bfloat16", "bfloat16"))


@pytest.mark.parametrize(
    ("fields", "load", "reason"),
    [
        ({"kv_lora_rank": 448}, {}, "kv_lora_rank 448: the kernels take multiples of 128"),
        ({}, {"page_size": 16, "kv": "float8_e4m3fn"}, "page size 16"),
        ({}, {"page_size": 24}, "page size 24"),
        ({}, {"pages_per_seq": 8192}, "page tables of 2097152 bytes: the kernels hold 917504 in scalar memory"),
        ({}, {"chip": replace(CHIP, vmem_bytes=8 << 20)}, "bytes of vector memory: the chip has"),
        ({}, {"kv": "int8"}, "cache in int8"),
        ({}, {"chip": replace(CHIP, lanes=1)}, "memory rows of 1 values"),
    ],
)
def test_refusals_name_the_rule(fields: dict[str, Any], load: dict[str, Any], reason: str) -> None:
    (found,) = tpu_cost.refuse(_fields(**fields), DIMS, _load(**load))
    assert reason in found


@pytest.mark.parametrize("page_size", [16, 48, 128, 256, 512])
@pytest.mark.parametrize("heads", [10, 16, 128])
def test_tiles_are_whole_pages_and_fit(heads: int, page_size: int) -> None:
    load = _load(page_size=page_size, prefill_tokens=448, prefill_context=4000, tokens=512)
    assert not tpu_cost.refuse(_fields(num_heads=heads), DIMS, load)
    tiles = tpu_cost.tuning(_fields(num_heads=heads), DIMS, {"mixed": load})
    assert tiles.keys() == {"row", "decode_keys", "prefill_keys", "prefill_rows", "buffers"} and tiles["row"] == 640
    assert not any(tiles[name] % unit for name in ("decode_keys", "prefill_keys") for unit in (page_size, 128))
    assert tpu_cost.vmem_bytes(_fields(num_heads=heads), DIMS, load) < 32 << 20


def test_work_moves_each_row_own_keys_once() -> None:
    """HBM bytes of decode: history in whole pages, one group per row written, queries and means; not the longest."""
    streams = {
        (longest, context): sum(
            term.bytes
            for term in tpu_cost.work(_fields(), DIMS, _load(decode_longest=longest, decode_context=context))
            if isinstance(term, Stream) and term.op == "attend decode"
        )
        for longest, context in [(8192, 4096), (65536, 4096), (8192, 2048)]
    }
    assert streams[8192, 4096] == streams[65536, 4096]
    assert streams[8192, 4096] - streams[8192, 2048] == 64 * 2048 * 640 * 2
    queries = 2 * 64 * 128 * 640 * 2
    assert streams[8192, 4096] == 64 * (4096 + 128 + 32) * 640 * 2 + queries
