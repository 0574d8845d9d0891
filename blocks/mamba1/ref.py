"""Mamba, float32 meaning: one row at a time, one token at a time.

Legend: T tokens, D hidden, I channels, N state size, K taps. Not jittable: it reads the batch on the host.
"""

import jax.numpy as jnp
import numpy as np
from jax import Array

from ..activation.ref import activate
from ..core.batch import Batch, Rows


def mamba1(
    h_TD: Array,
    w: dict[str, Array],
    conv_pool: Array,
    state_pool: Array,
    batch: Batch,
    rows: Rows,
    *,
    pool_layer: Array | int,
    conv_kernel: int,
    chunk: int,
    max_q: int,
    conv_bias: bool = False,
    proj_bias: bool = False,
    norm_eps: float | None = None,
    norm_zero_centered: bool = False,
    sum_axes: tuple[str, ...] = (),
) -> tuple[Array, Array, Array]:
    """The selective scan of every row from its slot's state; see xla.py.

    Returns out [T, D] float32 (zero for padding tokens, without b_o) and the two pools.
    """
    assert not sum_axes, "the meaning is that of the uncut block"
    weight = {name: np.asarray(value, np.float32) for name, value in w.items()}
    x_TI, z_TI = (np.asarray(h_TD, np.float32) @ weight[name] for name in ("w_x", "w_z"))
    if proj_bias:
        x_TI, z_TI = x_TI + weight["b_x"], z_TI + weight["b_z"]
    bias_I = weight["conv_bias"] if conv_bias else np.float32(0)
    decay_rate_NI = -np.exp(weight["a_log"].T)

    conv, state, y_TI = np.array(conv_pool), np.array(state_pool), np.zeros_like(x_TI)
    cu_q = np.asarray(batch.cu_q).tolist()
    for row in range(len(cu_q) - 1):
        if cu_q[row + 1] == cu_q[row]:
            continue
        place = (int(pool_layer), int(batch.slot[row]))
        window_KI = conv[place].astype(np.float32).reshape(conv_kernel - 1, -1)
        state_NI = state[place].astype(np.float32)
        if not bool(batch.has_state[row]):
            window_KI, state_NI = np.zeros_like(window_KI), np.zeros_like(state_NI)
        for t in range(cu_q[row], cu_q[row + 1]):
            window_KI = np.concatenate([window_KI, x_TI[t : t + 1]])
            x_I = activate(np.sum(window_KI * weight["conv"].T, axis=0) + bias_I, "silu")
            window_KI = window_KI[1:]
            dt_r, b_N, c_N = (x_I @ weight[f"x_{name}"] for name in ("dt", "b", "c"))
            if norm_eps is not None:
                dt_r, b_N, c_N = (
                    _rms(value, weight[f"{name}_norm"] + np.float32(norm_zero_centered), norm_eps)
                    for name, value in (("dt", dt_r), ("b", b_N), ("c", c_N))
                )
            dt_I = activate(dt_r @ weight["w_dt"] + weight["dt_bias"], "softplus")
            state_NI = np.exp(dt_I * decay_rate_NI) * state_NI + b_N[:, None] * (dt_I * x_I)
            y_TI[t] = (c_N @ state_NI + weight["d"] * x_I) * activate(z_TI[t], "silu")
        conv[place] = window_KI.reshape(-1)
        state[place] = state_NI
    return jnp.asarray(y_TI @ weight["w_o"]), jnp.asarray(conv), jnp.asarray(state)


def _rms(x: np.ndarray, gain: np.ndarray, eps: float) -> np.ndarray:
    return x / np.sqrt(np.mean(x * x) + np.float32(eps)) * gain


__all__ = ["mamba1"]
