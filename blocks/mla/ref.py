"""Latent attention, float32 meaning: every head's keys and values written out, one row at a time.

Legend: S rows, T tokens, D hidden, N heads, R latent (kv_lora_rank), E rope dims, C = R + E (one cached token:
normed latent, then rotated shared key), H nope dims, V value dims, Q queries and K keys of a row, L layers.
Not jittable: it reads the batch on the host.
"""

import jax.numpy as jnp
import numpy as np
from jax import Array

from ..core.batch import Batch, Rows
from ..core.norm import rms_norm
from ..core.rope import Rope, rope


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
    """Causal attention of every row over its cached pages and its own tokens; see xla.py.

    Returns out [T, D] float32 (zero for padding tokens) without the output's bias, and the new cache rows [T, C] in
    the pool's dtype. Rows are rounded to that dtype before use, cached or not.
    """
    T, N, R, H = h_TD.shape[0], num_heads, kv_lora_rank, qk_nope_head_dim
    x_TD = np.asarray(h_TD, np.float32)
    weight = {name: np.asarray(value, np.float32) for name, value in w.items()}

    def norm(x: np.ndarray, name: str) -> np.ndarray:
        gain = jnp.asarray(weight[name])
        return np.asarray(rms_norm(jnp.asarray(x), gain, eps=norm_eps, zero_centered=norm_zero_centered))

    def rotate(x_TNE: np.ndarray) -> np.ndarray:
        return np.asarray(rope(jnp.asarray(x_TNE), batch.positions, rope_spec))

    if query_latent:
        a_TF = x_TD @ weight["w_q_a"] + (weight["b_q_a"] if bias else 0)
        q_TNX = (norm(a_TF, "q_a_norm") @ weight["w_q_b"]).reshape(T, N, -1)
    else:
        q_TNX = (x_TD @ weight["w_q"]).reshape(T, N, -1)
    q_TNX = np.concatenate([q_TNX[..., :H], rotate(q_TNX[..., H:])], axis=-1)
    if temperature is not None:
        floor, growth = temperature
        hot_T = 1 + growth * np.log1p(np.floor(np.asarray(batch.positions) / floor))
        q_TNX = q_TNX * hot_T.astype(np.float32)[:, None, None]

    a_TC = x_TD @ weight["w_kv_a"] + (weight["b_kv_a"] if bias else 0)
    new_TC = np.concatenate([norm(a_TC[:, :R], "kv_a_norm"), rotate(a_TC[:, None, R:])[:, 0]], axis=-1)
    kv_new_TC = _saturate(jnp.asarray(new_TC), kv_pool.dtype)
    new_TC, C = np.asarray(kv_new_TC, np.float32), new_TC.shape[1]

    out_TNV = np.zeros((T, N, v_head_dim), np.float32)
    for row, first, last, start in _ranges(batch, rows):
        pages = np.asarray(batch.page_table[row]) + int(pool_layer) * num_pages
        old_KC = np.asarray(kv_pool[pages], np.float32).reshape(-1, kv_pool.shape[2])[:start, :C]
        k_KNX, v_KNV = _expand(np.concatenate([old_KC, new_TC[first:last]]), weight["w_kv_b"], N, R, H)
        out_TNV[first:last] = _attend(q_TNX[first:last], k_KNX, v_KNV, start, scale)
    if output_gate:
        gate_TNX = (x_TD @ weight["w_g"]).reshape(T, N, -1)
        out_TNV = out_TNV * np.exp(-np.logaddexp(0, -gate_TNX))  # sigmoid, no overflow at either end
    return jnp.asarray(out_TNV.reshape(T, -1) @ weight["w_o"]), jnp.pad(kv_new_TC, ((0, 0), (0, kv_pool.shape[2] - C)))


def _ranges(batch: Batch, rows: Rows) -> list[tuple[int, int, int, int]]:
    """(row, first token, last token, cached tokens) of every non-padding row."""
    cu_q, start = np.asarray(batch.cu_q).tolist(), np.asarray(rows.start).tolist()
    return [(s, cu_q[s], cu_q[s + 1], start[s]) for s in range(len(start)) if cu_q[s + 1] > cu_q[s]]


def _expand(kv_KC: np.ndarray, w_XR: np.ndarray, N: int, R: int, H: int) -> tuple[np.ndarray, np.ndarray]:
    """Keys [K, N, H + E] (the rope part alike in all heads) and values [K, N, V] of cached rows."""
    kv_KNX = (kv_KC[:, :R] @ w_XR.T).reshape(len(kv_KC), N, -1)
    shared_KNE = np.repeat(kv_KC[:, None, R:], N, axis=1)
    return np.concatenate([kv_KNX[..., :H], shared_KNE], axis=-1), kv_KNX[..., H:]


def _attend(q_QNX: np.ndarray, k_KNX: np.ndarray, v_KNV: np.ndarray, start: int, scale: float) -> np.ndarray:
    """Softmax attention of one row; query i sees keys 0 .. start + i."""
    score_NQK = np.einsum("qnx,knx->nqk", q_QNX, k_KNX) * np.float32(scale)
    seen_QK = np.arange(k_KNX.shape[0])[None] <= start + np.arange(q_QNX.shape[0])[:, None]
    score_NQK = np.where(seen_QK, score_NQK, -np.inf)
    p_NQK = np.exp(score_NQK - score_NQK.max(axis=-1, keepdims=True))
    p_NQK /= p_NQK.sum(axis=-1, keepdims=True)
    return np.einsum("nqk,knv->qnv", p_NQK, v_KNV)


def _saturate(x: Array, dtype: jnp.dtype) -> Array:
    """Cast to the cache dtype, clipping to its range (a float8 overflow would be NaN)."""
    limit = float(jnp.finfo(dtype).max)
    return jnp.clip(x, -limit, limit).astype(dtype)


__all__ = ["mla"]
