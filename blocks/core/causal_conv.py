"""Causal depthwise convolution over a ragged batch, its window carried in a slot pool.

Legend: T tokens, S rows, F channels, K taps (the last one = current token), W = K - 1 (window).
"""

import jax.numpy as jnp
from jax import Array

from .batch import Batch, Rows


def causal_conv(
    in_TF: Array,
    taps_FK: Array,
    bias_F: Array | None,
    pool: Array,
    batch: Batch,
    rows: Rows,
    *,
    pool_layer: Array | int,
    max_q: int,
) -> tuple[Array, Array]:
    """Each row's inputs behind its slot's window (zeros without has_state), convolved; no activation.

    pool [L, slots, W*F] or, in tiles, [L, slots, W*F/128, 128], oldest input first; pool_layer may be traced. max_q:
    the longest row this
    bucket may hold; with 1, token s belongs to row s. Returns conv [T, F] float32 (anything for
    padding tokens, also NaN) and the pool.
    """
    window = taps_FK.shape[1] - 1
    slot_S = jnp.where(rows.q_len > 0, batch.slot, 0)
    old_SWF = pool[pool_layer, slot_S].reshape(-1, window, in_TF.shape[1])
    old_SWF = jnp.where(batch.has_state[:, None, None], old_SWF, 0)
    new_SWF = _conv_next_window(in_TF, old_SWF, batch, rows, max_q=max_q)
    pool = pool.at[pool_layer, slot_S].set(new_SWF.reshape(-1, *pool.shape[2:]).astype(pool.dtype))

    taps_KF = taps_FK.astype(jnp.float32).T
    conv_TF = in_TF.astype(jnp.float32) * taps_KF[window]
    for lag in range(1, window + 1):
        before_TF = _conv_lagged(in_TF, old_SWF, rows, lag=lag, max_q=max_q)
        conv_TF = conv_TF + before_TF.astype(jnp.float32) * taps_KF[window - lag]
    return conv_TF if bias_F is None else conv_TF + bias_F.astype(jnp.float32), pool


def _conv_lagged(in_TF: Array, old_SWF: Array, rows: Rows, *, lag: int, max_q: int) -> Array:
    """The input `lag` tokens before each token in its own row: from this step, or from the window."""
    window = old_SWF.shape[1]
    if max_q == 1:
        return old_SWF[: in_TF.shape[0], window - lag]
    in_step_T = rows.offset >= lag
    place_T = jnp.clip(window - lag + rows.offset, 0, window - 1)
    shifted_TF = jnp.pad(in_TF, ((lag, 0), (0, 0)))[: in_TF.shape[0]]
    return jnp.where(in_step_T[:, None], shifted_TF, old_SWF[rows.row, place_T].astype(in_TF.dtype))


def _conv_next_window(in_TF: Array, old_SWF: Array, batch: Batch, rows: Rows, *, max_q: int) -> Array:
    """Each row's last W inputs after this step; anything for empty rows."""
    (T, _), (S, window, _) = in_TF.shape, old_SWF.shape
    if max_q == 1:
        assert T == S, (T, S)
        return jnp.concatenate([old_SWF[:, 1:], in_TF[:, None].astype(old_SWF.dtype)], axis=1)
    offset_SW = rows.q_len[:, None] - window + jnp.arange(window)
    in_step_SW = offset_SW >= 0
    new_SWF = in_TF[jnp.clip(batch.cu_q[:-1, None] + offset_SW, 0, T - 1)]
    kept_SWF = jnp.take_along_axis(old_SWF, jnp.clip(window + offset_SW, 0, window - 1)[..., None], axis=1)
    return jnp.where(in_step_SW[..., None], new_SWF.astype(old_SWF.dtype), kept_SWF)


__all__ = ["causal_conv"]
