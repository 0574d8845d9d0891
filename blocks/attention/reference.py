"""How a graph with attention is interpreted in float32: one whole sequence through ref.py, nothing cached."""

import jax.numpy as jnp
from jax import Array

from ..core.batch import Batch, Rows
from ..core.declare import ModelDims
from ..core.rope_fields import rope_of
from . import ref
from .block import Fields, value_dim


def apply(
    fields: Fields, dims: ModelDims, h_TD: Array, w: dict[str, Array], batch: Batch, rows: Rows, x_TD: Array, layer: int
) -> Array:
    """The block's output [T, D] for one sequence of T tokens; h_TD is the normed input, x_TD is not read."""
    norm, warm, gate = fields.norm.resolve(dims.norm), fields.temperature, fields.output_gate
    width = fields.num_kv_heads * (fields.head_dim + value_dim(fields))
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
        v_head_dim=fields.v_head_dim,
        rope=rope_of(fields.rope),
        qk_norm=fields.qk_norm,
        qk_norm_place=fields.qk_norm_place,
        v_norm=fields.v_norm == "head",
        norm_eps=norm.eps,
        norm_zero_centered=norm.zero_centered,
        qkv_bias=fields.bias.qkv,
        keys_as_values=fields.keys_as_values,
        clip_qkv=fields.clip_qkv,
        window=fields.window,
        chunk=fields.chunk,
        sinks=fields.sinks,
        softcap=fields.softcap,
        scale=fields.head_dim**-0.5 if fields.scale is None else fields.scale,
        value_scale=fields.value_scale,
        temperature=(warm.floor, warm.scale, warm.offset) if warm else None,
        output_gate=gate.activation if gate else None,
        gate_stored=gate.stored if gate else "fused",
        q_block=h_TD.shape[0],
        kv_block=h_TD.shape[0],
        max_q=h_TD.shape[0],
    )
    return y_TD + w["b_o"] if fields.bias.out else y_TD
