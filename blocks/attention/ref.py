"""Attention, float32 meaning: one row at a time, softmax over all keys the row's queries see.

Legend: S rows, T tokens, D hidden, N q heads, G kv heads, H head_dim, V v_head_dim, C = G*(H+V) (one
cached token: all key heads, then all value heads), L attention layers, Q queries and K keys of a row.
Not jittable: it reads the batch on the host.
"""

from typing import Literal

import jax.numpy as jnp
import numpy as np
from jax import Array

from ..activation.ref import activate
from ..core.batch import Batch, Rows
from ..core.ref import kept, rms_of, rotated, row_ranges, temperature_of
from ..core.rope_spec import Rope


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
    """Causal attention of every row over its cached pages and its own tokens; see xla.py.

    Returns out [T, D] float32 (zero for padding tokens) and the new cache rows [T, C] in the
    pool's dtype. Keys and values are rounded to the pool's dtype before use, cached or not.
    All heads are here: sum_axes, which names devices that hold the others, must be empty.
    """
    assert not sum_axes
    T, N, G, H, V = h_TD.shape[0], num_q_heads, num_kv_heads, head_dim, v_head_dim or head_dim
    x_TD = np.asarray(h_TD, np.float32)
    weight = {name: np.asarray(value, np.float32) for name, value in w.items()}

    def heads(name: str, number: int, bias: bool = qkv_bias) -> np.ndarray:
        return (x_TD @ weight[f"w_{name}"] + (weight[f"b_{name}"] if bias else 0)).reshape(T, number, -1)

    def normed(x_TNH: np.ndarray, name: str) -> np.ndarray:
        gain = weight[name] if qk_norm in ("head", "full") else None
        return _qk_norm(x_TNH, gain, qk_norm, norm_eps, norm_zero_centered)

    q_TNX, k_TGH = heads("q", N), heads("k", G)
    q_TNH, v_TGV = q_TNX[..., :H], k_TGH if keys_as_values else heads("v", G)
    if qk_norm_place == "before_rope":
        q_TNH, k_TGH = normed(q_TNH, "q_norm"), normed(k_TGH, "k_norm")
    if v_norm:
        v_TGV = rms_of(v_TGV, eps=norm_eps)
    if clip_qkv is not None:
        q_TNH, k_TGH, v_TGV = (np.clip(x, -clip_qkv, clip_qkv) for x in (q_TNH, k_TGH, v_TGV))
    q_TNH, k_TGH = (rotated(x, batch.positions, rope) for x in (q_TNH, k_TGH))
    if qk_norm_place == "after_rope":
        q_TNH, k_TGH = normed(q_TNH, "q_norm"), normed(k_TGH, "k_norm")
    if temperature is not None:
        q_TNH = q_TNH * temperature_of(batch.positions, *temperature)[:, None, None]
    kv_TC = np.concatenate([k_TGH.reshape(T, G * H), value_scale * v_TGV.reshape(T, G * V)], axis=-1)
    kv_new_TC = kept(kv_TC, kv_pool.dtype)

    new_TC, out_TNV = kv_new_TC.astype(np.float32), np.zeros((T, N, V), np.float32)
    sink_N = weight["sinks"] if sinks else None
    for row, first, last, start in row_ranges(batch, rows):
        pages = np.asarray(batch.page_table[row]) + int(pool_layer) * num_pages
        old_KC = np.asarray(kv_pool[pages], np.float32).reshape(-1, G * (H + V))[:start]
        kv_KC = np.concatenate([old_KC, new_TC[first:last]])
        k_KGH, v_KGV = kv_KC[:, : G * H].reshape(-1, G, H), kv_KC[:, G * H :].reshape(-1, G, V)
        seen_QK = _seen(start + np.arange(last - first), np.arange(len(kv_KC)), window, chunk)
        out_TNV[first:last] = _attend(q_TNH[first:last], k_KGH, v_KGV, seen_QK, scale, softcap, sink_N)
    if output_gate is not None:
        gate_TNX = q_TNX[..., H:] if gate_stored == "fused" else heads("g", N, bias=False)
        out_TNV = out_TNV * activate(gate_TNX, output_gate)
    return jnp.asarray(out_TNV.reshape(T, N * V) @ weight["w_o"]), jnp.asarray(kv_new_TC)


def _qk_norm(x_TNH: np.ndarray, gain: np.ndarray | None, kind: str, eps: float, zero_centered: bool) -> np.ndarray:
    """Norm of each head, or of all heads as one vector."""
    if kind == "none":
        return x_TNH
    flat = x_TNH.reshape(len(x_TNH), -1) if kind == "full" else x_TNH
    return rms_of(flat, gain, eps=eps, zero_centered=zero_centered).reshape(x_TNH.shape)


def _seen(query_Q: np.ndarray, key_K: np.ndarray, window: int | None, chunk: int | None) -> np.ndarray:
    """Which key positions a query position sees [Q, K]: no later ones, within the window or its own chunk."""
    query_Q1 = query_Q[:, None]
    seen_QK = key_K <= query_Q1
    if window is not None:
        seen_QK &= query_Q1 - key_K < window
    if chunk is not None:
        seen_QK &= query_Q1 // chunk == key_K // chunk
    return seen_QK


def _attend(
    q_QNH: np.ndarray,
    k_KGH: np.ndarray,
    v_KGV: np.ndarray,
    seen_QK: np.ndarray,
    scale: float,
    softcap: float | None,
    sink_N: np.ndarray | None,
) -> np.ndarray:
    """Softmax attention of one row; a sink is a score whose value is zero."""
    heads_per_group = q_QNH.shape[1] // k_KGH.shape[1]
    k_KNH, v_KNV = (np.repeat(x, heads_per_group, axis=1) for x in (k_KGH, v_KGV))
    score_NQK = np.einsum("qnh,knh->nqk", q_QNH, k_KNH) * np.float32(scale)
    if softcap is not None:
        score_NQK = softcap * np.tanh(score_NQK / softcap)
    score_NQK = np.where(seen_QK, score_NQK, -np.inf)
    top_NQ1 = score_NQK.max(axis=-1, keepdims=True)
    if sink_N is not None:
        top_NQ1 = np.maximum(top_NQ1, sink_N[:, None, None])
    p_NQK = np.exp(score_NQK - top_NQ1)
    total_NQ1 = p_NQK.sum(axis=-1, keepdims=True)
    if sink_N is not None:
        total_NQ1 = total_NQ1 + np.exp(sink_N[:, None, None] - top_NQ1)
    return np.einsum("nqk,knv->qnv", p_NQK / total_NQ1, v_KNV)


__all__ = ["attention"]
