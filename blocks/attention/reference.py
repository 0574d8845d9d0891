"""How a graph with attention is interpreted in float32: one whole sequence through ref.py, nothing cached."""

import jax.numpy as jnp
from jax import Array

from ..core.batch import Batch, Rows
from ..core.declare import ModelDims
from . import ref
from .block import Fields


def apply(fields: Fields, dims: ModelDims, h_TD: Array, w: dict[str, Array], batch: Batch, rows: Rows) -> Array:
    """The block's output [T, D] for one sequence of T tokens; h_TD is the normed input."""
    norm, rope = fields.norm.resolve(dims.norm), fields.rope
    width = 2 * fields.num_kv_heads * fields.head_dim
    y_TD, _ = ref.attention(
        h_TD,
        w,
        jnp.zeros((1, 1, width), jnp.float32),
        batch,
        rows,
        pool_layer=0,
        num_pages=1,
        num_q_heads=fields.num_q_heads,
        num_kv_heads=fields.num_kv_heads,
        head_dim=fields.head_dim,
        rope_dim=rope.dim if rope else 0,
        rope_theta=rope.theta if rope else 1.0,
        rope_pairing=rope.pairing if rope else "half",
        qk_norm_eps=norm.eps if fields.qk_norm == "head" else None,
        qk_norm_zero_centered=norm.zero_centered,
        output_gate=fields.output_gate == "sigmoid",
        scale=fields.head_dim**-0.5,
        q_block=h_TD.shape[0],
        kv_block=h_TD.shape[0],
        max_q=h_TD.shape[0],
    )
    return y_TD
