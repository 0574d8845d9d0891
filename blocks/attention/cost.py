"""Work of grouped-query attention in its XLA variant (xla.py), on one device."""

from collections.abc import Mapping

from ..collectives.cost import sum_over_heads
from ..core.declare import ModelDims
from ..core.work import Gemm, Load, Stream, Term, itemsize
from .block import Fields

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
    gate = 2 if fields.output_gate == "sigmoid" else 1
    width = heads * fields.head_dim
    return (
        Gemm("project in", load.tokens, width * gate + row, dims.hidden_size, act, weight),
        *_decode(fields, load, heads),
        *_prefill(fields, load, heads),
        Gemm("project out", load.tokens, dims.hidden_size, width, act, weight),
        Stream("write cache", 2 * load.tokens * _row_bytes(fields, load), load.tokens * _row_bytes(fields, load)),
        *sum_over_heads(dims, load),
    )


def tuning(fields: Fields, loads: Mapping[str, Load]) -> dict[str, int]:
    """Tiles of the prefill path, the same in every bucket; a step reads whole pages, at least two (see xla.py)."""
    (page_size,) = {load.page_size for load in loads.values()}
    return {"q_block": _Q_BLOCK, "kv_block": max(_KV_BLOCK // page_size, 2) * page_size}


def temp_bytes(fields: Fields, dims: ModelDims, load: Load) -> int:
    """Largest set of intermediates alive at once: gathered pages and projections."""
    heads, gate = fields.num_q_heads // load.degrees.tp, 2 if fields.output_gate == "sigmoid" else 1
    pages = load.seqs * load.page_size * _row_bytes(fields, load)
    per_token = heads * fields.head_dim * (gate + 2) + 2 * _row_values(fields, load)
    return int(2 * pages + load.tokens * per_token * itemsize(load.dtypes.activation))


def _row_values(fields: Fields, load: Load) -> int:
    """Values one device caches per token: at least one head, which several devices may hold."""
    return 2 * max(1, fields.num_kv_heads // load.degrees.tp) * fields.head_dim


def _row_bytes(fields: Fields, load: Load) -> int:
    return _row_values(fields, load) * itemsize(load.dtypes.kv)


def _decode(fields: Fields, load: Load, heads: int) -> tuple[Term, ...]:
    """All decode rows walk pages together, so that each reads as many as the longest."""
    if not load.decode_rows:
        return ()
    bytes_ = load.seqs * load.decode_longest * _row_bytes(fields, load) * _GATHER_PASSES
    chunk = load.seqs * load.page_size * _row_bytes(fields, load)
    return (
        Stream("attend decode", bytes_, chunk),
        Gemm("attend decode", load.seqs * heads, load.decode_longest, fields.head_dim, load.dtypes.activation, count=2),
    )


def _prefill(fields: Fields, load: Load, heads: int) -> tuple[Term, ...]:
    if not load.prefill_tokens:
        return ()
    # A row's own tokens of this step, which are not gathered, count as cached: a chunk is short beside its context.
    items = load.prefill_tokens / _Q_BLOCK
    bytes_ = items * load.prefill_context * _row_bytes(fields, load) * _GATHER_PASSES
    return (
        Stream("attend prefill", bytes_, load.page_size * _row_bytes(fields, load)),
        Gemm(
            "attend prefill",
            load.prefill_tokens * heads,
            load.prefill_context,
            fields.head_dim,
            load.dtypes.activation,
            count=2,
        ),
    )
