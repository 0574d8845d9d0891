"""Work of Mamba in its XLA variant (xla.py), on one device."""

from collections.abc import Mapping

from ..collectives.cost import TP, sum_over_heads
from ..core.causal_conv_work import convolve, window_bytes
from ..core.declare import ModelDims
from ..core.recurrence_work import chunk, chunk_tuning, recur
from ..core.work import Collective, Gemm, Load, Stream, Term, Vector, itemsize
from .block import Fields

# Prefill tokens scanned at once, at most: a chunk holds the states after each of its tokens in float32,
# twice and more (32 tokens of 8192 channels x 16: 16 MiB per copy).
_MAX_CHUNK = 32
# The associative scan's passes over the pairs of a chunk: written, halved and merged level by level, read.
_SCAN_PASSES = 8


def work(fields: Fields, dims: ModelDims, load: Load) -> tuple[Term, ...]:
    """Projections, convolution and recurrence of one layer."""
    act, weight, inner = load.dtypes.activation, load.dtypes.weight, _inner(fields, load)
    return (
        Gemm("project in", load.tokens, 2 * inner, dims.hidden_size, act, weight),
        *convolve(load, inner, fields.conv_kernel),
        Gemm("project dt, B, C", load.tokens, _mixed(fields), inner, act, weight),
        *_sum_mixed(fields, load),
        Gemm("project dt to channels", load.tokens, inner, fields.dt_rank, act, weight),
        *recur(load, inner * fields.state_size, 8),
        *_prefill(fields, load),
        Gemm("project out", load.tokens, dims.hidden_size, inner, act, weight),
        *sum_over_heads(dims, load),
    )


def tuning(fields: Fields, dims: ModelDims, loads: Mapping[str, Load]) -> dict[str, int]:
    """Prefill chunk length, the same in every bucket."""
    return chunk_tuning(loads, _MAX_CHUNK)


def temp_bytes(fields: Fields, dims: ModelDims, load: Load) -> int:
    """Largest set of intermediates alive at once: channels of all tokens (float32 dt and outputs); a chunk's states."""
    inner = _inner(fields, load)
    per_token = inner * (4 * itemsize(load.dtypes.activation) + 3 * 4) + 2 * _mixed(fields) * 4
    states = 6 * chunk(load, _MAX_CHUNK) * inner * fields.state_size * 4 if load.prefill_tokens else 0
    return int(load.tokens * per_token + 2 * window_bytes(load, inner, fields.conv_kernel) + states)


def _inner(fields: Fields, load: Load) -> int:
    return fields.inner_size // load.degrees.tp


def _mixed(fields: Fields) -> int:
    """Values every device knows of a token: dt before its second projection, B, C."""
    return fields.dt_rank + 2 * fields.state_size


def _sum_mixed(fields: Fields, load: Load) -> tuple[Collective, ...]:
    if load.degrees.tp == 1:
        return ()
    shape, what = (load.tokens, _mixed(fields)), "sum of dt, B and C over the channels"
    return (Collective("sum dt, B, C", "all-reduce", TP, "float32", shape, what),)


def _prefill(fields: Fields, load: Load) -> tuple[Term, ...]:
    """Chunk by chunk, elementwise: every token's (decay, write) pairs pass through memory."""
    if not load.prefill_tokens:
        return ()
    values = _inner(fields, load) * fields.state_size
    pairs = 2 * values * load.prefill_tokens * 4
    return (
        Stream("scan chunks", _SCAN_PASSES * pairs, chunk(load, _MAX_CHUNK) * values * 4),
        Vector("scan chunks", 16 * load.prefill_tokens * values),
    )
