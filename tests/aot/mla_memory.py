"""Compiles a scan over latent-attention layers for one Ironwood device and prints its memory as JSON.

`python mla_memory.py CASE`: a process of its own, because libtpu wants its environment before jax.
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

from moec.blocks.core.batch import Batch, Sampling, index_rows
from moec.blocks.core.declare import ModelDims, NormFields
from moec.blocks.core.paged import write_kv
from moec.blocks.mla.block import Fields, weights
from moec.blocks.mla.shapes import FULL_SHAPES, MlaShape
from moec.blocks.mla.xla import mla

LAYERS, PAGE_SIZE, PAGES, PAGES_PER_SEQ = 4, 256, 2048, 36
OPTIONS = {"xla_tpu_control_large_2nd_minor_layout_for_x16": "false"}

# tokens, rows, geometry, dtype of the cache
CASES = {
    "decode": (64, 64, "128h_512", jnp.bfloat16),
    "mixed": (1024, 64, "128h_512", jnp.bfloat16),
    "mixed_few_heads": (1024, 64, "16h_512", jnp.float8_e4m3fn),
    "one_row": (1, 1, "16h_512", jnp.bfloat16),
}
Q_BLOCK, KV_BLOCK = 512, 512  # what cost.tuning says for pages of 256


def declared(shape: MlaShape) -> Fields:
    """The block whose weights the program takes; its rope and scale are the shape's."""
    return Fields(
        kind="mla", num_heads=shape.num_heads, q_lora_rank=shape.q_lora_rank, kv_lora_rank=shape.kv_lora_rank,
        qk_nope_head_dim=shape.nope, qk_rope_head_dim=shape.rope, v_head_dim=shape.v,
    )  # fmt: skip


def batch_shapes(tokens: int, rows: int) -> Batch:
    """A Batch of (shape, dtype) pairs."""

    def pair(dtype: Any, *shape: int) -> Any:
        return shape, dtype

    token, row = pair(jnp.int32, tokens), pair(jnp.int32, rows)
    sampling = Sampling(pair(jnp.float32, rows), row, pair(jnp.float32, rows), pair(jnp.uint32, rows))
    table, cu_q = pair(jnp.int32, rows, PAGES_PER_SEQ), pair(jnp.int32, rows + 1)
    return Batch(token, token, cu_q, row, table, row, pair(jnp.bool_, rows), pair(jnp.int32, 3), sampling)


def make_step(shape: MlaShape, max_q: int) -> Callable[..., Any]:
    def step(w, kv, h, batch):
        rows = index_rows(batch)

        def layer(h, x):
            w_layer, index = x
            out, new = mla(
                h, w_layer, kv, batch, rows, pool_layer=index, num_pages=PAGES, num_heads=shape.num_heads,
                kv_lora_rank=shape.kv_lora_rank, qk_nope_head_dim=shape.nope, v_head_dim=shape.v, norm_eps=1e-6,
                scale=(shape.nope + shape.rope) ** -0.5, q_block=Q_BLOCK, kv_block=KV_BLOCK, max_q=max_q,
                rope_spec=shape.rope_spec, query_latent=True,
            )  # fmt: skip
            return h + out, new

        h, new = jax.lax.scan(layer, h, (w, jnp.arange(LAYERS)))
        return write_kv(kv, new, batch, rows), h

    return step


def main(case: str) -> None:
    tokens, rows, name, kv_dtype = CASES[case]
    shape = FULL_SHAPES[name]
    found = weights(declared(shape), ModelDims(shape.hidden, 8, NormFields()))
    pool = ((LAYERS * PAGES, PAGE_SIZE, shape.width), kv_dtype)
    device = topologies.get_topology_desc("tpu7x:2x2x1", platform="tpu").devices[0]
    sharding = NamedSharding(Mesh(np.array([device]), ("x",)), PartitionSpec())
    stacked = {weight: ((LAYERS, *one.shape), jnp.bfloat16) for weight, one in found.items()}
    arguments = jax.tree.map(
        lambda info: jax.ShapeDtypeStruct(*info, sharding=sharding),
        (stacked, pool, ((tokens, shape.hidden), jnp.bfloat16), batch_shapes(tokens, rows)),
        is_leaf=lambda x: isinstance(x, tuple) and len(x) == 2 and isinstance(x[0], tuple),
    )
    step = jax.jit(make_step(shape, 1 if tokens == rows else tokens), donate_argnums=(1,))
    memory = step.lower(*arguments).compile(compiler_options=OPTIONS).memory_analysis()
    pool_bytes = int(np.prod(pool[0])) * jnp.dtype(kv_dtype).itemsize
    found_bytes = {"temp": memory.temp_size_in_bytes, "alias": memory.alias_size_in_bytes, "pool": pool_bytes}
    print(json.dumps(found_bytes | {"arguments": memory.argument_size_in_bytes}))


if __name__ == "__main__":
    main(sys.argv[1])
