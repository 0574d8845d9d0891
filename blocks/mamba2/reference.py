"""How a graph with Mamba-2 is interpreted in float32: one whole sequence through ref.py, from zero state."""

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
    norm = fields.out_norm.resolve(dims.norm)
    conv, conv_bc, recurrent = (jnp.zeros((1, 1, *one.shape), jnp.float32) for one in state(fields, dims))
    y_TD, *_ = ref.mamba2(
        h_TD,
        w,
        conv,
        conv_bc,
        recurrent,
        batch,
        rows,
        pool_layer=0,
        num_heads=fields.num_heads,
        num_groups=fields.num_groups,
        head_dim=fields.head_dim,
        state_size=fields.state_size,
        conv_kernel=fields.conv_kernel,
        norm_eps=norm.eps,
        chunk=h_TD.shape[0],
        max_q=h_TD.shape[0],
        norm_zero_centered=norm.zero_centered,
        time_step_min=fields.time_step.min,
        time_step_max=fields.time_step.max,
        conv_bias=fields.conv_bias,
        proj_bias=fields.proj_bias,
    )
    return y_TD + w["b_o"] if fields.proj_bias else y_TD
