"""Attention over a paged cache in plain XLA: online softmax, one page per row at a time.

Legend: T tokens, S rows, P pages per row, D hidden, N q heads, G kv heads, M queries per kv
head (N/G of one token, or of every token of a block), H head_dim, C = 2*G*H (one cached token:
all key heads, then all value heads), K keys at hand, B tokens per block, L attention layers.

The pool is only read here: writing it inside a layer scan makes XLA keep a second pool. Each
layer attends to the old pages and to this step's own keys and returns its new cache rows;
core/paged.py writes all layers' rows once after the scan, in place when the pool is donated.
"""

from functools import partial
from typing import Literal

import jax.numpy as jnp
from jax import Array, lax

from ..core.batch import Batch, Rows
from ..core.norm import rms_norm
from ..core.rope import rope

# Below any real score, and exp(_ATTN_MASKED - real) is exactly 0. Not -inf: (-inf) - (-inf) is NaN.
_ATTN_MASKED = -1e30

# Online softmax (arXiv:1805.02867): running maximum and sum [S, G, M], weighted values [S, G, M, H]; float32.
_AttnState = tuple[Array, Array, Array]


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
    rope_dim: int,
    rope_theta: float,
    rope_pairing: Literal["half", "interleaved"],
    qk_norm_eps: float | None,
    qk_norm_zero_centered: bool,
    output_gate: bool,
    scale: float,
    q_block: int,
    kv_block: int,
    max_q: int,
) -> tuple[Array, Array]:
    """Causal attention of every row over its cached pages and its own tokens.

    kv_pool [L*num_pages, page_size, C] (read only), pool_layer may be traced. Heads are the
    local ones. rope_dim 0 = no rope, qk_norm_eps None = no query/key norm. q_block: tokens of a
    row per prefill work item, kv_block: cached keys such an item reads at once (whole pages, at
    least two). max_q: the longest row this bucket may hold; 1 leaves the prefill path out of the
    program.
    Returns out [T, D] in h's dtype, partial over tensor parallelism, and the new cache rows
    [T, C] in the pool's dtype. Own keys and values are rounded to the pool's dtype before use,
    so that a token gives the same result whether its history came from this step or the cache.
    """
    T, N, G, H = h_TD.shape[0], num_q_heads, num_kv_heads, head_dim
    q_TNX = _attn_linear(h_TD, w["w_q"]).reshape(T, N, 2 * H if output_gate else H)  # gated: [query | gate] per head
    q_TNH, k_TGH = q_TNX[..., :H], _attn_linear(h_TD, w["w_k"]).reshape(T, G, H)
    if qk_norm_eps is not None:
        q_TNH = rms_norm(q_TNH, w["q_norm"], eps=qk_norm_eps, zero_centered=qk_norm_zero_centered)
        k_TGH = rms_norm(k_TGH, w["k_norm"], eps=qk_norm_eps, zero_centered=qk_norm_zero_centered)
    q_TNH = rope(q_TNH, batch.positions, dim=rope_dim, theta=rope_theta, pairing=rope_pairing)
    k_TGH = rope(k_TGH, batch.positions, dim=rope_dim, theta=rope_theta, pairing=rope_pairing)
    new_TC = jnp.concatenate([k_TGH.reshape(T, G * H), _attn_linear(h_TD, w["w_v"])], axis=-1)
    new_TC = _attn_round(new_TC, kv_pool.dtype)

    pages_SP = batch.page_table + pool_layer * num_pages
    q_TGMH = q_TNH.reshape(T, G, N // G, H)
    out_TGMH = _attn_decode(q_TGMH, new_TC, kv_pool, pages_SP, batch, rows, scale=scale)
    if max_q > 1:
        out_TGMH = _attn_prefill(
            out_TGMH, q_TGMH, new_TC, kv_pool, pages_SP, batch, rows,
            scale=scale, q_block=min(q_block, max_q), kv_block=kv_block,
        )  # fmt: skip
    out_TNH = out_TGMH.reshape(T, N, H)
    if output_gate:
        gate_TNH = lax.logistic(q_TNX[..., H:].astype(jnp.float32))
        out_TNH = (out_TNH.astype(jnp.float32) * gate_TNH).astype(h_TD.dtype)
    return _attn_linear(out_TNH.reshape(T, N * H), w["w_o"]), new_TC


def _attn_linear(x: Array, w: Array) -> Array:
    """x @ w accumulated in float32, rounded to x.dtype; precision is the ambient default."""
    return jnp.dot(x, w, preferred_element_type=jnp.float32).astype(x.dtype)


def _attn_round(x: Array, dtype: jnp.dtype) -> Array:
    """Cast to the cache's dtype, clipped to its range: float8 overflow would be NaN."""
    limit = float(jnp.finfo(dtype).max)
    return jnp.clip(x, -limit, limit).astype(dtype)


def _attn_start(S: int, G: int, M: int, H: int) -> _AttnState:
    """The online softmax of no keys."""
    zero_SGM = jnp.zeros((S, G, M), jnp.float32)
    return zero_SGM + _ATTN_MASKED, zero_SGM, jnp.zeros((S, G, M, H), jnp.float32)


def _attn_add(state: _AttnState, q_SGMH: Array, kv_SKC: Array, seen_SMK: Array, scale: float) -> _AttnState:
    """Fold K more keys into the online softmax; seen_SMK may have M = 1 (all queries alike).

    Every query must see a key in the first call, so that the maximum is real from then on.
    Queries or a cache in float32 ask for float32 products: HIGHEST, since TPU's default would
    narrow them to bfloat16 (for a float32 pool: by a bfloat16 copy of the whole of it).
    """
    top, total, acc = state
    (S, G, _, H), K = q_SGMH.shape, kv_SKC.shape[1]
    dtype = jnp.float32 if jnp.float32 in (q_SGMH.dtype, kv_SKC.dtype) else q_SGMH.dtype
    dot = partial(
        jnp.einsum,
        precision=lax.Precision.HIGHEST if dtype == jnp.float32 else None,
        preferred_element_type=jnp.float32,
    )
    kv_SKYGH = kv_SKC.astype(dtype).reshape(S, K, 2, G, H)
    # Unseen values are cleared, not only weighted by 0: a reused page may hold another request's NaN.
    v_SKGH = jnp.where(seen_SMK.any(axis=1)[:, :, None, None], kv_SKYGH[:, :, 1], 0)
    score = dot("sgmh,skgh->sgmk", q_SGMH.astype(dtype), kv_SKYGH[:, :, 0])
    score = jnp.where(seen_SMK[:, None], score * scale, _ATTN_MASKED)
    new_top = jnp.maximum(top, score.max(axis=-1))
    p, keep = jnp.exp(score - new_top[..., None]), jnp.exp(top - new_top)
    values = dot("sgmk,skgh->sgmh", p.astype(dtype), v_SKGH)
    return new_top, total * keep + p.sum(axis=-1), acc * keep[..., None] + values


def _attn_read(kv_pool: Array, pages_SP: Array, cached_S: Array, step: Array, span: int) -> tuple[Array, Array]:
    """Pages step*span ... of every row: cache rows [S, K, C] and which of them hold cached tokens [S, K].

    Pages past a row's end are read from the pool's first page. S*span must be at least 2: XLA
    turns a gather of one page into a slice, and then lays the whole pool out as the matmul
    would like that page.
    """
    (S, P), (_, page_size, C) = pages_SP.shape, kv_pool.shape
    assert S * span > 1
    index_X = step * span + jnp.arange(span)
    pages_SX = jnp.where(index_X * page_size < cached_S[:, None], pages_SP[:, jnp.minimum(index_X, P - 1)], 0)
    kv_SKC = kv_pool[pages_SX].reshape(S, span * page_size, C)
    return kv_SKC, step * span * page_size + jnp.arange(span * page_size) < cached_S[:, None]


def _attn_decode(
    q_TGMH: Array, new_TC: Array, kv_pool: Array, pages_SP: Array, batch: Batch, rows: Rows, *, scale: float
) -> Array:
    """The decode rows, all at once (token s belongs to row s); zeros for other tokens. [T, G, M, H].

    The loop runs to the longest decode row and gathers one page per row, so that temporaries
    are S pages whatever the context.
    """
    (T, G, M, H), page_size = q_TGMH.shape, kv_pool.shape[1]
    S = min(T, pages_SP.shape[0])
    is_decode_S = (jnp.arange(S) < batch.distribution[0]) & rows.valid[:S]
    cached_S = jnp.where(is_decode_S, rows.start[:S], 0)
    q_SGMH = q_TGMH[:S]

    span = 2 if S == 1 else 1  # pages of a row per step (see _attn_read)

    def add_pages(step: Array, state: _AttnState) -> _AttnState:
        kv_SKC, seen_SK = _attn_read(kv_pool, pages_SP[:S], cached_S, step, span)
        return _attn_add(state, q_SGMH, kv_SKC, seen_SK[:, None], scale)

    own = _attn_add(_attn_start(S, G, M, H), q_SGMH, new_TC[:S, None], jnp.ones((S, 1, 1), bool), scale)
    num_steps = (cached_S.max() + span * page_size - 1) // (span * page_size)
    _, total, acc = lax.fori_loop(0, num_steps, add_pages, own)
    out_SGMH = jnp.where(is_decode_S[:, None, None, None], acc / total[..., None], 0)
    return jnp.pad(out_SGMH.astype(q_TGMH.dtype), ((0, T - S), (0, 0), (0, 0), (0, 0)))


def _attn_prefill(
    out_TGMH: Array,
    q_TGMH: Array,
    new_TC: Array,
    kv_pool: Array,
    pages_SP: Array,
    batch: Batch,
    rows: Rows,
    *,
    scale: float,
    q_block: int,
    kv_block: int,
) -> Array:
    """The prefill rows' tokens into out_TGMH; work items (row, block of tokens) in a loop.

    All trip counts are dynamic: a step with few prefill tokens runs few iterations.
    """
    T, B = q_TGMH.shape[0], q_block
    # B tokens of padding: the last block of the last row is then sliced whole.
    q_TGMH, new_TC, out_TGMH = (
        jnp.pad(x, ((0, B),) + ((0, 0),) * (x.ndim - 1)) for x in (q_TGMH, new_TC, out_TGMH)
    )  # fmt: skip

    def add_row(s: Array, out_TGMH: Array) -> Array:
        first, q_len, start = batch.cu_q[s], rows.q_len[s], rows.start[s]

        def add_block(b: Array, out_TGMH: Array) -> Array:
            q_BGMH = lax.dynamic_slice_in_dim(q_TGMH, first + b * B, B)
            done_BGMH = _attn_block(
                q_BGMH, new_TC, kv_pool, pages_SP[s],
                first=first, index=b, q_len=q_len, start=start, scale=scale, kv_block=kv_block,
            )  # fmt: skip
            mine_B = (b * B + jnp.arange(B) < q_len)[:, None, None, None]
            old_BGMH = lax.dynamic_slice_in_dim(out_TGMH, first + b * B, B)
            return lax.dynamic_update_slice_in_dim(
                out_TGMH, jnp.where(mine_B, done_BGMH, old_BGMH), first + b * B, 0
            )  # fmt: skip

        return lax.fori_loop(0, (q_len + B - 1) // B, add_block, out_TGMH)

    return lax.fori_loop(batch.distribution[0], batch.distribution[1], add_row, out_TGMH)[:T]


def _attn_block(
    q_BGMH: Array,
    new_TC: Array,
    kv_pool: Array,
    pages_P: Array,
    *,
    first: Array,
    index: Array,
    q_len: Array,
    start: Array,
    scale: float,
    kv_block: int,
) -> Array:
    """Block `index` of one row: over the row's keys of this step, then over its `start` cached ones.

    first: the row's first token, q_len: its tokens in this step.
    """
    assert kv_block % kv_pool.shape[1] == 0, (kv_block, kv_pool.shape)
    (B, G, M, H), page_size = q_BGMH.shape, kv_pool.shape[1]
    q_1GMH = q_BGMH.transpose(1, 0, 2, 3).reshape(1, G, B * M, H)
    token_B, span = jnp.arange(B), kv_block // page_size  # pages per step (see _attn_read)

    def add_own(j: Array, state: _AttnState) -> _AttnState:
        kv_1BC = lax.dynamic_slice_in_dim(new_TC, first + j * B, B)[None]
        key_B, query_B = j * B + token_B, index * B + token_B
        seen_BB = (key_B <= query_B[:, None]) & (key_B < q_len)
        return _attn_add(state, q_1GMH, kv_1BC, jnp.repeat(seen_BB, M, axis=0)[None], scale)

    def add_pages(step: Array, state: _AttnState) -> _AttnState:
        kv_1KC, seen_1K = _attn_read(kv_pool, pages_P[None], start[None], step, span)
        return _attn_add(state, q_1GMH, kv_1KC, seen_1K[:, None], scale)

    # The diagonal block first: there every query sees a key (itself).
    state = add_own(index, _attn_start(1, G, B * M, H))
    state = lax.fori_loop(0, index, add_own, state)
    _, total, acc = lax.fori_loop(0, (start + span * page_size - 1) // (span * page_size), add_pages, state)
    out_GBMH = (acc / total[..., None]).reshape(G, B, M, H)
    return out_GBMH.transpose(1, 0, 2, 3).astype(q_BGMH.dtype)


__all__ = ["attention"]
