"""Work of Mamba-2 in its XLA variant (xla.py), on one device."""

from collections.abc import Mapping

from ..collectives.cost import TP, sum_over_heads
from ..core.causal_conv_work import convolve, window_bytes
from ..core.declare import ModelDims
from ..core.recurrence_work import chunk, chunk_tuning, recur
from ..core.work import Collective, Gemm, Load, Stream, Term, Vector, itemsize
from .block import Fields

# Prefill tokens solved at once, at most. A token costs about 2*C*P within its chunk and 4*N*P through
# the state, per head: they balance at C = 2*N, and longer chunks read and write the state less often.
_MAX_CHUNK = 128


def work(fields: Fields, dims: ModelDims, load: Load) -> tuple[Term, ...]:
    """Projections, convolution and recurrence of one layer."""
    act, weight = load.dtypes.activation, load.dtypes.weight
    inner, heads, channels = _inner(fields, load), _heads(fields, load), _channels(fields, load)
    return (
        Gemm("project in", load.tokens, inner + channels + heads, dims.hidden_size, act, weight),
        *convolve(load, channels, fields.conv_kernel),
        *recur(load, _state_values(fields, load), 5),
        *_prefill(fields, load),
        *_shared_norm(fields, load),
        Gemm("project out", load.tokens, dims.hidden_size, inner, act, weight),
        *sum_over_heads(dims, load),
    )


def tuning(fields: Fields, dims: ModelDims, loads: Mapping[str, Load]) -> dict[str, int]:
    """Prefill chunk length, the same in every bucket."""
    return chunk_tuning(loads, _MAX_CHUNK)


def temp_bytes(fields: Fields, dims: ModelDims, load: Load) -> int:
    """Largest set of intermediates alive at once: projections, convolved inputs, float32 outputs and gate; a chunk."""
    inner, channels, act = _inner(fields, load), _channels(fields, load), itemsize(load.dtypes.activation)
    per_token = (3 * channels + 2 * inner) * act + 2 * inner * 4
    windows = 2 * window_bytes(load, channels, fields.conv_kernel)
    pairs = 3 * _heads(fields, load) * chunk(load, _MAX_CHUNK) ** 2 * 4 if load.prefill_tokens else 0
    return int(load.tokens * per_token + windows + pairs + 4 * _state_values(fields, load) * 4)


def _heads(fields: Fields, load: Load) -> int:
    return fields.num_heads // load.degrees.tp


def _inner(fields: Fields, load: Load) -> int:
    return _heads(fields, load) * fields.head_dim


def _groups(fields: Fields, load: Load) -> int:
    """At least one, which several devices may hold."""
    return max(1, fields.num_groups // load.degrees.tp)


def _channels(fields: Fields, load: Load) -> int:
    """Convolution channels: x, B, C."""
    return _inner(fields, load) + 2 * _groups(fields, load) * fields.state_size


def _state_values(fields: Fields, load: Load) -> int:
    return _inner(fields, load) * fields.state_size


def _shared_norm(fields: Fields, load: Load) -> tuple[Collective, ...]:
    """Sums of squares of groups that several devices share: one number per token and group."""
    if load.degrees.tp <= fields.num_groups:
        return ()
    shape, what = (load.tokens, fields.num_groups), "sums of squares of the norm's groups"
    return (Collective("norm groups", "all-reduce", TP, "float32", shape, what),)


def _prefill(fields: Fields, load: Load) -> tuple[Term, ...]:
    """Chunk by chunk; products of the float32 state math, the state read and written per chunk."""
    if not load.prefill_tokens:
        return ()
    size, dim, width = chunk(load, _MAX_CHUNK), fields.head_dim, fields.state_size
    chunks = load.prefill_tokens / size
    heads, groups = chunks * _heads(fields, load), chunks * _groups(fields, load)
    state = _state_values(fields, load) * 4
    return (
        Gemm("scan chunks", size, size, width, "float32", count=groups),  # C.B
        Gemm("scan chunks", size, size, size, "float32", count=heads),  # decays between tokens
        Gemm("scan chunks", size, dim, size, "float32", count=heads),  # outputs of the chunk's own writes
        Gemm("scan chunks", size, dim, width, "float32", count=2 * heads),  # read of the old state, its update
        Stream("scan chunks", 2 * chunks * state, state),
        Vector("scan chunks", 4 * heads * size * size),
    )
