"""How a graph with Mamba is interpreted in float32: one whole sequence through ref.py, from zero state."""

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
    norm = None if fields.input_norms is None else fields.input_norms.resolve(dims.norm)
    conv, recurrent = (jnp.zeros((1, 1, *one.shape), jnp.float32) for one in state(fields, dims))
    y_TD, *_ = ref.mamba1(
        h_TD,
        w,
        conv,
        recurrent,
        batch,
        rows,
        pool_layer=0,
        conv_kernel=fields.conv_kernel,
        chunk=h_TD.shape[0],
        max_q=h_TD.shape[0],
        conv_bias=fields.conv_bias,
        proj_bias=fields.proj_bias,
        norm_eps=None if norm is None else norm.eps,
        norm_zero_centered=norm is not None and norm.zero_centered,
    )
    return y_TD + w["b_o"] if fields.proj_bias else y_TD
