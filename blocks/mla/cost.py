"""Work of latent attention in its XLA variant (xla.py), on one device."""

from collections.abc import Mapping

from ..collectives.cost import sum_over_heads
from ..core.declare import ModelDims
from ..core.head_fields import fused_width, gate_width
from ..core.work import Gemm, Load, Stream, Term, itemsize
from .block import Fields, cached_row, query_dim, row_values

# xla.py gathers pages before the products read them: pool read, copy written, copy read.
_GATHER_PASSES = 3
# Tokens of a row per prefill work item. Each item expands its row's cached rows again: 2 R (H + V) operations per key
# and head, which with the usual sizes (R 512, H = V = 128, E 64) is what 410 queries spend on that key. Beyond 512 the
# expansion is the smaller part, while float32 scores and accumulators grow on: 64 KiB per query and head at 256 keys.
_Q_BLOCK = 512
# Cached keys an item expands at once, when pages allow: keys and values of 128 heads are then 20 MiB in bfloat16.
_KV_BLOCK = 256


def work(fields: Fields, dims: ModelDims, load: Load) -> tuple[Term, ...]:
    """Projections, cache reads, products and cache write of one layer."""
    act, weight = load.dtypes.activation, load.dtypes.weight
    heads, row = fields.num_heads // load.degrees.tp, row_values(fields)
    fused, gated = (width(fields.output_gate, fields.v_head_dim) for width in (fused_width, gate_width))
    query, gate = heads * (query_dim(fields) + fused), heads * (gated - fused)
    first = query if fields.q_lora_rank is None else fields.q_lora_rank
    second = () if fields.q_lora_rank is None else (Gemm("expand queries", load.tokens, query, first, act, weight),)
    return (
        Gemm("project in", load.tokens, first + row + gate, dims.hidden_size, act, weight),
        *second,
        *_decode(fields, load, heads),
        *_prefill(fields, load, heads),
        Gemm("project out", load.tokens, dims.hidden_size, heads * fields.v_head_dim, act, weight),
        Stream("write cache", 2 * load.tokens * _row_bytes(fields, load), load.tokens * _row_bytes(fields, load)),
        *sum_over_heads(dims, load),
    )


def tuning(fields: Fields, dims: ModelDims, loads: Mapping[str, Load]) -> dict[str, int]:
    """Values of a pool's row, and tiles of the prefill form: the same in every bucket.

    A step reads whole pages, at least two (see xla.py).
    """
    ((page_size, lanes),) = {(load.page_size, load.lanes) for load in loads.values()}
    (row,) = cached_row(fields).row(lanes)
    return {"row": row, "q_block": _Q_BLOCK, "kv_block": _kv_block(page_size)}


def temp_bytes(fields: Fields, dims: ModelDims, load: Load) -> int:
    """Largest set of intermediates alive at once: projections, and the larger of the two forms' loops."""
    heads, act = fields.num_heads // load.degrees.tp, itemsize(load.dtypes.activation)
    gate = gate_width(fields.output_gate, fields.v_head_dim)
    per_token = heads * (2 * query_dim(fields) + fields.v_head_dim + gate) + 2 * row_values(fields)
    prefill = _prefill_bytes(fields, load, heads) if load.prefill_tokens else 0
    return int(load.tokens * per_token * act + max(_decode_bytes(fields, load, heads), prefill))


def _row_bytes(fields: Fields, load: Load) -> int:
    """Bytes every device stores per cached token, unused values included."""
    (row,) = cached_row(fields).row(load.lanes)
    return row * itemsize(load.dtypes.kv)


def _kv_block(page_size: int) -> int:
    return max(_KV_BLOCK // page_size, 2) * page_size


def _decode_bytes(fields: Fields, load: Load, heads: int) -> int:
    """Gathered pages twice; latent queries, float32 scores and weights of a page, float32 accumulators twice."""
    pages = 2 * load.seqs * load.page_size * _row_bytes(fields, load)
    row = row_values(fields) * itemsize(load.dtypes.activation) + 8 * (load.page_size + fields.kv_lora_rank)
    return pages + load.seqs * heads * row


def _prefill_bytes(fields: Fields, load: Load, heads: int) -> int:
    """Expanded keys and values in float32 and once more, float32 scores and weights, float32 accumulators twice."""
    block, keys = min(_Q_BLOCK, load.tokens), _kv_block(load.page_size)
    expanded = query_dim(fields) + fields.v_head_dim
    per_key = expanded * (4 + itemsize(load.dtypes.activation)) + 8 * block
    return heads * (keys * per_key + 8 * block * fields.v_head_dim)


def _decode(fields: Fields, load: Load, heads: int) -> tuple[Term, ...]:
    """All decode rows walk pages together, so that each reads as many as the longest, once for all heads."""
    if not load.decode_rows:
        return ()
    act, weight, latent = load.dtypes.activation, load.dtypes.weight, fields.kv_lora_rank
    bytes_ = load.seqs * load.decode_longest * _row_bytes(fields, load) * _GATHER_PASSES
    return (
        Gemm("absorb keys", load.seqs, latent, fields.qk_nope_head_dim, act, weight, count=heads),
        Stream("attend decode", bytes_, load.seqs * load.page_size * _row_bytes(fields, load)),
        # Scores over the whole row, values over its latent part.
        Gemm("attend decode", load.seqs * heads, load.decode_longest, row_values(fields) + latent, act),
        Gemm("absorb values", load.seqs, fields.v_head_dim, latent, act, weight, count=heads),
    )


def _prefill(fields: Fields, load: Load, heads: int) -> tuple[Term, ...]:
    if not load.prefill_tokens:
        return ()
    act, weight, keys = load.dtypes.activation, load.dtypes.weight, _kv_block(load.page_size)
    # A row's own tokens of this step, which are not gathered, count as cached: a chunk is short beside its context.
    items = max(1.0, load.prefill_tokens / min(_Q_BLOCK, load.tokens))
    bytes_ = items * load.prefill_context * _row_bytes(fields, load) * _GATHER_PASSES
    expanded = heads * (fields.qk_nope_head_dim + fields.v_head_dim)
    width = query_dim(fields) + fields.v_head_dim
    reads = items * load.prefill_context / keys
    return (
        Stream("attend prefill", bytes_, load.page_size * _row_bytes(fields, load)),
        Gemm("expand prefill", keys, expanded, fields.kv_lora_rank, act, weight, count=reads),
        Gemm("attend prefill", load.prefill_tokens * heads, load.prefill_context, width, act),
    )
