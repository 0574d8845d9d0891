"""A program of arithmetic tokens on the real contract: the next token follows from all tokens so far.

next = (sum by slot + 10 * sum by pages) mod VOCAB: one sum runs in the slot's state, the other is
taken over the sequence's pages, so a wrong slot, page, position, row or reset changes tokens.
With temperature > 0 the row's seed times its length is added. A row in the wrong part of the
batch (decode, prefill) gives a token no program can give.
"""

import jax
import jax.numpy as jnp

from moec.blocks.core.array_info import ArrayInfo
from moec.blocks.core.batch import Bucket, index_rows
from moec.blocks.core.program import batch_info, make_mesh

from .weights import IGNORE, SCALE_BLOCK, SCALE_SUFFIX, weights  # noqa: F401 (part of the contract)

NAME = "fake"
PLAN_DIGEST = "none"
NUM_RANKS = 1
MESH_AXES = {"data": NUM_RANKS}
RULES = {"rank": ("data",)}
VOCAB = 97
PAGE_SIZE = 4
MAX_CONTEXT = 32
NUM_PAGES = 25
NUM_SLOTS = 4
BUCKETS = {
    "decode": Bucket(tokens_per_rank=3, seqs_per_rank=3, max_q=1, pages_per_seq=8),
    "mixed": Bucket(tokens_per_rank=10, seqs_per_rank=3, max_q=10, pages_per_seq=8),
}
POOLS = {
    "fake.kv": {"tokens_per_page": PAGE_SIZE, "bytes_per_page": 4 * PAGE_SIZE, "window": None},
    "fake.sum": {"bytes_per_slot": 4},
    "sampled": {"bytes_per_slot": 4},
}
COMPILE_OPTIONS = {}


def mesh(devices):
    return make_mesh(devices, MESH_AXES)


def state(pages, slots):
    return {
        "fake.kv": ArrayInfo((NUM_RANKS, pages["fake.kv"], PAGE_SIZE), "int32", ("rank", None, None)),
        "fake.sum": ArrayInfo((NUM_RANKS, slots["fake.sum"]), "int32", ("rank", None)),
        "sampled": ArrayInfo((NUM_RANKS, slots["sampled"]), "int32", ("rank", None)),
    }


def batch(bucket):
    return batch_info(BUCKETS[bucket], NUM_RANKS)


def forward(state, batch):
    """One rank: new state, next token after each token [T]."""
    rows = index_rows(batch)
    slot_T = batch.slot[rows.row]
    tokens_T = jnp.where(batch.tokens < 0, state["sampled"][slot_T], batch.tokens)
    tokens_T = jnp.where(rows.valid, tokens_T, 0)
    pages_T = jnp.where(rows.valid, batch.page_table[rows.row, batch.positions // PAGE_SIZE], 0)
    kv = state["fake.kv"].at[pages_T, batch.positions % PAGE_SIZE].set(tokens_T)
    cached_TC = kv[batch.page_table[rows.row]].reshape(len(tokens_T), -1)
    seen_TC = jnp.arange(cached_TC.shape[1]) <= batch.positions[:, None]
    paged_T = jnp.sum(jnp.where(seen_TC, cached_TC, 0), axis=1)
    before_T = jnp.where(batch.has_state, state["fake.sum"][batch.slot], 0)[rows.row]
    running_T = jnp.cumsum(tokens_T)
    first_T = batch.cu_q[rows.row]
    slot_sum_T = before_T + running_T - running_T[first_T] + tokens_T[first_T]
    last_S = jnp.maximum(batch.cu_q[1:] - 1, 0)
    state = state | {"fake.kv": kv, "fake.sum": state["fake.sum"].at[batch.slot].set(slot_sum_T[last_S])}
    return state, (slot_sum_T + 10 * paged_T) % VOCAB, rows


def step(w, state, batch):
    state, next_T, rows = forward(state, batch)
    next_S = next_T[jnp.maximum(batch.cu_q[1:] - 1, 0)]
    drawn_S = (next_S + batch.sampling.seed.astype(jnp.int32) * batch.kv_len) % VOCAB
    next_S = jnp.where(batch.sampling.temperature > 0, drawn_S, next_S)
    index_S = jnp.arange(len(next_S))
    rightly_placed = (rows.q_len == 1) == (index_S < batch.distribution[0])
    next_S = jnp.where(rightly_placed, next_S, VOCAB + 1)
    state["sampled"] = state["sampled"].at[batch.slot].set(next_S)
    return state, {"tokens": next_S, "logprobs": -batch.kv_len.astype(jnp.float32)}


def step_logits(w, state, batch):
    state, next_T, _ = forward(state, batch)
    return state, jax.nn.one_hot(next_T, VOCAB)


def step_tapped(w, state, batch):
    state, logits_TV = step_logits(w, state, batch)
    return state, logits_TV, jnp.stack([batch.tokens, batch.positions])[:, :, None].astype(jnp.bfloat16)


def jit_steps(function, out_axes, donate):
    over_ranks = jax.vmap(function, in_axes=(None, 0, 0), out_axes=out_axes)
    return {bucket: jax.jit(over_ranks, donate_argnums=donate) for bucket in BUCKETS}


STEPS = jit_steps(step, 0, donate=1)
STEPS_LOGITS = jit_steps(step_logits, 0, donate=1)
STEPS_TAPPED = jit_steps(step_tapped, (0, 0, 1), donate=())


def moved(state, source, target):
    return state | {key: state[key].at[target].set(state[key][source]) for key in ("fake.sum", "sampled")}


def zeroed(state, slot):
    return state | {key: state[key].at[slot].set(0) for key in ("fake.sum", "sampled")}


copy_slot = jax.jit(jax.vmap(moved), donate_argnums=0)
zero_slot = jax.jit(jax.vmap(zeroed), donate_argnums=0)
