"""Work, tiles, vector memory and limits of attention's Pallas kernels (tpu_ragged.py), on one device. No jax."""

from collections.abc import Mapping
from math import ceil, lcm

from ..core.declare import ModelDims
from ..core.work import Gemm, Load, Stream, Term, Vector, itemsize, off_steps, prefetched, tuned_key
from . import cost
from .block import Fields, reach, value_dim

# Bytes of a decode block: latencies of a step (scores must be complete before probabilities, those before values) show
# less in a large one, but a row's last block is multiplied in smaller steps, which cost half as much again.
_BLOCK_BYTES = 2 << 20
# Blocks on the chip: three are worked on, the others are on their way. 10 MiB take HBM 3 us, a few access times.
_SLOTS = 8
# Keys of a step in a row's last block.
_TAIL = 256
# Tokens of a prefill work item, each of which reads its row's keys again; their float32 sums take a few MiB.
_Q_BLOCK = 64
# Cached keys such an item multiplies at once: with 256 query rows, scores fill the registers twice.
_KV_BLOCK = 512
_QUERY_ROWS = 256  # of one product in the prefill kernel (tpu_ragged_prefill.py)
# Float32 operations per score: scale, maximum, difference, power, sum, rounding into two terms.
_SCORE_OPS = 9
# Share of vector memory the ring of decode blocks may take.
_RING_SHARE = 4
# What the compiler takes beside the declared buffers: spills and its own scratch.
_SPARE_BYTES = 2 << 20
# Scalar memory that is left to the compiler and to scalars other than the page table.
_SMEM_SPARE = 128 << 10
_ACTIVATIONS, _CACHES = ("bfloat16", "float32"), ("bfloat16", "float32", "float8_e4m3fn")
# What decides tiles, of one device. reach: keys a query sees at most, or "all".
TUNED_BY = ("rows", "q_heads", "kv_heads", "head_dim", "page", "kv", "reach")
# cost.py's terms of what is done otherwise here.
_REPLACED = ("attend decode", "attend prefill", "write cache")


def work(fields: Fields, dims: ModelDims, load: Load) -> tuple[Term, ...]:
    """As in cost.py, but between the projections: every row reads its own pages once, for as many keys as it has."""
    kept = [term for term in cost.work(fields, dims, load) if term.op not in _REPLACED]
    after = next(place for place, term in enumerate(kept) if term.op == "project out")
    return (*kept[:after], *_decode(fields, load), *_prefill(fields, load), *kept[after:])


def tuning(fields: Fields, dims: ModelDims, loads: Mapping[str, Load]) -> dict[str, int]:
    """Tiles, the same in every bucket: they follow from the page size, the cache's rows and what a query sees.

    Only a step smaller than a work item has smaller items: the largest step decides.
    """
    return _tiles(fields, max(loads.values(), key=lambda load: load.tokens))


def kernels(tiles: Mapping[str, int], *, prefills: bool) -> dict[str, int]:
    """Launches of one layer by kernel, named up to its sizes. prefills: the bucket takes rows of several tokens."""
    return {"rpa_decode": 1, "rpa_prefill": 1} if prefills else {"rpa_decode": 1}


def temp_bytes(fields: Fields, dims: ModelDims, load: Load) -> int:
    """Projections, queries as the kernels take them, outputs, and new cache rows laid out by tiles."""
    act, heads = itemsize(load.dtypes.activation), fields.num_q_heads // load.degrees.tp
    per_token = heads * (4 * fields.head_dim + value_dim(fields)) + 2 * _row_values(fields, load)
    words = load.seqs * _row_values(fields, load) * 4
    by_tiles = load.tokens + 2 * _tile_rows(load) * min(load.seqs, load.tokens) if load.prefill_tokens else 0
    return int(load.tokens * per_token * act + words + by_tiles * _row_bytes(fields, load))


def refuse(fields: Fields, dims: ModelDims, load: Load) -> list[str]:
    """Why these kernels cannot serve this load; [] when they can."""
    chip, page_size, found = load.chip, load.page_size, []
    if chip.lanes != 128 or chip.sublanes != 8:
        return [f"memory tiles of {chip.sublanes} x {chip.lanes} values: the kernels take 8 x 128"]
    if fields.head_dim % chip.lanes:
        found.append(f"head_dim {fields.head_dim}: the kernels take multiples of {chip.lanes}")
    if value_dim(fields) != fields.head_dim:
        found.append(f"v_head_dim {value_dim(fields)}: the kernels take values of head_dim ({fields.head_dim}) dims")
    if load.dtypes.activation not in _ACTIVATIONS:
        found.append(f"activations in {load.dtypes.activation}: the kernels take {' or '.join(_ACTIVATIONS)}")
    if load.dtypes.kv not in _CACHES:
        return [*found, f"cache in {load.dtypes.kv}: the kernels take {', '.join(_CACHES)}"]
    if page_size % (tile := _tile_rows(load)):
        found.append(
            f"page size {page_size}: the kernels take multiples of {tile} with a cache in {load.dtypes.kv}, whole tiles"
        )
    if load.table_bytes > (held := chip.smem_bytes - _SMEM_SPARE):
        found.append(
            f"page tables of {load.table_bytes} bytes: the kernels hold {held} in scalar memory; larger pages need less"
        )
    found = found or _refuse_tiles(fields, load)
    if not found and (needed := vmem_bytes(fields, dims, load)) > chip.vmem_bytes:
        found.append(f"{needed} bytes of vector memory: the chip has {chip.vmem_bytes}")
    return found


def _refuse_tiles(fields: Fields, load: Load) -> list[str]:
    """Why the kernels do not take their tiles; own ones they do."""
    tiles, unit = _tiles(fields, load), lcm(load.page_size, load.chip.lanes)
    steps = {"q_block": _q_tile(fields, load), "kv_block": unit, "decode_tail": lcm(_tile_rows(load), load.chip.lanes)}
    found = off_steps(tiles, {**steps, "decode_block": lcm(unit, max(tiles["decode_tail"], 1))})
    if (slots := tiles["decode_slots"]) < 4 or slots & (slots - 1):
        found.append(f"decode_slots {slots}: the kernel takes powers of two from 4 on")
    return found


def vmem_bytes(fields: Fields, dims: ModelDims, load: Load) -> int:
    """Scoped vector memory of the larger kernel, as tpu_ragged_kernel.py and tpu_ragged_prefill.py ask for it."""
    decode = _decode_vmem(fields, load, _tiles(fields, load))
    return max(decode, _prefill_vmem(fields, load)) if load.prefill_tokens else decode


def shape_key(fields: Fields, dims: ModelDims, load: Load) -> str:
    """What tuned tiles are kept by."""
    return _key(fields, load)


def _key(fields: Fields, load: Load) -> str:
    return tuned_key(
        TUNED_BY,
        rows=load.seqs,
        q_heads=fields.num_q_heads // load.degrees.tp,
        kv_heads=_kv_heads(fields, load),
        head_dim=fields.head_dim,
        page=load.page_size,
        kv=load.dtypes.kv,
        reach=reach(fields) or "all",
    )


def _kv_heads(fields: Fields, load: Load) -> int:
    """Key/value heads of one device: at least one, which several devices may hold."""
    return max(1, fields.num_kv_heads // load.degrees.tp)


def _row_values(fields: Fields, load: Load) -> int:
    return _kv_heads(fields, load) * 2 * fields.head_dim


def _row_bytes(fields: Fields, load: Load) -> int:
    """Bytes of one cached token."""
    return _row_values(fields, load) * itemsize(load.dtypes.kv)


def _tile_rows(load: Load) -> int:
    """Cache rows of one memory tile."""
    return load.chip.sublanes * 4 // itemsize(load.dtypes.kv)


def _group(fields: Fields, load: Load, rows: int) -> int:
    """Query heads of a key/value head, in whole tiles of `rows`."""
    heads = fields.num_q_heads // load.degrees.tp
    return ceil(heads / _kv_heads(fields, load) / rows) * rows


def _splits(load: Load) -> bool:
    """Whether queries and probabilities are two float8 terms."""
    float8 = "float8_e4m3fn"
    return load.dtypes.kv == float8 in load.chip.mxu_dtypes and load.dtypes.activation == "bfloat16"


def _operand(load: Load) -> int:
    """Bytes of what the prefill kernel multiplies."""
    return 4 if "float32" in (load.dtypes.activation, load.dtypes.kv) else 2


def _q_tile(fields: Fields, load: Load) -> int:
    """Tokens of a chunk whose queries are multiplied together."""
    group = _group(fields, load, load.chip.sublanes * 4 // itemsize(load.dtypes.activation))
    return max(_QUERY_ROWS // group, 1)


def _tiles(fields: Fields, load: Load) -> dict[str, int]:
    page, lanes, row = load.page_size, load.chip.lanes, _row_bytes(fields, load)
    unit = lcm(page, lanes)  # whole pages, whole registers of scores
    keys = min(_BLOCK_BYTES, load.chip.vmem_bytes // _RING_SHARE // _SLOTS) // row
    seen = reach(fields)
    if seen is not None:
        keys = min(keys, seen + page)
    block = max(keys // unit, 1) * unit
    tail = next(size for size in (_TAIL, lanes) if block % size == 0)
    kv_block, tile = max(_KV_BLOCK // unit, 1) * unit, _q_tile(fields, load)
    own = {
        "q_block": ceil(min(_Q_BLOCK, load.tokens) / tile) * tile,
        "kv_block": kv_block,
        "decode_block": block,
        "decode_tail": tail,
        "decode_slots": _SLOTS,
    }
    return own | dict(load.tuned_tiles("attention.tpu_ragged", _key(fields, load)))


def _decode_vmem(fields: Fields, load: Load, tiles: Mapping[str, int]) -> int:
    G, H, lanes = _kv_heads(fields, load), fields.head_dim, load.chip.lanes
    act, group, block = (
        itemsize(load.dtypes.activation),
        _group(fields, load, load.chip.sublanes),
        tiles["decode_block"],
    )
    rows, operand = (2 * group, 1) if _splits(load) else (group, _operand(load))
    ring = (tiles["decode_slots"] * block + _tile_rows(load)) * _row_bytes(fields, load)
    whole = min(load.seqs, load.tokens) * (
        2 * G * _group(fields, load, 4 * 8 // act) * H * act + _row_values(fields, load) * 4
    )
    scores = G * block * (4 * group + operand * rows)
    sums = G * 4 * (3 * group * lanes + rows * lanes + 2 * rows * H)
    return ring + whole + scores + sums + _SPARE_BYTES


def _prefill_vmem(fields: Fields, load: Load) -> int:
    G, H, lanes, operand = _kv_heads(fields, load), fields.head_dim, load.chip.lanes, _operand(load)
    group = _group(fields, load, load.chip.sublanes * 4 // itemsize(load.dtypes.activation))
    tiles = _tiles(fields, load)
    rows, keys = tiles["q_block"] * group, tiles["kv_block"]
    cached = 2 * (keys + _tile_rows(load)) * _row_bytes(fields, load)
    wide = 0 if operand == itemsize(load.dtypes.kv) else keys * _row_values(fields, load) * operand
    return cached + wide + G * rows * (2 * H * operand + 4 * (2 * lanes + H)) + 2 * _SPARE_BYTES


def _seen(fields: Fields, keys: float) -> float:
    limit = reach(fields)
    return keys if limit is None else min(keys, limit)


def _attend(op: str, fields: Fields, load: Load, items: float, rows: float, keys: float) -> tuple[Term, ...]:
    """`items` walks over `keys` keys, whole pages; `rows` query rows in all per key/value head, padding included."""
    heads, act = _kv_heads(fields, load), load.dtypes.activation
    read = items * (keys + load.page_size / 2) * _row_bytes(fields, load)
    products = Gemm(op, rows, keys, fields.head_dim, act, count=2 * heads)
    return (prefetched(op, read), products, Vector(op, rows * heads * keys * _SCORE_OPS))


def _decode(fields: Fields, load: Load) -> tuple[Term, ...]:
    """Each row reads its own keys once; its new row goes back with the tile it lies in."""
    if not load.decode_rows:
        return ()
    op, rows = "attend decode", load.decode_rows
    queries = rows * _group(fields, load, load.chip.sublanes)
    written = prefetched(op, rows * _tile_rows(load) * _row_bytes(fields, load))
    return (*_attend(op, fields, load, rows, queries, _seen(fields, load.decode_context)), written)


def _prefill(fields: Fields, load: Load) -> tuple[Term, ...]:
    """Each work item reads its row's keys again; new rows are laid out by tiles and copied into their pages."""
    if not load.prefill_tokens:
        return ()
    new = load.prefill_tokens * _row_bytes(fields, load)
    queries = load.prefill_tokens * _group(fields, load, load.chip.sublanes * 4 // itemsize(load.dtypes.activation))
    items = max(1.0, load.prefill_tokens / _tiles(fields, load)["q_block"])
    keys = _seen(fields, load.prefill_context)
    return (Stream("write cache", 4 * new, new), *_attend("attend prefill", fields, load, items, queries, keys))
