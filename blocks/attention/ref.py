"""Attention, float32 meaning: one row at a time, softmax over the row's whole history.

Legend: S rows, T tokens, D hidden, N q heads, G kv heads, H head_dim, C = 2*G*H (one cached
token: all key heads, then all value heads), L attention layers, K keys of a row.
Not jittable: it reads the batch on the host.
"""

from typing import Literal

import jax.numpy as jnp
import numpy as np
from jax import Array

from ..core.batch import Batch, Rows
from ..core.norm import rms_norm
from ..core.rope import rope


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
    """Causal attention of every row over its cached pages and its own tokens; see xla.py.

    Returns out [T, D] float32 (zero for padding tokens) and the new cache rows [T, C] in the
    pool's dtype. Keys and values are rounded to the pool's dtype before use, cached or not.
    """
    T, N, G, H = h_TD.shape[0], num_q_heads, num_kv_heads, head_dim
    x_TD = np.asarray(h_TD, np.float32)
    weight = {name: np.asarray(value, np.float32) for name, value in w.items()}
    q_TNX = (x_TD @ weight["w_q"]).reshape(T, N, -1)
    q_TNH, gate_TNH = jnp.asarray(q_TNX[..., :H]), q_TNX[..., H:]
    k_TGH = jnp.asarray(x_TD @ weight["w_k"]).reshape(T, G, H)
    v_TF = jnp.asarray(x_TD @ weight["w_v"])
    if qk_norm_eps is not None:
        q_TNH = rms_norm(q_TNH, jnp.asarray(weight["q_norm"]), eps=qk_norm_eps, zero_centered=qk_norm_zero_centered)
        k_TGH = rms_norm(k_TGH, jnp.asarray(weight["k_norm"]), eps=qk_norm_eps, zero_centered=qk_norm_zero_centered)
    q_TNH = rope(q_TNH, batch.positions, dim=rope_dim, theta=rope_theta, pairing=rope_pairing)
    k_TGH = rope(k_TGH, batch.positions, dim=rope_dim, theta=rope_theta, pairing=rope_pairing)
    kv_new_TC = _saturate(jnp.concatenate([k_TGH.reshape(T, G * H), v_TF], axis=-1), kv_pool.dtype)

    query_TNH, new_TC = np.asarray(q_TNH), np.asarray(kv_new_TC, np.float32)
    out_TNH = np.zeros((T, N, H), np.float32)
    for row, first, last, start in _ranges(batch, rows):
        pages = np.asarray(batch.page_table[row]) + int(pool_layer) * num_pages
        old_KC = np.asarray(kv_pool[pages], np.float32).reshape(-1, 2 * G * H)[:start]
        kv_K2GH = np.concatenate([old_KC, new_TC[first:last]]).reshape(-1, 2, G, H)
        out_TNH[first:last] = _attend(query_TNH[first:last], kv_K2GH[:, 0], kv_K2GH[:, 1], start, scale)
    if output_gate:
        out_TNH = out_TNH * np.exp(-np.logaddexp(0, -gate_TNH))  # sigmoid, no overflow at either end
    return jnp.asarray(out_TNH.reshape(T, N * H) @ weight["w_o"]), kv_new_TC


def _ranges(batch: Batch, rows: Rows) -> list[tuple[int, int, int, int]]:
    """(row, first token, last token, cached tokens) of every non-padding row."""
    cu_q, start = np.asarray(batch.cu_q).tolist(), np.asarray(rows.start).tolist()
    return [(s, cu_q[s], cu_q[s + 1], start[s]) for s in range(len(start)) if cu_q[s + 1] > cu_q[s]]


def _attend(q_QNH: np.ndarray, k_KGH: np.ndarray, v_KGH: np.ndarray, start: int, scale: float) -> np.ndarray:
    """Softmax attention of one row; query i sees keys 0 .. start + i."""
    heads_per_group = q_QNH.shape[1] // k_KGH.shape[1]
    k_KNH, v_KNH = (np.repeat(x, heads_per_group, axis=1) for x in (k_KGH, v_KGH))
    score_NQK = np.einsum("qnh,knh->nqk", q_QNH, k_KNH) * np.float32(scale)
    seen_QK = np.arange(k_KNH.shape[0])[None] <= start + np.arange(q_QNH.shape[0])[:, None]
    score_NQK = np.where(seen_QK, score_NQK, -np.inf)
    p_NQK = np.exp(score_NQK - score_NQK.max(axis=-1, keepdims=True))
    p_NQK /= p_NQK.sum(axis=-1, keepdims=True)
    return np.einsum("nqk,knh->qnh", p_NQK, v_KNH)


def _saturate(x: Array, dtype: jnp.dtype) -> Array:
    """Cast to the cache dtype, clipping to its range (a float8 overflow would be NaN)."""
    limit = float(jnp.finfo(dtype).max)
    return jnp.clip(x, -limit, limit).astype(dtype)


__all__ = ["attention"]
