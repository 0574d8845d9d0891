"""Work of a router in its XLA variant (xla.py), on one device."""

from collections.abc import Mapping
from math import log2

from ..core.declare import ModelDims
from ..core.work import Gemm, Load, Term, Vector
from .router_fields import Router

# A compare-exchange of (value, index) pairs: compare, and two selects.
_EXCHANGE_FLOPS = 3


def work(router: Router, dims: ModelDims, load: Load) -> tuple[Term, ...]:
    """Logits of this rank's tokens, and the choice among them."""
    return (logits(router, dims, load), _sort(router, load))


def tuning(router: Router, dims: ModelDims, loads: Mapping[str, Load]) -> dict[str, int]:
    """Nothing is tuned."""
    return {}


def logits(router: Router, dims: ModelDims, load: Load) -> Gemm:
    """The product. A float32 one takes several passes where products are bfloat16; the matrix is stored as planned."""
    dtype = load.dtypes.activation if router.logits_dtype == "activation" else "float32"
    return Gemm("route", load.tokens, router.num_experts, dims.hidden_size, dtype, load.dtypes.weight)


def _sort(router: Router, load: Load) -> Vector:
    """lax.top_k compiles to a full sort of each token's scores: a bitonic network of log2(E) (log2(E) + 1) / 2 stages
    (K. Batcher, Sorting networks and their applications, 1968), each E / 2 exchanges."""
    stages = log2(router.num_experts) * (log2(router.num_experts) + 1) / 2
    return Vector("choose experts", load.tokens * router.num_experts / 2 * stages * _EXCHANGE_FLOPS)
