"""Latent attention over a paged cache in plain XLA: online softmax over pages, in two forms.

Legend: T tokens, S rows, P pages per row, D hidden, N heads, R latent (kv_lora_rank), E rope dims, C = R + E (one
cached token: normed latent, then rotated shared key), H nope dims, V value dims, K keys at hand, B tokens per block,
G key heads, M queries per key head, X dims of a query and key, Y dims of a value, L layers.

A head's key is [W_k latent | shared key], its value W_v latent; its rows of w_kv_b are [W_k | W_v].
Decode is absorbed: q . (W_k c) = (W_k^T q) . c, so that all heads attend to the cached rows themselves as to one key
head (G = 1, M = N, X = C, Y = R), and W_v is applied to the weighted latent.
Prefill is expanded: a block's queries share the product that writes out keys and values per head (G = N, M = B,
X = H + E, Y = V), which then cost (H + E + V) instead of (C + R) per query and key.

The pool is only read here: writing it inside a layer scan makes XLA keep a second pool. Each layer attends to the old
pages and to this step's own rows and returns these; core/paged.py writes all layers' rows once after the scan, in
place when the pool is donated.
"""

from collections.abc import Callable
from typing import Literal

import jax.numpy as jnp
from jax import Array, lax

from ..core.batch import Batch, Rows
from ..core.online_softmax import (
    SoftmaxState,
    einsum_wide,
    softmax_add,
    softmax_mean,
    softmax_over_pages,
    softmax_start,
)
from ..core.paged import clear_unseen, to_cache
from ..core.prefill_blocks import PrefillBlock, over_prefill_blocks, own_rows
from ..core.rope_spec import Rope
from .project import MlaTokenRules, mla_output, mla_project


def mla(
    h_TD: Array,
    w: dict[str, Array],
    kv_pool: Array,
    batch: Batch,
    rows: Rows,
    *,
    pool_layer: Array | int,
    num_pages: int,
    num_heads: int,
    kv_lora_rank: int,
    qk_nope_head_dim: int,
    v_head_dim: int,
    norm_eps: float,
    scale: float,
    q_block: int,
    kv_block: int,
    max_q: int,
    rope_spec: Rope | None = None,
    norm_zero_centered: bool = False,
    query_latent: bool = False,
    temperature: tuple[int, float, int] | None = None,
    output_gate: Literal["sigmoid", "softplus"] | None = None,
    gate_stored: Literal["fused", "own"] = "fused",
    bias: bool = False,
) -> tuple[Array, Array]:
    """Causal attention of every row over its cached pages and its own tokens.

    kv_pool [L*num_pages, page_size, C or wider] (read only), pool_layer may be traced. num_heads: the local ones; the
    cache is whole. rope_spec None = no positional encoding. norm_*: of the latent norms. query_latent: queries come
    through w_q_a, q_a_norm, w_q_b instead of w_q. temperature: (floor, scale, offset) of core/heads.py. A gate has one
    value per element or per head, as its weight is wide. bias: the down-projections have biases. q_block: tokens of a
    row per prefill work item, kv_block: cached keys such an item reads at once (whole pages, at least two). max_q: the
    longest row this bucket may hold; 1 leaves the prefill form out of the program.
    Returns out [T, D] in h's dtype, without bias, partial over tensor parallelism, and the new cache rows in the
    pool's width (zeros behind C) and dtype. Own rows are rounded to that dtype before use, so that a token gives the
    same result whether its history came from this step or the cache.
    """
    N, R, H = num_heads, kv_lora_rank, qk_nope_head_dim
    tokens = MlaTokenRules(
        num_heads=N, kv_lora_rank=R, qk_nope_head_dim=H, norm_eps=norm_eps, rope_spec=rope_spec,
        norm_zero_centered=norm_zero_centered, query_latent=query_latent, temperature=temperature,
        output_gate=output_gate, gate_stored=gate_stored, bias=bias,
    )  # fmt: skip
    q_TNX, new_TC, gate_TNY = mla_project(h_TD, w, batch.positions, tokens)
    new_TC = to_cache(new_TC, kv_pool.dtype)

    pages_SP = batch.page_table + pool_layer * num_pages
    w_NXR = w["w_kv_b"].reshape(N, H + v_head_dim, R)
    out_TNV = _mla_decode(q_TNX, new_TC, w_NXR, kv_pool, pages_SP, batch, rows, scale=scale)
    if max_q > 1:

        def attend(q_BNX: Array, new_TC: Array, block: PrefillBlock) -> Array:
            return _mla_block(q_BNX, new_TC, w_NXR, kv_pool, block, scale=scale, kv_block=kv_block)

        out_TNV = over_prefill_blocks(attend, out_TNV, q_TNX, new_TC, pages_SP, batch, rows, size=min(q_block, max_q))
    unused = kv_pool.shape[2] - new_TC.shape[1]
    return mla_output(out_TNV, gate_TNY, w, output_gate), jnp.pad(new_TC, ((0, 0), (0, unused)))


def _mla_decode(
    q_TNX: Array, new_TC: Array, w_NXR: Array, kv_pool: Array, pages_SP: Array, batch: Batch, rows: Rows, *,
    scale: float,
) -> Array:  # fmt: skip
    """The decode rows, all at once and absorbed (token s belongs to row s); zeros for other tokens. [T, N, V].

    The loop runs to the longest decode row and gathers one page per row.
    """
    (T, N, X), C, R = q_TNX.shape, new_TC.shape[1], w_NXR.shape[2]
    H = X - (C - R)
    S = min(T, pages_SP.shape[0])
    is_decode_S = (jnp.arange(S) < batch.distribution[0]) & rows.valid[:S]
    cached_S = jnp.where(is_decode_S, rows.start[:S], 0)
    # The weight first: XLA:CPU has no bfloat16 product for the other order.
    latent_SNR = einsum_wide("nhr,snh->snr", w_NXR[:, :H], q_TNX[:S, :, :H]).astype(q_TNX.dtype)
    q_SGNC = jnp.concatenate([latent_SNR, q_TNX[:S, :, H:]], axis=-1)[:, None]

    def add(state: SoftmaxState, kv_SKC: Array, key_K: Array | None, seen_SK: Array) -> SoftmaxState:
        kv_SKGC = clear_unseen(kv_SKC[..., :C], seen_SK[:, None])[:, :, None]
        return softmax_add(state, q_SGNC, kv_SKGC, kv_SKGC[..., :R], seen_SK[:, None], scale=scale)

    own = add(softmax_start(S, 1, N, R), new_TC[:S, None], None, jnp.ones((S, 1), bool))
    span = 2 if S == 1 else 1  # pages of a row per step (see read_pages)
    mean_SNR = softmax_mean(softmax_over_pages(add, own, kv_pool, pages_SP[:S], cached_S, span=span))[:, 0]
    mean_SNR = jnp.where(is_decode_S[:, None, None], mean_SNR, 0).astype(q_TNX.dtype)
    out_SNV = einsum_wide("snr,nvr->snv", mean_SNR, w_NXR[:, H:]).astype(q_TNX.dtype)
    return jnp.pad(out_SNV, ((0, T - S), (0, 0), (0, 0)))


def _mla_block(
    q_BNX: Array, new_TC: Array, w_NXR: Array, kv_pool: Array, block: PrefillBlock, *, scale: float, kv_block: int
) -> Array:
    """One block of a row's queries, expanded: over the row's keys of this step, then its cached ones. [B, N, V]."""
    assert kv_block % kv_pool.shape[1] == 0, (kv_block, kv_pool.shape)
    (B, N, X), C = q_BNX.shape, new_TC.shape[1]
    H = X - (C - w_NXR.shape[2])
    q_1NBX = q_BNX.transpose(1, 0, 2)[None]
    expand = _mla_expander(w_NXR, H, q_BNX.dtype)

    def add(state: SoftmaxState, kv_1KC: Array, seen_1MK: Array) -> SoftmaxState:
        k_1KNX, v_1KNV = expand(clear_unseen(kv_1KC, seen_1MK)[0])
        return softmax_add(state, q_1NBX, k_1KNX, v_1KNV, seen_1MK, scale=scale)

    def add_own(j: Array, state: SoftmaxState) -> SoftmaxState:
        kv_BC, _, seen_BB = own_rows(new_TC, block, j, B)
        return add(state, kv_BC[None], seen_BB[None])

    def add_pages(state: SoftmaxState, kv_1KC: Array, key_K: Array, seen_1K: Array) -> SoftmaxState:
        return add(state, kv_1KC[..., :C], seen_1K[:, None])

    # The diagonal block first: there every query sees a key (itself).
    state = add_own(block.index, softmax_start(1, N, B, w_NXR.shape[1] - H))
    state = lax.fori_loop(0, block.index, add_own, state)
    span = kv_block // kv_pool.shape[1]  # pages per step (see read_pages)
    pages_1P, cached_1 = block.pages_P[None], block.start[None]
    mean_1NBV = softmax_mean(softmax_over_pages(add_pages, state, kv_pool, pages_1P, cached_1, span=span))
    return mean_1NBV[0].transpose(1, 0, 2).astype(q_BNX.dtype)


def _mla_expander(w_NXR: Array, H: int, dtype: jnp.dtype) -> Callable[[Array], tuple[Array, Array]]:
    """Cached rows [K, C] -> every head's keys [1, K, N, H + E] and values [1, K, N, V]; float32 if the rows are."""
    N, _, R = w_NXR.shape

    def expand(kv_KC: Array) -> tuple[Array, Array]:
        kv_KC = kv_KC if kv_KC.dtype == jnp.float32 else kv_KC.astype(dtype)
        kv_KNX = einsum_wide("kr,nxr->knx", kv_KC[:, :R], w_NXR).astype(kv_KC.dtype)
        shared_KNE = jnp.broadcast_to(kv_KC[:, None, R:], (kv_KC.shape[0], N, kv_KC.shape[1] - R))
        return jnp.concatenate([kv_KNX[..., :H], shared_KNE], axis=-1)[None], kv_KNX[None, ..., H:]

    return expand


__all__ = ["mla"]
