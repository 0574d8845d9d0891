"""Grouped experts of Qwen3.5-397B on one device of eight: 64 local experts of 4096 x 1024, 512 tokens, 10 rows each.

Counts hold all the kernel does per expert: gather of its rows, their rounding to float8, three products, SwiGLU,
rows written at their places. The peer's two products have none but the products and SwiGLU.
"""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from jax.sharding import Mesh

from benchmarks.kernels.case import Arg, Case, Refused
from moec.blocks.core.chip import ChipLimits
from moec.blocks.core.work import tuned_key
from moec.blocks.moe.tpu_cost import TUNED_BY
from moec.blocks.moe.tpu_grouped import expert_rows_grouped

# Layers of the stack that the kernel indexes: as many as a v6e holds in bfloat16.
LAYERS, EXPERTS, HIDDEN, INNER, TOP_K = 16, 64, 4096, 1024, 10
F8 = "float8_e4m3fn"
CHUNK_BYTES = 16 << 20  # moe/tpu_cost.py: sums of eight ranks return in four messages of at least as much


def _build(row_parts: int) -> Callable[..., Any]:
    def build(chip: ChipLimits, mesh: Mesh, tiles: Mapping[str, int]) -> Callable[..., Any]:
        def run(h_TD: Any, token_P: Any, start_E: Any, stacks: Any, scales: Any, layer: Any) -> Any:
            if stacks[0].dtype.name == F8 and F8 not in chip.mxu_dtypes:
                raise Refused("float8 experts on a chip whose matrix unit has no float8 product")
            options = {"row_parts": row_parts, "layer": layer, "chip": chip, **tiles}
            return expert_rows_grouped(h_TD, token_P, start_E, *stacks, scales, **options)

        return run

    return build


def _case(
    name: str,
    tokens: int,
    dtype: str,
    block: int,
    rows: int,
    row_parts: int,
    peer: str = "",
    bar: float | None = None,
) -> Case:
    sizes = ((HIDDEN, INNER), (HIDDEN, INNER), (INNER, HIDDEN))
    keys = ("w_gate", "w_up", "w_down")
    scales = {
        k: Arg((LAYERS, EXPERTS, a // block, b // block), "float32") for k, (a, b) in zip(keys, sizes, strict=True)
    }
    local = tokens * TOP_K // 8
    mean = local / EXPERTS
    item = 1 if dtype == F8 else 2
    return Case(
        name=name,
        block="moe",
        variant="tpu_grouped",
        build=_build(row_parts),
        args=(
            Arg((tokens, HIDDEN), "bfloat16"),
            Arg((tokens * TOP_K,), "int32"),
            Arg((EXPERTS + 1,), "int32"),
            tuple(Arg((LAYERS, EXPERTS, *size), dtype) for size in sizes),
            scales if dtype == F8 else None,
            Arg((), "int32"),
        ),
        unit="expert",
        units=EXPERTS,
        floor_bytes=EXPERTS * 3 * HIDDEN * INNER * item + 2 * local * HIDDEN * 2,
        kernels=(r"grouped_.*",),
        trips=partial(_trips, mean),
        tiles={"block_rows": rows},
        grid={"block_rows": (16, 32)} if rows <= 32 else {"block_rows": (64, 128)},
        shape=tuned_key(
            TUNED_BY,
            tokens=tokens,
            top_k=TOP_K,
            experts=EXPERTS,
            width=HIDDEN,
            inner=INNER,
            expert=dtype,
            scale_block=block if dtype == F8 else 0,
            rows=F8 if row_parts == 1 else "activation",
            chunks=1 if tokens * HIDDEN * 2 < 2 * CHUNK_BYTES else 4,
        ),
        peer=peer,
        bar=bar,
    )


def _trips(mean: float, tiles: Mapping[str, int]) -> dict[str, dict[str, float]]:
    """No expert is empty: each search for the next one with rows looks once; each expert has `blocks` row blocks.

    Blocks of more than 32 rows make their products in loops over 512 columns.
    """
    rows = tiles["block_rows"]
    blocks = max(1, -(-mean // rows))
    loops = {"I2.L0.I1.L0.I0.L0": INNER // 512} if rows > 32 else {}
    return {r"grouped_.*": {"I0.L0": 1, "I2.L0": EXPERTS, "I2.L0.I0.L0": 1, "I2.L0.I1.L0": blocks, **loops}}


CASES = (
    _case("moe-grouped-fp8", 512, F8, 128, 16, 1, "gmm-v2-fp8-128", 0.51),
    _case("moe-grouped-fp8-512", 512, F8, 512, 16, 1, "gmm-v2-fp8", 0.51),
    _case("moe-grouped-fp8-exact", 512, F8, 128, 16, 2, "gmm-v2-fp8-128"),
    _case("moe-grouped-bf16", 512, "bfloat16", 128, 16, 0),
    _case("moe-grouped-fp8-prefill", 16384, F8, 128, 128, 1),
)
