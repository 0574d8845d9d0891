"""Work of grouped-query attention in its XLA variant (xla.py), on one device."""

from collections.abc import Mapping

from ..collectives.cost import TP, sum_over_heads
from ..core.declare import ModelDims
from ..core.head_fields import gate_width
from ..core.work import Collective, Gemm, Load, Stream, Term, itemsize
from .block import Fields, reach, value_dim

# xla.py gathers pages before the products read them: pool read, copy written, copy read.
_GATHER_PASSES = 3
# Tokens of a row per prefill work item. Each item reads its row's cached keys again, so more is better, until the
# float32 accumulators (a block's query heads times head_dim) outgrow a few MiB. At 128 the products already have
# 128 x (query heads per key/value head) rows.
_Q_BLOCK = 128
# Cached keys an item reads at once, when pages allow: a block's float32 scores stay within a few MiB.
_KV_BLOCK = 512


def work(fields: Fields, dims: ModelDims, load: Load) -> tuple[Term, ...]:
    """Projections, cache reads, products and cache write of one layer."""
    act, weight = load.dtypes.activation, load.dtypes.weight
    heads, row = fields.num_q_heads // load.degrees.tp, _row_values(fields, load)
    projected = _kv_heads(fields, load) * fields.head_dim if fields.keys_as_values else row
    width_in = heads * (fields.head_dim + gate_width(fields.output_gate, value_dim(fields))) + projected
    return (
        Gemm("project in", load.tokens, width_in, dims.hidden_size, act, weight),
        *_sum_squares(fields, load),
        *_decode(fields, load, heads),
        *_prefill(fields, load, heads),
        Gemm("project out", load.tokens, dims.hidden_size, heads * value_dim(fields), act, weight),
        Stream("write cache", 2 * load.tokens * _row_bytes(fields, load), load.tokens * _row_bytes(fields, load)),
        *sum_over_heads(dims, load),
    )


def tuning(fields: Fields, dims: ModelDims, loads: Mapping[str, Load]) -> dict[str, int]:
    """Tiles of the prefill path, the same in every bucket; a step reads whole pages, at least two (see xla.py)."""
    (page_size,) = {load.page_size for load in loads.values()}
    return {"q_block": _Q_BLOCK, "kv_block": max(_KV_BLOCK // page_size, 2) * page_size}


def temp_bytes(fields: Fields, dims: ModelDims, load: Load) -> int:
    """Largest set of intermediates alive at once: gathered pages and projections."""
    heads = fields.num_q_heads // load.degrees.tp
    pages = load.seqs * load.page_size * _row_bytes(fields, load)
    # projected, rotated, output, gate
    per_head = 2 * fields.head_dim + value_dim(fields) + gate_width(fields.output_gate, value_dim(fields))
    per_token = heads * per_head + 2 * _row_values(fields, load)
    return int(2 * pages + load.tokens * per_token * itemsize(load.dtypes.activation))


def _kv_heads(fields: Fields, load: Load) -> int:
    """Key/value heads of one device: at least one, which several devices may hold."""
    return max(1, fields.num_kv_heads // load.degrees.tp)


def _row_values(fields: Fields, load: Load) -> int:
    """Values one device caches per token."""
    return _kv_heads(fields, load) * (fields.head_dim + value_dim(fields))


def _row_bytes(fields: Fields, load: Load) -> int:
    return _row_values(fields, load) * itemsize(load.dtypes.kv)


def _in_reach(fields: Fields, keys: float) -> float:
    """Keys of a history of `keys` that a query sees."""
    limit = reach(fields)
    return keys if limit is None else min(keys, limit)


def _sum_squares(fields: Fields, load: Load) -> tuple[Collective, ...]:
    """The mean squares of a norm over all heads, of which each device has some."""
    if fields.qk_norm != "full" or load.degrees.tp == 1:
        return ()
    what = "mean squares of queries and keys"
    return (Collective("norm heads", "all-reduce", TP, "float32", (load.tokens, 2), what),)


def _products(op: str, fields: Fields, load: Load, rows: float, keys: float) -> Gemm:
    """Queries by keys and weights by values: two products of one size when both heads have the same dims."""
    dims = (fields.head_dim + value_dim(fields)) / 2
    return Gemm(op, rows, keys, dims, load.dtypes.activation, count=2)


def _decode(fields: Fields, load: Load, heads: int) -> tuple[Term, ...]:
    """All decode rows walk pages together, so that each reads as many as the longest."""
    if not load.decode_rows:
        return ()
    keys = _in_reach(fields, load.decode_longest)
    bytes_ = load.seqs * keys * _row_bytes(fields, load) * _GATHER_PASSES
    chunk = load.seqs * load.page_size * _row_bytes(fields, load)
    return (
        Stream("attend decode", bytes_, chunk),
        _products("attend decode", fields, load, load.seqs * heads, keys),
    )


def _prefill(fields: Fields, load: Load, heads: int) -> tuple[Term, ...]:
    if not load.prefill_tokens:
        return ()
    # A row's own tokens of this step, which are not gathered, count as cached: a chunk is short beside its context.
    items, keys = load.prefill_tokens / _Q_BLOCK, _in_reach(fields, load.prefill_context)
    bytes_ = items * keys * _row_bytes(fields, load) * _GATHER_PASSES
    return (
        Stream("attend prefill", bytes_, load.page_size * _row_bytes(fields, load)),
        _products("attend prefill", fields, load, load.prefill_tokens * heads, keys),
    )
