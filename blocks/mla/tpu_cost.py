"""Work, tiles, vector memory and limits of latent attention's Pallas kernels (tpu_ragged.py), on one device. No jax."""

from collections.abc import Mapping
from dataclasses import dataclass
from math import ceil, lcm

from ..core.declare import ModelDims
from ..core.head_fields import gate_width
from ..core.work import Gemm, Load, Stream, Term, Vector, itemsize, off_steps, prefetched, tuned_key
from . import cost
from .block import Fields, cached_row, query_dim, row_values
from .tpu_ragged_sizes import (
    mla_contraction,
    mla_group,
    mla_query_block,
    mla_step_keys,
    mla_tile_rows,
    mla_vmem_bytes,
)

# Keys of a step. A decode step has a latency of its own (scores must be complete before weights, those before values)
# that 2048 keys hide better than 1024; but every row's last step is half empty on average.
_DECODE_KEYS, _LONG_DECODE_KEYS, _LONG_CONTEXT = 1024, 2048, 4096
_PREFILL_KEYS = 512
# Queries times heads of a prefill step: with fewer, a step's keys arrive later than its products end.
_PREFILL_ROWS = 1024
# Steps in VMEM or in flight: three steps of 1024 bfloat16 rows are 1.2 us of HBM time, about one access.
_BUFFERS = 4
# Float32 operations per score: scale, mask, maximum, difference, power, sum, rounding.
_SCORE_OPS = 8
# Scalar memory that is left to the compiler and to scalars other than the page table.
_SMEM_SPARE = 128 << 10
_ACTIVATIONS, _CACHES = ("bfloat16", "float32"), ("bfloat16", "float32", "float8_e4m3fn", "float8_e5m2")
# What decides tiles, of one device.
TUNED_BY = ("rows", "heads", "latent", "page", "kv")
# cost.py's terms of what is done otherwise here.
_REPLACED = ("absorb keys", "absorb values", "attend decode", "attend prefill", "expand prefill", "write cache")


@dataclass(frozen=True)
class _Sizes:
    """One kernel's, as tpu_ragged.py makes them (see MlaSizes)."""

    prefill: bool
    block_tokens: int
    tile_tokens: int
    num_heads: int
    latent: int
    row: int
    keys: int
    buffers: int
    group: int


def work(fields: Fields, dims: ModelDims, load: Load) -> tuple[Term, ...]:
    """As in cost.py, but between the projections: pages move once, for as many keys as each row has."""
    kept = [term for term in cost.work(fields, dims, load) if term.op not in _REPLACED]
    after = next(place for place, term in enumerate(kept) if term.op == "project out")
    act, weight, latent = load.dtypes.activation, load.dtypes.weight, fields.kv_lora_rank
    heads = fields.num_heads // load.degrees.tp
    inner = (
        Gemm("absorb keys", load.tokens, latent, fields.qk_nope_head_dim, act, weight, count=heads),
        *_decode(fields, dims, load),
        *_prefill(fields, dims, load),
        Gemm("absorb values", load.tokens, fields.v_head_dim, latent, act, weight, count=heads),
    )
    return (*kept[:after], *inner, *kept[after:])


def tuning(fields: Fields, dims: ModelDims, loads: Mapping[str, Load]) -> dict[str, int]:
    """Values of a pool's row, keys per step, prefill rows per step and buffers: the same in every bucket."""
    return max((_tiles(fields, load) for load in loads.values()), key=lambda tiles: tiles["decode_keys"]) | {
        "row": _row(fields, next(iter(loads.values())))
    }


def kernels(tiles: Mapping[str, int], *, prefills: bool) -> dict[str, int]:
    """Launches of one layer by kernel, named up to its sizes. prefills: the bucket takes rows of several tokens."""
    return {"mla_decode": 1, "mla_prefill": 1} if prefills else {"mla_decode": 1}


def temp_bytes(fields: Fields, dims: ModelDims, load: Load) -> int:
    """Projections; latent queries as produced and as the kernel takes them, rotated ones, outputs in latent space."""
    heads, act = fields.num_heads // load.degrees.tp, itemsize(load.dtypes.activation)
    gate, latent = gate_width(fields.output_gate, fields.v_head_dim), fields.kv_lora_rank
    per_head = 2 * query_dim(fields) + fields.v_head_dim + gate + 3 * latent + _row(fields, load) - latent
    return int(load.tokens * (heads * per_head + 2 * row_values(fields)) * act)


def refuse(fields: Fields, dims: ModelDims, load: Load) -> list[str]:
    """Why these kernels cannot serve this load; [] when they can."""
    chip, size = load.chip, load.page_size
    if chip.lanes != 128:
        return [f"memory rows of {chip.lanes} values: the kernels take 128"]
    found = []
    if fields.kv_lora_rank % chip.lanes:
        found.append(f"kv_lora_rank {fields.kv_lora_rank}: the kernels take multiples of {chip.lanes}")
    if load.dtypes.activation not in _ACTIVATIONS:
        found.append(f"activations in {load.dtypes.activation}: the kernels take {' or '.join(_ACTIVATIONS)}")
    if load.dtypes.kv not in _CACHES:
        return [*found, f"cache in {load.dtypes.kv}: the kernels take {', '.join(_CACHES)}"]
    tile = chip.sublanes * 4 // itemsize(load.dtypes.kv)
    if size % tile:
        found.append(
            f"page size {size}: with a cache in {load.dtypes.kv} the kernels take multiples of {tile}, memory tiles"
        )
    if load.table_bytes > (held := chip.smem_bytes - _SMEM_SPARE):
        found.append(
            f"page tables of {load.table_bytes} bytes: the kernels hold {held} in scalar memory; larger pages need less"
        )
    if not found:
        unit, tiles = lcm(size, chip.lanes), _tiles(fields, load)
        found += off_steps(tiles, {"decode_keys": unit, "prefill_keys": unit, "prefill_rows": 1, "buffers": 2})
    if not found and (needed := vmem_bytes(fields, dims, load)) > chip.vmem_bytes:
        found.append(f"{needed} bytes of vector memory: the chip has {chip.vmem_bytes}")
    return found


def vmem_bytes(fields: Fields, dims: ModelDims, load: Load) -> int:
    """Scoped vector memory of the larger kernel, as tpu_ragged.py asks for it."""
    act, kv = load.dtypes.activation, load.dtypes.kv
    kernels = (False, True) if load.prefill_tokens else (False,)
    return max(mla_vmem_bytes(_sizes(fields, load, prefill), load.seqs, load.tokens, act, kv) for prefill in kernels)


def shape_key(fields: Fields, dims: ModelDims, load: Load) -> str:
    """What tuned tiles are kept by."""
    return _key(fields, load)


def _key(fields: Fields, load: Load) -> str:
    heads, latent = fields.num_heads // load.degrees.tp, fields.kv_lora_rank
    return tuned_key(TUNED_BY, rows=load.seqs, heads=heads, latent=latent, page=load.page_size, kv=load.dtypes.kv)


def _row(fields: Fields, load: Load) -> int:
    (row,) = cached_row(fields).row(load.lanes)
    return row


def _row_bytes(fields: Fields, load: Load) -> int:
    return _row(fields, load) * itemsize(load.dtypes.kv)


def _heads(fields: Fields, load: Load) -> int:
    """Local heads, in whole tiles of the dtype that products take."""
    wide = "float32" in (load.dtypes.activation, load.dtypes.kv)
    tile = mla_tile_rows("float32" if wide else load.dtypes.activation)
    return ceil(fields.num_heads // load.degrees.tp / tile) * tile


def _tiles(fields: Fields, load: Load) -> dict[str, int]:
    decode = _LONG_DECODE_KEYS if load.decode_context >= _LONG_CONTEXT else _DECODE_KEYS
    own = {
        "decode_keys": mla_step_keys(decode, load.page_size),
        "prefill_keys": mla_step_keys(_PREFILL_KEYS, load.page_size),
        "prefill_rows": _PREFILL_ROWS,
        "buffers": _BUFFERS,
    }
    return own | dict(load.tuned_tiles("mla.tpu_ragged", _key(fields, load)))


def _sizes(fields: Fields, load: Load, prefill: bool) -> _Sizes:
    tiles, heads = _tiles(fields, load), _heads(fields, load)
    block, tile = mla_query_block(tiles["prefill_rows"], heads, load.tokens) if prefill else (1, 1)
    keys = tiles["prefill_keys" if prefill else "decode_keys"]
    row, group = _row(fields, load), mla_group(load.page_size)
    return _Sizes(prefill, block, tile, heads, fields.kv_lora_rank, row, keys, tiles["buffers"], group)


def _depth(sizes: _Sizes, side: int) -> int:
    """Values that the products of one query row and key pass through the matrix unit, idle ones included.

    side: of the unit; a product of fewer values takes as long.
    """
    width = mla_contraction(sizes.tile_tokens * sizes.num_heads, sizes.latent)
    pieces = sizes.latent // width * ceil(width / side) + ceil((sizes.row - sizes.latent) / side)
    return pieces * side + sizes.latent


def _attend(
    op: str, fields: Fields, load: Load, sizes: _Sizes, items: float, queries: float, keys: float
) -> tuple[Term, ...]:
    """`items` query blocks of `queries` tokens in all, each over `keys` keys: whole pages in, whole steps computed."""
    row, rows = _row_bytes(fields, load), queries * sizes.num_heads
    read, computed = keys + load.page_size / 2, keys + sizes.keys / 2
    return (
        prefetched(op, items * read * row),
        prefetched(op, 2 * rows * sizes.row * itemsize(load.dtypes.activation)),
        Gemm(op, rows, computed, _depth(sizes, load.row_full), load.dtypes.activation),
        Vector(op, rows * computed * _SCORE_OPS),
    )


def _decode(fields: Fields, dims: ModelDims, load: Load) -> tuple[Term, ...]:
    """Each row reads its own keys once for all heads; its new row goes back with the group it lies in."""
    if not load.decode_rows:
        return ()
    sizes, rows = _sizes(fields, load, prefill=False), load.decode_rows
    written = prefetched("attend decode", rows * sizes.group * _row_bytes(fields, load))
    return (*_attend("attend decode", fields, load, sizes, rows, rows, load.decode_context), written)


def _prefill(fields: Fields, dims: ModelDims, load: Load) -> tuple[Term, ...]:
    """Each block of queries reads its row's keys again; new rows are laid out in groups and copied into their pages."""
    if not load.prefill_tokens:
        return ()
    sizes, new = _sizes(fields, load, prefill=True), load.prefill_tokens * _row_bytes(fields, load)
    items = max(1.0, load.prefill_tokens / sizes.block_tokens)
    attend = _attend("attend prefill", fields, load, sizes, items, load.prefill_tokens, load.prefill_context)
    return (Stream("write cache", 4 * new, new), *attend)
