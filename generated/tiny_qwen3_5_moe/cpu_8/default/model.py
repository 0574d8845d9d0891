# Emitted by moec; do not edit. Regenerate: moec compile tiny/qwen3_5_moe --target cpu:8 --workload default
# Digests: spec 2e982e786557aadc, target 57776177cc6d0b90, workload aff6b214b470e3f4, overrides 4f53cda18c2baa0c, plan 6108b0c41458c893
"""tiny_qwen3_5_moe on cpu:8: 4 layers, attention DP8, experts EP8.

Read `step` first, then `forward`, the groups, the layer kinds and the blocks. Arrays are this device's shards.
Suffixes: T tokens of this rank, A tokens of all ranks, S rows (sequences), D hidden, K experts per token,
C cached values per token, V vocabulary, L layers.
"""

from functools import partial

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec as P

from moec.blocks.attention.xla import attention
from moec.blocks.collectives.xla import gather_routing, gather_tokens, reduce_scatter_tokens
from moec.blocks.core.array_info import ArrayInfo
from moec.blocks.core.batch import Bucket, index_rows, local, ranked, stack_layers
from moec.blocks.core.norm import rms_norm
from moec.blocks.core.paged import write_kv
from moec.blocks.core.program import batch_info, jit_slots, jit_step, make_mesh, partition_specs
from moec.blocks.core.rope_spec import Rope
from moec.blocks.core.slots import copy_slots, zero_slots
from moec.blocks.embed.xla import lookup
from moec.blocks.gated_delta.xla import gated_delta
from moec.blocks.head.xla import logits
from moec.blocks.moe.xla import experts, shared_expert
from moec.blocks.router.xla import route
from moec.blocks.sampling.xla import sample

from .weights import IGNORE, SCALE_BLOCK, SCALE_SUFFIX, weights

__all__ = ["IGNORE", "SCALE_BLOCK", "SCALE_SUFFIX"]  # the loader reads them here

NAME = "tiny_qwen3_5_moe"
PLAN_DIGEST = "6108b0c41458c893"  # sha256 of plan.json

MESH_AXES = {"data": 8}  # 8 devices
DATA = ("data",)  # attention data parallel: each rank has its own sequences
TENSOR = ()  # attention tensor parallel: heads are cut
EXPERT = ("data",)  # expert parallel: each device has its own experts
NUM_RANKS = 8  # attention data-parallel ranks
VOCAB = 256  # token ids
ACTIVATION = "float32"  # dtype of the residual stream
MATMUL_PRECISION = "highest"  # of matrix products while tracing
PAGE_SIZE = 16  # tokens per KV page
MAX_CONTEXT = 128  # tokens per sequence
NUM_PAGES = 9  # KV pages per rank the plan budgets, page 0 is the sink
NUM_SLOTS = 2  # sequences per rank the plan budgets, slot 0 is the sink
GDN_LAYERS = 3  # layers with gdn
GDN_QK_HEADS = 2  # query/key heads, not cut
GDN_V_HEADS = 4  # value heads, not cut
GDN_K_DIM = 16  # query/key dims per head
GDN_V_DIM = 16  # value dims per head
GDN_CONV = 4  # taps of the causal convolution
GDN_CHUNK = 16  # prefill tokens solved at once
MOE_LAYERS = 4  # layers with moe
MOE_EXPERTS = 1  # 8 experts / ep 8
MOE_TOP_K = 2  # experts per token
MOE_BLOCK_ROWS = {"decode": 8, "mixed": 256}  # token rows of one expert's GEMM block
GQA_LAYERS = 1  # layers with gqa
GQA_Q_HEADS = 4  # query heads, not cut
GQA_KV_HEADS = 2  # key/value heads, not cut
GQA_HEAD_DIM = 16  # dims per head
GQA_ROPE = Rope(dim=8, theta=10000000.0)  # rotary embedding of queries and keys
GQA_Q_BLOCK = 128  # tokens of a row per prefill work item, at most
GQA_KV_BLOCK = 512  # cached keys such an item reads at once

BUCKETS = {  # static step shapes; max_q 1 = decode only
    "decode": Bucket(tokens_per_rank=1, seqs_per_rank=1, max_q=1, pages_per_seq=8),
    "mixed": Bucket(tokens_per_rank=128, seqs_per_rank=1, max_q=128, pages_per_seq=8),
}
POOLS = {  # state key -> what one page or slot takes: bytes per rank, all layers
    "gdn.conv": {"bytes_per_slot": 4608},
    "gdn.state": {"bytes_per_slot": 12288},
    "gqa.kv": {"tokens_per_page": PAGE_SIZE, "bytes_per_page": 4096, "window": None},
    "sampled": {"bytes_per_slot": 4},
}
COMPILE_OPTIONS = {}  # for whoever compiles for the target's backend
RULES = {  # logical axis -> mesh axes it is cut over
    "rank": ("data",),
    "embed_vocab": (),
    "head_vocab": (),
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
            (NUM_RANKS, GDN_LAYERS, slots["gdn.conv"], 384), "float32", ("rank", None, None, "v_heads")
        ),
        "gdn.state": ArrayInfo(
            (NUM_RANKS, GDN_LAYERS, slots["gdn.state"], 4, 16, 16),
            "float32", ("rank", None, None, "v_heads", None, None),
        ),
        "gqa.kv": ArrayInfo(
            (NUM_RANKS, GQA_LAYERS * pages["gqa.kv"], PAGE_SIZE, 64),
            "float32", ("rank", None, None, "kv_heads"),
        ),
        "sampled": ArrayInfo((NUM_RANKS, slots["sampled"]), "int32", ("rank", None)),
    }


def batch(bucket):
    """Abstract batch of a bucket."""
    return batch_info(BUCKETS[bucket], NUM_RANKS)


def gdn_block(h_TD, w, pools, batch, rows, layer, bucket):
    """Gated DeltaNet: 4 value, 2 query/key heads of 16."""
    conv_pool = pools["gdn.conv"]
    state_pool = pools["gdn.state"]
    with jax.named_scope("gdn"):
        y_TD, conv_pool, state_pool = gated_delta(
            h_TD, w["gdn"], conv_pool, state_pool, batch, rows,
            pool_layer=layer,
            num_qk_heads=GDN_QK_HEADS,
            num_v_heads=GDN_V_HEADS,
            head_k_dim=GDN_K_DIM,
            head_v_dim=GDN_V_DIM,
            conv_kernel=GDN_CONV,
            norm_eps=1e-06,
            norm_zero_centered=False,
            chunk=GDN_CHUNK,
            max_q=BUCKETS[bucket].max_q,
        )
    return y_TD, pools | {"gdn.conv": conv_pool, "gdn.state": state_pool}


def moe_block(h_TD, w, stack, rows, layer, bucket):
    """8 experts of 32, top 2, shared expert of 48."""
    with jax.named_scope("moe"):
        index_TK, weight_TK = route(h_TD, w["moe"]["router"], top_k=MOE_TOP_K)
        index_TK = jnp.where(rows.valid[:, None], index_TK, -1)  # padding tokens visit no expert
        h_AD = gather_tokens(h_TD, DATA)  # A: the tokens of all ranks
        index_AK, weight_AK = gather_routing(index_TK, weight_TK, DATA)  # one packed all-gather
        y_AD = experts(
            h_AD,
            index_AK,
            weight_AK,
            stack["w_gate"],
            stack["w_up"],
            stack["w_down"],
            None,
            layer=layer,
            first_expert=lax.axis_index(EXPERT) * MOE_EXPERTS,
            block_rows=MOE_BLOCK_ROWS[bucket],
        )
        y_AD = y_AD.astype(h_TD.dtype)  # partial sums travel in the activation dtype
        y_TD = reduce_scatter_tokens(y_AD, DATA)  # sum over experts, back to own tokens
        s_TD = shared_expert(h_TD, w["moe"], gate="sigmoid")
        y_TD = (y_TD + s_TD).astype(h_TD.dtype)
    return y_TD


def gqa_block(h_TD, w, kv_pool, batch, rows, layer, bucket):
    """4 query heads on 2 key/value heads of 16."""
    with jax.named_scope("gqa"):
        y_TD, new_kv_TC = attention(
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
            q_block=GQA_Q_BLOCK, kv_block=GQA_KV_BLOCK,
            max_q=BUCKETS[bucket].max_q,
        )
    return y_TD, new_kv_TC


def gdn_moe_layer(x_TD, w, pools, stacks, batch, rows, gdn_index, moe_index, bucket):
    """gdn, then moe; each adds to the residual stream."""
    h_TD = rms_norm(x_TD, w["mixer_norm"], eps=1e-06, zero_centered=True)
    y_TD, pools = gdn_block(h_TD, w, pools, batch, rows, gdn_index, bucket)
    x_TD = x_TD + y_TD
    h_TD = rms_norm(x_TD, w["ffn_norm"], eps=1e-06, zero_centered=True)
    y_TD = moe_block(h_TD, w, stacks["moe"], rows, moe_index, bucket)
    x_TD = x_TD + y_TD
    return x_TD, pools


def gqa_moe_layer(x_TD, w, kv, stacks, batch, rows, gqa_index, moe_index, bucket):
    """gqa, then moe; each adds to the residual stream."""
    h_TD = rms_norm(x_TD, w["mixer_norm"], eps=1e-06, zero_centered=True)
    y_TD, new_kv_TC = gqa_block(h_TD, w, kv["gqa.kv"], batch, rows, gqa_index, bucket)
    x_TD = x_TD + y_TD
    h_TD = rms_norm(x_TD, w["ffn_norm"], eps=1e-06, zero_centered=True)
    y_TD = moe_block(h_TD, w, stacks["moe"], rows, moe_index, bucket)
    x_TD = x_TD + y_TD
    return x_TD, new_kv_TC


def group0(x_TD, pools, kv, w, stacks, batch, rows, bucket):
    """Layers 0-3: 1 x [gdn_moe, gdn_moe, gdn_moe, gqa_moe], scanned."""

    def body(carry, scanned):
        (x_TD, pools), (i, w) = carry, scanned
        in0_TD = x_TD
        x_TD, pools = gdn_moe_layer(
            x_TD, w["layer0"], pools, stacks, batch, rows, gdn_index=0, moe_index=0, bucket=bucket
        )
        in1_TD = x_TD
        x_TD, pools = gdn_moe_layer(
            x_TD, w["layer1"], pools, stacks, batch, rows, gdn_index=1, moe_index=1, bucket=bucket
        )
        in2_TD = x_TD
        x_TD, pools = gdn_moe_layer(
            x_TD, w["layer2"], pools, stacks, batch, rows, gdn_index=2, moe_index=2, bucket=bucket
        )
        in3_TD = x_TD
        x_TD, gqa_kv3 = gqa_moe_layer(
            x_TD, w["layer3"], kv, stacks, batch, rows, gqa_index=0, moe_index=3, bucket=bucket
        )
        new_kv = {"gqa.kv": jnp.stack([gqa_kv3])}
        # The inputs of the layers leave the scan only in step_tapped; elsewhere they are dead code.
        return (x_TD, pools), (new_kv, jnp.stack([in0_TD, in1_TD, in2_TD, in3_TD]))

    (x_TD, pools), (new_kv, hidden) = lax.scan(body, (x_TD, pools), (jnp.arange(1), w))
    return x_TD, pools, new_kv, hidden.reshape(-1, *x_TD.shape)


def forward(w, state, batch, bucket):
    """All layers on this rank's rows: final hidden [T, D], new state, hidden before each layer [L, T, D]."""
    rows = index_rows(batch)  # which row each token belongs to, and where in it
    # Token -1 stands for what the row's slot sampled last, so that steps need not wait for the host.
    tokens_T = jnp.where(batch.tokens < 0, state["sampled"][batch.slot[rows.row]], batch.tokens)
    with jax.named_scope("embed"):
        x_TD = lookup(w["embed"]["table"], tokens_T).astype(ACTIVATION)
    pools = {"gdn.conv": state["gdn.conv"], "gdn.state": state["gdn.state"]}
    x_TD, pools, new_kv0, hidden0 = group0(x_TD, pools, state, w["group0"], w["stacks"], batch, rows, bucket)
    state = state | pools
    with jax.named_scope("write_kv"):  # once per step: the scan only read the pages
        new_kv_LTC = stack_layers(new_kv0["gqa.kv"])
        state["gqa.kv"] = write_kv(state["gqa.kv"], new_kv_LTC, batch, rows)
    with jax.named_scope("final_norm"):
        h_TD = rms_norm(x_TD, w["final_norm"], eps=1e-06, zero_centered=True)
    return h_TD, state, hidden0


def vocabulary(h_TD, w):
    """Logits of some hidden rows, float32 [rows, V]."""
    with jax.named_scope("head"):
        return logits(h_TD, w["head"]["w"])


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
