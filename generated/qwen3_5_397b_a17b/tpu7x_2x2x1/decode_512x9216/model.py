# Emitted by moec; do not edit. Regenerate: moec compile qwen3.5-397b-a17b --target tpu7x:2x2x1 --workload decode_512x9216
# Digests: spec a912a5398831487d, target 8c7a408c9f47814c, workload 919da80e67124d21, overrides 4f53cda18c2baa0c, plan 63824eb498475da7
"""qwen3.5-397b-a17b on tpu7x:2x2x1: 60 layers, attention DP8, experts EP8.

Read `step` first, then `forward`, the groups, the layer kinds and the blocks. Arrays are this device's shards.
Suffixes: T tokens of this rank, A tokens of all ranks, S rows (sequences), D hidden, K experts per token,
V vocabulary, L layers.
"""

from functools import partial

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec as P

from moec.blocks.attention.tpu_ragged import attention_ragged
from moec.blocks.collectives.xla import gather_routing_packed, gather_tokens
from moec.blocks.core.array_info import ArrayInfo
from moec.blocks.core.batch import Bucket, index_rows, local, ranked
from moec.blocks.core.chip import ChipLimits
from moec.blocks.core.norm import rms_norm
from moec.blocks.core.program import batch_info, jit_slots, jit_step, make_mesh, partition_specs
from moec.blocks.core.rope_spec import Rope
from moec.blocks.core.slots import copy_slots, zero_slots
from moec.blocks.embed.xla import lookup_sharded
from moec.blocks.gated_delta.tpu_fused import gated_delta_fused
from moec.blocks.head.xla import logits_sharded
from moec.blocks.moe.tpu_grouped import experts_reduce_scatter_grouped
from moec.blocks.moe.xla import shared_expert
from moec.blocks.router.tpu_fused import route_packed_fused
from moec.blocks.sampling.xla import sample

from .weights import IGNORE, SCALE_BLOCK, SCALE_SUFFIX, weights

__all__ = ["IGNORE", "SCALE_BLOCK", "SCALE_SUFFIX"]  # the loader reads them here

NAME = "qwen3.5-397b-a17b"
PLAN_DIGEST = "63824eb498475da7"  # sha256 of plan.json

MESH_AXES = {"data": 8}  # 8 devices
DATA = ("data",)  # attention data parallel: each rank has its own sequences
TENSOR = ()  # attention tensor parallel: heads are cut
EXPERT = ("data",)  # expert parallel: each device has its own experts
NUM_RANKS = 8  # attention data-parallel ranks
VOCAB = 248320  # token ids
ACTIVATION = "bfloat16"  # dtype of the residual stream
MATMUL_PRECISION = "default"  # of matrix products while tracing
PAGE_SIZE = 256  # tokens per KV page
MAX_CONTEXT = 9216  # tokens per sequence
NUM_PAGES = 2305  # KV pages per rank the plan budgets, page 0 is the sink
NUM_SLOTS = 65  # sequences per rank the plan budgets, slot 0 is the sink
CHIP = ChipLimits(  # what the kernels must respect of a device of tpu7x:2x2x1
    vmem_bytes=67108864, lanes=128, sublanes=8,
    mxu_dtypes=("bfloat16", "float32", "float8_e4m3fn", "float8_e5m2"), sparse_cores=2, sc_subcores=16,
    sc_lanes=16, sc_vmem_bytes=524288, cores_per_chip=2, smem_bytes=1048576,
)
GDN_LAYERS = 45  # layers with gdn
GDN_QK_HEADS = 16  # query/key heads, not cut
GDN_V_HEADS = 64  # value heads, not cut
GDN_K_DIM = 128  # query/key dims per head
GDN_V_DIM = 128  # value dims per head
GDN_CONV = 4  # taps of the causal convolution
GDN_CHUNK = 64  # prefill tokens solved at once
GDN_UNROLL = 8  # groups of value heads a pass of the decode update takes
MOE_LAYERS = 60  # layers with moe
MOE_EXPERTS = 64  # 512 experts / ep 8
MOE_TOP_K = 10  # experts per token
MOE_BLOCK_ROWS = {"decode": 16, "mixed": 128}  # token rows of one expert's product
MOE_INNER_TILE = 1024  # columns of an expert in vector memory at once
MOE_COMBINE_TOKENS = 64  # tokens whose sums leave together
MOE_STREAM_ROWS = {"decode": 64, "mixed": 0}  # rows summed at once with all sums in vector memory; 0 = fetched by token
MOE_ROUTE_TOKENS = {"decode": 64, "mixed": 512}  # tokens a block of the router takes
MOE_ROUTE_HIDDEN = 4096  # rows of its matrix it multiplies at a time
MOE_RETURN_CHUNKS = {"decode": 1, "mixed": 4}  # messages in which sums return, one beside the sums of the next
MOE_ROW_PARTS = {"decode": 2, "mixed": 0}  # float8 parts of a row in products; 0 = weights are widened to bfloat16
GQA_LAYERS = 15  # layers with gqa
GQA_Q_HEADS = 32  # query heads, not cut
GQA_KV_HEADS = 2  # key/value heads, not cut
GQA_HEAD_DIM = 256  # dims per head
GQA_ROPE = Rope(dim=64, theta=10000000.0)  # rotary embedding of queries and keys
GQA_Q_BLOCK = 64  # tokens of a chunk per prefill work item
GQA_KV_BLOCK = 512  # cached keys such an item multiplies at once
GQA_DECODE_BLOCK = 1024  # keys of a decode row fetched and multiplied at once
GQA_DECODE_TAIL = 256  # the same in a row's last block
GQA_DECODE_SLOTS = 8  # such blocks in vector memory

BUCKETS = {  # static step shapes; max_q 1 = decode only
    "decode": Bucket(tokens_per_rank=64, seqs_per_rank=64, max_q=1, pages_per_seq=36),
    "mixed": Bucket(tokens_per_rank=1024, seqs_per_rank=64, max_q=1024, pages_per_seq=36),
}
POOLS = {  # state key -> what one page or slot takes: bytes per rank, all layers
    "gdn.conv": {"bytes_per_slot": 3317760},
    "gdn.state": {"bytes_per_slot": 94371840},
    "gqa.kv": {"tokens_per_page": PAGE_SIZE, "bytes_per_page": 7864320, "window": None},
    "sampled": {"bytes_per_slot": 4},
}
COMPILE_OPTIONS = {"xla_tpu_control_large_2nd_minor_layout_for_x16": "false"}  # for whoever compiles for the target's backend
RULES = {  # logical axis -> mesh axes it is cut over
    "rank": ("data",),
    "embed_vocab": ("data",),
    "head_vocab": ("data",),
    "q_heads": (),
    "kv_heads": (),
    "qk_heads": (),
    "v_heads": (),
    "experts": ("data",),
    "expert_intermediate": (),
    "shared_intermediate": (),
}


def mesh(devices):
    """The mesh over `devices` (the last axis runs over neighbouring cores)."""
    return make_mesh(devices, MESH_AXES)


def state(pages, slots):
    """Abstract state of one engine. pages, slots: pool key -> count per rank, entry 0 is the sink."""
    return {
        "gdn.conv": ArrayInfo(
            (NUM_RANKS, GDN_LAYERS, slots["gdn.conv"], 288, 128),
            "bfloat16", ("rank", None, None, "v_heads", None),
        ),
        "gdn.state": ArrayInfo(
            (NUM_RANKS, GDN_LAYERS, slots["gdn.state"], 64, 128, 128),
            "bfloat16", ("rank", None, None, "v_heads", None, None),
        ),
        "gqa.kv": ArrayInfo(
            (NUM_RANKS, GQA_LAYERS * pages["gqa.kv"], PAGE_SIZE, 1024),
            "bfloat16", ("rank", None, None, "kv_heads"),
        ),
        "sampled": ArrayInfo((NUM_RANKS, slots["sampled"]), "int32", ("rank", None)),
    }


def batch(bucket):
    """Abstract batch of a bucket."""
    return batch_info(BUCKETS[bucket], NUM_RANKS)


def gdn_block(h_TD, w, pools, batch, rows, layer, bucket):
    """Gated DeltaNet: 64 value, 16 query/key heads of 128."""
    conv_pool = pools["gdn.conv"]
    state_pool = pools["gdn.state"]
    with jax.named_scope("gdn"):
        y_TD, conv_pool, state_pool = gated_delta_fused(
            h_TD, w["gdn"], conv_pool, state_pool, batch, rows,
            pool_layer=layer,
            num_qk_heads=GDN_QK_HEADS,
            num_v_heads=GDN_V_HEADS,
            head_k_dim=GDN_K_DIM,
            head_v_dim=GDN_V_DIM,
            conv_kernel=GDN_CONV,
            norm_eps=1e-06,
            norm_zero_centered=False,
            chunk=GDN_CHUNK, unroll=GDN_UNROLL, chip=CHIP,
            max_q=BUCKETS[bucket].max_q,
        )
    return y_TD, pools | {"gdn.conv": conv_pool, "gdn.state": state_pool}


def moe_block(h_TD, w, stack, rows, layer, bucket):
    """512 experts of 1024, top 10, shared expert of 1024."""
    with jax.named_scope("moe"):
        packed_T2K = route_packed_fused(
            h_TD,
            w["moe"]["router"],
            valid_T=rows.valid,
            top_k=MOE_TOP_K,
            route_tokens=MOE_ROUTE_TOKENS[bucket], route_hidden=MOE_ROUTE_HIDDEN, chip=CHIP,
        )
        h_AD = gather_tokens(h_TD, DATA)  # A: the tokens of all ranks
        index_AK, weight_AK = gather_routing_packed(packed_T2K, DATA)
        y_TD = experts_reduce_scatter_grouped(
            h_AD,
            index_AK,
            weight_AK,
            stack["w_gate"],
            stack["w_up"],
            stack["w_down"],
            {"w_gate": stack["w_gate_scale"], "w_up": stack["w_up_scale"], "w_down": stack["w_down_scale"]},
            layer=layer,
            first_expert=lax.axis_index(EXPERT) * MOE_EXPERTS,
            block_rows=MOE_BLOCK_ROWS[bucket], inner_tile=MOE_INNER_TILE, combine_tokens=MOE_COMBINE_TOKENS,
            stream_rows=MOE_STREAM_ROWS[bucket], chip=CHIP,
            axes=DATA, return_chunks=MOE_RETURN_CHUNKS[bucket],
            row_parts=MOE_ROW_PARTS[bucket],
        )
        s_TD = shared_expert(h_TD, w["moe"], gate="sigmoid")
        y_TD = (y_TD + s_TD).astype(h_TD.dtype)
    return y_TD


def gqa_block(h_TD, w, pools, batch, rows, layer, bucket):
    """32 query heads on 2 key/value heads of 256."""
    kv_pool = pools["gqa.kv"]
    with jax.named_scope("gqa"):
        y_TD, kv_pool = attention_ragged(
            h_TD, w["gqa"], kv_pool, batch, rows,
            pool_layer=layer,
            num_pages=kv_pool.shape[0] // GQA_LAYERS,
            num_q_heads=GQA_Q_HEADS,
            num_kv_heads=GQA_KV_HEADS,
            head_dim=GQA_HEAD_DIM,
            rope=GQA_ROPE,
            qk_norm="head",
            norm_eps=1e-06,
            norm_zero_centered=True,
            scale=GQA_HEAD_DIM**-0.5,
            output_gate="sigmoid",
            q_block=GQA_Q_BLOCK, kv_block=GQA_KV_BLOCK, decode_block=GQA_DECODE_BLOCK,
            decode_tail=GQA_DECODE_TAIL, decode_slots=GQA_DECODE_SLOTS, chip=CHIP,
            max_q=BUCKETS[bucket].max_q,
        )
    return y_TD, pools | {"gqa.kv": kv_pool}


def gdn_moe_layer(x_TD, w, pools, stacks, batch, rows, gdn_index, moe_index, bucket):
    """gdn, then moe; each adds to the residual stream."""
    h_TD = rms_norm(x_TD, w["mixer_norm"], eps=1e-06, zero_centered=True)
    y_TD, pools = gdn_block(h_TD, w, pools, batch, rows, gdn_index, bucket)
    x_TD = x_TD + y_TD
    h_TD = rms_norm(x_TD, w["ffn_norm"], eps=1e-06, zero_centered=True)
    y_TD = moe_block(h_TD, w, stacks["moe"], rows, moe_index, bucket)
    x_TD = x_TD + y_TD
    return x_TD, pools


def gqa_moe_layer(x_TD, w, pools, stacks, batch, rows, gqa_index, moe_index, bucket):
    """gqa, then moe; each adds to the residual stream."""
    h_TD = rms_norm(x_TD, w["mixer_norm"], eps=1e-06, zero_centered=True)
    y_TD, pools = gqa_block(h_TD, w, pools, batch, rows, gqa_index, bucket)
    x_TD = x_TD + y_TD
    h_TD = rms_norm(x_TD, w["ffn_norm"], eps=1e-06, zero_centered=True)
    y_TD = moe_block(h_TD, w, stacks["moe"], rows, moe_index, bucket)
    x_TD = x_TD + y_TD
    return x_TD, pools


def group0(x_TD, pools, w, stacks, batch, rows, bucket):
    """Layers 0-59: 15 x [gdn_moe, gdn_moe, gdn_moe, gqa_moe], scanned."""

    def body(carry, scanned):
        (x_TD, pools), (i, w) = carry, scanned
        in0_TD = x_TD
        x_TD, pools = gdn_moe_layer(
            x_TD, w["layer0"], pools, stacks, batch, rows, gdn_index=3 * i, moe_index=4 * i, bucket=bucket
        )
        in1_TD = x_TD
        x_TD, pools = gdn_moe_layer(
            x_TD, w["layer1"], pools, stacks, batch, rows, gdn_index=3 * i + 1, moe_index=4 * i + 1, bucket=bucket
        )
        in2_TD = x_TD
        x_TD, pools = gdn_moe_layer(
            x_TD, w["layer2"], pools, stacks, batch, rows, gdn_index=3 * i + 2, moe_index=4 * i + 2, bucket=bucket
        )
        in3_TD = x_TD
        x_TD, pools = gqa_moe_layer(
            x_TD, w["layer3"], pools, stacks, batch, rows, gqa_index=i, moe_index=4 * i + 3, bucket=bucket
        )
        # The inputs of the layers leave the scan only in step_tapped; elsewhere they are dead code.
        return (x_TD, pools), jnp.stack([in0_TD, in1_TD, in2_TD, in3_TD])

    (x_TD, pools), hidden = lax.scan(body, (x_TD, pools), (jnp.arange(15), w))
    return x_TD, pools, hidden.reshape(-1, *x_TD.shape)


def forward(w, state, batch, bucket):
    """All layers on this rank's rows: final hidden [T, D], new state, hidden before each layer [L, T, D]."""
    rows = index_rows(batch)  # which row each token belongs to, and where in it
    # Token -1 stands for what the row's slot sampled last, so that steps need not wait for the host.
    tokens_T = jnp.where(batch.tokens < 0, state["sampled"][batch.slot[rows.row]], batch.tokens)
    with jax.named_scope("embed"):
        x_TD = lookup_sharded(w["embed"]["table"], tokens_T, DATA, TENSOR).astype(ACTIVATION)
    pools = {"gdn.conv": state["gdn.conv"], "gdn.state": state["gdn.state"], "gqa.kv": state["gqa.kv"]}
    x_TD, pools, hidden0 = group0(x_TD, pools, w["group0"], w["stacks"], batch, rows, bucket)
    state = state | pools
    with jax.named_scope("final_norm"):
        h_TD = rms_norm(x_TD, w["final_norm"], eps=1e-06, zero_centered=True)
    return h_TD, state, hidden0


def vocabulary(h_TD, w):
    """Logits of some hidden rows, float32 [rows, V]."""
    with jax.named_scope("head"):
        return logits_sharded(h_TD, w["head"]["w"], DATA, TENSOR)


def step(w, state, batch, *, bucket):
    """One engine step: run the rows, sample a token for each."""
    state, batch = local(state), local(batch)  # this rank's: drops the leading axis; `ranked` puts it back
    h_TD, state, _ = forward(w, state, batch, bucket)
    last_SD = h_TD[jnp.maximum(batch.cu_q[1:] - 1, 0)]  # the last token of each row
    logits_SV = vocabulary(last_SD, w)
    with jax.named_scope("sampling"):
        tokens_S, logprobs_S = sample(logits_SV, batch.sampling, batch.kv_len)
    state["sampled"] = state["sampled"].at[batch.slot].set(tokens_S)
    return ranked(state), ranked({"tokens": tokens_S, "logprobs": logprobs_S})


def step_logits(w, state, batch, *, bucket):
    """Logits of every token of the step."""
    state, batch = local(state), local(batch)
    h_TD, state, _ = forward(w, state, batch, bucket)
    return ranked(state), ranked(vocabulary(h_TD, w))


def step_tapped(w, state, batch, *, bucket):
    """As step_logits, with the hidden states: before each layer, then after the final norm."""
    state, batch = local(state), local(batch)
    h_TD, state, hidden_LTD = forward(w, state, batch, bucket)
    taps_LTD = jnp.concatenate([hidden_LTD, h_TD[None]])
    return ranked(state), ranked(vocabulary(h_TD, w)), taps_LTD[:, None]


WEIGHT_SPECS = partition_specs(weights(), RULES)
STATE_SPECS = partition_specs(state(dict.fromkeys(POOLS, 1), dict.fromkeys(POOLS, 1)), RULES)
RANK = P(DATA or None)


def jit_steps(function, out_specs, donate_state):
    """`function` jitted for every bucket."""
    return {
        bucket: jit_step(
            partial(function, bucket=bucket),
            mesh_axes=MESH_AXES,
            in_specs=(WEIGHT_SPECS, STATE_SPECS, partition_specs(batch(bucket), RULES)),
            out_specs=(STATE_SPECS, *out_specs),
            donate_state=donate_state,
            matmul_precision=MATMUL_PRECISION,
        )
        for bucket in BUCKETS
    }


STEPS = jit_steps(step, ({"tokens": RANK, "logprobs": RANK},), donate_state=True)
STEPS_LOGITS = jit_steps(step_logits, (RANK,), donate_state=True)
STEPS_TAPPED = jit_steps(step_tapped, (RANK, P(None, DATA or None)), donate_state=False)
# copy_slot(state, source[R], target[R]) and zero_slot(state, slot[R]) -> state: one slot per rank, in every slot pool.
copy_slot = jit_slots(copy_slots, 2, pools=POOLS, mesh_axes=MESH_AXES, state_specs=STATE_SPECS, rank=RANK)
zero_slot = jit_slots(zero_slots, 1, pools=POOLS, mesh_axes=MESH_AXES, state_specs=STATE_SPECS, rank=RANK)
