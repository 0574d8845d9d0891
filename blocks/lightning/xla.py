"""Lightning attention (arXiv:2401.04658) in plain XLA: recurrent step for decode rows, chunks for prefill rows.

Legend: T tokens, S rows, D hidden, H heads (local), G heads of all devices, k = d = head dim
(of keys, of values), F = H*d, L layers with this block, C tokens of a chunk (i, j: two of them).

Per token and head, with slope s > 0 (a constant of layer and head):
    S <- e^-s S + k v^T;  o = S^T q
The outputs of all heads together pass an RMS norm, then a sigmoid gate.

State math is float32 whatever the pool's dtype, and its dot products are Precision.HIGHEST (see
blocks/core/linear.py). Only values <= 0 are exponentiated.
"""

from collections.abc import Iterable
from functools import partial

import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from ..activation.names import Activation
from ..activation.xla import activate
from ..core.batch import Batch, Rows
from ..core.linear import einsum_f32, linear
from ..core.norm import rms_norm
from ..core.recurrence import over_chunks, over_decode_rows


def lightning_slopes(num_heads: int, layers: Iterable[int], num_layers: int) -> np.ndarray:
    """How fast each head of each layer forgets, [L, G] float32.

    2^(-8 (h+1) / G) of head h, falling linearly to nearly 0 with the layer's absolute index among
    num_layers; both small terms as in Hugging Face transformers 5.24.
    """
    head_G = 2.0 ** (-8.0 / num_heads * (np.arange(num_heads) + 1))
    layer_L = 1 - np.asarray(list(layers), np.float64) / (num_layers - 1 + 1e-5) + 1e-5
    return (layer_L[:, None] * head_G).astype(np.float32)


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
    """Lightning attention of every row, from its slot's state (zeros without has_state) and back into it.

    state_pool [L, slots, H, k, d]; pool_layer may be traced. num_heads: local heads.
    activation: of queries, keys and values. norm_eps, norm_zero_centered: the output norm.
    chunk: tokens of one step of the prefill path. max_q: the longest row this bucket may hold; 1
    leaves the prefill path out of the program. sum_axes: mesh axes that cut the heads.
    Returns out [T, D] in h's dtype, partial over sum_axes, and the pool.
    """
    q_THk, k_THk, v_THd = (
        activate(linear(h_TD, w[name]).astype(jnp.float32), activation).reshape(-1, num_heads, head_dim)
        for name in ("w_q", "w_k", "w_v")
    )
    slope_H = _lightning_own_slopes(jnp.asarray(slopes_LG)[pool_layer], num_heads, sum_axes)
    inputs = (q_THk, k_THk, v_THd)
    step, first = partial(_lightning_step, slope_H), tuple(x[: batch.slot.shape[0]] for x in inputs)
    o_THd, state_pool = over_decode_rows(step, first, v_THd.shape, jnp.float32, state_pool, pool_layer, batch)
    if max_q > 1:
        solve = partial(_lightning_chunk, slope_H)
        o_THd, (state_pool,) = over_chunks(solve, inputs, o_THd, (state_pool,), pool_layer, batch, rows, chunk=chunk)

    o_TF = o_THd.reshape(h_TD.shape[0], -1).astype(h_TD.dtype)
    normed_TF = rms_norm(o_TF, w["out_norm"], eps=norm_eps, zero_centered=norm_zero_centered, sum_axes=sum_axes)
    gate_TF = activate(linear(h_TD, w["w_g"]).astype(jnp.float32), "sigmoid")
    y_TF = (normed_TF.astype(jnp.float32) * gate_TF).astype(h_TD.dtype)
    return linear(y_TF, w["w_o"]), state_pool


def _lightning_own_slopes(slope_G: Array, num_heads: int, sum_axes: tuple[str, ...]) -> Array:
    """The slopes of this device's heads."""
    if not sum_axes:
        return slope_G
    return lax.dynamic_slice_in_dim(slope_G, lax.axis_index(sum_axes) * num_heads, num_heads)


def _lightning_step(slope_H: Array, q_Hk: Array, k_Hk: Array, v_Hd: Array, state_Hkd: Array) -> tuple[Array, Array]:
    """One token. Products and sums instead of dots: exact float32, and a matrix unit gains nothing on one vector.

    The output is taken from the old state (o = e^-s S^T q + (k.q) v), so that one pass reads it.
    """
    kept_Hkd = jnp.exp(-slope_H)[:, None, None] * state_Hkd
    o_Hd = jnp.sum(kept_Hkd * q_Hk[:, :, None], axis=1) + jnp.sum(k_Hk * q_Hk, axis=1, keepdims=True) * v_Hd
    return o_Hd, kept_Hkd + k_Hk[:, :, None] * v_Hd[:, None, :]


def _lightning_chunk(
    slope_H: Array, q_CHk: Array, k_CHk: Array, v_CHd: Array, num_valid: Array, state_Hkd: Array
) -> tuple[Array, tuple[Array]]:
    """Outputs [C, H, d] of the first num_valid tokens (the rest of q, k, v are zeros) and the state after them."""
    q_HCk, k_HCk, v_HCd = (x.swapaxes(0, 1) for x in (q_CHk, k_CHk, v_CHd))
    token_C = jnp.arange(q_HCk.shape[1])
    i, j = token_C[:, None], token_C[None]
    slope_H1, slope_H11 = slope_H[:, None], slope_H[:, None, None]
    decay_Hij = jnp.exp(jnp.where(i >= j, -slope_H11 * (i - j), -jnp.inf))
    since_start_HC1 = jnp.exp(-slope_H1 * (token_C + 1))[..., None]
    until_end_HC1 = jnp.exp(-slope_H1 * jnp.maximum(num_valid - 1 - token_C, 0))[..., None]

    o_HCd = einsum_f32("hck,hkd->hcd", q_HCk * since_start_HC1, state_Hkd)
    qk_Hij = einsum_f32("hik,hjk->hij", q_HCk, k_HCk) * decay_Hij
    o_HCd = o_HCd + einsum_f32("hij,hjd->hid", qk_Hij, v_HCd)
    new_Hkd = einsum_f32("hck,hcd->hkd", k_HCk * until_end_HC1, v_HCd)
    return o_HCd.swapaxes(0, 1), (jnp.exp(-slope_H11 * num_valid) * state_Hkd + new_Hkd,)


__all__ = ["lightning", "lightning_slopes"]
