"""The exchanges around the experts at 64 tokens per device (decode) and 1024 (mixed), hidden 4096, bfloat16.

Floors are HBM bytes of one device: partial sums read once, own tokens written once. Links set the time, not these.
"""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import jax
from jax.sharding import AbstractMesh
from jax.sharding import PartitionSpec as P

from benchmarks.kernels.case import Arg, Case, Refused
from moec.blocks.collectives.tpu_cost import refuse_reduce_scatter
from moec.blocks.collectives.tpu_hierarchical import reduce_scatter_hierarchical
from moec.blocks.core.chip import ChipLimits
from moec.blocks.core.work import Degrees, Dtypes, Load

DEVICES, HIDDEN, ITEM_BYTES = 8, 4096, 2


def _build(chip: ChipLimits, mesh: AbstractMesh, tiles: Mapping[str, int], *, tokens: int) -> Callable[..., Any]:
    """Counts are those of eight devices; on fewer each has more tokens."""
    if why := _refusals(chip, mesh.size, tiles["micro_batches"], tokens):
        raise Refused("; ".join(why))
    scatter = partial(reduce_scatter_hierarchical, axes=("data",), chip=chip, shards_per_chip=chip.cores_per_chip)
    return jax.shard_map(partial(scatter, **tiles), mesh=mesh, in_specs=P("data"), out_specs=P("data"), check_vma=False)


def _refusals(chip: ChipLimits, devices: int, micro_batches: int, tokens: int) -> list[str]:
    """Why the kernel does not run on so many devices, each a rank. tokens: of one of eight devices."""
    own = DEVICES * DEVICES * tokens // devices**2
    degrees = Degrees(dp=devices, ep=devices)
    dtypes = Dtypes(**dict.fromkeys(("activation", "weight", "expert", "kv", "state", "conv"), "bfloat16"))
    load = Load(
        tokens=own, seqs=own, decode_rows=own, decode_context=1, decode_longest=1, prefill_tokens=0, prefill_context=0,
        page_size=1, degrees=degrees, dtypes=dtypes, row_tile=1, row_full=1, lanes=chip.lanes, chip=chip,
    )  # fmt: skip
    found = refuse_reduce_scatter(HIDDEN, load)
    if not found and own % (micro_batches * chip.sublanes):
        found = [f"{own} tokens per rank: {micro_batches} micro-batches take whole tiles of {chip.sublanes}"]
    return found


def _case(name: str, tokens: int, micro_batches: int) -> Case:
    """tokens: of one device."""
    gathered = DEVICES * tokens
    # Four stages (begin, and the end of three rounds), one micro-batch apart: each runs once per micro-batch.
    passes = micro_batches + 3
    shares = {f"L0.I{stage}": micro_batches / passes for stage in range(4)}
    return Case(
        name=name,
        block="collectives",
        variant="tpu_hierarchical",
        build=partial(_build, tokens=tokens),
        args=(Arg((DEVICES * gathered, HIDDEN), "bfloat16", ("data", None)),),
        devices="all",
        unit="token",
        units=tokens,
        floor_bytes=(gathered + tokens) * HIDDEN * ITEM_BYTES,
        kernels=(r"reduce_scatter_hierarchical.*",),
        trips={r"reduce_scatter_hierarchical.*": {"L0": passes, **shares}},
        tiles={"micro_batches": micro_batches},
    )


CASES = (_case("rs-hierarchical-decode", 64, 2), _case("rs-hierarchical-mixed", 1024, 16))
