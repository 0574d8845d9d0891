"""Work of a mixture of experts in its XLA variant (xla.py), on one device. Routing is taken as uniform."""

from collections.abc import Mapping
from math import ceil, log2, sqrt

from ..collectives.cost import gather_for_experts, gather_tokens, return_from_experts, return_tokens
from ..core.declare import ModelDims
from ..core.work import Gemm, Load, Stream, Term, itemsize, touched
from ..mlp.cost import dense_products
from .block import Fields


def work(fields: Fields, dims: ModelDims, load: Load) -> tuple[Term, ...]:
    """Exchange of tokens, local experts, shared expert, combine. The router: ../router/cost.py."""
    act, router, width = load.dtypes.activation, fields.router, fields.expert_width(dims)
    before, after = _latent(fields, dims, load)
    return (
        *before,
        *gather_for_experts(router.top_k, width, load),
        *_experts(fields, width, load),
        *_shared(fields, dims, load),
        # Float32 sums: set to zero, read and cast.
        Stream(
            "combine",
            load.gathered_tokens * width * (8 + itemsize(act)),
            load.gathered_tokens * width * 4,
        ),
        *return_from_experts(width, load),
        *after,
    )


def refuse(fields: Fields, dims: ModelDims, load: Load) -> list[str]:
    """Plain XLA takes everything but rows of another dtype than the activations'."""
    if load.dtypes.expert_rows == "activation":
        return []
    return [f"rows in {load.dtypes.expert_rows}: plain XLA multiplies rows in the activations' dtype"]


def tuning(fields: Fields, dims: ModelDims, loads: Mapping[str, Load]) -> dict[str, int]:
    """Rows of one expert's block, per bucket."""
    return {f"block_rows.{bucket}": block_rows(fields, load) for bucket, load in loads.items()}


def block_rows(fields: Fields, load: Load) -> int:
    """Smallest power of two that holds nearly every expert's tokens (mean + 2 deviations) in one block.

    A second block would stream the expert's weights again; spare rows cost only products,
    which do not bind below row_full, where blocks end.
    """
    mean = max(load.valid_tokens, 0) * fields.router.top_k / fields.router.num_experts
    rows = 2 ** ceil(log2(max(mean + 2 * sqrt(mean), 1)))
    return min(max(rows, load.row_tile), load.row_full)


def temp_bytes(fields: Fields, dims: ModelDims, load: Load) -> int:
    """Largest set of intermediates alive at once: all ranks' tokens, float32 sums, one expert in compute dtype."""
    act = itemsize(load.dtypes.activation)
    tokens = load.gathered_tokens
    hidden = tokens * fields.expert_width(dims) * (2 * act + 4)
    routing = tokens * fields.router.top_k * 4 * 6 + load.tokens * fields.router.num_experts * 4 * 3
    inner = fields.experts.intermediate_size // load.degrees.etp
    matrices = 3 if fields.experts.gated else 2
    return int(hidden + routing + matrices * fields.expert_width(dims) * inner * act)


def _latent(fields: Fields, dims: ModelDims, load: Load) -> tuple[tuple[Gemm, ...], tuple[Gemm, ...]]:
    """Projections around the routed experts, of this rank's tokens."""
    latent = fields.experts.latent_size
    if latent is None:
        return (), ()
    act, weight, hidden = load.dtypes.activation, load.dtypes.weight, dims.hidden_size
    before = Gemm("latent in", load.tokens, latent, hidden, act, weight)
    return (before,), (Gemm("latent out", load.tokens, hidden, latent, act, weight),)


def _experts(fields: Fields, width: int, load: Load) -> tuple[Term, ...]:
    """A loop over blocks of rows; each slices one expert's matrices out of the stack."""
    act, dtype, router = load.dtypes.activation, load.dtypes.expert, fields.router
    rows = block_rows(fields, load)
    mean = load.valid_tokens * router.top_k / router.num_experts
    per_expert = max(touched(load.valid_tokens, router.top_k / router.num_experts), mean / rows)
    blocks = router.num_experts // load.degrees.ep * per_expert
    inner = fields.experts.intermediate_size // load.degrees.etp
    moved = blocks * rows * width * (2 * itemsize(act) + 2 * 4)  # gather rows; read and add float32 sums
    return (
        Gemm("experts", rows, inner, width, act, dtype, (2 if fields.experts.gated else 1) * blocks),
        Gemm("experts", rows, width, inner, act, dtype, blocks),
        Stream("experts", moved, moved),  # part of the blocks' products, no pieces of its own
    )


def _shared(fields: Fields, dims: ModelDims, load: Load) -> tuple[Term, ...]:
    """Own tokens with the whole expert, or all ranks' tokens with this device's share of it.

    A share's sums travel with those of the routed experts when both have one width, else on their own.
    """
    if fields.shared is None:
        return ()
    degree, hidden = load.degrees.shared, dims.hidden_size
    products = dense_products("shared expert", fields.shared.width, fields.shared_is_gated, degree, dims, load)
    if degree == 1 or fields.experts.latent_size is None:
        return products
    gather = gather_tokens("gather for shared", hidden, load)
    return (*gather, *products, *return_tokens("return from shared", "combine shared", "shares", hidden, load))
