"""Work, tiles, vector memory and limits of the grouped experts (tpu_grouped.py), on one device. No jax."""

from collections.abc import Mapping
from dataclasses import replace
from math import ceil, prod, sqrt

from ..collectives.cost import return_tokens
from ..collectives.tpu_cost import refuse_chunks
from ..core.array_info import SCALED
from ..core.declare import ModelDims
from ..core.work import Gemm, Load, Stream, Term, Vector, itemsize, off_steps, prefetched, touched, tuned_key
from . import cost
from .block import Fields
from .tpu_combine_cost import (
    CombinePlan,
    combine_plan,
    combine_refuse,
    combine_rows_plan,
    combine_tiled,
    combine_work,
    sparsecore_copy_rows,
    sparsecore_refuse,
    sparsecore_work,
)
from .tpu_dispatch_cost import dispatch_refuse, dispatch_vmem_bytes

# Rows of one product. Below 16 a float8 product costs the same: two of 128 columns share a load of 32 rows.
_BLOCK_ROWS = (16, 32, 64, 128)
_SPARE_BYTES = 2 << 20  # the compiler's own: spilled registers, results on their way out of the matrix unit
_SMEM_SPARE = 128 << 10  # scalar memory that is left to the compiler and to other scalars
# Vector operations per value of x times a block scale, rounded to float8: multiply, two packs of two, splat of it.
_FOLD = 2.25
_WIDEN = 2.5  # per weight: to float32, times its scale, half a pack
_SPLIT_ROWS = 32  # up to so many rows of a block two float8 parts of each are cheaper than widened weights
# Messages in which sums may return, and what one carries at least. Each pays a collective's latency again, and sums of
# chosen tokens are made by token, at more instructions than by row. By the prices of tpu7x, 4096 wide, two messages of
# 8 MiB gain 1 %, two of 16 MiB 6 %, four of 16 MiB 12 % of sums and reduce-scatter, eight of 8 MiB less than four.
_RETURN_CHUNKS = (4, 2)
_CHUNK_BYTES = 16 << 20
# What decides tiles, of one device. rows: dtype of token rows in products with float8 experts; chunks: return_chunks.
TUNED_BY = ("tokens", "top_k", "experts", "width", "inner", "expert", "scale_block", "rows", "chunks")
# cost.py's terms of what the kernels do instead.
_REPLACED = ("experts", "combine")


def work(fields: Fields, dims: ModelDims, load: Load) -> tuple[Term, ...]:
    """As in cost.py, but rows are ordered, multiplied and summed by the kernels."""
    kept = [term for term in cost.work(fields, dims, load) if term.op not in _REPLACED]
    # The order of its terms is that of the program: what stands before and after the experts stays there.
    before = [term for term in kept if term.op in ("latent in", "gather hidden", "gather routing")]
    after = [term for term in kept if term not in before]
    if return_chunks(fields, dims, load) == 1:
        return (*before, *_experts(fields, dims, load), *_sums(fields, dims, load), *after)
    after = [term for term in after if term.op != "return tokens"]
    return (*before, *_experts(fields, dims, load), *_sums_in_chunks(fields, dims, load), *after)


def tuning(fields: Fields, dims: ModelDims, loads: Mapping[str, Load]) -> dict[str, int]:
    """Rows of a block and tiles of the sums per bucket, columns of an expert that are in VMEM at once."""
    found: dict[str, int] = {}
    for bucket, load in loads.items():
        plan = _combine(fields, dims, load)
        found[f"block_rows.{bucket}"] = _rows(fields, dims, load)
        found[f"combine_tokens.{bucket}"] = plan.tile_tokens if plan else 8
        found[f"stream_rows.{bucket}"] = plan.tile_rows if plan else 0
    # Decisions that only some programs have an argument for.
    chunks = {f"return_chunks.{bucket}": return_chunks(fields, dims, load) for bucket, load in loads.items()}
    if max(chunks.values()) > 1:
        found |= chunks
    if any(load.dtypes.expert in SCALED for load in loads.values()):
        found |= {f"row_parts.{bucket}": _parts(load, _rows(fields, dims, load)) for bucket, load in loads.items()}
    if any(load.unpermute == "sparsecore" for load in loads.values()):
        found |= {f"sparsecore_rows.{bucket}": _sparsecore_rows(fields, dims, load) for bucket, load in loads.items()}
    inner = {f"inner_tile.{bucket}": _inner_tile(fields, dims, load) or 128 for bucket, load in loads.items()}
    return found | (inner if len(set(inner.values())) > 1 else {"inner_tile": next(iter(inner.values()))})


def kernels(tiles: Mapping[str, int], *, prefills: bool) -> dict[str, int]:
    """Launches of one layer by kernel, named up to its sizes. prefills: the bucket takes rows of several tokens."""
    chunks = tiles.get("return_chunks", 1)
    if tiles.get("sparsecore_rows"):
        sums = "combine_sparsecore"
    else:  # those of a chunk are of chosen tokens, which only one kernel makes
        sums = "combine_stream" if tiles["stream_rows"] and chunks == 1 else "combine_rows"
    return {"moe_dispatch": 1, "grouped": 1, sums: chunks}


def temp_bytes(fields: Fields, dims: ModelDims, load: Load) -> int:
    """Tokens of all ranks as words, a row per assignment, float32 sums."""
    act, width = itemsize(load.dtypes.activation), fields.expert_width(dims)
    rows = load.gathered_tokens * fields.router.top_k
    return int(
        load.gathered_tokens * width * (2 * act + 4) + (rows + _rows(fields, dims, load)) * width * act + rows * 4 * 6
    )


def refuse(fields: Fields, dims: ModelDims, load: Load) -> list[str]:
    """Why these kernels cannot serve this load; [] when they can."""
    experts, act, width = fields.experts, load.dtypes.activation, fields.expert_width(dims)
    if load.chip.lanes != 128:
        return [f"memory rows of {load.chip.lanes} values: the kernel takes 128"]
    found = _refuse_options(fields)
    found += _refuse_dtypes(load)
    found += combine_refuse(fields.router.top_k, width, act)
    inner, edge = experts.intermediate_size // load.degrees.etp, _edge(load)
    if inner % edge:
        found.append(f"intermediate {inner} of an expert on one device: the kernel takes multiples of {edge}")
    if load.dtypes.expert in SCALED and width % edge:
        found.append(f"width {width}: the kernel takes multiples of {edge}, whole scale blocks")
    tokens, local = load.gathered_tokens, fields.router.num_experts // load.degrees.ep
    found += dispatch_refuse(tokens, fields.router.top_k, local, load)
    scalars = tokens * fields.router.top_k * 4
    if scalars > (held := load.chip.smem_bytes - _SMEM_SPARE):
        found.append(f"{scalars} bytes of row tokens in scalar memory: the kernel takes {held}")
    if not found and _inner_tile(fields, dims, load) is None:
        needed, has = _vmem(fields, dims, load, edge), load.chip.vmem_bytes
        found.append(f"{needed} bytes of vector memory with {edge} columns of an expert: the chip has {has}")
    if not found and _combine(fields, dims, load) is None:
        found.append(f"no tile of 8 tokens of width {width} fits the vector memory of {load.chip.vmem_bytes} bytes")
    found = found or _refuse_tiles(fields, dims, load)
    if load.unpermute == "sparsecore":
        refused = sparsecore_refuse(tokens, fields.router.top_k, width, act, load.chip)
        found += [reason for reason in refused if reason not in found]
    return found


def vmem_bytes(fields: Fields, dims: ModelDims, load: Load) -> int:
    """Scoped vector memory of the largest kernel: the products, the sums or, for many narrow tokens, the sort."""
    plan, local = _combine(fields, dims, load), fields.router.num_experts // load.degrees.ep
    return max(
        _vmem(fields, dims, load, _inner_tile(fields, dims, load) or 128),
        plan.vmem_bytes if plan else 0,
        dispatch_vmem_bytes(load.gathered_tokens, fields.router.top_k, local),
    )


def block_rows(fields: Fields, load: Load) -> int:
    """Smallest block that holds most experts' rows (mean + 1.5 deviations), or the largest.

    Weights stay for the next block of the same expert, so a second block costs its products only, in the shadow of the
    next expert's weights while those bind.
    """
    # Asked how many sequences would fit, the planner tries loads whose rows leave a pinned step less than no room.
    mean = max(load.valid_tokens, 0) * fields.router.top_k / fields.router.num_experts
    rows = mean + 1.5 * sqrt(mean)
    return next((size for size in _BLOCK_ROWS if size >= rows), _BLOCK_ROWS[-1])


def shape_key(fields: Fields, dims: ModelDims, load: Load) -> str:
    """What tuned tiles are kept by."""
    return tuned_key(
        TUNED_BY,
        tokens=load.gathered_tokens,
        top_k=fields.router.top_k,
        experts=fields.router.num_experts // load.degrees.ep,
        width=fields.expert_width(dims),
        inner=fields.experts.intermediate_size // load.degrees.etp,
        expert=load.dtypes.expert,
        scale_block=load.dtypes.scale_block if load.dtypes.expert in SCALED else 0,
        rows=load.dtypes.expert_rows,
        chunks=return_chunks(fields, dims, load),
    )


def _tuned(fields: Fields, dims: ModelDims, load: Load) -> Mapping[str, int]:
    kernel = "moe.tpu_grouped"
    return load.tuned_tiles(kernel, shape_key(fields, dims, load)) if kernel in load.tuned else {}


def _rows(fields: Fields, dims: ModelDims, load: Load) -> int:
    return _tuned(fields, dims, load).get("block_rows", block_rows(fields, load))


def _refuse_tiles(fields: Fields, dims: ModelDims, load: Load) -> list[str]:
    """Why the kernels do not take their tiles; own ones they do."""
    plan, inner = _combine(fields, dims, load), fields.experts.intermediate_size // load.degrees.etp
    assert plan is not None, "refused before"
    tiles = {"block_rows": _rows(fields, dims, load), "combine_tokens": plan.tile_tokens}
    tiles["inner_tile"] = _inner_tile(fields, dims, load) or 0
    found = off_steps(tiles, {"block_rows": 16, "combine_tokens": 8, "inner_tile": _edge(load)})
    if plan.tile_rows and return_chunks(fields, dims, load) > 1:
        found.append(f"stream_rows {plan.tile_rows}: sums that return in chunks are made by token, 0")
    if not found and inner % tiles["inner_tile"]:
        found.append(f"inner_tile {tiles['inner_tile']}: the kernel takes what divides {inner}")
    if not found and (needed := vmem_bytes(fields, dims, load)) > load.chip.vmem_bytes:
        found.append(f"{needed} bytes of vector memory: the chip has {load.chip.vmem_bytes}")
    return found


def return_chunks(fields: Fields, dims: ModelDims, load: Load) -> int:
    """Messages in which the sums return to their rank, each but the first beside the sums of the next; 1 = whole.

    Only where nothing is added to the sums before they travel, and where something exchanges them beside the cores
    that make them: the SparseCores, to which the compiler gives its reduce-scatters, beside the TensorCore.
    """
    width, act, experts = fields.expert_width(dims), load.dtypes.activation, fields.experts
    added = fields.shared is not None and load.degrees.shared > 1 and experts.latent_size is None
    if load.degrees.dp == 1 or added or load.kernel_returns or not load.chip.sparse_cores:
        return 1
    if load.unpermute == "sparsecore":
        return 1
    if combine_rows_plan(fields.router.top_k, width, act, load.chip) is None:
        return 1
    whole = load.gathered_tokens * width * itemsize(act)
    return next((n for n in _RETURN_CHUNKS if whole >= n * _CHUNK_BYTES and not refuse_chunks(load, n)), 1)


def _refuse_options(fields: Fields) -> list[str]:
    experts, found = fields.experts, []
    if not experts.gated:
        found.append("experts without a gate: the kernel takes gated ones")
    if experts.activation != "silu":
        found.append(f"activation {experts.activation}: the kernel takes silu")
    if experts.bias:
        found.append("experts with biases: the kernel takes none")
    if experts.clamp is not None:
        found.append("limits on the inner values (clamp): the kernel takes none")
    if fields.router.apply == "input":
        found.append("weights on the experts' input: the kernel takes them on the output")
    return found


def _refuse_dtypes(load: Load) -> list[str]:
    act, expert = load.dtypes.activation, load.dtypes.expert
    if expert == "float8_e4m3fn":
        found = [] if act == "bfloat16" else [f"activation {act} with float8 experts: the kernel takes bfloat16"]
        if expert not in load.chip.mxu_dtypes:
            found.append("float8 experts on a chip whose matrix unit has no float8 product")
        return found
    if expert not in ("bfloat16", "float32"):
        return [f"expert dtype {expert}: the kernel takes float8_e4m3fn, bfloat16 or float32"]
    return (
        [] if expert == act else [f"expert dtype {expert} with activation {act}: the kernel takes one dtype for both"]
    )


def _combine(fields: Fields, dims: ModelDims, load: Load) -> CombinePlan | None:
    shape = (fields.router.top_k, fields.expert_width(dims), load.dtypes.activation, load.chip)
    whole = return_chunks(fields, dims, load) == 1
    plan = combine_plan(load.gathered_tokens, *shape) if whole else combine_rows_plan(*shape)
    tuned = _tuned(fields, dims, load)
    if plan is None or not tuned.keys() & {"combine_tokens", "stream_rows"}:
        return plan
    tiles = tuned.get("combine_tokens", plan.tile_tokens), tuned.get("stream_rows", plan.tile_rows)
    return combine_tiled(load.gathered_tokens, *shape, *tiles)


def _inner_tile(fields: Fields, dims: ModelDims, load: Load) -> int | None:
    """Most columns of an expert, in whole blocks of scales, that fit VMEM twice; None when one block's do not."""
    if (tuned := _tuned(fields, dims, load).get("inner_tile")) is not None:
        return tuned
    inner, edge = fields.experts.intermediate_size // load.degrees.etp, _edge(load)
    sizes = [inner // n for n in range(1, inner // edge + 1) if inner % (n * edge) == 0]
    return next((size for size in sizes if _vmem(fields, dims, load, size) <= load.chip.vmem_bytes), None)


def _edge(load: Load) -> int:
    """Columns that are not cut: a memory row, or a block of scales, which _refuse_dtypes leaves to float8."""
    return load.dtypes.scale_block if load.dtypes.expert in SCALED else 128


def _parts(load: Load, rows: int) -> int:
    """Float8 parts of a row of activations; 0: rows stay bfloat16, and weights with scales are widened to it."""
    if load.dtypes.expert not in SCALED:
        return 0
    return 1 if load.dtypes.expert_rows != "activation" else 2 if rows <= _SPLIT_ROWS else 0


def _vmem(fields: Fields, dims: ModelDims, load: Load, inner: int) -> int:
    """Two slots of weights, rows as they come and go, x, inner values and results of a block."""
    rows, width, act = _rows(fields, dims, load), fields.expert_width(dims), itemsize(load.dtypes.activation)
    scaled = _parts(load, rows) > 0
    widened = 3 * width * inner * act if load.dtypes.expert in SCALED and not scaled else 0
    weights = 2 * 3 * width * inner * itemsize(load.dtypes.expert) + widened
    words = 2 * rows * ceil(width * act / 4096) * 4096
    x = rows * width * (4 if scaled else act) + rows * inner * (4 if scaled else 4 + act) + 2 * rows * 128 * 4
    return weights + words + x + rows * width * 4 + _SPARE_BYTES


def _experts(fields: Fields, dims: ModelDims, load: Load) -> tuple[Term, ...]:
    """Ordering, then blocks of rows; weights of each expert with rows move once, as whole matrices."""
    act, dtype, router, width = load.dtypes.activation, load.dtypes.expert, fields.router, fields.expert_width(dims)
    rows, local = _rows(fields, dims, load), router.num_experts // load.degrees.ep
    mean = load.valid_tokens * router.top_k / router.num_experts
    used = local * touched(load.valid_tokens, router.top_k / router.num_experts)
    blocks = max(used, local * mean / rows)
    inner = fields.experts.intermediate_size // load.degrees.etp
    once = (_inner_tile(fields, dims, load) or 128) == inner
    streams = used if once else blocks
    matrix = width * inner * itemsize(dtype)
    block = load.dtypes.expert_block
    scales = prod(block.count(width, inner)) * 4 if block else 0
    parts = _parts(load, rows)
    # With 128 x 128 scales two blocks of columns share a tile, each with its own left operand; else a tile has one.
    lefts = 2 if _edge(load) == 128 else 1
    left, product = (lefts * parts * rows, dtype) if parts else (rows, act)
    fold = blocks * 3 * matrix / 256 * lefts * rows * parts * _FOLD if parts else streams * 3 * matrix * _WIDEN
    scaling = [Vector("experts", fold)] if dtype in SCALED else []
    assignments = load.gathered_tokens * router.top_k
    return (
        Stream("order rows", assignments * 4 * 4, assignments * 4),
        Stream(
            "pack rows", 2 * load.gathered_tokens * width * itemsize(act), load.gathered_tokens * width * itemsize(act)
        ),
        Gemm("experts", left, inner, width, product, None, 2 * blocks),
        Gemm("experts", left, width, inner, product, None, blocks),
        *scaling,
        prefetched("experts", streams * 3 * (matrix + scales)),
        prefetched("experts", 2 * blocks * rows * width * itemsize(act)),
    )


def _sparsecore_rows(fields: Fields, dims: ModelDims, load: Load) -> int:
    """Rows of one copy of a subcore; 0: the TensorCore sums."""
    if load.unpermute == "tensorcore":
        return 0
    act, width = load.dtypes.activation, fields.expert_width(dims)
    return sparsecore_copy_rows(load.gathered_tokens, fields.router.top_k, width, act, load.chip) or 0


def _sums(fields: Fields, dims: ModelDims, load: Load) -> tuple[Term, ...]:
    """Rows weighted and summed per token, then cast."""
    plan = _combine(fields, dims, load)
    if plan is None:
        return ()
    act, router, width = load.dtypes.activation, fields.router, fields.expert_width(dims)
    rows = load.valid_tokens * router.top_k / load.degrees.ep
    cast = load.gathered_tokens * width * (4 + itemsize(act))
    shape = (load.gathered_tokens, rows, router.top_k, width, act, load.chip)
    if load.unpermute == "sparsecore":
        return (*sparsecore_work(*shape), Stream("cast sums", cast, load.gathered_tokens * width * 4))
    return (*combine_work(*shape, plan=plan), Stream("combine", cast, load.gathered_tokens * width * 4))


def _sums_in_chunks(fields: Fields, dims: ModelDims, load: Load) -> tuple[Term, ...]:
    """The first chunk's sums, the reduce-scatters beside the sums of the others, then the chunks in one array."""
    chunks, width = return_chunks(fields, dims, load), fields.expert_width(dims)
    sums = _sums(fields, dims, load)
    own = load.tokens * width * itemsize(load.dtypes.activation)
    messages = return_tokens("return tokens", "combine experts", "experts", width, load, chunks)
    return (
        *(_share(term, "combine", 1, chunks) for term in sums),
        *(message for message in messages if message.kind == "reduce-scatter"),
        *(_share(term, "return tokens", chunks - 1, chunks) for term in sums),
        Stream("join chunks", 2 * own, own),
    )


def _share(term: Term, op: str, parts: int, chunks: int) -> Term:
    """`parts` of `chunks` equal parts of a term, as part of another operator."""
    if isinstance(term, Stream):
        return Stream(op, term.bytes * parts / chunks, term.chunk_bytes / chunks)
    assert isinstance(term, Vector), term
    return replace(term, op=op, flops=term.flops * parts / chunks)


__all__ = [
    "block_rows",
    "kernels",
    "refuse",
    "return_chunks",
    "shape_key",
    "temp_bytes",
    "tuning",
    "vmem_bytes",
    "work",
]
