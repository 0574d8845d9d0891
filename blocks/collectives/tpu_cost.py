"""Messages, vector memory and limits of the TPU variants. Meaning and the exchanges without kernels: cost.py.

The kernel's reduce-scatter is one Collective term like the compiler's own: same kind, shape and dtype. What differs
is how it travels (`rounds`) and that it needs vector memory.
"""

from collections.abc import Mapping
from dataclasses import replace

from ..core.declare import ModelDims
from ..core.work import Load, Round, Term, itemsize
from .returning import Returning

# Fewer do not overlap the rounds within a chip with those between chips; more only as vector memory demands.
LEAST_BATCHES = 2
# Share of vector memory the buffers may take: XLA keeps arrays of the layers around in the rest.
MEMORY_SHARE = 2
SLOTS = 2  # micro-batches that are on their way
SPARE_BYTES = 1 << 20
PAYLOADS = ("bfloat16", "float32")


def work(returning: Returning, dims: ModelDims, load: Load) -> tuple[Term, ...]:
    """As in cost.py, by the kernel's rounds."""
    return returning.messages(dims, replace(load, kernel_returns=True))


def tuning(returning: Returning, dims: ModelDims, loads: Mapping[str, Load]) -> dict[str, int]:
    """Micro-batches per bucket: those of the widest sums, which narrower ones can be cut into as well."""
    found = {
        f"micro_batches.{bucket}": micro_batches(returning.widths(dims, load)[-1], load)
        for bucket, load in loads.items()
    }
    return {**found, "shards_per_chip": shards_per_chip(next(iter(loads.values())))}


def kernels(tiles: Mapping[str, int], *, prefills: bool) -> dict[str, int]:
    """Launches by kernel of one message on its way back."""
    return {"reduce_scatter_hierarchical": 1}


def refuse(returning: Returning, dims: ModelDims, load: Load) -> list[str]:
    """Why the kernel cannot return what the blocks of a program scatter; [] when it can."""
    widths = returning.widths(dims, load)
    if not widths:
        return ["no block returns tokens to other ranks: nothing is scattered"]
    return list(dict.fromkeys(reason for width in widths for reason in refuse_reduce_scatter(width, load)))


def vmem_bytes(returning: Returning, dims: ModelDims, load: Load) -> int:
    """Vector memory of the kernel for the widest sums."""
    width = returning.widths(dims, load)[-1]
    return buffer_bytes(width, load, micro_batches(width, load))


def shards_per_chip(load: Load) -> int:
    """Attention-DP ranks that share a chip: its two cores, unless tensor parallelism takes them."""
    return 2 if load.chip.cores_per_chip == 2 and load.degrees.tp == 1 and load.degrees.dp > 1 else 1


def _chips(load: Load) -> int:
    return load.degrees.dp // shards_per_chip(load)


def _halvings(load: Load) -> range:
    return range(1, _chips(load).bit_length())


def rounds(width: int, load: Load) -> tuple[Round, ...]:
    """What one reduce-scatter of [A, width] sends, in order; micro-batches are in different rounds at a time."""
    run = load.tokens * width * itemsize(load.dtypes.activation)
    within = (Round("D2D", _chips(load) * run),) if shards_per_chip(load) == 2 else ()
    # Two ranks of a chip take different links in each round; the devices of one rank all take the same.
    sharing = load.chip.cores_per_chip // shards_per_chip(load)
    return (*within, *(Round("ICI", (_chips(load) >> step) * run, sharing) for step in _halvings(load)))


def refuse_reduce_scatter(width: int, load: Load) -> list[str]:
    """Why the hierarchical kernel cannot return this load's tokens; [] when it can."""
    chip, dtype, found = load.chip, load.dtypes.activation, []
    if load.degrees.dp == 1:
        return ["one attention rank: nothing is scattered"]
    if chip.cores_per_chip not in (1, 2):
        found.append(f"{chip.cores_per_chip} devices per chip: the kernel takes 1 or 2")
    chips = _chips(load)
    if chips & (chips - 1) or load.degrees.dp % shards_per_chip(load):
        found.append(
            f"{load.degrees.dp} attention ranks: the kernel halves, so chips of a group must be a power of two"
        )
    if dtype not in PAYLOADS:
        found.append(f"activations in {dtype}: the kernel takes {' or '.join(PAYLOADS)}")
    if width % chip.lanes:
        found.append(f"width {width}: the kernel takes multiples of {chip.lanes}")
    if load.tokens % chip.sublanes:
        found.append(f"{load.tokens} tokens per rank: the kernel takes multiples of {chip.sublanes}")
    if not found and not _batches(width, load):
        least = buffer_bytes(width, load, load.tokens // chip.sublanes)
        found.append(f"{least} bytes of vector memory at least: the kernel may take {chip.vmem_bytes // MEMORY_SHARE}")
    return found


def micro_batches(width: int, load: Load) -> int:
    """The fewest micro-batches, at least two where the tokens allow it, whose buffers fit."""
    found = _batches(width, load)
    assert found, refuse_reduce_scatter(width, load)
    return next((n for n in found if n >= LEAST_BATCHES), found[-1])


def _batches(width: int, load: Load) -> list[int]:
    """Legal numbers of micro-batches: whole tiles of tokens, buffers within their share of vector memory."""
    tiles = load.tokens // load.chip.sublanes
    limit = load.chip.vmem_bytes // MEMORY_SHARE
    return [n for n in range(1, tiles + 1) if tiles % n == 0 and buffer_bytes(width, load, n) <= limit]


def buffer_bytes(width: int, load: Load, batches: int) -> int:
    """Vector memory of the kernel: what its buffers take, as tpu_hierarchical.py allocates them."""
    value, chips = itemsize(load.dtypes.activation), _chips(load)
    run = load.tokens // batches * width
    own = chips * shards_per_chip(load) + 1  # this core's rows, its partner's, the result
    per_batch = own * value + sum((chips >> step) * (2 * value + itemsize("float32")) for step in _halvings(load))
    return SLOTS * run * per_batch + SPARE_BYTES


def refuse_chunks(load: Load, chunks: int) -> list[str]:
    """Why tokens cannot return in this many chunks; [] when they can."""
    if load.tokens % chunks:
        return [f"{load.tokens} tokens per rank in {chunks} chunks: the number must divide them"]
    return []


__all__ = [
    "buffer_bytes",
    "kernels",
    "micro_batches",
    "refuse",
    "refuse_chunks",
    "refuse_reduce_scatter",
    "rounds",
    "shards_per_chip",
    "tuning",
    "vmem_bytes",
    "work",
]
