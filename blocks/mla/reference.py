"""How a graph with latent attention is interpreted in float32: one whole sequence through ref.py, nothing cached."""

import jax.numpy as jnp
from jax import Array

from ..core.batch import Batch, Rows
from ..core.declare import ModelDims
from ..core.rope_fields import rope_of
from . import ref
from .block import Fields, default_scale, row_values


def apply(
    fields: Fields, dims: ModelDims, h_TD: Array, w: dict[str, Array], batch: Batch, rows: Rows, x_TD: Array, layer: int
) -> Array:
    """The block's output [T, D] for one sequence of T tokens; h_TD is the normed input."""
    norm, heat, gate = fields.norm.resolve(dims.norm), fields.temperature, fields.output_gate
    y_TD, _ = ref.mla(
        h_TD,
        w,
        jnp.zeros((1, 1, row_values(fields)), jnp.float32),
        batch,
        rows,
        pool_layer=0,
        num_pages=1,
        num_heads=fields.num_heads,
        kv_lora_rank=fields.kv_lora_rank,
        qk_nope_head_dim=fields.qk_nope_head_dim,
        v_head_dim=fields.v_head_dim,
        norm_eps=norm.eps,
        scale=fields.scale or default_scale(fields),
        q_block=h_TD.shape[0],
        kv_block=h_TD.shape[0],
        max_q=h_TD.shape[0],
        rope_spec=rope_of(fields.rope),
        norm_zero_centered=norm.zero_centered,
        query_latent=fields.q_lora_rank is not None,
        temperature=(heat.floor, heat.scale, heat.offset) if heat else None,
        output_gate=gate.activation if gate else None,
        gate_stored=gate.stored if gate else "fused",
        bias=fields.bias,
    )
    return y_TD + jnp.asarray(w["b_o"], jnp.float32) if fields.bias else y_TD
