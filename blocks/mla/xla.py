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

import jax.numpy as jnp
from jax import Array, lax

from ..core.batch import Batch, Rows
from ..core.norm import rms_norm
from ..core.rope import Rope, rope

# Below any real score, and exp(_MLA_MASKED - real) is exactly 0. Not -inf: (-inf) - (-inf) is NaN.
_MLA_MASKED = -1e30

# Online softmax (arXiv:1805.02867): running maximum and sum [S, G, M], weighted values [S, G, M, Y]; float32.
_MlaState = tuple[Array, Array, Array]


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
    temperature: tuple[int, float] | None = None,
    output_gate: bool = False,
    bias: bool = False,
) -> tuple[Array, Array]:
    """Causal attention of every row over its cached pages and its own tokens.

    kv_pool [L*num_pages, page_size, C or wider] (read only), pool_layer may be traced. num_heads: the local ones; the
    cache is whole. rope_spec None = no positional encoding. norm_*: of the latent norms. query_latent: queries come
    through w_q_a, q_a_norm, w_q_b instead of w_q. temperature (floor, growth): queries times
    1 + growth * log(1 + floor(position / floor)). output_gate: w_g gates each head, or each element of it. bias: the
    down-projections have biases. q_block: tokens of a row per prefill work item, kv_block: cached keys such an item
    reads at once (whole pages, at least two). max_q: the longest row this bucket may hold; 1 leaves the prefill form
    out of the program.
    Returns out [T, D] in h's dtype, without bias, partial over tensor parallelism, and the new cache rows in the
    pool's width (zeros behind C) and dtype. Own rows are rounded to that dtype before use, so that a token gives the
    same result whether its history came from this step or the cache.
    """
    T, N, R, H = h_TD.shape[0], num_heads, kv_lora_rank, qk_nope_head_dim

    def norm(x: Array, name: str) -> Array:
        return rms_norm(x, w[name], eps=norm_eps, zero_centered=norm_zero_centered)

    if query_latent:
        a_TF = norm(_mla_linear(h_TD, w["w_q_a"], w["b_q_a"] if bias else None), "q_a_norm")
        q_TNX = _mla_linear(a_TF, w["w_q_b"]).reshape(T, N, -1)
    else:
        q_TNX = _mla_linear(h_TD, w["w_q"]).reshape(T, N, -1)
    q_TNX = jnp.concatenate([q_TNX[..., :H], rope(q_TNX[..., H:], batch.positions, rope_spec)], axis=-1)
    if temperature is not None:
        q_TNX = _mla_heat(q_TNX, batch.positions, *temperature)
    a_TC = _mla_linear(h_TD, w["w_kv_a"], w["b_kv_a"] if bias else None)
    shared_TE = rope(a_TC[:, None, R:], batch.positions, rope_spec)[:, 0]
    new_TC = _mla_round(jnp.concatenate([norm(a_TC[:, :R], "kv_a_norm"), shared_TE], axis=-1), kv_pool.dtype)

    pages_SP = batch.page_table + pool_layer * num_pages
    w_NXR = w["w_kv_b"].reshape(N, H + v_head_dim, R)
    out_TNV = _mla_decode(q_TNX, new_TC, w_NXR, kv_pool, pages_SP, batch, rows, scale=scale)
    if max_q > 1:
        out_TNV = _mla_prefill(
            out_TNV, q_TNX, new_TC, w_NXR, kv_pool, pages_SP, batch, rows,
            scale=scale, q_block=min(q_block, max_q), kv_block=kv_block,
        )  # fmt: skip
    if output_gate:
        gate_TNX = lax.logistic(_mla_linear(h_TD, w["w_g"]).astype(jnp.float32)).reshape(T, N, -1)
        out_TNV = (out_TNV.astype(jnp.float32) * gate_TNX).astype(h_TD.dtype)
    unused = kv_pool.shape[2] - new_TC.shape[1]
    return _mla_linear(out_TNV.reshape(T, N * v_head_dim), w["w_o"]), jnp.pad(new_TC, ((0, 0), (0, unused)))


def _mla_linear(x: Array, w: Array, b: Array | None = None) -> Array:
    """x @ w [+ b] accumulated in float32, rounded to x.dtype; precision is the ambient default."""
    y = jnp.dot(x, w, preferred_element_type=jnp.float32)
    return (y if b is None else y + b.astype(jnp.float32)).astype(x.dtype)


def _mla_dot(spec: str, a: Array, b: Array) -> Array:
    """einsum accumulated in float32; where either side is float32, both are, at HIGHEST precision.

    TPU's default would narrow float32 to bfloat16 (for a float32 pool: by a bfloat16 copy of the whole of it).
    """
    dtype = jnp.float32 if jnp.float32 in (a.dtype, b.dtype) else a.dtype
    precision = lax.Precision.HIGHEST if dtype == jnp.float32 else None
    return jnp.einsum(
        spec, a.astype(dtype), b.astype(dtype), precision=precision, preferred_element_type=jnp.float32
    )  # fmt: skip


def _mla_heat(q_TNX: Array, positions_T: Array, floor: int, growth: float) -> Array:
    """Queries times 1 + growth * log(1 + floor(position / floor)); the division is of integers, hence exact."""
    hot_T = 1 + growth * jnp.log1p((positions_T // floor).astype(jnp.float32))
    return (q_TNX.astype(jnp.float32) * hot_T[:, None, None]).astype(q_TNX.dtype)


def _mla_round(x: Array, dtype: jnp.dtype) -> Array:
    """Cast to the cache's dtype, clipped to its range: float8 overflow would be NaN."""
    limit = float(jnp.finfo(dtype).max)
    return jnp.clip(x, -limit, limit).astype(dtype)


def _mla_start(S: int, G: int, M: int, Y: int) -> _MlaState:
    """The online softmax of no keys."""
    zero_SGM = jnp.zeros((S, G, M), jnp.float32)
    return zero_SGM + _MLA_MASKED, zero_SGM, jnp.zeros((S, G, M, Y), jnp.float32)


def _mla_add(state: _MlaState, q_SGMX: Array, k_SKGX: Array, v_SKGY: Array, seen_SMK: Array, scale: float) -> _MlaState:
    """Fold K more keys into the online softmax; seen_SMK may have M = 1 (all queries alike).

    Every query must see a key in the first call, so that the maximum is real from then on.
    Keys and values that no query sees must be finite.
    """
    top, total, acc = state
    score = _mla_dot("sgmx,skgx->sgmk", q_SGMX, k_SKGX)
    score = jnp.where(seen_SMK[:, None], score * scale, _MLA_MASKED)
    new_top = jnp.maximum(top, score.max(axis=-1))
    p, keep = jnp.exp(score - new_top[..., None]), jnp.exp(top - new_top)
    values = _mla_dot("sgmk,skgy->sgmy", p.astype(q_SGMX.dtype), v_SKGY)
    return new_top, total * keep + p.sum(axis=-1), acc * keep[..., None] + values


def _mla_read(
    kv_pool: Array, pages_SP: Array, cached_S: Array, step: Array, *, span: int, C: int
) -> tuple[Array, Array]:
    """Pages step*span ... of every row: cache rows [S, K, C] and which of them hold cached tokens [S, K].

    Pages past a row's end are read from the pool's first page. Rows that hold no cached token are cleared, not only
    masked: a reused page may hold another request's NaN. S*span must be at least 2: XLA turns a gather of one page
    into a slice, and then lays the whole pool out as the product would like that page.
    """
    (S, P), page_size = pages_SP.shape, kv_pool.shape[1]
    assert S * span > 1
    index_X = step * span + jnp.arange(span)
    pages_SX = jnp.where(index_X * page_size < cached_S[:, None], pages_SP[:, jnp.minimum(index_X, P - 1)], 0)
    seen_SK = step * span * page_size + jnp.arange(span * page_size) < cached_S[:, None]
    kv_SKC = kv_pool[pages_SX].reshape(S, span * page_size, -1)[..., :C]
    return jnp.where(seen_SK[..., None], kv_SKC, 0), seen_SK


def _mla_decode(
    q_TNX: Array, new_TC: Array, w_NXR: Array, kv_pool: Array, pages_SP: Array, batch: Batch, rows: Rows, *,
    scale: float,
) -> Array:  # fmt: skip
    """The decode rows, all at once and absorbed (token s belongs to row s); zeros for other tokens. [T, N, V].

    The loop runs to the longest decode row and gathers one page per row, so that temporaries are S pages whatever
    the context.
    """
    (T, N, X), C, page_size = q_TNX.shape, new_TC.shape[1], kv_pool.shape[1]
    R = w_NXR.shape[2]
    H = X - (C - R)
    S = min(T, pages_SP.shape[0])
    is_decode_S = (jnp.arange(S) < batch.distribution[0]) & rows.valid[:S]
    cached_S = jnp.where(is_decode_S, rows.start[:S], 0)
    # The weight first: XLA:CPU has no bfloat16 product for the other order.
    latent_SNR = _mla_dot("nhr,snh->snr", w_NXR[:, :H], q_TNX[:S, :, :H]).astype(q_TNX.dtype)
    q_SGNC = jnp.concatenate([latent_SNR, q_TNX[:S, :, H:]], axis=-1)[:, None]
    span = 2 if S == 1 else 1  # pages of a row per step (see _mla_read)

    def add(state: _MlaState, kv_SKC: Array, seen_SK: Array) -> _MlaState:
        return _mla_add(state, q_SGNC, kv_SKC[:, :, None], kv_SKC[:, :, None, :R], seen_SK[:, None], scale)

    def add_pages(step: Array, state: _MlaState) -> _MlaState:
        return add(state, *_mla_read(kv_pool, pages_SP[:S], cached_S, step, span=span, C=C))

    own = add(_mla_start(S, 1, N, R), new_TC[:S, None], jnp.ones((S, 1), bool))
    num_steps = (cached_S.max() + span * page_size - 1) // (span * page_size)
    _, total, acc = lax.fori_loop(0, num_steps, add_pages, own)
    mean_SNR = jnp.where(is_decode_S[:, None, None], (acc / total[..., None])[:, 0], 0).astype(q_TNX.dtype)
    out_SNV = _mla_dot("snr,nvr->snv", mean_SNR, w_NXR[:, H:]).astype(q_TNX.dtype)
    return jnp.pad(out_SNV, ((0, T - S), (0, 0), (0, 0)))


def _mla_prefill(
    out_TNV: Array, q_TNX: Array, new_TC: Array, w_NXR: Array, kv_pool: Array, pages_SP: Array, batch: Batch,
    rows: Rows, *, scale: float, q_block: int, kv_block: int,
) -> Array:  # fmt: skip
    """The prefill rows' tokens into out_TNV; work items (row, block of tokens) in a loop.

    All trip counts are dynamic: a step with few prefill tokens runs few iterations.
    """
    T, B = q_TNX.shape[0], q_block
    # B tokens of padding: the last block of the last row is then sliced whole.
    q_TNX, new_TC, out_TNV = (jnp.pad(x, ((0, B),) + ((0, 0),) * (x.ndim - 1)) for x in (q_TNX, new_TC, out_TNV))

    def add_row(s: Array, out_TNV: Array) -> Array:
        first, q_len, start = batch.cu_q[s], rows.q_len[s], rows.start[s]

        def add_block(b: Array, out_TNV: Array) -> Array:
            q_BNX = lax.dynamic_slice_in_dim(q_TNX, first + b * B, B)
            done_BNV = _mla_block(
                q_BNX, new_TC, w_NXR, kv_pool, pages_SP[s],
                first=first, index=b, q_len=q_len, start=start, scale=scale, kv_block=kv_block,
            )  # fmt: skip
            mine_B = (b * B + jnp.arange(B) < q_len)[:, None, None]
            old_BNV = lax.dynamic_slice_in_dim(out_TNV, first + b * B, B)
            return lax.dynamic_update_slice_in_dim(out_TNV, jnp.where(mine_B, done_BNV, old_BNV), first + b * B, 0)

        return lax.fori_loop(0, (q_len + B - 1) // B, add_block, out_TNV)

    return lax.fori_loop(batch.distribution[0], batch.distribution[1], add_row, out_TNV)[:T]


def _mla_block(
    q_BNX: Array, new_TC: Array, w_NXR: Array, kv_pool: Array, pages_P: Array, *, first: Array, index: Array,
    q_len: Array, start: Array, scale: float, kv_block: int,
) -> Array:  # fmt: skip
    """Block `index` of one row, expanded: over the row's keys of this step, then over its `start` cached ones.

    first: the row's first token, q_len: its tokens in this step.
    """
    assert kv_block % kv_pool.shape[1] == 0, (kv_block, kv_pool.shape)
    (B, N, _), page_size = q_BNX.shape, kv_pool.shape[1]
    H = q_BNX.shape[2] - (new_TC.shape[1] - w_NXR.shape[2])
    V = w_NXR.shape[1] - H
    q_1NBX = q_BNX.transpose(1, 0, 2)[None]
    token_B, span = jnp.arange(B), kv_block // page_size  # pages per step (see _mla_read)
    expand = _mla_expander(w_NXR, H, q_BNX.dtype)

    def add_own(j: Array, state: _MlaState) -> _MlaState:
        key_B, query_B = j * B + token_B, index * B + token_B
        # What follows the row's tokens is padding or another row's: cleared, since it may be NaN.
        kv_BC = jnp.where((key_B < q_len)[:, None], lax.dynamic_slice_in_dim(new_TC, first + j * B, B), 0)
        seen_BB = (key_B <= query_B[:, None]) & (key_B < q_len)
        return _mla_add(state, q_1NBX, *expand(kv_BC), seen_BB[None], scale)

    def add_pages(step: Array, state: _MlaState) -> _MlaState:
        kv_1KC, seen_1K = _mla_read(kv_pool, pages_P[None], start[None], step, span=span, C=new_TC.shape[1])
        return _mla_add(state, q_1NBX, *expand(kv_1KC[0]), seen_1K[:, None], scale)

    # The diagonal block first: there every query sees a key (itself).
    state = add_own(index, _mla_start(1, N, B, V))
    state = lax.fori_loop(0, index, add_own, state)
    _, total, acc = lax.fori_loop(0, (start + span * page_size - 1) // (span * page_size), add_pages, state)
    return (acc / total[..., None])[0].transpose(1, 0, 2).astype(q_BNX.dtype)


def _mla_expander(w_NXR: Array, H: int, dtype: jnp.dtype) -> Callable[[Array], tuple[Array, Array]]:
    """Cached rows [K, C] -> every head's keys [1, K, N, H + E] and values [1, K, N, V]; float32 if the rows are."""
    N, _, R = w_NXR.shape

    def expand(kv_KC: Array) -> tuple[Array, Array]:
        kv_KC = kv_KC if kv_KC.dtype == jnp.float32 else kv_KC.astype(dtype)
        kv_KNX = _mla_dot("kr,nxr->knx", kv_KC[:, :R], w_NXR).astype(kv_KC.dtype)
        shared_KNE = jnp.broadcast_to(kv_KC[:, None, R:], (kv_KC.shape[0], N, kv_KC.shape[1] - R))
        return jnp.concatenate([kv_KNX[..., :H], shared_KNE], axis=-1)[None], kv_KNX[None, ..., H:]

    return expand


__all__ = ["mla"]
