"""A miniature program on the emitted-program contract: one scan with expert-parallel collectives.

For the tests of `moec verify --aot` only: it has the shape of an emitted step (scan over layers,
all-gathers and a reduce-scatter per layer, donated state, one gather for the head) and no meaning.

Legend: R ranks, T tokens per rank, A all ranks' tokens, D hidden, E local experts, I intermediate.
"""

import jax
import jax.numpy as jnp
from jax import lax

from moec.blocks.core.array_info import ArrayInfo
from moec.blocks.core.batch import Bucket, local, ranked
from moec.blocks.core.program import batch_info, jit_step, make_mesh, partition_specs

from .weights import EXPERTS, HIDDEN, IGNORE, LAYERS, SCALE_BLOCK, SCALE_SUFFIX, VOCAB, weights

__all__ = ["IGNORE", "SCALE_BLOCK", "SCALE_SUFFIX", "VOCAB"]

NAME = "toy"
PLAN_DIGEST = "toy"
MESH_AXES = {"data": 8}
RULES = {"rank": ("data",), "experts": ("data",), "vocab": ("data",)}
NUM_RANKS = 8
PAGE_SIZE = 16
BUCKETS = {"decode": Bucket(16, 16, 1, 4), "tiny": Bucket(2, 2, 1, 4)}
COMPILE_OPTIONS = {"xla_tpu_control_large_2nd_minor_layout_for_x16": "false"}
POOLS = {
    "gqa.kv": {"tokens_per_page": PAGE_SIZE, "bytes_per_page": 2 * LAYERS * PAGE_SIZE * HIDDEN, "window": None},
    "sampled": {"bytes_per_slot": 4},
}
MAX_CONTEXT = 4 * PAGE_SIZE
NUM_PAGES, NUM_SLOTS = 64, 17


def mesh(devices):
    return make_mesh(devices, MESH_AXES)


def state(pages, slots):
    kv = (NUM_RANKS, LAYERS * pages["gqa.kv"], PAGE_SIZE, HIDDEN)
    return {
        "gqa.kv": ArrayInfo(kv, "bfloat16", ("rank", None, None, None)),
        "sampled": ArrayInfo((NUM_RANKS, slots["sampled"]), "int32", ("rank", None)),
    }


def batch(bucket):
    return batch_info(BUCKETS[bucket], NUM_RANKS)


def moe(x_TD, w, layer):
    """Gather tokens and routing, loop over local experts, scatter back."""
    score_TE = jax.nn.softmax(jnp.dot(x_TD, w["router"][layer]).astype(jnp.float32))
    weight_T, index_T = lax.top_k(score_TE, 1)
    packed = jnp.concatenate([index_T, lax.bitcast_convert_type(weight_T, jnp.int32)], 1)
    packed_A = lax.all_gather(packed, "data", tiled=True)
    x_AD = lax.all_gather(x_TD, "data", tiled=True)
    weight_A = lax.bitcast_convert_type(packed_A[:, 1], jnp.float32)
    first = lax.axis_index("data") * EXPERTS

    def one(expert, y_AD):
        gain_A = jnp.where(packed_A[:, 0] == first + expert, weight_A, 0)
        up_AI = jax.nn.silu(jnp.dot(x_AD, w["w_up"][layer, expert]))
        return y_AD + gain_A[:, None] * jnp.dot(up_AI, w["w_down"][layer, expert])

    y_AD = lax.fori_loop(0, EXPERTS, one, jnp.zeros(x_AD.shape, jnp.float32)).astype(x_TD.dtype)
    return lax.psum_scatter(y_AD, "data", scatter_dimension=0, tiled=True)


def step(weights, state, batch):
    """One decode step: embed, scan over layers, write the new rows, pick a token."""
    batch, pool = local(batch), local(state["gqa.kv"])
    num_pages = pool.shape[0] // LAYERS
    x_TD = weights["embed"][batch.tokens]

    def body(x_TD, layer):
        with jax.named_scope("gqa"):
            page_T = layer * num_pages + batch.page_table[:, 0]
            x_TD = x_TD + pool[page_T, 0]
        with jax.named_scope("moe"):
            x_TD = x_TD + moe(x_TD, weights, layer)
        return x_TD, x_TD

    x_TD, new_LTD = lax.scan(body, x_TD, jnp.arange(LAYERS))
    page_LT = jnp.arange(LAYERS)[:, None] * num_pages + batch.page_table[None, :, 0]
    pool = pool.at[page_LT, batch.positions[None] % PAGE_SIZE].set(new_LTD)
    with jax.named_scope("head"):
        logits = lax.all_gather(jnp.dot(x_TD, weights["head"]), "data", axis=1, tiled=True)
        tokens = jnp.argmax(logits.astype(jnp.float32), axis=1).astype(jnp.int32)
    sampled = local(state["sampled"]).at[batch.slot].set(tokens)
    return {"gqa.kv": ranked(pool), "sampled": ranked(sampled)}, {"tokens": ranked(tokens)}


def _build(bucket):
    state_specs = partition_specs(state({"gqa.kv": 1}, {"sampled": 1}), RULES)
    rank = jax.sharding.PartitionSpec(RULES["rank"])
    return jit_step(
        step,
        mesh_axes=MESH_AXES,
        in_specs=(partition_specs(weights(), RULES), state_specs, partition_specs(batch(bucket), RULES)),
        out_specs=(state_specs, {"tokens": rank}),
        donate_state=True,
        matmul_precision="default",
    )


STEPS = {"decode": _build("decode"), "tiny": _build("tiny")}
# This program is only compiled.
STEPS_LOGITS = STEPS_TAPPED = {}
copy_slot = zero_slot = None
