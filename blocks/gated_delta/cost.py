"""Work of Gated DeltaNet in its XLA variant (xla.py), on one device."""

from collections.abc import Mapping
from math import log2

from ..collectives.cost import sum_over_heads
from ..core.declare import ModelDims
from ..core.work import Gemm, Load, Stream, Term, Vector, itemsize
from .block import Fields

# Prefill tokens solved at once: the size published kernels use; the inverse costs C^2 per token.
CHUNK = 64
# xla.py's decode step: both reductions share one read of the state, the update reads it again and writes it.
_STATE_PASSES = 3


def work(fields: Fields, dims: ModelDims, load: Load) -> tuple[Term, ...]:
    """Projections, convolution and recurrence of one layer."""
    act, weight = load.dtypes.activation, load.dtypes.weight
    v, channels = _v_width(fields, load), _channels(fields, load)
    inputs = channels + v + 2 * (fields.num_v_heads // load.degrees.tp)
    return (
        Gemm("project in", load.tokens, inputs, dims.hidden_size, act, weight),
        *_decode(fields, load, channels),
        *_prefill(fields, load),
        Gemm("project out", load.tokens, dims.hidden_size, v, act, weight),
        *sum_over_heads(dims, load),
    )


def tuning(fields: Fields, loads: Mapping[str, Load]) -> dict[str, int]:
    """Prefill chunk length."""
    return {"chunk": CHUNK}


def temp_bytes(fields: Fields, dims: ModelDims, load: Load) -> int:
    """Largest set of intermediates alive at once: float32 convolution inputs and outputs of all tokens."""
    per_token = 2 * _channels(fields, load) * 4 + 3 * _v_width(fields, load) * 4
    return int(load.tokens * per_token + 4 * _state_values(fields, load) * 4)


def _v_width(fields: Fields, load: Load) -> int:
    return fields.num_v_heads // load.degrees.tp * fields.dv


def _channels(fields: Fields, load: Load) -> int:
    """Convolution channels: queries, keys, values."""
    return 2 * (fields.num_qk_heads // load.degrees.tp) * fields.dk + _v_width(fields, load)


def _state_values(fields: Fields, load: Load) -> int:
    return fields.num_v_heads // load.degrees.tp * fields.dk * fields.dv


def _decode(fields: Fields, load: Load, channels: int) -> tuple[Term, ...]:
    """One row at a time: its state is read, updated and written."""
    if not load.decode_rows:
        return ()
    values = _state_values(fields, load)
    state = values * itemsize(load.dtypes.state)
    window = (fields.conv_kernel - 1) * channels * itemsize(load.dtypes.conv)
    return (
        Stream("convolve", 2 * load.decode_rows * window, load.decode_rows * window),
        Stream("recur", _STATE_PASSES * load.decode_rows * state, state),
        Vector("recur", 8 * load.decode_rows * values),
    )


def _prefill(fields: Fields, load: Load) -> tuple[Term, ...]:
    """Chunk by chunk; products of the float32 state math, the state read and written per chunk."""
    if not load.prefill_tokens:
        return ()
    count = load.prefill_tokens / CHUNK * (fields.num_v_heads // load.degrees.tp)
    dk, dv = fields.dk, fields.dv
    state = _state_values(fields, load) * 4
    return (
        Gemm("scan chunks", CHUNK, CHUNK, dk, "float32", count=2 * count),  # k.k, q.k
        Gemm("scan chunks", CHUNK, CHUNK, dv, "float32", count=2 * count),  # solved writes, outputs
        Gemm("scan chunks", CHUNK, dv, dk, "float32", count=3 * count),  # reads of the old state, its update
        Gemm("scan chunks", CHUNK, CHUNK, CHUNK, "float32", count=2 * (log2(CHUNK) - 1) * count),  # inverse
        Stream("scan chunks", 2 * load.prefill_tokens / CHUNK * state, state),
    )
