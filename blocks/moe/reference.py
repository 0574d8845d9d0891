"""How a graph with a mixture of experts is interpreted in float32: every expert here, one token at a time."""

from jax import Array

from ..core.batch import Batch, Rows
from ..core.declare import ModelDims
from ..mlp.clamp_fields import clamp_of
from ..router.reference import apply_router
from . import ref
from .block import Fields


def apply(
    fields: Fields, dims: ModelDims, h_TD: Array, w: dict[str, Array], batch: Batch, rows: Rows, x_TD: Array, layer: int
) -> Array:
    """Routed plus shared experts [T, D]; expert weights are [E, D, I], without a layer dim. x: before the norm."""
    index_TK, weight_TK = apply_router(fields.router, dims, h_TD, x_TD, w)
    latent = fields.experts.latent_size is not None
    biases: dict[str, Array] = {key: w[key][None] for key in ("b_gate", "b_up", "b_down") if key in w}
    y_TD = ref.experts(
        ref.latent_projection(h_TD, w["latent_in"]) if latent else h_TD,
        index_TK,
        weight_TK,
        w["w_gate"][None] if fields.experts.gated else None,
        w["w_up"][None],
        w["w_down"][None],
        None,
        layer=0,
        first_expert=0,
        block_rows=1,
        activation=fields.experts.activation,
        biases=biases or None,
        clamp=clamp_of(fields.experts.clamp),
        weigh=fields.router.apply,
    )
    y_TD = ref.latent_projection(y_TD, w["latent_out"]) if latent else y_TD
    return y_TD if fields.shared is None else y_TD + _shared(fields, h_TD, w)


def _shared(fields: Fields, h_TD: Array, w: dict[str, Array]) -> Array:
    """The expert every token passes."""
    assert fields.shared is not None
    return ref.shared_expert(
        h_TD,
        w,
        gate=fields.shared.gate,
        gated=fields.shared_is_gated,
        activation=fields.shared_activation,
        bias=fields.shared.bias,
        clamp=clamp_of(fields.shared.clamp),
        scale=fields.shared.scale,
    )
