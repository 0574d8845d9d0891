"""Work of Gated DeltaNet in its XLA variant (xla.py), on one device."""

from collections.abc import Mapping
from math import log2

from ..collectives.cost import sum_over_heads
from ..core.declare import ModelDims
from ..core.recurrence_work import chunk, chunk_tuning, recur
from ..core.work import Gemm, Load, Stream, Term, Vector, itemsize
from .block import Fields

# Prefill tokens solved at once, at most: the size published kernels use; the inverse costs C^2 per token.
_MAX_CHUNK = 64


def work(fields: Fields, dims: ModelDims, load: Load) -> tuple[Term, ...]:
    """Projections, convolution and recurrence of one layer."""
    act, weight = load.dtypes.activation, load.dtypes.weight
    v, channels = _v_width(fields, load), _channels(fields, load)
    inputs = channels + fields.num_v_heads // load.degrees.tp
    low_rank: list[Gemm] = []
    for width, rank in ((v, fields.gate.rank), (_rates(fields, load), fields.decay.rank)):
        inputs += width if rank is None else rank
        low_rank += [] if rank is None else [Gemm("project low rank", load.tokens, width, rank, act, weight)]
    return (
        Gemm("project in", load.tokens, inputs, dims.hidden_size, act, weight),
        *low_rank,
        *_decode(fields, load, channels),
        *_prefill(fields, load),
        Gemm("project out", load.tokens, dims.hidden_size, v, act, weight),
        *sum_over_heads(dims, load),
    )


def tuning(fields: Fields, dims: ModelDims, loads: Mapping[str, Load]) -> dict[str, int]:
    """Prefill chunk length, the same in every bucket."""
    return chunk_tuning(loads, _MAX_CHUNK)


def temp_bytes(fields: Fields, dims: ModelDims, load: Load) -> int:
    """Largest set of intermediates alive at once: float32 convolution inputs and outputs of all tokens."""
    per_token = 2 * _channels(fields, load) * 4 + 3 * _v_width(fields, load) * 4
    if fields.decay.per == "channel":
        per_token += 2 * _rates(fields, load) * 4  # before and after the softplus
    return int(load.tokens * per_token + 4 * _state_values(fields, load) * 4)


def _v_width(fields: Fields, load: Load) -> int:
    return fields.num_v_heads // load.degrees.tp * fields.dv


def _rates(fields: Fields, load: Load) -> int:
    """Decay rates of one token."""
    return fields.decay_width // load.degrees.tp


def _channels(fields: Fields, load: Load) -> int:
    """Convolution channels: queries, keys, values."""
    return 2 * (fields.num_qk_heads // load.degrees.tp) * fields.dk + _v_width(fields, load)


def _state_values(fields: Fields, load: Load) -> int:
    return fields.num_v_heads // load.degrees.tp * fields.dk * fields.dv


def _decode(fields: Fields, load: Load, channels: int) -> tuple[Term, ...]:
    """One row at a time: its window and its state are read, updated and written."""
    window = (fields.conv_kernel - 1) * channels * itemsize(load.dtypes.conv)
    state = recur(load, _state_values(fields, load), 8)
    return (Stream("convolve", 2 * load.decode_rows * window, load.decode_rows * window), *state) if state else ()


def _prefill(fields: Fields, load: Load) -> tuple[Term, ...]:
    """Chunk by chunk; products of the float32 state math, the state read and written per chunk."""
    if not load.prefill_tokens:
        return ()
    size = chunk(load, _MAX_CHUNK)
    count = load.prefill_tokens / size * (fields.num_v_heads // load.degrees.tp)
    dk, dv, doublings = fields.dk, fields.dv, log2(max(size, 2)) - 1
    state = _state_values(fields, load) * 4
    return (
        *_pair_products(fields, size, count),
        Gemm("scan chunks", size, size, dv, "float32", count=2 * count),  # solved writes, outputs
        Gemm("scan chunks", size, dv, dk, "float32", count=3 * count),  # reads of the old state, its update
        Gemm("scan chunks", size, size, size, "float32", count=2 * doublings * count),  # inverse
        Stream("scan chunks", 2 * load.prefill_tokens / size * state, state),
    )


def _pair_products(fields: Fields, size: int, count: float) -> tuple[Term, ...]:
    """k.k and q.k of all pairs; with a decay per channel once per doubling of the block size."""
    dk = fields.dk
    if fields.decay.per == "head":
        return (Gemm("scan chunks", size, size, dk, "float32", count=2 * count),)
    borders = log2(max(size, 2))
    return (
        Gemm("scan chunks", size, size, dk, "float32", count=2 * borders * count),
        Gemm("scan chunks", size, dk, size, "float32", count=(borders + 2) * count),  # sums of log decays
        Vector("scan chunks", (4 * borders + 8) * count * size * dk),
    )
