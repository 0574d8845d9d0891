"""Work of a mixture of experts in its XLA variant (xla.py), on one device. Routing is taken as uniform."""

from collections.abc import Mapping
from math import ceil, log2, sqrt

from ..collectives.cost import gather_for_experts, return_from_experts
from ..core.declare import ModelDims
from ..core.work import Gemm, Load, Stream, Term, itemsize, touched
from .block import Fields


def work(fields: Fields, dims: ModelDims, load: Load) -> tuple[Term, ...]:
    """Router, exchange of tokens, local experts, shared expert, way back."""
    act, weight = load.dtypes.activation, load.dtypes.weight
    router = fields.router
    return (
        Gemm("route", load.tokens, router.num_experts, dims.hidden_size, act, weight),
        *gather_for_experts(router.top_k, dims, load),
        *_experts(fields, dims, load),
        *_shared(fields, dims, load),
        # Float32 sums: set to zero, read and cast.
        Stream(
            "combine",
            load.gathered_tokens * dims.hidden_size * (8 + itemsize(act)),
            load.gathered_tokens * dims.hidden_size * 4,
        ),
        *return_from_experts(dims, load),
    )


def tuning(fields: Fields, loads: Mapping[str, Load]) -> dict[str, int]:
    """Rows of one expert's block, per bucket."""
    return {f"block_rows.{bucket}": block_rows(fields, load) for bucket, load in loads.items()}


def block_rows(fields: Fields, load: Load) -> int:
    """Smallest power of two that holds nearly every expert's tokens (mean + 2 deviations) in one block.

    A second block would stream the expert's weights again; spare rows cost only products,
    which do not bind below row_full, where blocks end.
    """
    mean = load.valid_tokens * fields.router.top_k / fields.router.num_experts
    rows = 2 ** ceil(log2(max(mean + 2 * sqrt(mean), 1)))
    return min(max(rows, load.row_tile), load.row_full)


def temp_bytes(fields: Fields, dims: ModelDims, load: Load) -> int:
    """Largest set of intermediates alive at once: all ranks' tokens, float32 sums, one expert in compute dtype."""
    act = itemsize(load.dtypes.activation)
    tokens = load.gathered_tokens
    hidden = tokens * dims.hidden_size * (2 * act + 4)
    routing = tokens * fields.router.top_k * 4 * 6 + load.tokens * fields.router.num_experts * 4 * 3
    inner = fields.experts.intermediate_size // load.degrees.etp
    return int(hidden + routing + 3 * dims.hidden_size * inner * act)


def _experts(fields: Fields, dims: ModelDims, load: Load) -> tuple[Term, ...]:
    """A loop over blocks of rows; each slices one expert's three matrices out of the stack."""
    act, dtype, router = load.dtypes.activation, load.dtypes.expert, fields.router
    rows = block_rows(fields, load)
    mean = load.valid_tokens * router.top_k / router.num_experts
    per_expert = max(touched(load.valid_tokens, router.top_k / router.num_experts), mean / rows)
    blocks = router.num_experts // load.degrees.ep * per_expert
    inner, hidden = fields.experts.intermediate_size // load.degrees.etp, dims.hidden_size
    moved = blocks * rows * hidden * (2 * itemsize(act) + 2 * 4)  # gather rows; read and add float32 sums
    return (
        Gemm("experts", rows, inner, hidden, act, dtype, 2 * blocks),
        Gemm("experts", rows, hidden, inner, act, dtype, blocks),
        Stream("experts", moved, moved),  # part of the blocks' products, no pieces of its own
    )


def _shared(fields: Fields, dims: ModelDims, load: Load) -> tuple[Term, ...]:
    """Own tokens with the whole expert, or all ranks' tokens with this device's share of it."""
    if fields.shared is None:
        return ()
    act, weight = load.dtypes.activation, load.dtypes.weight
    tokens = load.tokens if load.degrees.shared == 1 else load.gathered_tokens
    inner = fields.shared.intermediate_size // load.degrees.shared
    return (
        Gemm("shared expert", tokens, 2 * inner, dims.hidden_size, act, weight),
        Gemm("shared expert", tokens, dims.hidden_size, inner, act, weight),
    )
