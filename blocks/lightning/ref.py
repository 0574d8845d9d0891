"""Lightning attention, float32 meaning: one row at a time, one token at a time.

Legend: S rows, T tokens, D hidden, H heads, k = d = head dim (of keys, of values), L layers with
this block. Not jittable: it reads the batch on the host.
"""

from collections.abc import Iterable

import jax.numpy as jnp
import numpy as np
from jax import Array

from ..activation.names import Activation
from ..activation.ref import activate, sigmoid_of
from ..core.batch import Batch, Rows


def lightning(
    h_TD: Array,
    w: dict[str, Array],
    state_pool: Array,
    batch: Batch,
    rows: Rows,
    *,
    pool_layer: Array | int,
    slopes_LG: Array | np.ndarray,
    num_heads: int,
    head_dim: int,
    norm_eps: float,
    norm_zero_centered: bool,
    chunk: int,
    max_q: int,
    activation: Activation = "silu",
    sum_axes: tuple[str, ...] = (),
) -> tuple[Array, Array]:
    """The recurrence of every row from its slot's state; see xla.py. All heads are here: sum_axes is empty.

    Returns out [T, D] float32 (zero for padding tokens) and the pool.
    """
    assert not sum_axes, "the reference has no devices to sum over"
    T, H, d = h_TD.shape[0], num_heads, head_dim
    x_TD = np.asarray(h_TD, np.float32)
    weight = {name: np.asarray(value, np.float32) for name, value in w.items()}
    q_THk, k_THk, v_THd = (activate(x_TD @ weight[name], activation).reshape(T, H, d) for name in ("w_q", "w_k", "w_v"))
    decay_H11 = np.exp(-np.asarray(slopes_LG, np.float32)[int(pool_layer)])[:, None, None]

    state = np.array(state_pool)
    o_THd = np.zeros((T, H, d), np.float32)
    cu_q = np.asarray(batch.cu_q).tolist()
    for row in range(len(cu_q) - 1):
        if cu_q[row + 1] == cu_q[row]:
            continue
        place = (int(pool_layer), int(batch.slot[row]))
        state_Hkd = state[place].astype(np.float32) if bool(batch.has_state[row]) else np.zeros((H, d, d), np.float32)
        for t in range(cu_q[row], cu_q[row + 1]):
            state_Hkd = decay_H11 * state_Hkd + k_THk[t][:, :, None] * v_THd[t][:, None, :]
            o_THd[t] = np.einsum("hkd,hk->hd", state_Hkd, q_THk[t])
        state[place] = state_Hkd
    o_TF = o_THd.reshape(T, H * d)
    normed_TF = o_TF / np.sqrt(np.mean(o_TF**2, axis=-1, keepdims=True) + np.float32(norm_eps))
    gain_F = weight["out_norm"] + np.float32(norm_zero_centered)
    y_TF = normed_TF * gain_F * sigmoid_of(x_TD @ weight["w_g"])
    return jnp.asarray(y_TF @ weight["w_o"]), jnp.asarray(state)


def lightning_slopes(num_heads: int, layers: Iterable[int], num_layers: int) -> np.ndarray:
    """How fast each head of each layer forgets [L, H], one by one, as in Hugging Face transformers 5.24."""
    base, factors = 1 / 2 ** (8 / num_heads), [1 - layer / (num_layers - 1 + 1e-5) + 1e-5 for layer in layers]
    return np.asarray([[base ** (head + 1) * factor for head in range(num_heads)] for factor in factors], np.float32)


__all__ = ["lightning", "lightning_slopes"]
