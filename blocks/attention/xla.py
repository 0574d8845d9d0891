"""Attention over a paged cache in plain XLA: online softmax, one page per row at a time.

Legend: T tokens, S rows, P pages per row, D hidden, N q heads, G kv heads, M queries per kv
head (N/G of one token, or of every token of a block), H head_dim, V v_head_dim, C = G*(H+V) (one
cached token: all key heads, then all value heads), K keys at hand, B tokens per block, L attention
layers.

The pool is only read here: writing it inside a layer scan makes XLA keep a second pool. Each
layer attends to the old pages and to this step's own keys and returns its new cache rows;
core/paged.py writes all layers' rows once after the scan, in place when the pool is donated.
"""

from dataclasses import dataclass
from typing import Literal

import jax.numpy as jnp
from jax import Array, lax

from ..core.batch import Batch, Rows
from ..core.heads import gated
from ..core.linear import linear
from ..core.online_softmax import SoftmaxState, softmax_add, softmax_mean, softmax_over_pages, softmax_start
from ..core.paged import clear_unseen, to_cache
from ..core.prefill_blocks import PrefillBlock, over_prefill_blocks, own_rows
from ..core.rope_spec import Rope
from .project import AttnTokenRules, attn_project


@dataclass(frozen=True)
class _AttnScoreRules:
    """How queries meet keys: the options of attention that are the same for every head."""

    scale: float
    softcap: float | None
    window: int | None
    chunk: int | None

    @property
    def reach(self) -> int | None:
        """The most keys a query sees, itself included; None = all."""
        return self.window or self.chunk


def attention(
    h_TD: Array,
    w: dict[str, Array],
    kv_pool: Array,
    batch: Batch,
    rows: Rows,
    *,
    pool_layer: Array | int,
    num_pages: int,
    num_q_heads: int,
    num_kv_heads: int,
    head_dim: int,
    v_head_dim: int | None = None,
    rope: Rope | None = None,
    qk_norm: Literal["none", "head", "full", "l2"] = "none",
    qk_norm_place: Literal["before_rope", "after_rope"] = "before_rope",
    v_norm: bool = False,
    norm_eps: float = 1e-6,
    norm_zero_centered: bool = False,
    qkv_bias: bool = False,
    keys_as_values: bool = False,
    clip_qkv: float | None = None,
    window: int | None = None,
    chunk: int | None = None,
    sinks: bool = False,
    softcap: float | None = None,
    scale: float,
    value_scale: float = 1.0,
    temperature: tuple[int, float, int] | None = None,
    output_gate: Literal["sigmoid", "softplus"] | None = None,
    gate_stored: Literal["fused", "own"] = "fused",
    sum_axes: tuple[str, ...] = (),
    q_block: int,
    kv_block: int,
    max_q: int,
) -> tuple[Array, Array]:
    """Causal attention of every row over its cached pages and its own tokens.

    kv_pool [L*num_pages, page_size, C] (read only), pool_layer may be traced. Heads are the local ones.
    qk_norm, v_norm, keys_as_values, clip_qkv, window, chunk, sinks, softcap: as block.py has them.
    temperature: (floor, scale, offset). A gate has one value per element or per head, as its weight is wide.
    sum_axes: mesh axes that cut the heads; only qk_norm "full" needs them. q_block: tokens of a
    row per prefill work item, kv_block: cached keys such an item reads at once (whole pages, at
    least two). max_q: the longest row this bucket may hold; 1 leaves the prefill path out of the
    program.
    Returns out [T, D] in h's dtype, partial over tensor parallelism and without b_o, and the new cache
    rows [T, C] in the pool's dtype. Own keys and values are rounded to the pool's dtype before use,
    so that a token gives the same result whether its history came from this step or the cache.
    """
    T, N, G, H = h_TD.shape[0], num_q_heads, num_kv_heads, head_dim
    assert kv_pool.shape[2] == G * (H + (v_head_dim or H)), (kv_pool.shape, G, H, v_head_dim)
    tokens = AttnTokenRules(
        num_q_heads=N, num_kv_heads=G, head_dim=H, rope=rope, qk_norm=qk_norm, qk_norm_place=qk_norm_place,
        v_norm=v_norm, norm_eps=norm_eps, norm_zero_centered=norm_zero_centered, qkv_bias=qkv_bias,
        keys_as_values=keys_as_values, clip_qkv=clip_qkv, value_scale=value_scale, temperature=temperature,
        output_gate=output_gate, gate_stored=gate_stored, sum_axes=sum_axes,
    )  # fmt: skip
    q_TNH, k_TF, v_TF, gate_TNX = attn_project(h_TD, w, batch.positions, tokens)
    new_TC = to_cache(jnp.concatenate([k_TF, v_TF], axis=-1), kv_pool.dtype)

    rules = _AttnScoreRules(scale, softcap, window, chunk)
    sink_GM = w["sinks"].astype(jnp.float32).reshape(G, N // G) if sinks else None
    pages_SP = batch.page_table + pool_layer * num_pages
    q_TGMH = q_TNH.reshape(T, G, N // G, H)
    out_TGMV = _attn_decode(q_TGMH, new_TC, kv_pool, pages_SP, batch, rows, rules, sink_GM)
    if max_q > 1:

        def attend(q_BGMH: Array, new_TC: Array, block: PrefillBlock) -> Array:
            return _attn_block(q_BGMH, new_TC, kv_pool, block, rules, sink_GM, kv_block)

        out_TGMV = over_prefill_blocks(
            attend, out_TGMV, q_TGMH, new_TC, pages_SP, batch, rows, size=min(q_block, max_q)
        )
    out_TNV = out_TGMV.reshape(T, N, -1)
    if output_gate is not None and gate_TNX is not None:
        out_TNV = gated(out_TNV, gate_TNX, output_gate)
    return linear(out_TNV.reshape(T, -1), w["w_o"]), new_TC


def _attn_oldest(position: Array, rules: _AttnScoreRules) -> Array:
    """The first position that a query at `position` sees."""
    if rules.window is not None:
        return jnp.maximum(position - rules.window + 1, 0)
    if rules.chunk is not None:
        return position // rules.chunk * rules.chunk
    return jnp.zeros_like(position)


def _attn_skip(
    pages_SP: Array, cached_S: Array, oldest_S: Array, page_size: int, rules: _AttnScoreRules
) -> tuple[Array, Array, Array]:
    """Each row without the pages before its oldest key: its pages [S, W], cached tokens [S], tokens left out [S].

    W is as many pages as the cached keys in reach can touch. Without a reach nothing is left out.
    """
    if rules.reach is None:
        return pages_SP, cached_S, jnp.zeros_like(cached_S)
    P, first_S = pages_SP.shape[1], oldest_S // page_size
    width = min(P, (rules.reach - 2) // page_size + 2)  # reach - 1 keys, the first anywhere in its page
    index_SW = jnp.minimum(first_S[:, None] + jnp.arange(width), P - 1)
    skipped_S = first_S * page_size
    return jnp.take_along_axis(pages_SP, index_SW, axis=1), jnp.maximum(cached_S - skipped_S, 0), skipped_S


def _attn_parts(kv_SKC: Array, G: int, H: int) -> tuple[Array, Array]:
    """Keys [S, K, G, H] and values [S, K, G, V] of cache rows."""
    S, K, C = kv_SKC.shape
    if C == 2 * G * H:
        kv_SKYGH = kv_SKC.reshape(S, K, 2, G, H)
        return kv_SKYGH[:, :, 0], kv_SKYGH[:, :, 1]
    return kv_SKC[..., : G * H].reshape(S, K, G, H), kv_SKC[..., G * H :].reshape(S, K, G, -1)


def _attn_add(
    state: SoftmaxState, q_SGMH: Array, kv_SKC: Array, seen_SMK: Array, rules: _AttnScoreRules
) -> SoftmaxState:
    """Fold cache rows into the online softmax."""
    k_SKGH, v_SKGV = _attn_parts(clear_unseen(kv_SKC, seen_SMK), q_SGMH.shape[1], q_SGMH.shape[3])
    return softmax_add(state, q_SGMH, k_SKGH, v_SKGV, seen_SMK, scale=rules.scale, softcap=rules.softcap)


def _attn_decode(
    q_TGMH: Array,
    new_TC: Array,
    kv_pool: Array,
    pages_SP: Array,
    batch: Batch,
    rows: Rows,
    rules: _AttnScoreRules,
    sink_GM: Array | None,
) -> Array:
    """The decode rows, all at once (token s belongs to row s); zeros for other tokens. [T, G, M, V].

    The loop runs to the longest decode row, or the longest reach, and gathers one page per row.
    """
    (T, G, M, H), (_, page_size, C) = q_TGMH.shape, kv_pool.shape
    S = min(T, pages_SP.shape[0])
    is_decode_S = (jnp.arange(S) < batch.distribution[0]) & rows.valid[:S]
    oldest_S = _attn_oldest(rows.start[:S], rules)
    pages_SP, cached_S, skipped_S = _attn_skip(pages_SP[:S], rows.start[:S], oldest_S, page_size, rules)
    cached_S = jnp.where(is_decode_S, cached_S, 0)
    q_SGMH = q_TGMH[:S]

    def add(state: SoftmaxState, kv_SKC: Array, key_K: Array, seen_SK: Array) -> SoftmaxState:
        if rules.reach is not None:
            seen_SK &= key_K >= (oldest_S - skipped_S)[:, None]
        return _attn_add(state, q_SGMH, kv_SKC, seen_SK[:, None], rules)

    start = softmax_start(S, G, M, C // G - H, sink_GM)
    own = _attn_add(start, q_SGMH, new_TC[:S, None], jnp.ones((S, 1, 1), bool), rules)
    span = 2 if S == 1 else 1  # pages of a row per step (see read_pages)
    out_SGMV = softmax_mean(softmax_over_pages(add, own, kv_pool, pages_SP, cached_S, span=span))
    out_SGMV = jnp.where(is_decode_S[:, None, None, None], out_SGMV, 0)
    return jnp.pad(out_SGMV.astype(q_TGMH.dtype), ((0, T - S), (0, 0), (0, 0), (0, 0)))


def _attn_block(
    q_BGMH: Array,
    new_TC: Array,
    kv_pool: Array,
    block: PrefillBlock,
    rules: _AttnScoreRules,
    sink_GM: Array | None,
    kv_block: int,
) -> Array:
    """One block of a row's queries: over the row's keys of this step, then over its cached ones. [B, G, M, V].

    Keys before the oldest one that the block's first query sees are left out of both.
    """
    assert kv_block % kv_pool.shape[1] == 0, (kv_block, kv_pool.shape)
    (B, G, M, H), (_, page_size, C) = q_BGMH.shape, kv_pool.shape
    q_1GMH = q_BGMH.transpose(1, 0, 2, 3).reshape(1, G, B * M, H)
    oldest_B = _attn_oldest(block.start + block.index * B + jnp.arange(B), rules)
    pages_1P, cached_1, skipped_1 = _attn_skip(block.pages_P[None], block.start[None], oldest_B[:1], page_size, rules)
    span = kv_block // page_size  # pages per step (see read_pages)
    if rules.reach is not None:
        span = min(span, max(pages_1P.shape[1], 2))

    def add_own(j: Array, state: SoftmaxState) -> SoftmaxState:
        kv_BC, key_B, seen_BB = own_rows(new_TC, block, j, B)
        if rules.reach is not None:
            seen_BB &= block.start + key_B >= oldest_B[:, None]
        return _attn_add(state, q_1GMH, kv_BC[None], jnp.repeat(seen_BB, M, axis=0)[None], rules)

    def add(state: SoftmaxState, kv_1KC: Array, key_K: Array, seen_1K: Array) -> SoftmaxState:
        seen_1MK = seen_1K[:, None]
        if rules.reach is not None:
            seen_BK = seen_1K & (key_K >= (oldest_B - skipped_1)[:, None])
            seen_1MK = jnp.repeat(seen_BK, M, axis=0)[None]
        return _attn_add(state, q_1GMH, kv_1KC, seen_1MK, rules)

    sink_GM = None if sink_GM is None else jnp.tile(sink_GM, (1, B))
    first_own = jnp.maximum(oldest_B[0] - block.start, 0) // B if rules.reach is not None else 0
    # The diagonal block first: there every query sees a key (itself).
    state = add_own(block.index, softmax_start(1, G, B * M, C // G - H, sink_GM))
    state = lax.fori_loop(first_own, block.index, add_own, state)
    out_1GMV = softmax_mean(softmax_over_pages(add, state, kv_pool, pages_1P, cached_1, span=span))
    return out_1GMV.reshape(G, B, M, -1).transpose(1, 0, 2, 3).astype(q_BGMH.dtype)


__all__ = ["attention"]
