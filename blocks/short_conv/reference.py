"""How a graph with short convolutions is interpreted in float32: one whole sequence through ref.py, empty window."""

import jax.numpy as jnp
from jax import Array

from ..core.batch import Batch, Rows
from ..core.declare import ModelDims
from . import ref
from .block import Fields, state


def apply(
    fields: Fields, dims: ModelDims, h_TD: Array, w: dict[str, Array], batch: Batch, rows: Rows, x_TD: Array, layer: int
) -> Array:
    """The block's output [T, D] for one sequence of T tokens in slot 0; h_TD is the normed input."""
    (window,) = state(fields, dims)
    y_TD, _ = ref.short_conv(
        h_TD,
        w,
        jnp.zeros((1, 1, *window.shape), jnp.float32),
        batch,
        rows,
        pool_layer=0,
        conv_kernel=fields.conv_kernel,
        max_q=h_TD.shape[0],
        bias=fields.bias,
    )
    return y_TD + w["b_o"] if fields.bias else y_TD
