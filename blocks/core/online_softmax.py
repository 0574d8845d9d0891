"""Softmax attention over keys that come in pieces (online softmax, arXiv:1805.02867).

Legend: S rows, G key/value heads, M queries per key/value head, K keys at hand, X dims of a query and key, V dims of a
value.
"""

from collections.abc import Callable

import jax.numpy as jnp
from jax import Array, lax

from .paged import read_pages

# Below any real score, and exp(_MASKED - real) is exactly 0. Not -inf: (-inf) - (-inf) is NaN.
_MASKED = -1e30

# Running maximum and sum [S, G, M], weighted values [S, G, M, V]; float32.
SoftmaxState = tuple[Array, Array, Array]


def softmax_start(S: int, G: int, M: int, V: int, sink_GM: Array | None = None) -> SoftmaxState:
    """The state of no keys, or of a sink: a key without value whose score is the sink."""
    zero_SGM = jnp.zeros((S, G, M), jnp.float32)
    acc_SGMV = jnp.zeros((S, G, M, V), jnp.float32)
    if sink_GM is None:
        return zero_SGM + _MASKED, zero_SGM, acc_SGMV
    return zero_SGM + sink_GM, zero_SGM + 1, acc_SGMV


def softmax_add(
    state: SoftmaxState,
    q_SGMX: Array,
    k_SKGX: Array,
    v_SKGV: Array,
    seen_SMK: Array,
    *,
    scale: float,
    softcap: float | None = None,
) -> SoftmaxState:
    """Fold K more keys into the state; seen_SMK may have M = 1 (all queries alike).

    Every query must see a key in the first call, so that the maximum is real from then on (a sink is real too).
    Values that no query sees must be finite. softcap: scores s become softcap * tanh(s / softcap).
    """
    top, total, acc = state
    score = einsum_wide("sgmx,skgx->sgmk", q_SGMX, k_SKGX)
    score = score * scale if softcap is None else softcap * jnp.tanh(score * (scale / softcap))
    score = jnp.where(seen_SMK[:, None], score, _MASKED)
    new_top = jnp.maximum(top, score.max(axis=-1))
    p, keep = jnp.exp(score - new_top[..., None]), jnp.exp(top - new_top)
    values = einsum_wide("sgmk,skgv->sgmv", p.astype(product_dtype(q_SGMX, v_SKGV)), v_SKGV)
    return new_top, total * keep + p.sum(axis=-1), acc * keep[..., None] + values


def softmax_over_pages(
    add: Callable[[SoftmaxState, Array, Array, Array], SoftmaxState],
    state: SoftmaxState,
    kv_pool: Array,
    pages_SP: Array,
    cached_S: Array,
    *,
    span: int,
) -> SoftmaxState:
    """add(state, *read_pages(...)) over the pages of all rows, `span` of each at a time, up to the longest row's end.

    The trip count is dynamic, and temporaries are S*span pages whatever the context.
    """
    keys = span * kv_pool.shape[1]

    def add_pages(step: Array, state: SoftmaxState) -> SoftmaxState:
        return add(state, *read_pages(kv_pool, pages_SP, cached_S, step, span))

    return lax.fori_loop(0, (cached_S.max() + keys - 1) // keys, add_pages, state)


def softmax_mean(state: SoftmaxState) -> Array:
    """The weighted mean of the values [S, G, M, V], float32."""
    _, total, acc = state
    return acc / total[..., None]


def product_dtype(x: Array, cached: Array) -> jnp.dtype:
    """Operands' dtype of a product of activations with what may come from a cache: float32 if either is, else x's."""
    return jnp.dtype(jnp.float32) if jnp.float32 in (x.dtype, cached.dtype) else x.dtype


def einsum_wide(subscripts: str, x: Array, cached: Array) -> Array:
    """einsum in product_dtype accumulated in float32; float32 operands at HIGHEST precision.

    TPU's default would narrow them to bfloat16 (for a float32 pool: by a bfloat16 copy of the whole of it).
    """
    dtype = product_dtype(x, cached)
    precision = lax.Precision.HIGHEST if dtype == jnp.float32 else None
    return jnp.einsum(
        subscripts, x.astype(dtype), cached.astype(dtype), precision=precision, preferred_element_type=jnp.float32
    )


__all__ = [
    "SoftmaxState",
    "einsum_wide",
    "product_dtype",
    "softmax_add",
    "softmax_mean",
    "softmax_over_pages",
    "softmax_start",
]
