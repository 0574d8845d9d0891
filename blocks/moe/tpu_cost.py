"""Work, tiles, vector memory and limits of the grouped experts (tpu_grouped.py), on one device. No jax."""

from collections.abc import Mapping
from dataclasses import replace
from math import ceil, sqrt

from ..collectives.cost import return_tokens
from ..collectives.tpu_cost import refuse_chunks
from ..core.array_info import SCALED
from ..core.declare import ModelDims
from ..core.work import Gemm, Load, Stream, Term, Vector, itemsize, prefetched, touched
from ..router.tpu_cost import refuse_dispatch
from . import cost
from .block import Fields
from .tpu_combine_cost import CombinePlan, combine_plan, combine_refuse, combine_rows_plan, combine_work

# Rows of one product. Below 16 a float8 product costs the same: two of 128 columns share a load of 32 rows.
_BLOCK_ROWS = (16, 32, 64, 128)
_SPARE_BYTES = 2 << 20  # the compiler's own: spilled registers, results on their way out of the matrix unit
_SMEM_BYTES = 1 << 20  # scalar memory of a TensorCore
_SMEM_SPARE = 128 << 10
# Vector operations per value of x times a block scale, rounded to float8: multiply, two packs of two, splat of it.
_FOLD = 2.25
_WIDEN = 2.5  # per weight: to float32, times its scale, half a pack
_SPLIT_ROWS = 32  # tpu_grouped.py
# Messages in which sums may return, and what one carries at least. Each pays a collective's latency again, and sums of
# chosen tokens are made by token, at more instructions than by row. By the prices of tpu7x, 4096 wide, two messages of
# 8 MiB gain 1 %, two of 16 MiB 6 %, four of 16 MiB 12 % of sums and way back, eight of 8 MiB less than four.
_RETURN_CHUNKS = (4, 2)
_CHUNK_BYTES = 16 << 20
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
        found[f"block_rows.{bucket}"] = block_rows(fields, load)
        found[f"combine_tokens.{bucket}"] = plan.tile_tokens if plan else 8
        found[f"stream_rows.{bucket}"] = plan.tile_rows if plan else 0
        found[f"return_chunks.{bucket}"] = return_chunks(fields, dims, load)
    found["inner_tile"] = min(_inner_tile(fields, dims, load) or 128 for load in loads.values())
    return found


def temp_bytes(fields: Fields, dims: ModelDims, load: Load) -> int:
    """Tokens of all ranks as words, a row per assignment, float32 sums."""
    act, width = itemsize(load.dtypes.activation), fields.expert_width(dims)
    rows = load.gathered_tokens * fields.router.top_k
    return int(
        load.gathered_tokens * width * (2 * act + 4) + (rows + block_rows(fields, load)) * width * act + rows * 4 * 6
    )


def refuse(fields: Fields, dims: ModelDims, load: Load) -> list[str]:
    """Why these kernels cannot serve this load; [] when they can."""
    experts, act, width = fields.experts, load.dtypes.activation, fields.expert_width(dims)
    if load.chip.lanes != 128:
        return [f"memory rows of {load.chip.lanes} values: the kernel takes 128"]
    found = _refuse_options(fields)
    found += _refuse_dtypes(load)
    found += combine_refuse(fields.router.top_k, width, act)
    inner = experts.intermediate_size // load.degrees.etp
    if inner % 128:
        found.append(f"intermediate {inner} of an expert on one device: the kernel takes multiples of 128")
    if load.dtypes.expert in SCALED and width % 128:
        found.append(f"width {width}: the kernel takes multiples of 128, whole scale blocks")
    tokens, local = load.gathered_tokens, fields.router.num_experts // load.degrees.ep
    found += refuse_dispatch(tokens, fields.router.top_k, local, load)
    scalars = tokens * fields.router.top_k * 4
    if scalars > _SMEM_BYTES - _SMEM_SPARE:
        found.append(f"{scalars} bytes of row tokens in scalar memory: the kernel takes {_SMEM_BYTES - _SMEM_SPARE}")
    if not found and _inner_tile(fields, dims, load) is None:
        needed = _vmem(fields, dims, load, 128)
        found.append(
            f"{needed} bytes of vector memory with 128 columns of an expert: the chip has {load.chip.vmem_bytes}"
        )
    if not found and _combine(fields, dims, load) is None:
        found.append(f"no tile of 8 tokens of width {width} fits the vector memory of {load.chip.vmem_bytes} bytes")
    return found


def vmem_bytes(fields: Fields, dims: ModelDims, load: Load) -> int:
    """Scoped vector memory of the largest kernel, which is that of the products."""
    plan = _combine(fields, dims, load)
    return max(_vmem(fields, dims, load, _inner_tile(fields, dims, load) or 128), plan.vmem_bytes if plan else 0)


def block_rows(fields: Fields, load: Load) -> int:
    """Smallest block that holds most experts' rows (mean + 1.5 deviations), or the largest.

    Weights stay for the next block of the same expert, so a second block costs its products only, in the shadow of the
    next expert's weights while those bind.
    """
    # Asked how many sequences would fit, the planner tries loads whose rows leave a pinned step less than no room.
    mean = max(load.valid_tokens, 0) * fields.router.top_k / fields.router.num_experts
    rows = mean + 1.5 * sqrt(mean)
    return next((size for size in _BLOCK_ROWS if size >= rows), _BLOCK_ROWS[-1])


def return_chunks(fields: Fields, dims: ModelDims, load: Load) -> int:
    """Messages in which the sums return to their rank, each but the first beside the sums of the next; 1 = whole.

    Only where nothing is added to the sums before they travel, and where something beside the TensorCore exchanges
    them: the SparseCores, to which the compiler gives its reduce-scatters.
    """
    width, act, experts = fields.expert_width(dims), load.dtypes.activation, fields.experts
    added = fields.shared is not None and load.degrees.shared > 1 and experts.latent_size is None
    if load.degrees.dp == 1 or added or load.kernel_returns or not load.chip.sparse_cores:
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
    if return_chunks(fields, dims, load) > 1:
        return combine_rows_plan(*shape)
    return combine_plan(load.gathered_tokens, *shape)


def _inner_tile(fields: Fields, dims: ModelDims, load: Load) -> int | None:
    """Most columns of an expert that fit VMEM twice; None when 128 do not."""
    inner = fields.experts.intermediate_size // load.degrees.etp
    sizes = [inner // n for n in range(1, inner // 128 + 1) if inner % (n * 128) == 0]
    return next((size for size in sizes if _vmem(fields, dims, load, size) <= load.chip.vmem_bytes), None)


def _parts(load: Load, rows: int) -> int:
    """Float8 parts of a row of activations; 0: rows stay bfloat16, and weights with scales are widened to it."""
    if load.dtypes.expert not in SCALED:
        return 0
    return 1 if load.dtypes.expert_rows != "activation" else 2 if rows <= _SPLIT_ROWS else 0


def _vmem(fields: Fields, dims: ModelDims, load: Load, inner: int) -> int:
    """Two slots of weights, rows as they come and go, x, inner values and results of a block."""
    rows, width, act = block_rows(fields, load), fields.expert_width(dims), itemsize(load.dtypes.activation)
    scaled = _parts(load, rows) > 0
    widened = 3 * width * inner * act if load.dtypes.expert in SCALED and not scaled else 0
    weights = 2 * 3 * width * inner * itemsize(load.dtypes.expert) + widened
    words = 2 * rows * ceil(width * act / 4096) * 4096
    x = rows * width * (4 if scaled else act) + rows * inner * (4 if scaled else 4 + act) + 2 * rows * 128 * 4
    return weights + words + x + rows * width * 4 + _SPARE_BYTES


def _experts(fields: Fields, dims: ModelDims, load: Load) -> tuple[Term, ...]:
    """Ordering, then blocks of rows; weights of each expert with rows move once, as whole matrices."""
    act, dtype, router, width = load.dtypes.activation, load.dtypes.expert, fields.router, fields.expert_width(dims)
    rows, local = block_rows(fields, load), router.num_experts // load.degrees.ep
    mean = load.valid_tokens * router.top_k / router.num_experts
    used = local * touched(load.valid_tokens, router.top_k / router.num_experts)
    blocks = max(used, local * mean / rows)
    inner = fields.experts.intermediate_size // load.degrees.etp
    once = (_inner_tile(fields, dims, load) or 128) == inner
    streams = used if once else blocks
    matrix = width * inner * itemsize(dtype)
    scales = SCALED[dtype].count(width, inner)[0] * SCALED[dtype].count(width, inner)[1] * 4 if dtype in SCALED else 0
    parts = _parts(load, rows)
    # With 128 x 128 scales two blocks of columns share a tile, each with its own left operand.
    left, product = (2 * parts * rows, dtype) if parts else (rows, act)
    fold = blocks * 3 * matrix / 128 * rows * parts * _FOLD if parts else streams * 3 * matrix * _WIDEN
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


def _sums(fields: Fields, dims: ModelDims, load: Load) -> tuple[Term, ...]:
    """Rows weighted and summed per token, then cast."""
    plan = _combine(fields, dims, load)
    if plan is None:
        return ()
    act, router, width = load.dtypes.activation, fields.router, fields.expert_width(dims)
    rows = load.valid_tokens * router.top_k / load.degrees.ep
    cast = load.gathered_tokens * width * (4 + itemsize(act))
    return (
        *combine_work(load.gathered_tokens, rows, router.top_k, width, act, load.chip, plan=plan),
        Stream("combine", cast, load.gathered_tokens * width * 4),
    )


def _sums_in_chunks(fields: Fields, dims: ModelDims, load: Load) -> tuple[Term, ...]:
    """The first chunk's sums, every chunk's way back beside the sums of the others, then the chunks in one array."""
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


__all__ = ["block_rows", "refuse", "return_chunks", "temp_bytes", "tuning", "vmem_bytes", "work"]
