"""Compiles a scan over attention and Gated DeltaNet layers for one Ironwood device and prints its memory as JSON.

`python block_memory.py CASE`: a process of its own, because libtpu wants its environment before jax.
"""

import json
import os
import sys
from collections.abc import Callable
from typing import Any

os.environ.update(JAX_PLATFORMS="cpu", ALLOW_MULTIPLE_LIBTPU_LOAD="1", TPU_SKIP_MDS_QUERY="1")

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import topologies
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from moec.blocks.attention.shapes import FULL_SHAPES as ATTENTION
from moec.blocks.attention.shapes import AttentionShape
from moec.blocks.attention.xla import attention
from moec.blocks.core.batch import Batch, Sampling, index_rows
from moec.blocks.core.paged import write_kv
from moec.blocks.gated_delta.shapes import FULL_SHAPES as GATED_DELTA
from moec.blocks.gated_delta.shapes import GatedDeltaShape
from moec.blocks.gated_delta.xla import gated_delta

LAYERS, PAGE_SIZE, PAGES, PAGES_PER_SEQ, SLOTS = 4, 256, 2048, 36, 321
OPTIONS = {"xla_tpu_control_large_2nd_minor_layout_for_x16": "false"}

# tokens, rows, attention geometry, Gated DeltaNet geometry, dtype of the KV pool
CASES = {
    "one_row": (1, 1, "32q_2kv_256", "16qk_64v_128", jnp.bfloat16),
    "mixed_few_heads": (512, 320, "4q_1kv_256", "2qk_8v_128", jnp.bfloat16),
    "wide_cache": (64, 64, "32q_2kv_256", "2qk_8v_128", jnp.float32),
    "window_sinks": (512, 64, "64q_8kv_64_window_128", "2qk_8v_128", jnp.bfloat16),
}

Shapes = dict[str, tuple[tuple[int, ...], Any]]


def attention_weights(a: AttentionShape) -> Shapes:
    widths = {"q": a.num_q_heads * (a.head_dim + a.gate_width), "k": a.num_kv_heads * a.head_dim}
    widths["v"] = a.num_kv_heads * a.value_dim
    found = {f"w_{name}": (a.hidden, width) for name, width in widths.items()}
    found["w_o"] = (a.num_q_heads * a.value_dim, a.hidden)
    if a.qk_norm == "head":
        found |= {"q_norm": (a.head_dim,), "k_norm": (a.head_dim,)}
    if a.qkv_bias:
        found |= {f"b_{name}": (width,) for name, width in widths.items()}
    if a.sinks:
        found["sinks"] = (a.num_q_heads,)
    return {name: ((LAYERS, *shape), jnp.bfloat16) for name, shape in found.items()}


def delta_weights(g: GatedDeltaShape) -> Shapes:
    qk, v, heads = g.num_qk_heads * g.head_k_dim, g.num_v_heads * g.head_v_dim, g.num_v_heads
    widths = {"w_q": qk, "w_k": qk, "w_v": v, "w_z": v, "w_b": heads, "w_a": heads}
    found: Shapes = {name: ((LAYERS, g.hidden, width), jnp.bfloat16) for name, width in widths.items()}
    taps = {"conv_q": qk, "conv_k": qk, "conv_v": v}
    found |= {name: ((LAYERS, width, g.conv_kernel), jnp.bfloat16) for name, width in taps.items()}
    found |= dict.fromkeys(("a_log", "dt_bias"), ((LAYERS, heads), jnp.float32))
    return found | {"out_norm": ((LAYERS, g.head_v_dim), jnp.bfloat16), "w_o": ((LAYERS, v, g.hidden), jnp.bfloat16)}


def batch_shapes(tokens: int, rows: int) -> Batch:
    """A Batch of (shape, dtype) pairs."""

    def pair(dtype: Any, *shape: int) -> Any:
        return shape, dtype

    token, row = pair(jnp.int32, tokens), pair(jnp.int32, rows)
    sampling = Sampling(pair(jnp.float32, rows), row, pair(jnp.float32, rows), pair(jnp.uint32, rows))
    table, cu_q = pair(jnp.int32, rows, PAGES_PER_SEQ), pair(jnp.int32, rows + 1)
    return Batch(token, token, cu_q, row, table, row, pair(jnp.bool_, rows), pair(jnp.int32, 3), sampling)


def make_step(a: AttentionShape, g: GatedDeltaShape, max_q: int) -> Callable[..., Any]:
    def step(weights, kv, conv, state, h, batch):
        rows = index_rows(batch)

        def layer(carry, x):
            (h, conv, state), (w_attention, w_delta, index) = carry, x
            out, new = attention(
                h, w_attention, kv, batch, rows, pool_layer=index, num_pages=PAGES, **a.options(),
                q_block=128, kv_block=512, max_q=max_q,
            )  # fmt: skip
            mixed, conv, state = gated_delta(
                h + out, w_delta, conv, state, batch, rows, pool_layer=index, num_qk_heads=g.num_qk_heads,
                num_v_heads=g.num_v_heads, head_k_dim=g.head_k_dim, head_v_dim=g.head_v_dim, conv_kernel=g.conv_kernel,
                norm_eps=1e-6, norm_zero_centered=False, chunk=64, max_q=max_q,
            )  # fmt: skip
            return (h + out + mixed, conv, state), new

        (h, conv, state), new = jax.lax.scan(layer, (h, conv, state), (*weights, jnp.arange(LAYERS)))
        return write_kv(kv, new, batch, rows), conv, state, h

    return step


def main(case: str) -> None:
    tokens, rows, attention_name, delta_name, kv_dtype = CASES[case]
    a, g = ATTENTION[attention_name], GATED_DELTA[delta_name]
    channels = 2 * g.num_qk_heads * g.head_k_dim + g.num_v_heads * g.head_v_dim
    pools = (
        ((LAYERS * PAGES, PAGE_SIZE, a.num_kv_heads * (a.head_dim + a.value_dim)), kv_dtype),
        ((LAYERS, SLOTS, (g.conv_kernel - 1) * channels), jnp.bfloat16),
        ((LAYERS, SLOTS, g.num_v_heads, g.head_k_dim, g.head_v_dim), jnp.float32),
    )
    weights = (attention_weights(a), delta_weights(g))
    device = topologies.get_topology_desc("tpu7x:2x2x1", platform="tpu").devices[0]
    sharding = NamedSharding(Mesh(np.array([device]), ("x",)), PartitionSpec())
    arguments = jax.tree.map(
        lambda info: jax.ShapeDtypeStruct(*info, sharding=sharding),
        (weights, *pools, ((tokens, a.hidden), jnp.bfloat16), batch_shapes(tokens, rows)),
        is_leaf=lambda x: isinstance(x, tuple) and len(x) == 2 and isinstance(x[0], tuple),
    )
    step = jax.jit(make_step(a, g, 1 if tokens == rows else tokens), donate_argnums=(1, 2, 3))
    memory = step.lower(*arguments).compile(compiler_options=OPTIONS).memory_analysis()
    pool_bytes = [int(np.prod(shape)) * jnp.dtype(dtype).itemsize for shape, dtype in pools]
    print(json.dumps({"temp": memory.temp_size_in_bytes, "alias": memory.alias_size_in_bytes, "pools": pool_bytes}))


if __name__ == "__main__":
    main(sys.argv[1])
