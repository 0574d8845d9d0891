"""How a graph with Gated DeltaNet is interpreted in float32: one whole sequence through ref.py, from zero state."""

import jax.numpy as jnp
from jax import Array

from ..core.batch import Batch, Rows
from ..core.declare import ModelDims
from . import ref
from .block import Fields


def apply(
    fields: Fields, dims: ModelDims, h_TD: Array, w: dict[str, Array], batch: Batch, rows: Rows, x_TD: Array, layer: int
) -> Array:
    """The block's output [T, D] for one sequence of T tokens in slot 0; h_TD is the normed input."""
    norm = fields.out_norm.resolve(dims.norm)
    channels = 2 * fields.num_qk_heads * fields.dk + fields.num_v_heads * fields.dv
    y_TD, _, _ = ref.gated_delta(
        h_TD,
        w,
        jnp.zeros((1, 1, (fields.conv_kernel - 1) * channels), jnp.float32),
        jnp.zeros((1, 1, fields.num_v_heads, fields.dk, fields.dv), jnp.float32),
        batch,
        rows,
        pool_layer=0,
        num_qk_heads=fields.num_qk_heads,
        num_v_heads=fields.num_v_heads,
        head_k_dim=fields.dk,
        head_v_dim=fields.dv,
        conv_kernel=fields.conv_kernel,
        norm_eps=norm.eps,
        norm_zero_centered=norm.zero_centered,
        chunk=h_TD.shape[0],
        max_q=h_TD.shape[0],
        channel_decay=fields.decay.per == "channel",
        decay_lower_bound=fields.decay.lower_bound,
        gate_activation=fields.gate.activation,
        negative_eigenvalues=fields.negative_eigenvalues,
    )
    return y_TD
