"""Latent attention over the compressed cache at DeepSeek-V3's shape: all heads on a device, and one device of eight."""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from jax.sharding import Mesh

from benchmarks.kernels.case import Arg, Case
from moec.blocks.core.batch import Batch, Rows
from moec.blocks.core.chip import ChipLimits
from moec.blocks.core.work import tuned_key
from moec.blocks.mla.tpu_cost import TUNED_BY
from moec.blocks.mla.tpu_ragged import mla_attend_rows

LATENT, ROPE, ROW = 512, 64, 640
SEQS, CONTEXT, PAGES, LAYERS = 64, 8192, 2048, 4
CHUNKS, CHUNK_TOKENS, HISTORY = 4, 512, 4096
BUFFERS = 4
ITEMSIZE = {"bfloat16": 2, "float8_e4m3fn": 1}


def _build(chip: ChipLimits, mesh: Mesh, tiles: Mapping[str, int], *, heads: int, prefill: bool) -> Callable[..., Any]:
    keys, block_rows = (tiles["prefill_keys"], tiles["prefill_rows"]) if prefill else (tiles["decode_keys"], heads)

    def run(latent, rest, new, pool, start, q_len, cu_q, pages, distribution, layer, old):  # type: ignore[no-untyped-def]
        nothing: Any = None
        batch = Batch(nothing, nothing, cu_q, start + q_len, pages, nothing, nothing, distribution, nothing)
        rows = Rows(nothing, nothing, nothing, q_len, start)
        return mla_attend_rows(
            latent, rest, new, pool, old if prefill else None, batch=batch, rows=rows, base=layer * PAGES, rope=ROPE,
            scale=192**-0.5, chip=chip, keys=keys, block_rows=block_rows, buffers=tiles["buffers"],
        )  # fmt: skip

    return run


def _args(tokens: int, heads: int, cache: str, page: int) -> tuple[Arg, ...]:
    out, rest = Arg((tokens, heads, LATENT), "bfloat16"), Arg((tokens, heads, ROW - LATENT), "bfloat16")
    new, pool = Arg((tokens, ROW), cache), Arg((LAYERS * PAGES, page, ROW), cache)
    start, q_len, cu_q = Arg((SEQS,), "int32"), Arg((SEQS,), "int32"), Arg((SEQS + 1,), "int32")
    pages, distribution, layer = Arg((SEQS, 2 * CONTEXT // page), "int32"), Arg((3,), "int32"), Arg((), "int32")
    return out, rest, new, pool, start, q_len, cu_q, pages, distribution, layer, out


def _decode(name: str, heads: int, cache: str, keys: int, page: int = 256) -> Case:
    """Rows of CONTEXT keys. The floor: every cached row once, queries in and means out."""
    return Case(
        name=name, block="mla", variant="tpu_ragged", build=partial(_build, heads=heads, prefill=False),
        args=_args(SEQS, heads, cache, page), donate=(3,), unit="KV token", units=SEQS * CONTEXT,
        floor_bytes=SEQS * (CONTEXT * ROW * ITEMSIZE[cache] + heads * (ROW + LATENT) * 2), kernels=(r"mla_decode.*",),
        trips=partial(_decode_trips, page), tiles={"decode_keys": keys, "buffers": BUFFERS},
        grid={"decode_keys": (512, 1024, 2048)},
        shape=tuned_key(TUNED_BY, rows=SEQS, heads=heads, latent=LATENT, page=page, kv=cache),
    )  # fmt: skip


def _decode_trips(page: int, tiles: Mapping[str, int]) -> dict[str, dict[str, float]]:
    """Whole steps; of a row's steps one is the first (queries arrive) and one the last (its new row, its outputs)."""
    keys, loop = tiles["decode_keys"], "I0.I0.L0"
    pages, share = keys // page, keys / CONTEXT
    trips = {
        "I0.L0.I0.I0.L0": pages, loop: SEQS * CONTEXT / keys, f"{loop}.I0.I0.L0": pages, f"{loop}.I1": share,
        f"{loop}.I2.L0": pages, f"{loop}.I3": share, f"{loop}.I3.L0": 0, f"{loop}.I4": share, f"{loop}.I4.I0.L0": 1,
        f"{loop}.I4.L0": 1, "I0.I1.L0": 1, "I0.I2.L0": 1,
    }  # fmt: skip
    return {"mla_decode": trips}


def _prefill(name: str, heads: int, cache: str, page: int = 256) -> Case:
    """CHUNKS rows of CHUNK_TOKENS behind HISTORY keys. The floor: new rows, history once, queries and means."""
    tokens, itemsize = CHUNKS * CHUNK_TOKENS, ITEMSIZE[cache]
    context, keys, block = HISTORY + CHUNK_TOKENS, 512, 1024 // heads
    items, steps, pages, groups = CHUNKS * CHUNK_TOKENS // block, -(-context // keys), keys // page, CHUNK_TOKENS // 32
    # Chunks start at a page, so that no group of new rows is merged with old ones. A block ends inside a page.
    loop = "I0.I2.L0"
    # Small query blocks: the wait for them is no branch of its own.
    wait, clear, finish = ("I1", "I2", "I3") if block < 16 else ("I2", "I3", "I4")
    first = {} if block < 16 else {f"{loop}.I1": 1 / steps}
    trips = {
        "I0.I0.L0": CHUNKS, "I0.I0.L0.I0.L0": groups, "I0.I0.L0.I0.L0.I0": 0.0, "I0.I1.L0": CHUNKS,
        "I0.I1.L0.I0.L0": groups, "I0.L0.I0.I0.L0": pages, loop: items * steps, f"{loop}.I0.L0": pages, **first,
        f"{loop}.{wait}.L0": pages, f"{loop}.{clear}": 1 / steps, f"{loop}.{clear}.I0.L0": page / 64,
        f"{loop}.{finish}": 1 / steps, f"{loop}.{finish}.I0.L0": block, f"{loop}.{finish}.L1": block,
        "I0.I3.L0": block, "I0.I4.L0": block,
    }  # fmt: skip
    return Case(
        name=name, block="mla", variant="tpu_ragged", build=partial(_build, heads=heads, prefill=True),
        args=_args(tokens, heads, cache, page), donate=(3, 10), unit="query token", units=tokens,
        floor_bytes=CHUNKS * context * ROW * itemsize + tokens * heads * (ROW + LATENT) * 2,
        kernels=(r"mla_prefill.*",), trips={"mla_prefill": trips},
        tiles={"prefill_keys": keys, "prefill_rows": 1024, "buffers": BUFFERS},
    )  # fmt: skip


CASES = (
    _decode("mla-decode-128h-bf16", 128, "bfloat16", 2048),
    _decode("mla-decode-128h-fp8", 128, "float8_e4m3fn", 2048),
    _decode("mla-decode-16h-bf16", 16, "bfloat16", 2048),
    _decode("mla-decode-16h-fp8", 16, "float8_e4m3fn", 2048),
    _prefill("mla-prefill-128h-bf16", 128, "bfloat16"),
    _prefill("mla-prefill-16h-fp8", 16, "float8_e4m3fn"),
)
