"""Gated DeltaNet, float32 meaning: one row at a time, one token at a time. Options: see xla.py.

Legend: S rows, T tokens, D hidden, Q query/key heads, V value heads, dk and dv their dims,
F = 2*Q*dk + V*dv conv channels (q | k | v), taps = conv_kernel. Not jittable: it reads the
batch on the host.
"""

from typing import Literal

import jax.numpy as jnp
import numpy as np
from jax import Array

from ..activation.ref import activate, sigmoid_of
from ..core.batch import Batch, Rows


def gated_delta(
    h_TD: Array,
    w: dict[str, Array],
    conv_pool: Array,
    state_pool: Array,
    batch: Batch,
    rows: Rows,
    *,
    pool_layer: Array | int,
    num_qk_heads: int,
    num_v_heads: int,
    head_k_dim: int,
    head_v_dim: int,
    conv_kernel: int,
    norm_eps: float,
    norm_zero_centered: bool,
    chunk: int,
    max_q: int,
    channel_decay: bool = False,
    decay_lower_bound: float | None = None,
    gate_activation: Literal["silu", "sigmoid"] = "silu",
    negative_eigenvalues: bool = False,
) -> tuple[Array, Array, Array]:
    """The recurrence of every row from its slot's state; see xla.py.

    Returns out [T, D] float32 (zero for padding tokens) and the two pools.
    """
    T, Q, V, dk, dv = h_TD.shape[0], num_qk_heads, num_v_heads, head_k_dim, head_v_dim
    x_TD = np.asarray(h_TD, np.float32)
    weight = {name: np.asarray(value, np.float32) for name, value in w.items()}
    m_TF = np.concatenate([x_TD @ weight[name] for name in ("w_q", "w_k", "w_v")], axis=1)
    taps_FK = np.concatenate([weight[name] for name in ("conv_q", "conv_k", "conv_v")])
    z_TVd = _project(x_TD, weight, "w_z", "g").reshape(T, V, dv)
    beta_TV = sigmoid_of(x_TD @ weight["w_b"]) * np.float32(2 if negative_eigenvalues else 1)
    a_TVr = (_project(x_TD, weight, "w_a", "f") + weight["dt_bias"]).reshape(T, V, dk if channel_decay else 1)
    g_TVr = _log_decay(a_TVr, weight["a_log"], decay_lower_bound)

    conv, state = np.array(conv_pool), np.array(state_pool)
    o_TVd = np.zeros((T, V, dv), np.float32)
    cu_q = np.asarray(batch.cu_q).tolist()
    for row in range(len(cu_q) - 1):
        if cu_q[row + 1] == cu_q[row]:
            continue
        place = (int(pool_layer), int(batch.slot[row]))
        window_KF = conv[place].astype(np.float32).reshape(conv_kernel - 1, -1)
        state_Vkd = state[place].astype(np.float32)
        if not bool(batch.has_state[row]):
            window_KF, state_Vkd = np.zeros_like(window_KF), np.zeros_like(state_Vkd)
        for t in range(cu_q[row], cu_q[row + 1]):
            window_KF = np.concatenate([window_KF, m_TF[t : t + 1]])
            m_F = activate(np.sum(window_KF * taps_FK.T, axis=0), "silu")
            window_KF = window_KF[1:]
            q_Vk, k_Vk = (
                np.repeat(_unit(x.reshape(Q, dk)), V // Q, axis=0) for x in (m_F[: Q * dk], m_F[Q * dk : 2 * Q * dk])
            )
            o_TVd[t], state_Vkd = _step(
                q_Vk / np.float32(dk**0.5), k_Vk, m_F[2 * Q * dk :].reshape(V, dv), beta_TV[t], g_TVr[t], state_Vkd
            )
        conv[place] = window_KF.reshape(-1)
        state[place] = state_Vkd
    normed_TVd = o_TVd / np.sqrt(np.mean(o_TVd**2, axis=-1, keepdims=True) + np.float32(norm_eps))
    gain_d = weight["out_norm"] + np.float32(norm_zero_centered)
    gate_TVd = activate(z_TVd, gate_activation)
    y_TF = (normed_TVd * gain_d * gate_TVd).reshape(T, V * dv)
    return jnp.asarray(y_TF @ weight["w_o"]), jnp.asarray(conv), jnp.asarray(state)


def _step(
    q_Vk: np.ndarray, k_Vk: np.ndarray, v_Vd: np.ndarray, beta_V: np.ndarray, g_Vr: np.ndarray, state_Vkd: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """One token: decay the state, correct what it stores under key k, read it with q."""
    state_Vkd = state_Vkd * np.exp(g_Vr)[:, :, None]
    error_Vd = v_Vd - np.einsum("vkd,vk->vd", state_Vkd, k_Vk)
    state_Vkd = state_Vkd + k_Vk[:, :, None] * (beta_V[:, None] * error_Vd)[:, None, :]
    return np.einsum("vkd,vk->vd", state_Vkd, q_Vk), state_Vkd


def _project(x_TD: np.ndarray, weight: dict[str, np.ndarray], whole: str, halves: str) -> np.ndarray:
    """Through one matrix, or through the two of a low-rank one."""
    if whole in weight:
        return x_TD @ weight[whole]
    return x_TD @ weight[f"{halves}_a"] @ weight[f"{halves}_b"]


def _log_decay(a_TVr: np.ndarray, a_log_V: np.ndarray, lower_bound: float | None) -> np.ndarray:
    """Always <= 0; r: one rate per head, or one per channel."""
    speed_V1 = np.exp(a_log_V)[:, None]
    if lower_bound is not None:
        return np.float32(lower_bound) * sigmoid_of(speed_V1 * a_TVr)
    return -speed_V1 * activate(a_TVr, "softplus")


def _unit(x: np.ndarray) -> np.ndarray:
    """l2 normalisation, epsilon inside the root of the sum as in Hugging Face transformers 5.24."""
    return x / np.sqrt(np.sum(x * x, axis=-1, keepdims=True) + np.float32(1e-6))


__all__ = ["gated_delta"]
