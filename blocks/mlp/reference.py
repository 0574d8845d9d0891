"""How a graph with a dense MLP is interpreted in float32."""

from jax import Array

from ..core.batch import Batch, Rows
from ..core.declare import ModelDims
from . import ref
from .block import Fields
from .clamp_fields import clamp_of


def apply(
    fields: Fields, dims: ModelDims, h_TD: Array, w: dict[str, Array], batch: Batch, rows: Rows, x_TD: Array, layer: int
) -> Array:
    """The block's output [T, D]; h_TD is the normed input."""
    return ref.dense_mlp(
        h_TD,
        w["w_gate"] if fields.gated else None,
        w["w_up"],
        w["w_down"],
        activation=fields.activation,
        b_gate=w["b_gate"] if fields.bias and fields.gated else None,
        b_up=w["b_up"] if fields.bias else None,
        b_down=w["b_down"] if fields.bias else None,
        clamp=clamp_of(fields.clamp),
    )
