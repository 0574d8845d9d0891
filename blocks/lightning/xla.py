"""Lightning attention (arXiv:2401.04658) in plain XLA: recurrent step for decode rows, chunks for prefill rows.

Legend: T tokens, S rows, D hidden, H heads (local), G heads of all devices, k = d = head dim
(of keys, of values), F = H*d, L layers with this block, C tokens of a chunk (i, j: two of them).

Per token and head, with slope s > 0 (a constant of layer and head):
    S <- e^-s S + k v^T;  o = S^T q
The outputs of all heads together pass an RMS norm, then a sigmoid gate.

State math is float32 whatever the pool's dtype, and its dot products are Precision.HIGHEST (see
blocks/gated_delta/xla.py). Only values <= 0 are exponentiated. The pool is loop-carried and
updated in place, one slot of one layer at a time.
"""

from collections.abc import Iterable

import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from ..activation.names import Activation
from ..activation.xla import activate
from ..core.batch import Batch, Rows


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
        activate(_lightning_linear(h_TD, w[name]).astype(jnp.float32), activation).reshape(-1, num_heads, head_dim)
        for name in ("w_q", "w_k", "w_v")
    )
    slope_H = _lightning_own_slopes(jnp.asarray(slopes_LG)[pool_layer], num_heads, sum_axes)
    args = (q_THk, k_THk, v_THd, slope_H, batch, rows, pool_layer)
    o_THd, state_pool = _lightning_decode(*args, state_pool)
    if max_q > 1:
        o_THd, state_pool = _lightning_prefill(*args, o_THd, state_pool, chunk=chunk)

    o_TF = o_THd.reshape(h_TD.shape[0], -1).astype(h_TD.dtype)
    width = slopes_LG.shape[1] * head_dim
    normed_TF = _lightning_norm(o_TF, w["out_norm"], width, norm_eps, norm_zero_centered, sum_axes)
    gate_TF = lax.logistic(_lightning_linear(h_TD, w["w_g"]).astype(jnp.float32))
    y_TF = (normed_TF.astype(jnp.float32) * gate_TF).astype(h_TD.dtype)
    return _lightning_linear(y_TF, w["w_o"]), state_pool


def _lightning_linear(x: Array, w: Array) -> Array:
    """x @ w accumulated in float32, rounded to x.dtype; precision is the ambient default."""
    return jnp.dot(x, w, preferred_element_type=jnp.float32).astype(x.dtype)


def _lightning_einsum(subscripts: str, a: Array, b: Array) -> Array:
    """A float32 contraction of the state math."""
    return jnp.einsum(subscripts, a, b, precision=lax.Precision.HIGHEST)


def _lightning_own_slopes(slope_G: Array, num_heads: int, sum_axes: tuple[str, ...]) -> Array:
    """The slopes of this device's heads."""
    if not sum_axes:
        return slope_G
    return lax.dynamic_slice_in_dim(slope_G, lax.axis_index(sum_axes) * num_heads, num_heads)


def _lightning_norm(
    o_TF: Array, gain_F: Array, width: int, eps: float, zero_centered: bool, sum_axes: tuple[str, ...]
) -> Array:
    """RMS norm over all heads' outputs, `width` of them, with the rounding points of core/norm.py."""
    o32_TF = o_TF.astype(jnp.float32)
    square_T1 = jnp.sum(o32_TF * o32_TF, axis=-1, keepdims=True)
    if sum_axes:
        square_T1 = lax.psum(square_T1, sum_axes)
    normed_TF = o32_TF * lax.rsqrt(square_T1 / width + eps)
    if zero_centered:
        return (normed_TF * (1.0 + gain_F.astype(jnp.float32))).astype(o_TF.dtype)
    return normed_TF.astype(o_TF.dtype) * gain_F.astype(o_TF.dtype)


def _lightning_decode(
    q_THk: Array,
    k_THk: Array,
    v_THd: Array,
    slope_H: Array,
    batch: Batch,
    rows: Rows,
    pool_layer: Array | int,
    state_pool: Array,
) -> tuple[Array, Array]:
    """The decode rows (token s belongs to row s); outputs are zeros for other tokens. [T, H, d] float32.

    The states go through a loop one row at a time, so that no second copy of them exists. The
    output is taken from the old state (o = e^-s S^T q + (k.q) v), so that one pass reads it.
    """
    decay_H11 = jnp.exp(-slope_H)[:, None, None]

    def add_row(s: Array, carry: tuple[Array, Array]) -> tuple[Array, Array]:
        o_THd, state_pool = carry
        q_Hk, k_Hk, v_Hd = q_THk[s], k_THk[s], v_THd[s]
        kept_Hkd = decay_H11 * _lightning_read_state(state_pool, pool_layer, batch.slot[s], batch.has_state[s])
        # Products and sums instead of dots: exact float32, and a matrix unit gains nothing on one vector.
        o_Hd = jnp.sum(kept_Hkd * q_Hk[:, :, None], axis=1) + jnp.sum(k_Hk * q_Hk, axis=1, keepdims=True) * v_Hd
        new_Hkd = kept_Hkd + k_Hk[:, :, None] * v_Hd[:, None, :]
        return o_THd.at[s].set(o_Hd), _lightning_write_state(state_pool, pool_layer, batch.slot[s], new_Hkd)

    return lax.fori_loop(0, batch.distribution[0], add_row, (jnp.zeros_like(v_THd), state_pool))


def _lightning_read_state(state_pool: Array, layer: Array | int, slot: Array, has_state: Array) -> Array:
    """One slot's state [H, k, d] in float32; zeros (whatever the slot holds) without has_state."""
    state = lax.dynamic_slice(state_pool, (layer, slot, 0, 0, 0), (1, 1, *state_pool.shape[2:]))[0, 0]
    return jnp.where(has_state, state.astype(jnp.float32), 0)


def _lightning_write_state(state_pool: Array, layer: Array | int, slot: Array, state_Hkd: Array) -> Array:
    update = state_Hkd.astype(state_pool.dtype)[None, None]
    return lax.dynamic_update_slice(state_pool, update, (layer, slot, 0, 0, 0))


def _lightning_prefill(
    q_THk: Array,
    k_THk: Array,
    v_THd: Array,
    slope_H: Array,
    batch: Batch,
    rows: Rows,
    pool_layer: Array | int,
    o_THd: Array,
    state_pool: Array,
    *,
    chunk: int,
) -> tuple[Array, Array]:
    """The prefill rows' tokens into o_THd; chunks start at row starts, work items run in a loop.

    All trip counts are dynamic. Within a row the state stays float32 from chunk to chunk; it
    takes the pool's dtype at the end of the row.
    """
    T = q_THk.shape[0]
    # `chunk` tokens of padding: the last chunk of the last row is then sliced whole.
    q_THk, k_THk, v_THd, o_THd = (jnp.pad(x, ((0, chunk), (0, 0), (0, 0))) for x in (q_THk, k_THk, v_THd, o_THd))

    def add_row(s: Array, carry: tuple[Array, Array]) -> tuple[Array, Array]:
        o_THd, state_pool = carry
        slot, q_len = batch.slot[s], rows.q_len[s]

        def add_chunk(c: Array, carry: tuple[Array, Array]) -> tuple[Array, Array]:
            o_THd, state_Hkd = carry
            first, num_valid = batch.cu_q[s] + c * chunk, jnp.minimum(q_len - c * chunk, chunk)
            valid_C11 = (jnp.arange(chunk) < num_valid)[:, None, None]
            # Other rows' tokens are cleared, not only weighted by 0: they may hold NaN.
            q_HCk, k_HCk, v_HCd = (
                jnp.where(valid_C11, lax.dynamic_slice_in_dim(x, first, chunk), 0).swapaxes(0, 1)
                for x in (q_THk, k_THk, v_THd)
            )
            new_HCd, state_Hkd = _lightning_chunk(q_HCk, k_HCk, v_HCd, slope_H, num_valid, state_Hkd)
            o_CHd = jnp.where(valid_C11, new_HCd.swapaxes(0, 1), lax.dynamic_slice_in_dim(o_THd, first, chunk))
            return lax.dynamic_update_slice_in_dim(o_THd, o_CHd, first, 0), state_Hkd

        state_Hkd = _lightning_read_state(state_pool, pool_layer, slot, batch.has_state[s])
        o_THd, state_Hkd = lax.fori_loop(0, (q_len + chunk - 1) // chunk, add_chunk, (o_THd, state_Hkd))
        return o_THd, _lightning_write_state(state_pool, pool_layer, slot, state_Hkd)

    o_THd, state_pool = lax.fori_loop(batch.distribution[0], batch.distribution[1], add_row, (o_THd, state_pool))
    return o_THd[:T], state_pool


def _lightning_chunk(
    q_HCk: Array, k_HCk: Array, v_HCd: Array, slope_H: Array, num_valid: Array, state_Hkd: Array
) -> tuple[Array, Array]:
    """Outputs [H, C, d] of the first num_valid tokens (the rest of q, k, v are zeros) and the state after them."""
    token_C = jnp.arange(q_HCk.shape[1])
    i, j = token_C[:, None], token_C[None]
    slope_H1, slope_H11 = slope_H[:, None], slope_H[:, None, None]
    decay_Hij = jnp.exp(jnp.where(i >= j, -slope_H11 * (i - j), -jnp.inf))
    since_start_HC1 = jnp.exp(-slope_H1 * (token_C + 1))[..., None]
    until_end_HC1 = jnp.exp(-slope_H1 * jnp.maximum(num_valid - 1 - token_C, 0))[..., None]

    o_HCd = _lightning_einsum("hck,hkd->hcd", q_HCk * since_start_HC1, state_Hkd)
    qk_Hij = _lightning_einsum("hik,hjk->hij", q_HCk, k_HCk) * decay_Hij
    o_HCd = o_HCd + _lightning_einsum("hij,hjd->hid", qk_Hij, v_HCd)
    new_Hkd = _lightning_einsum("hck,hcd->hkd", k_HCk * until_end_HC1, v_HCd)
    return o_HCd, jnp.exp(-slope_H11 * num_valid) * state_Hkd + new_Hkd


__all__ = ["lightning", "lightning_slopes"]
