"""How a graph with a mixture of experts is interpreted in float32: every expert here, one token at a time."""

from jax import Array

from ..core.batch import Batch, Rows
from ..core.declare import ModelDims
from . import ref
from .block import Fields


def apply(fields: Fields, dims: ModelDims, h_TD: Array, w: dict[str, Array], batch: Batch, rows: Rows) -> Array:
    """Routed plus shared experts [T, D]; expert weights are [E, D, I], without a layer dim."""
    router = fields.router
    index_TK, weight_TK = ref.route(
        h_TD,
        w["router"],
        top_k=router.top_k,
        score=router.score,
        renormalize=router.renormalize,
        scale=router.scale,
    )
    y_TD = ref.experts(
        h_TD,
        index_TK,
        weight_TK,
        w["w_gate"][None],
        w["w_up"][None],
        w["w_down"][None],
        None,
        layer=0,
        first_expert=0,
        activation=fields.experts.activation,
        block_rows=1,
    )
    if fields.shared is None:
        return y_TD
    return y_TD + ref.shared_expert(h_TD, w, gate=fields.shared.gate, activation=fields.experts.activation)
