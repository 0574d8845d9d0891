"""Mamba-2, float32 meaning: one row at a time, one token at a time.

Legend: S rows, T tokens, D hidden, H heads, G groups, P channels of a head, N state size,
I = H*P, F = I + 2*G*N conv channels (x | B | C), K taps. Not jittable: it reads the batch on the host.
"""

import jax.numpy as jnp
import numpy as np
from jax import Array

from ..activation.ref import activate
from ..core.batch import Batch, Rows


def mamba2(
    h_TD: Array,
    w: dict[str, Array],
    conv_pool: Array,
    conv_bc_pool: Array,
    state_pool: Array,
    batch: Batch,
    rows: Rows,
    *,
    pool_layer: Array | int,
    num_heads: int,
    num_groups: int,
    head_dim: int,
    state_size: int,
    conv_kernel: int,
    norm_eps: float,
    chunk: int,
    max_q: int,
    norm_zero_centered: bool = False,
    time_step_min: float = 0.0,
    time_step_max: float | None = None,
    conv_bias: bool = False,
    proj_bias: bool = False,
    sum_axes: tuple[str, ...] = (),
    norm_groups: int = 1,
) -> tuple[Array, Array, Array, Array]:
    """The recurrence of every row from its slot's state; see xla.py.

    Returns out [T, D] float32 (of padding tokens: anything) and the three pools.
    """
    assert not sum_axes, "the meaning is that of the uncut block"
    T, H, G, P, N = h_TD.shape[0], num_heads, num_groups, head_dim, state_size
    weight = {name: np.asarray(value, np.float32) for name, value in w.items()}
    part = {name: np.asarray(h_TD, np.float32) @ weight[f"w_{name}"] for name in ("z", "x", "b", "c", "dt")}
    if proj_bias:
        part = {name: value + weight[f"b_{name}"] for name, value in part.items()}
    in_TF = np.concatenate([part[name] for name in ("x", "b", "c")], axis=1)
    taps_FK = np.concatenate([weight[f"conv_{name}"] for name in ("x", "b", "c")])
    bias_F = np.concatenate([weight[f"conv_{name}_bias"] for name in ("x", "b", "c")]) if conv_bias else np.float32(0)
    dt_TH = np.clip(activate(part["dt"] + weight["dt_bias"], "softplus"), time_step_min, time_step_max)

    conv, conv_bc, state = (np.array(pool) for pool in (conv_pool, conv_bc_pool, state_pool))
    y_THP = np.zeros((T, H, P), np.float32)
    cu_q = np.asarray(batch.cu_q).tolist()
    for row in range(len(cu_q) - 1):
        if cu_q[row + 1] == cu_q[row]:
            continue
        place = (int(pool_layer), int(batch.slot[row]))
        halves = [pool[place].astype(np.float32).reshape(conv_kernel - 1, -1) for pool in (conv, conv_bc)]
        window_KF, state_HPN = np.concatenate(halves, axis=1), state[place].astype(np.float32)
        if not bool(batch.has_state[row]):
            window_KF, state_HPN = np.zeros_like(window_KF), np.zeros_like(state_HPN)
        for t in range(cu_q[row], cu_q[row + 1]):
            window_KF = np.concatenate([window_KF, in_TF[t : t + 1]])
            m_F = activate(np.sum(window_KF * taps_FK.T, axis=0) + bias_F, "silu")
            window_KF = window_KF[1:]
            x_HP = m_F[: H * P].reshape(H, P)
            b_HN, c_HN = (np.repeat(half.reshape(G, N), H // G, axis=0) for half in np.split(m_F[H * P :], 2))
            decay_H = np.exp(-np.exp(weight["a_log"]) * dt_TH[t])
            write_HPN = (dt_TH[t, :, None] * x_HP)[:, :, None] * b_HN[:, None, :]
            state_HPN = decay_H[:, None, None] * state_HPN + write_HPN
            y_THP[t] = np.einsum("hpn,hn->hp", state_HPN, c_HN) + weight["d"][:, None] * x_HP
        conv[place] = window_KF[:, : H * P].reshape(-1)
        conv_bc[place] = window_KF[:, H * P :].reshape(-1)
        state[place] = state_HPN
    gated_TGi = (y_THP.reshape(T, -1) * activate(part["z"], "silu")).reshape(T, G, -1)
    normed_TGi = gated_TGi / np.sqrt(np.mean(gated_TGi**2, axis=-1, keepdims=True) + np.float32(norm_eps))
    out_TD = normed_TGi.reshape(T, -1) * (weight["out_norm"] + np.float32(norm_zero_centered)) @ weight["w_o"]
    return jnp.asarray(out_TD), jnp.asarray(conv), jnp.asarray(conv_bc), jnp.asarray(state)


__all__ = ["mamba2"]
