"""Paged attention at Qwen3.5-397B's shape, 32 query heads on 2 key/value heads of 256, all of them on one device."""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, cast

from jax.sharding import Mesh

from benchmarks.kernels.case import Arg, Case
from moec.blocks.attention.tpu_cost import TUNED_BY
from moec.blocks.attention.tpu_ragged_kernel import RpaShape, rpa_decode
from moec.blocks.attention.tpu_ragged_prefill import rpa_prefill
from moec.blocks.core.batch import Batch, Rows
from moec.blocks.core.chip import ChipLimits
from moec.blocks.core.work import tuned_key

KV_HEADS, GROUP, HEAD_DIM = 2, 16, 256
SEQS, CONTEXT, LAYERS = 64, 8192, 2
CHUNKS, CHUNK_TOKENS, HISTORY = 2, 512, 4096
VALUES = 2 * KV_HEADS * HEAD_DIM
ITEMSIZE = {"bfloat16": 2, "float8_e4m3fn": 1}


def _shape(chip: ChipLimits, cache: str, page: int, block: int, tail: int, slots: int, decode: bool) -> RpaShape:
    split = decode and cache == "float8_e4m3fn" and cache in chip.mxu_dtypes
    return RpaShape(
        num_kv_heads=KV_HEADS, group=GROUP, head_dim=HEAD_DIM, page_size=page, pages_per_seq=CONTEXT // page,
        block=block, slots=slots, tail=tail, tile_rows=chip.sublanes * 4 // ITEMSIZE[cache], split=split,
        window=None, chunk=None, softcap=None,
    )  # fmt: skip


def _pool(cache: str, page: int) -> Arg:
    return Arg((LAYERS * SEQS * CONTEXT // page, page, VALUES), cache)


def _build_decode(
    chip: ChipLimits, mesh: Mesh, tiles: Mapping[str, int], *, cache: str, page: int
) -> Callable[..., Any]:
    block, tail, slots = (tiles[f"decode_{name}"] for name in ("block", "tail", "slots"))
    shape = _shape(chip, cache, page, block, tail, slots, decode=True)

    def run(count, length, pages, factor, scale, q, new, pool):  # type: ignore[no-untyped-def]
        return rpa_decode(count, length, pages, factor, scale, q, new, None, pool, shape=shape, chip=chip)

    return run


def _decode(name: str, cache: str, page: int, block: int, peer: str) -> Case:
    """Rows of CONTEXT keys, whole blocks: no tail."""
    rows = tuple(Arg((SEQS,), kind) for kind in ("int32", "float32", "float32"))
    return Case(
        name=name, block="attention", variant="tpu_ragged",
        build=partial(_build_decode, cache=cache, page=page),
        args=(
            Arg((1,), "int32"), rows[0], Arg((SEQS, CONTEXT // page), "int32"), *rows[1:],
            Arg((SEQS, KV_HEADS, GROUP, HEAD_DIM), "bfloat16"), Arg((SEQS, VALUES), "uint32"), _pool(cache, page),
        ),
        donate=(7,), unit="KV token", units=SEQS * CONTEXT, floor_bytes=SEQS * CONTEXT * VALUES * ITEMSIZE[cache],
        kernels=(r"rpa_decode.*",), trips=_decode_trips,
        tiles={"decode_block": block, "decode_tail": 256, "decode_slots": 8}, grid={"decode_block": (512, 1024, 2048)},
        shape=tuned_key(
            TUNED_BY, rows=SEQS, q_heads=KV_HEADS * GROUP, kv_heads=KV_HEADS, head_dim=HEAD_DIM, page=page, kv=cache,
            reach="all",
        ), peer=peer, bar=0.85,
    )  # fmt: skip


def _decode_trips(tiles: Mapping[str, int]) -> dict[str, dict[str, float]]:
    """All other dynamic loops are over the pages of blocks that are not whole, and tiles behind a row: none here."""
    row, blocks = "I0.L0", CONTEXT // tiles["decode_block"]
    turn = f"{row}.I1.I2.L0"
    trips = {
        row: SEQS,
        f"{row}.I0.I1": 0,  # the new token is in a row's last block,
        f"{row}.I1.I1": 0,
        turn: blocks - 2,  # which the loop's last turn takes
        f"{turn}.I1": 1 / (blocks - 2),
        f"{row}.I3": 0,  # no tail
        "*": 0,
    }
    return {"rpa_decode": trips}


def _build_prefill(
    chip: ChipLimits, mesh: Mesh, tiles: Mapping[str, int], *, cache: str, page: int
) -> Callable[..., Any]:
    keys, nothing = tiles["kv_block"], cast(Any, None)
    shape = _shape(chip, cache, page, keys, keys, 2, decode=False)

    def run(q, new, pool, pages, start, q_len, cu_q, distribution):  # type: ignore[no-untyped-def]
        batch = Batch(nothing, nothing, cu_q, start + q_len, pages, nothing, nothing, distribution, nothing)
        rows = Rows(nothing, nothing, nothing, q_len, start)
        return rpa_prefill(
            q, new, None, pool, pages, batch, rows, HEAD_DIM**-0.5, shape=shape, q_block=tiles["q_block"], chip=chip
        )

    return run


def _prefill(name: str, cache: str, page: int) -> Case:
    """CHUNKS rows of CHUNK_TOKENS new tokens after HISTORY, both whole pages. Floor: each item reads its keys once."""
    tokens, queries, keys = CHUNKS * CHUNK_TOKENS, 64, 512
    items, row = CHUNK_TOKENS // queries, VALUES * ITEMSIZE[cache]
    seen = CHUNKS * sum(HISTORY + (item + 1) * queries for item in range(items))
    q = Arg((tokens, KV_HEADS, GROUP, HEAD_DIM), "bfloat16")
    rows = tuple(Arg((SEQS,), "int32") for _ in range(2))
    return Case(
        name=name, block="attention", variant="tpu_ragged", build=partial(_build_prefill, cache=cache, page=page),
        args=(
            q, Arg((tokens, VALUES), cache), _pool(cache, page), Arg((SEQS, CONTEXT // page), "int32"), *rows,
            Arg((SEQS + 1,), "int32"), Arg((3,), "int32"),
        ),
        donate=(2,), unit="token", units=tokens, floor_bytes=seen * row + 2 * tokens * row,
        kernels=(r"rpa_prefill.*",), trips={"rpa_prefill": _prefill_trips(page, keys, queries)},
        tiles={"q_block": queries, "kv_block": keys},
    )  # fmt: skip


def _prefill_trips(page: int, keys: int, queries: int) -> dict[str, float]:
    """Rows, tiles a row writes and waits for, its items, their blocks of keys; a block's pages; diagonals."""
    items, tiles = CHUNK_TOKENS // queries, CHUNK_TOKENS // 32
    blocks = HISTORY // keys + 1  # the last one holds the chunk itself, whatever the item
    pages = (HISTORY + CHUNK_TOKENS / 2) / page - keys / page
    item = "I0.L0.I1.L0"
    block = f"{item}.I1.L0"
    return {
        "I0.L0": CHUNKS,
        "I0.L0.L0": tiles - 1,
        "I0.L0.I0.L0": tiles + 1,
        item: items,
        f"{item}.I0.L0": keys / page,
        block: blocks,
        f"{block}.I0.L0": keys / page,
        f"{block}.L0": pages / blocks,
        f"{block}.I1": 1 / blocks,
        f"{block}.I1.L0": keys / 2 / 32,
        f"{block}.I2": 1 / blocks,
        f"{block}.I3": 1 - 1 / blocks,
    }


CASES = (
    _decode("rpa-decode-fp8", "float8_e4m3fn", 256, 2048, "rpa-batched-decode-fp8"),
    _decode("rpa-decode-bf16", "bfloat16", 256, 1024, "rpa-batched-decode-bf16"),
    _prefill("rpa-prefill-fp8", "float8_e4m3fn", 256),
)
