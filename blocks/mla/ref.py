"""Latent attention, float32 meaning: every head's keys and values written out, one row at a time.

Legend: S rows, T tokens, D hidden, N heads, R latent (kv_lora_rank), E rope dims, C = R + E (one cached token:
normed latent, then rotated shared key), H nope dims, V value dims, Q queries and K keys of a row, L layers.
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
    """Causal attention of every row over its cached pages and its own tokens; see xla.py.

    Returns out [T, D] float32 (zero for padding tokens) without the output's bias, and the new cache rows [T, C] in
    the pool's dtype. Rows are rounded to that dtype before use, cached or not.
    """
    T, N, R, H = h_TD.shape[0], num_heads, kv_lora_rank, qk_nope_head_dim
    X = H + w["w_kv_a"].shape[1] - R
    x_TD = np.asarray(h_TD, np.float32)
    weight = {name: np.asarray(value, np.float32) for name, value in w.items()}

    def norm(x: np.ndarray, name: str) -> np.ndarray:
        return rms_of(x, weight[name], eps=norm_eps, zero_centered=norm_zero_centered)

    if query_latent:
        a_TF = x_TD @ weight["w_q_a"] + (weight["b_q_a"] if bias else 0)
        made_TNF = (norm(a_TF, "q_a_norm") @ weight["w_q_b"]).reshape(T, N, -1)
    else:
        made_TNF = (x_TD @ weight["w_q"]).reshape(T, N, -1)
    turned_TNE = rotated(made_TNF[..., H:X], batch.positions, rope_spec)
    q_TNX = np.concatenate([made_TNF[..., :H], turned_TNE], axis=-1)
    if temperature is not None:
        q_TNX = q_TNX * temperature_of(batch.positions, *temperature)[:, None, None]

    a_TC = x_TD @ weight["w_kv_a"] + (weight["b_kv_a"] if bias else 0)
    shared_TE = rotated(a_TC[:, None, R:], batch.positions, rope_spec)[:, 0]
    kv_new_TC = kept(np.concatenate([norm(a_TC[:, :R], "kv_a_norm"), shared_TE], axis=-1), kv_pool.dtype)
    new_TC, C = kv_new_TC.astype(np.float32), kv_new_TC.shape[1]

    out_TNV = np.zeros((T, N, v_head_dim), np.float32)
    for row, first, last, start in row_ranges(batch, rows):
        pages = np.asarray(batch.page_table[row]) + int(pool_layer) * num_pages
        old_KC = np.asarray(kv_pool[pages], np.float32).reshape(-1, kv_pool.shape[2])[:start, :C]
        k_KNX, v_KNV = _expand(np.concatenate([old_KC, new_TC[first:last]]), weight["w_kv_b"], N, R, H)
        out_TNV[first:last] = _attend(q_TNX[first:last], k_KNX, v_KNV, start, scale)
    if output_gate:
        gate_TNY = (x_TD @ weight["w_g"]).reshape(T, N, -1) if gate_stored == "own" else made_TNF[..., X:]
        out_TNV = out_TNV * activate(gate_TNY, output_gate)
    kv_new_TC = np.pad(kv_new_TC, ((0, 0), (0, kv_pool.shape[2] - C)))
    return jnp.asarray(out_TNV.reshape(T, -1) @ weight["w_o"]), jnp.asarray(kv_new_TC)


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


__all__ = ["mla"]
