"""Weighted sums of expert rows at one rank of EP8 with the shapes of Qwen3.5-397B: hidden 4096, top 10, bfloat16.

Routing is uniform: an eighth of all choices is local, so a token has 1.25 rows and a word of 32 entries, which is two
tokens, 2.5. Floors: rows that are there read once, float32 sums written once. Programs of the SparseCores are not in
the compiler's dump; their cases show that they compile, what XLA puts around them, and their compile time.
"""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from jax import Array
from jax.sharding import AbstractMesh

from benchmarks.kernels.case import Arg, Case, Refused
from moec.blocks.core.chip import ChipLimits
from moec.blocks.core.work import tuned_key
from moec.blocks.moe.tpu_combine import combine_rows, combine_stream
from moec.blocks.moe.tpu_combine_cost import sparsecore_copy_rows, sparsecore_refuse
from moec.blocks.moe.tpu_cost import TUNED_BY
from moec.blocks.moe.tpu_sparsecore import combine_sparsecore, gather_rows_sparsecore

HIDDEN, TOP_K, LOCAL = 4096, 10, 1 / 8
UNROLL = 8  # rows per step of the loop that sums
DEPTH = 8  # copies of rows under way
EXPERTS = 64  # local ones
F8 = "float8_e4m3fn"


def _by_token(chip: ChipLimits, mesh: AbstractMesh, tiles: Mapping[str, int]) -> Callable[..., Any]:
    return partial(combine_rows, width=HIDDEN, chip=chip, tile_tokens=tiles["combine_tokens"])


def _by_row(chip: ChipLimits, mesh: AbstractMesh, tiles: Mapping[str, int]) -> Callable[..., Any]:
    sizes = {"tile_tokens": tiles["combine_tokens"], "tile_rows": tiles["stream_rows"]}
    return partial(combine_stream, width=HIDDEN, chip=chip, **sizes)


def _sparsecore(
    call: str, tokens: int, chip: ChipLimits, mesh: AbstractMesh, tiles: Mapping[str, int]
) -> Callable[..., Any]:
    refused = sparsecore_refuse(tokens, TOP_K, HIDDEN, "bfloat16", chip, sums=call == "combine")
    copy_rows = sparsecore_copy_rows(tokens, TOP_K, HIDDEN, "bfloat16", chip, sums=call == "combine")
    if refused or copy_rows is None:
        raise Refused("; ".join(refused))

    def combine(out_PJ: Array, place_TK: Array, weight_TK: Array) -> Array:
        return combine_sparsecore(out_PJ, place_TK, weight_TK, width=HIDDEN, chip=chip, copy_rows=copy_rows)

    def gather(h_TJ: Array, token_P: Array, num_rows: Array) -> Array:
        return gather_rows_sparsecore(h_TJ, token_P, num_rows, chip=chip, copy_rows=copy_rows)

    return combine if call == "combine" else gather


def _words(rows: int) -> Arg:
    return Arg((rows, HIDDEN // 256, 128), "int32")


def _floor(tokens: int) -> int:
    return int(tokens * TOP_K * LOCAL) * HIDDEN * 2 + tokens * HIDDEN * 4


def _rows_case(name: str, tokens: int, tile_tokens: int) -> Case:
    tiles, rows = -(-tokens // tile_tokens), tile_tokens * TOP_K * LOCAL
    # One step more than there are tiles: the first only fetches, the last only sums.
    share = tiles / (tiles + 1)
    fetch, add = "L0.I0.I0", "L0.I0.I1"
    trips = {
        "L0": tiles + 1,
        fetch: share,
        f"{fetch}.L0.I0.L0": 2 * TOP_K * LOCAL,
        add: share,
        f"{add}.I0.L0": rows // UNROLL,
        f"{add}.I1": 1 if rows % UNROLL else 0,
        f"{add}.I1.L0": rows % UNROLL,
    }
    return Case(
        name=name,
        block="moe",
        variant="tpu_grouped",
        build=_by_token,
        args=(_words(tokens * TOP_K), Arg((tokens, TOP_K), "int32"), Arg((tokens, TOP_K), "float32")),
        unit="token",
        units=tokens,
        floor_bytes=_floor(tokens),
        kernels=(r"combine_rows.*",),
        trips={r"combine_rows.*": trips},
        tiles={"combine_tokens": tile_tokens},
    )


def _stream_case(name: str, tokens: int, tile_tokens: int, tile_rows: int) -> Case:
    numbers = Arg((tokens * TOP_K,), "int32")
    return Case(
        name=name,
        block="moe",
        variant="tpu_grouped",
        build=_by_row,
        args=(_words(tokens * TOP_K), numbers, numbers, Arg((EXPERTS + 1,), "int32"), Arg((tokens, TOP_K), "float32")),
        unit="token",
        units=tokens,
        floor_bytes=_floor(tokens),
        kernels=(r"combine_stream.*",),
        trips=partial(_stream_trips, tokens),
        tiles={"combine_tokens": tile_tokens, "stream_rows": tile_rows},
        grid={"combine_tokens": (16, 32, 64), "stream_rows": (16, 32, 64)},
        shape=tuned_key(
            TUNED_BY,
            tokens=tokens,
            top_k=TOP_K,
            experts=EXPERTS,
            width=HIDDEN,
            inner=1024,
            expert=F8,
            scale_block=128,
            rows="activation",
            chunks=1,
        ),
    )


def _stream_trips(tokens: int, tiles: Mapping[str, int]) -> dict[str, dict[str, float]]:
    """All rows in one run, in pieces of stream_rows."""
    steps, tile_rows = -(-tokens // tiles["combine_tokens"]), tiles["stream_rows"]
    pieces = tokens * TOP_K * LOCAL / tile_rows
    all_rows = "L0.I0.I0"  # in the first step only
    piece = f"{all_rows}.I2.L0"
    trips = {
        "L0": steps,
        all_rows: 1 / steps,
        f"{all_rows}.I0.L0": pieces,
        f"{all_rows}.I1.L0": min(pieces, DEPTH),
        piece: pieces,
        f"{piece}.I0.L0": tile_rows / UNROLL,
        f"{piece}.I1": 0,  # rows that are left when the piece is no multiple of UNROLL
        f"{piece}.I1.L0": 0,
    }
    return {r"combine_stream.*": trips}


def _runs_case(name: str, tokens: int, tile_tokens: int, tile_rows: int, held_tokens: int) -> Case:
    """Runs of 20 rows, Poisson: 2.06 whole steps of 8 rows, 3.5 rows left; hardly one in 200 exceeds 32 rows."""
    tiles, run = -(-tokens // tile_tokens), held_tokens * TOP_K * LOCAL / EXPERTS
    assert (run, tile_rows) == (20, 32), "the numbers above"
    held = "L0.I0.I1"
    piece = f"{held}.I1.L0"
    trips = {
        "L0": tiles,
        "L0.I0.I0": 1 / tiles,
        held: tile_tokens / held_tokens,
        f"{held}.L0.I0.L0": 1.005,
        f"{held}.I0.L0": DEPTH,
        piece: 1.005 * EXPERTS,
        f"{piece}.I0.L0": 2.06,
        f"{piece}.L0": 3.5,
    }
    numbers = Arg((tokens * TOP_K,), "int32")
    return Case(
        name=name,
        block="moe",
        variant="tpu_grouped",
        build=_by_row,
        args=(_words(tokens * TOP_K), numbers, numbers, Arg((EXPERTS + 1,), "int32"), Arg((tokens, TOP_K), "float32")),
        unit="token",
        units=tokens,
        floor_bytes=_floor(tokens),
        kernels=(r"combine_stream.*",),
        trips={r"combine_stream.*": trips},
        tiles={"combine_tokens": tile_tokens, "stream_rows": tile_rows},
    )


def _sparsecore_case(call: str, tokens: int) -> Case:
    rows = tokens * TOP_K
    combine = (_words(rows), Arg((tokens, TOP_K), "int32"), Arg((tokens, TOP_K), "float32"))
    gather = (_words(tokens), Arg((rows,), "int32"), Arg((), "int32"))
    moved = int(rows * LOCAL) * HIDDEN * 2 * 2
    return Case(
        name=f"moe-{call}-sparsecore-{tokens}",
        block="moe",
        variant="tpu_grouped",
        build=partial(_sparsecore, call, tokens),
        args=combine if call == "combine" else gather,
        unit="token",
        units=tokens,
        floor_bytes=_floor(tokens) if call == "combine" else moved,
        knows_chip=True,  # plsc asks for the chip
    )


CASES = (
    _stream_case("moe-combine-decode", 512, 64, 64),
    _rows_case("moe-combine-decode-by-token", 512, 32),
    _rows_case("moe-combine-prefill-by-token", 8192, 64),
    _runs_case("moe-combine-prefill", 8192, 64, 32, 1024),
    _sparsecore_case("combine", 512),
    _sparsecore_case("gather", 512),
)
