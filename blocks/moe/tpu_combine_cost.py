"""What the combine kernels move and hold, without jax: tpu_cost.py puts it into the experts' work.

Issue slots per row, per token and per tile are what the compiler schedules for tpu7x at width 4096 (the case
moe-combine-* of benchmarks/kernels prints them); they scale with the memory rows of a row. A slot is priced as one
full vector operation, four values per lane and sublane, so that the plan's vector rate turns it into a bundle.
"""

from dataclasses import dataclass

from ..core.chip import ChipLimits
from ..core.work import Stream, Subcore, Term, Vector, itemsize, prefetched

# Bundles: per row that is summed, per token (its sums set to zero and written out), per tile of tokens.
_STREAM_SLOTS = (10.2, 9.25, 68.0)
_CUT_SLOTS = (15.5, 9.25, 68.0)  # where not all sums are held and experts' runs are cut: 20 rows each
_ROWS_SLOTS = (22.0, 13.5, 240.0)
_SLOT_WIDTH = 4096  # width at which they were counted
_COPIES = 8  # of rows, under way at a time
_SPARSE_TOKENS = 8  # tokens that leave a subcore together
# Bundles of a subcore at _SLOT_WIDTH with 16 lanes, delays included, read off the compiler's program for tpu7x
# (tests/aot/test_sparsecore.py counts its loops): a row that is a token's first and is stored, one that is added, a
# token without rows; per row, per group of tokens and per vector of choices that is looked through, at any width.
_SPARSE_SLOTS = {"first": 432, "added": 496, "none": 416}
_SPARSE_ROW, _SPARSE_GROUP, _SPARSE_CHOICES = 76, 40, 5.5
_SPARSE_LANES = 16


@dataclass(frozen=True)
class CombinePlan:
    """How the TensorCore sums: kernel "stream" (combine_stream) or "rows" (combine_rows), and its tiles.

    held_tokens: tokens whose sums are in VMEM at a time.
    """

    kernel: str
    tile_tokens: int
    tile_rows: int
    held_tokens: int
    vmem_bytes: int


def combine_plan(tokens: int, top_k: int, width: int, dtype: str, chip: ChipLimits) -> CombinePlan | None:
    """The kernel for that many tokens; None when no tile of 8 tokens fits.

    By row, which looks at the rows that are there only, while their list fits half of scalar memory; else by token.
    """
    budget = chip.vmem_bytes // 2
    for tile_tokens in (64, 32, 16, 8):
        held = _held_tokens(tokens, tile_tokens, width, dtype, chip)
        tile_rows = 64 if held >= tokens else 32
        vmem = _stream_vmem(held, tile_tokens, tile_rows, width, dtype)
        if vmem <= budget and _stream_smem(tokens, held, top_k) <= chip.smem_bytes // 2:
            return CombinePlan("stream", tile_tokens, tile_rows, held, vmem)
    return combine_rows_plan(top_k, width, dtype, chip)


def combine_rows_plan(top_k: int, width: int, dtype: str, chip: ChipLimits) -> CombinePlan | None:
    """By token, for any choice of tokens; None when no tile of 8 tokens fits."""
    for tile_tokens in (64, 32, 16, 8):
        vmem = _rows_vmem(tile_tokens, top_k, width, dtype)
        if vmem <= chip.vmem_bytes // 2:
            return CombinePlan("rows", tile_tokens, 0, tile_tokens, vmem)
    return None


def combine_tiled(
    tokens: int, top_k: int, width: int, dtype: str, chip: ChipLimits, tile_tokens: int, tile_rows: int
) -> CombinePlan:
    """The plan with these tiles, whether they fit or not. tile_rows 0: by token."""
    if not tile_rows:
        vmem = _rows_vmem(tile_tokens, top_k, width, dtype)
        return CombinePlan("rows", tile_tokens, 0, tile_tokens, vmem)
    held = _held_tokens(tokens, tile_tokens, width, dtype, chip)
    return CombinePlan("stream", tile_tokens, tile_rows, held, _stream_vmem(held, tile_tokens, tile_rows, width, dtype))


def combine_refuse(top_k: int, width: int, dtype: str) -> list[str]:
    """Reasons why no combine kernel serves this shape."""
    values = 256 if dtype == "bfloat16" else 128
    found = []
    if dtype not in ("bfloat16", "float32"):
        found.append(f"activation {dtype}: expert rows are summed from bfloat16 or float32")
    elif width % values:
        found.append(f"width {width}: rows of {dtype} words take multiples of {values}")
    if top_k > 32:
        found.append(f"top_k {top_k}: a token's choices fit one word of 32 bits")
    return found


def combine_work(
    tokens: int,
    rows: float,
    top_k: int,
    width: int,
    dtype: str,
    chip: ChipLimits,
    op: str = "combine",
    plan: CombinePlan | None = None,
) -> tuple[Term, ...]:
    """Rows that are there read once, sums written once; issue slots beside it. rows: local (token, choice) pairs.

    plan: None = combine_plan's.
    """
    plan = plan or combine_plan(tokens, top_k, width, dtype, chip)
    assert plan is not None, "refused by combine_refuse or its VMEM"
    cut = _CUT_SLOTS if plan.held_tokens < tokens else _STREAM_SLOTS
    per_row, per_token, per_tile = cut if plan.kernel == "stream" else _ROWS_SLOTS
    slots = (rows * per_row + tokens * per_token) * width / _SLOT_WIDTH + -(-tokens // plan.tile_tokens) * per_tile
    row_bytes = width * itemsize(dtype)
    return (
        prefetched(op, rows * row_bytes),
        prefetched(op, tokens * width * 4),
        Vector(op, slots * 4 * chip.lanes * chip.sublanes),
    )


def sparsecore_work(
    tokens: int, rows: float, top_k: int, width: int, dtype: str, chip: ChipLimits, op: str = "combine"
) -> tuple[Term, ...]:
    """Sums on the SparseCores, one after the other: choices laid out by the TensorCore, start, rows that are there,
    sums written. rows: local (token, choice) pairs, divided evenly over tokens and subcores.

    Nothing overlaps but rows that come with rows that are summed: a subcore's sums leave before its next are made.
    """
    workers, stride = chip.sparse_cores * chip.sc_subcores, max(_power_of_two(top_k), 2)
    groups = -(-tokens // (_SPARSE_TOKENS * workers))  # of the busiest subcore
    here = rows / (tokens * top_k)
    none = (1 - here) ** top_k
    first, added = 1 - none, top_k * here - (1 - none)
    counts = {"first": first, "added": added, "none": none}
    scale = width / _SLOT_WIDTH * _SPARSE_LANES / chip.sc_lanes
    per_token = sum(counts[key] * slots for key, slots in _SPARSE_SLOTS.items()) * scale + top_k * here * _SPARSE_ROW
    per_group = _SPARSE_TOKENS * (per_token + stride / chip.sc_lanes * _SPARSE_CHOICES) + _SPARSE_GROUP
    entries = 2 * 4 * tokens * (top_k + stride)  # places and weights, read and laid out anew
    sums = tokens * width * 4
    return (
        Stream("lay out choices", entries, entries / 2),
        Subcore("start SparseCores", 0, starts=1),
        Subcore(op, groups * per_group),
        prefetched(op, rows * width * itemsize(dtype)),
        prefetched("write sums", sums),
    )


def sparsecore_refuse(
    tokens: int, top_k: int, width: int, dtype: str, chip: ChipLimits, *, sums: bool = True
) -> list[str]:
    """Reasons why the SparseCores do not serve this shape; sums: combine_sparsecore, else gather_rows_sparsecore."""
    if not chip.sparse_cores:
        return ["the chip has no SparseCores"]
    found = combine_refuse(top_k, width, dtype)
    whole = 2048 if dtype == "bfloat16" else 1024
    if width % whole:
        found.append(f"width {width}: the SparseCores copy rows of whole memory tiles, multiples of {whole}")
    workers = chip.sparse_cores * chip.sc_subcores
    if workers & (workers - 1):
        found.append(f"{workers} subcores: work is divided by a power of two")
    if not found and sparsecore_copy_rows(tokens, top_k, width, dtype, chip, sums=sums) is None:
        need = _sparsecore_bytes(tokens, top_k, width, dtype, chip, 8, sums)
        found.append(f"a subcore needs {need} bytes for {tokens} tokens of width {width}, it has {chip.sc_vmem_bytes}")
    return found


def sparsecore_copy_rows(
    tokens: int, top_k: int, width: int, dtype: str, chip: ChipLimits, *, sums: bool = True
) -> int | None:
    """Rows of one indirect copy: the most that fit a subcore's memory twice, beside the sums of 8 tokens."""
    sizes = ((n, _sparsecore_bytes(tokens, top_k, width, dtype, chip, n, sums)) for n in (16, 8))
    return next((n for n, size in sizes if size <= chip.sc_vmem_bytes), None)


def _sparsecore_bytes(
    tokens: int, top_k: int, width: int, dtype: str, chip: ChipLimits, copy_rows: int, sums: bool
) -> int:
    workers = chip.sparse_cores * chip.sc_subcores
    entries = -(-tokens // (_SPARSE_TOKENS * workers)) * _SPARSE_TOKENS * max(_power_of_two(top_k), 2)
    rows = 2 * copy_rows * width * itemsize(dtype)
    if not sums:
        return rows + 4 * (-(-tokens * top_k // workers) + copy_rows + chip.sc_lanes) + 4096
    return rows + _SPARSE_TOKENS * width * 4 + 4 * (4 * entries + copy_rows + 3 * chip.sc_lanes) + 4096


def _rows_vmem(tile_tokens: int, top_k: int, width: int, dtype: str) -> int:
    """Rows of two tiles, their sums, and two tiles on their way out."""
    held = tile_tokens * _padded(width, dtype)
    return 2 * top_k * held + held * 4 // itemsize(dtype) + 2 * tile_tokens * width * 4


def _held_tokens(tokens: int, tile_tokens: int, width: int, dtype: str, chip: ChipLimits) -> int:
    """As combine_stream decides: all, or a power of two of tiles whose sums fit a quarter of VMEM."""
    tiles = -(-tokens // tile_tokens)
    fit = chip.vmem_bytes // 4 // (tile_tokens * _padded(width, dtype) * 4 // itemsize(dtype))
    return tile_tokens * (tiles if tiles <= fit else 1 << max(fit.bit_length() - 1, 0))


def _stream_vmem(held_tokens: int, tile_tokens: int, tile_rows: int, width: int, dtype: str) -> int:
    """Sums that are held, rows on their way in, two tiles of sums on their way out."""
    held = held_tokens * _padded(width, dtype) * 4 // itemsize(dtype)
    return held + _COPIES * tile_rows * _padded(width, dtype) + 2 * tile_tokens * width * 4


def _stream_smem(tokens: int, held_tokens: int, top_k: int) -> int:
    """Entry of each row, two sets of weights by entry of what is held, pieces of runs."""
    weights = 2 * held_tokens * max(_power_of_two(top_k), 4)
    return 4 * (tokens * top_k + weights + 3 * (1024 + held_tokens * top_k // 32))


def _padded(width: int, dtype: str) -> int:
    """Bytes of a row in VMEM: whole tiles of 8 rows of 128 words."""
    return -(-width * itemsize(dtype) // 4096) * 4096


def _power_of_two(n: int) -> int:
    return 1 << (n - 1).bit_length()


__all__ = [
    "CombinePlan",
    "combine_plan",
    "combine_refuse",
    "combine_rows_plan",
    "combine_tiled",
    "combine_work",
    "sparsecore_copy_rows",
    "sparsecore_refuse",
    "sparsecore_work",
]
