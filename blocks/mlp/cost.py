"""Work of a dense MLP in its XLA variant (xla.py), on one device."""

from collections.abc import Mapping

from ..collectives.cost import gather_tokens, return_tokens
from ..core.declare import ModelDims
from ..core.work import Gemm, Load, Term, itemsize
from .block import Fields


def work(fields: Fields, dims: ModelDims, load: Load) -> tuple[Term, ...]:
    """Own tokens through the whole network, or all ranks' tokens through this device's share of it."""
    degree = load.degrees.mlp
    products = dense_products("dense mlp", fields.intermediate_size, fields.gated, degree, dims, load)
    if degree == 1:
        return products
    hidden, what = dims.hidden_size, "inner dims"
    gather = gather_tokens("gather for mlp", hidden, load)
    return (*gather, *products, *return_tokens("return from mlp", "combine mlp", what, hidden, load))


def dense_products(
    op: str, inner: int, gated: bool, degree: int, dims: ModelDims, load: Load
) -> tuple[Gemm, Gemm]:  # fmt: skip
    """The products in, then the one out, of a dense network cut over `degree` devices."""
    act, weight, hidden = load.dtypes.activation, load.dtypes.weight, dims.hidden_size
    tokens = load.tokens if degree == 1 else load.gathered_tokens
    local = inner // degree
    return (
        Gemm(op, tokens, (2 if gated else 1) * local, hidden, act, weight),
        Gemm(op, tokens, hidden, local, act, weight),
    )


def tuning(fields: Fields, dims: ModelDims, loads: Mapping[str, Load]) -> dict[str, int]:
    """Nothing to tune."""
    return {}


def temp_bytes(fields: Fields, dims: ModelDims, load: Load) -> int:
    """Tokens in and out, float32 inner values and their rounded product."""
    act, degree = itemsize(load.dtypes.activation), load.degrees.mlp
    tokens = load.tokens if degree == 1 else load.gathered_tokens
    inner = (2 if fields.gated else 1) * 4 + act
    return int(tokens * (fields.intermediate_size // degree * inner + dims.hidden_size * (act + 4)))
