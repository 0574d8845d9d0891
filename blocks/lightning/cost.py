"""Work of lightning attention in its XLA variant (xla.py), on one device."""

from collections.abc import Mapping

from ..collectives.cost import TP, sum_over_heads
from ..core.declare import ModelDims
from ..core.recurrence_work import chunk, chunk_tuning, recur
from ..core.work import Collective, Gemm, Load, Stream, Term
from .block import Fields

# Prefill tokens of one step, at most: the head dim of published models, where products inside
# a chunk cost as much as those with the state.
_MAX_CHUNK = 128


def work(fields: Fields, dims: ModelDims, load: Load) -> tuple[Term, ...]:
    """Projections and recurrence of one layer."""
    act, weight = load.dtypes.activation, load.dtypes.weight
    width = _heads(fields, load) * fields.head_dim
    return (
        Gemm("project in", load.tokens, 4 * width, dims.hidden_size, act, weight),  # q, k, v, gate
        *recur(load, _state_values(fields, load), 5),
        *_prefill(fields, load),
        *_norm(load),
        Gemm("project out", load.tokens, dims.hidden_size, width, act, weight),
        *sum_over_heads(dims, load),
    )


def tuning(fields: Fields, dims: ModelDims, loads: Mapping[str, Load]) -> dict[str, int]:
    """Prefill chunk length, the same in every bucket."""
    return chunk_tuning(loads, _MAX_CHUNK)


def temp_bytes(fields: Fields, dims: ModelDims, load: Load) -> int:
    """Largest set of intermediates alive at once: float32 queries, keys, values, outputs, also padded, and gates."""
    width = _heads(fields, load) * fields.head_dim
    return int(load.tokens * 9 * width * 4 + 4 * _state_values(fields, load) * 4)


def _heads(fields: Fields, load: Load) -> int:
    return fields.num_heads // load.degrees.tp


def _state_values(fields: Fields, load: Load) -> int:
    return _heads(fields, load) * fields.head_dim**2


def _norm(load: Load) -> tuple[Collective, ...]:
    """The norm runs over all heads: their squares are summed over the devices of a rank."""
    if load.degrees.tp == 1:
        return ()
    what = "sum of squares over the heads of a rank"
    return (Collective("norm heads", "all-reduce", TP, "float32", (load.tokens, 1), what),)


def _prefill(fields: Fields, load: Load) -> tuple[Term, ...]:
    """Chunk by chunk; products of the float32 state math, the state read and written per chunk."""
    if not load.prefill_tokens:
        return ()
    size, dim = chunk(load, _MAX_CHUNK), fields.head_dim
    chunks = load.prefill_tokens / size
    count = chunks * _heads(fields, load)
    state = _state_values(fields, load) * 4
    return (
        Gemm("scan chunks", size, size, dim, "float32", count=2 * count),  # q.k, its product with v
        Gemm("scan chunks", size, dim, dim, "float32", count=2 * count),  # reads of the old state, its update
        Stream("scan chunks", 2 * chunks * state, state),
    )
