"""Work of a gated short convolution in its XLA variant (xla.py), on one device."""

from collections.abc import Mapping

from ..collectives.cost import sum_over_heads
from ..core.causal_conv_work import convolve, window_bytes
from ..core.declare import ModelDims
from ..core.work import Gemm, Load, Term, itemsize
from .block import Fields


def work(fields: Fields, dims: ModelDims, load: Load) -> tuple[Term, ...]:
    """Projections and convolution of one layer."""
    act, weight, width = load.dtypes.activation, load.dtypes.weight, fields.channels // load.degrees.tp
    return (
        Gemm("project in", load.tokens, 3 * width, dims.hidden_size, act, weight),
        *convolve(load, width, fields.conv_kernel),
        Gemm("project out", load.tokens, dims.hidden_size, width, act, weight),
        *sum_over_heads(dims, load),
    )


def tuning(fields: Fields, dims: ModelDims, loads: Mapping[str, Load]) -> dict[str, int]:
    """Nothing to tune."""
    return {}


def temp_bytes(fields: Fields, dims: ModelDims, load: Load) -> int:
    """Largest set of intermediates alive at once: the three projections, the convolution's input and float32 output."""
    width = fields.channels // load.degrees.tp
    per_token = width * (4 * itemsize(load.dtypes.activation) + 4)
    return load.tokens * per_token + 2 * window_bytes(load, width, fields.conv_kernel)
