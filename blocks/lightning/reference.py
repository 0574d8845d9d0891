"""How lightning attention is interpreted in float32: one whole sequence through ref.py, from zero state."""

import jax.numpy as jnp
from jax import Array

from ..core.batch import Batch, Rows
from ..core.declare import ModelDims
from . import ref
from .block import Fields


def apply(
    fields: Fields,
    dims: ModelDims,
    h_TD: Array,
    w: dict[str, Array],
    batch: Batch,
    rows: Rows,
    x_TD: Array,
    layer: int,
) -> Array:
    """The block's output [T, D] for one sequence of T tokens in slot 0; h_TD is the normed input.

    layer: absolute index, which sets the decays.
    """
    norm = fields.out_norm.resolve(dims.norm)
    y_TD, _ = ref.lightning(
        h_TD,
        w,
        jnp.zeros((1, 1, fields.num_heads, fields.head_dim, fields.head_dim), jnp.float32),
        batch,
        rows,
        pool_layer=0,
        slopes_LG=ref.lightning_slopes(fields.num_heads, (layer,), fields.decay_layers),
        num_heads=fields.num_heads,
        head_dim=fields.head_dim,
        norm_eps=norm.eps,
        norm_zero_centered=norm.zero_centered,
        chunk=h_TD.shape[0],
        max_q=h_TD.shape[0],
        activation=fields.activation,
    )
    return y_TD
