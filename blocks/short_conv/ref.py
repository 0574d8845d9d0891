"""Gated short convolution, float32 meaning: one row at a time, one token at a time.

Legend: T tokens, D hidden, F channels, K taps. Not jittable: it reads the batch on the host.
"""

import jax.numpy as jnp
import numpy as np
from jax import Array

from ..core.batch import Batch, Rows


def short_conv(
    h_TD: Array,
    w: dict[str, Array],
    conv_pool: Array,
    batch: Batch,
    rows: Rows,
    *,
    pool_layer: Array | int,
    conv_kernel: int,
    max_q: int,
    bias: bool = False,
) -> tuple[Array, Array]:
    """y = c * conv(b * x) of every row behind its slot's window; see xla.py.

    Returns out [T, D] float32 (zero for padding tokens, without b_o) and the pool.
    """
    weight = {name: np.asarray(value, np.float32) for name, value in w.items()}
    part = {name: np.asarray(h_TD, np.float32) @ weight[f"w_{name}"] for name in ("b", "c", "x")}
    if bias:
        part = {name: value + weight[f"b_{name}"] for name, value in part.items()}
    in_TF, bias_F = part["b"] * part["x"], weight["conv_bias"] if bias else np.float32(0)
    conv, y_TF = np.array(conv_pool), np.zeros_like(in_TF)
    cu_q = np.asarray(batch.cu_q).tolist()
    for row in range(len(cu_q) - 1):
        if cu_q[row + 1] == cu_q[row]:
            continue
        place = (int(pool_layer), int(batch.slot[row]))
        window_KF = conv[place].astype(np.float32).reshape(conv_kernel - 1, -1)
        if not bool(batch.has_state[row]):
            window_KF = np.zeros_like(window_KF)
        for t in range(cu_q[row], cu_q[row + 1]):
            window_KF = np.concatenate([window_KF, in_TF[t : t + 1]])
            y_TF[t] = part["c"][t] * (np.sum(window_KF * weight["conv"].T, axis=0) + bias_F)
            window_KF = window_KF[1:]
        conv[place] = window_KF.reshape(-1)
    return jnp.asarray(y_TF @ weight["w_o"]), jnp.asarray(conv)


__all__ = ["short_conv"]
