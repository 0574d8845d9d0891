"""The exchanges around the experts at 64 tokens per device (decode) and 1024 (mixed), hidden 4096, bfloat16.

Floors are HBM bytes of one device: partial sums read once, own tokens written once. Links set the time, not these.
"""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import jax
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from benchmarks.kernels.case import Arg, Case
from moec.blocks.collectives.tpu_hierarchical import reduce_scatter_hierarchical
from moec.blocks.core.chip import ChipLimits

DEVICES, HIDDEN, ITEM_BYTES = 8, 4096, 2


def _build(chip: ChipLimits, mesh: Mesh, tiles: Mapping[str, int]) -> Callable[..., Any]:
    """Counts are those of eight devices; on fewer each has more tokens."""
    scatter = partial(reduce_scatter_hierarchical, axes=("data",), chip=chip, shards_per_chip=chip.cores_per_chip)
    return jax.shard_map(partial(scatter, **tiles), mesh=mesh, in_specs=P("data"), out_specs=P("data"), check_vma=False)


def _case(name: str, tokens: int, micro_batches: int) -> Case:
    """tokens: of one device."""
    gathered = DEVICES * tokens
    # Four stages (begin, and the end of three rounds), one micro-batch apart: each runs once per micro-batch.
    passes = micro_batches + 3
    shares = {f"L0.I{stage}": micro_batches / passes for stage in range(4)}
    return Case(
        name=name,
        block="collectives",
        variant="hierarchical",
        build=_build,
        args=(Arg((DEVICES * gathered, HIDDEN), "bfloat16", ("data", None)),),
        devices="all",
        unit="token",
        units=tokens,
        floor_bytes=(gathered + tokens) * HIDDEN * ITEM_BYTES,
        kernels=(r"reduce_scatter_hierarchical.*",),
        trips={r"reduce_scatter_hierarchical.*": {"L0": passes, **shares}},
        tiles={"micro_batches": micro_batches},
        shape=f"{gathered}x{HIDDEN}",
    )


CASES = (_case("rs-hierarchical-decode", 64, 2), _case("rs-hierarchical-mixed", 1024, 16))
