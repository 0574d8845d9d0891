"""Gated DeltaNet (arXiv:2412.06464) in plain XLA: recurrent step for decode rows, chunks for prefill rows.

Legend: T tokens, S rows, D hidden, Q query/key heads, V value heads, k = dk and d = dv their
dims, F = 2*Q*dk + V*dv conv channels (q | k | v), W = conv taps - 1 (window), C tokens of a
chunk (i, j: two of them).

Per token and value head, with log decay g <= 0 and write strength beta in (0, 1) or (0, 2):
    S <- e^g S;  S <- S + k (beta (v - S^T k))^T;  o = S^T q
g is one number [T, V], or one per key channel [T, V, k] (arXiv:2510.26692): a third dim selects
the functions of the second kind below.
The chunk form solves the C coupled writes at once (UT transform, arXiv:2406.06484).

State math is float32 whatever the pools' dtype, and its dot products are Precision.HIGHEST:
TPU's default multiplies float32 in bfloat16, and the recurrence would carry that error along.
The projections follow the ambient precision. Only values <= 0 are exponentiated.
"""

from functools import partial
from typing import Literal

import jax.numpy as jnp
from jax import Array, lax

from ..core.batch import Batch, Rows
from ..core.linear import einsum_f32
from ..core.recurrence import over_chunks, over_decode_rows
from .project import GdnHeads, gdn_inputs, gdn_output, gdn_split


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
    """Gated delta rule of every row, from its slot's state (zeros without has_state) and back into it.

    conv_pool [L, slots, W*F] or, in tiles, [L, slots, W*F/128, 128] (oldest input first), state_pool
    [L, slots, V, dk, dv]; pool_layer
    may be traced. Heads are the local ones. chunk: tokens solved together in the prefill path.
    max_q: the longest row this bucket may hold; 1 leaves the prefill path out of the program.
    norm_eps, norm_zero_centered: the output norm (see core/norm.py).
    channel_decay: a decay per key channel. decay_lower_bound: see project.py.
    negative_eigenvalues: write strengths are doubled.
    Decays and output gates come through w_a and w_z, or, low-rank, f_a f_b and g_a g_b.
    Returns out [T, D] in h's dtype, partial over tensor parallelism, and the two pools.
    """
    heads = GdnHeads(num_qk_heads, num_v_heads, head_k_dim, head_v_dim)
    in_TF, beta_TV, g_T, taps_KF = gdn_inputs(
        h_TD, w, heads, channel_decay=channel_decay, decay_lower_bound=decay_lower_bound,
        negative_eigenvalues=negative_eigenvalues,
    )  # fmt: skip
    assert taps_KF.shape[0] == conv_kernel, (taps_KF.shape, conv_kernel)

    inputs = (in_TF, beta_TV, g_T)
    o_TVd, conv_pool, state_pool = _gdn_decode(*inputs, taps_KF, batch, rows, pool_layer, heads, conv_pool, state_pool)
    if max_q > 1:
        solve, pools = partial(_gdn_chunk, taps_KF, heads), (conv_pool, state_pool)
        o_TVd, (conv_pool, state_pool) = over_chunks(solve, inputs, o_TVd, pools, pool_layer, batch, rows, chunk=chunk)

    y_TD = gdn_output(
        o_TVd, h_TD, w, norm_eps=norm_eps, norm_zero_centered=norm_zero_centered, gate_activation=gate_activation
    )
    return y_TD, conv_pool, state_pool


def _gdn_decode(
    in_TF: Array,
    beta_TV: Array,
    g_T: Array,
    taps_KF: Array,
    batch: Batch,
    rows: Rows,
    pool_layer: Array | int,
    heads: GdnHeads,
    conv_pool: Array,
    state_pool: Array,
) -> tuple[Array, Array, Array]:
    """The decode rows (token s belongs to row s); outputs are zeros for other tokens. [T, V, d].

    The small inputs are handled for all rows at once, the states row by row.
    """
    T, window = in_TF.shape[0], taps_KF.shape[0] - 1
    S = min(T, batch.slot.shape[0])
    is_decode_S = (jnp.arange(S) < batch.distribution[0]) & rows.valid[:S]
    slot_S = jnp.where(is_decode_S, batch.slot[:S], 0)
    old_SWF = conv_pool[pool_layer, slot_S].reshape(S, window, -1)
    old_SWF = jnp.where(batch.has_state[:S, None, None], old_SWF, 0)
    in_SKF = jnp.concatenate([old_SWF, in_TF[:S, None]], axis=1, dtype=jnp.float32)
    new_S = in_SKF[:, 1:].reshape(S, *conv_pool.shape[2:]).astype(conv_pool.dtype)
    conv_pool = conv_pool.at[pool_layer, slot_S].set(new_S)

    q_SQk, k_SQk, v_SVd = gdn_split(jnp.sum(in_SKF * taps_KF, axis=1), heads)
    q_SVk, k_SVk = (jnp.repeat(x, heads.v // heads.qk, axis=1) for x in (q_SQk, k_SQk))
    step = _gdn_step if g_T.ndim == 2 else _gdn_channel_step

    inputs = (q_SVk, k_SVk, v_SVd, beta_TV[:S], g_T[:S])
    out = (T, heads.v, heads.dv)
    o_TVd, state_pool = over_decode_rows(step, inputs, out, in_TF.dtype, state_pool, pool_layer, batch)
    return o_TVd, conv_pool, state_pool


def _gdn_step(
    q_Vk: Array, k_Vk: Array, v_Vd: Array, beta_V: Array, g_V: Array, state_Vkd: Array
) -> tuple[Array, Array]:
    """One token. Products and sums instead of dots: exact float32, and a matrix unit gains nothing on one vector.

    The output is taken from the old state (o = e^g S^T q + (k.q) u), so that both reductions
    share one pass over it.
    """
    decay_V1 = jnp.exp(g_V)[:, None]
    read_Vd = decay_V1 * jnp.sum(state_Vkd * k_Vk[:, :, None], axis=1)
    kept_Vd = decay_V1 * jnp.sum(state_Vkd * q_Vk[:, :, None], axis=1)
    u_Vd = beta_V[:, None] * (v_Vd - read_Vd)
    o_Vd = kept_Vd + jnp.sum(k_Vk * q_Vk, axis=1, keepdims=True) * u_Vd
    return o_Vd, decay_V1[:, :, None] * state_Vkd + k_Vk[:, :, None] * u_Vd[:, None, :]


def _gdn_channel_step(
    q_Vk: Array, k_Vk: Array, v_Vd: Array, beta_V: Array, g_Vk: Array, state_Vkd: Array
) -> tuple[Array, Array]:
    """As _gdn_step with a decay per channel: it goes to the vectors that read the state, not to what they read."""
    decay_Vk = jnp.exp(g_Vk)
    read_Vd = jnp.sum(state_Vkd * (decay_Vk * k_Vk)[:, :, None], axis=1)
    kept_Vd = jnp.sum(state_Vkd * (decay_Vk * q_Vk)[:, :, None], axis=1)
    u_Vd = beta_V[:, None] * (v_Vd - read_Vd)
    o_Vd = kept_Vd + jnp.sum(k_Vk * q_Vk, axis=1, keepdims=True) * u_Vd
    return o_Vd, decay_Vk[:, :, None] * state_Vkd + k_Vk[:, :, None] * u_Vd[:, None, :]


def _gdn_chunk(
    taps_KF: Array,
    heads: GdnHeads,
    in_CF: Array,
    beta_CV: Array,
    g_C: Array,
    num_valid: Array,
    window: Array,
    state_Vkd: Array,
) -> tuple[Array, tuple[Array, Array]]:
    """Convolve and fold in one chunk of a row, whose first num_valid tokens are the row's; the rest are zeros.

    window (W*F values): the row's last inputs before the chunk. Returns outputs [C, V, d] (anything for
    tokens past num_valid), the next window and the next state; float32.
    """
    C, (num_taps, F) = in_CF.shape[0], taps_KF.shape
    in_XF = jnp.concatenate([window.reshape(-1, F), in_CF])
    conv_CF = sum((in_XF[tap : tap + C] * taps_KF[tap] for tap in range(num_taps)), jnp.zeros((C, F), jnp.float32))
    window = lax.dynamic_slice_in_dim(in_XF, num_valid, num_taps - 1).reshape(window.shape)
    q_QCk, k_QCk, v_VCd = (x.swapaxes(0, 1) for x in gdn_split(conv_CF, heads))
    # With beta = 0 and g = 0 a token leaves the state as it is.
    solve = _gdn_solve if g_C.ndim == 2 else _gdn_channel_solve
    o_VCd, state_Vkd = solve(q_QCk, k_QCk, v_VCd, beta_CV.T, g_C.swapaxes(0, 1), state_Vkd)
    return o_VCd.swapaxes(0, 1), (window, state_Vkd)


def _gdn_solve(
    q_QCk: Array, k_QCk: Array, v_VCd: Array, beta_VC: Array, g_VC: Array, state_Vkd: Array
) -> tuple[Array, Array]:
    """The delta rule over C tokens at once: outputs [V, C, d] and the state after them.

    Writing u_i for token i's write, the recurrence reads (G: running sum of g)
        u_i + beta_i sum_{j<i} e^(G_i - G_j) (k_i.k_j) u_j = beta_i (v_i - e^(G_i) S^T k_i),
    a unit lower triangular system in u.
    """
    group, C = v_VCd.shape[0] // q_QCk.shape[0], q_QCk.shape[1]
    q_VCk, k_VCk = jnp.repeat(q_QCk, group, axis=0), jnp.repeat(k_QCk, group, axis=0)
    kk_Vij = jnp.repeat(einsum_f32("qik,qjk->qij", k_QCk, k_QCk), group, axis=0)
    qk_Vij = jnp.repeat(einsum_f32("qik,qjk->qij", q_QCk, k_QCk), group, axis=0)
    sum_VC = jnp.cumsum(g_VC, axis=1)
    i, j = jnp.arange(C)[:, None], jnp.arange(C)[None]
    decay_Vij = jnp.exp(jnp.where(i >= j, sum_VC[:, :, None] - sum_VC[:, None, :], -jnp.inf))
    decay_VC1, beta_VC1 = jnp.exp(sum_VC)[..., None], beta_VC[..., None]

    inverse_Vij = _gdn_invert(jnp.where(i > j, beta_VC1 * kk_Vij * decay_Vij, 0))
    rest_VCd = beta_VC1 * (v_VCd - decay_VC1 * einsum_f32("vck,vkd->vcd", k_VCk, state_Vkd))
    u_VCd = einsum_f32("vij,vjd->vid", inverse_Vij, rest_VCd)
    o_VCd = decay_VC1 * einsum_f32("vck,vkd->vcd", q_VCk, state_Vkd)
    o_VCd = o_VCd + einsum_f32("vij,vjd->vid", qk_Vij * decay_Vij, u_VCd)
    end_V1 = sum_VC[:, -1:]
    late_u_VCd = jnp.exp(end_V1 - sum_VC)[..., None] * u_VCd
    state_Vkd = jnp.exp(end_V1)[..., None] * state_Vkd + einsum_f32("vck,vcd->vkd", k_VCk, late_u_VCd)
    return o_VCd, state_Vkd


def _gdn_channel_solve(
    q_QCk: Array, k_QCk: Array, v_VCd: Array, beta_VC: Array, g_VCk: Array, state_Vkd: Array
) -> tuple[Array, Array]:
    """As _gdn_solve with a decay per channel: e^(G_i - G_j) goes inside the products of q and k."""
    group, C = v_VCd.shape[0] // q_QCk.shape[0], q_QCk.shape[1]
    q_VCk, k_VCk = jnp.repeat(q_QCk, group, axis=0), jnp.repeat(k_QCk, group, axis=0)
    qk_Vij, kk_Vij = _gdn_decayed_products(q_VCk, k_VCk, g_VCk)
    i, j = jnp.arange(C)[:, None], jnp.arange(C)[None]
    since_start_VCk = jnp.exp(_gdn_masked_sums(j <= i, g_VCk))
    until_end_VCk = jnp.exp(_gdn_masked_sums(j > i, g_VCk))
    beta_VC1 = beta_VC[..., None]

    rest_VCd = beta_VC1 * (v_VCd - einsum_f32("vck,vkd->vcd", k_VCk * since_start_VCk, state_Vkd))
    u_VCd = einsum_f32("vij,vjd->vid", _gdn_invert(beta_VC1 * kk_Vij), rest_VCd)
    o_VCd = einsum_f32("vck,vkd->vcd", q_VCk * since_start_VCk, state_Vkd)
    o_VCd = o_VCd + einsum_f32("vij,vjd->vid", qk_Vij, u_VCd)
    new_Vkd = einsum_f32("vck,vcd->vkd", k_VCk * until_end_VCk, u_VCd)
    return o_VCd, since_start_VCk[:, -1, :, None] * state_Vkd + new_Vkd


def _gdn_decayed_products(q_VCk: Array, k_VCk: Array, g_VCk: Array) -> tuple[Array, Array]:
    """sum_k x_i k_j e^(G_i - G_j) over the channels: for x = q with j <= i, for x = k with j < i; 0 elsewhere.

    e^(G_i) and e^(-G_j) alone may be 0 and infinite. So the pairs are taken by the border between
    two neighbouring blocks of 1, 2, 4, ... tokens with j before it and i behind it: both e^(G_i - G_border)
    and e^(G_border - G_j) are <= 1, and where one is 0, so is their product. The exponents are sums
    of g over the tokens between, not differences of running sums, which would lose what small g hold.
    """
    C = k_VCk.shape[1]
    i, j = jnp.arange(C)[:, None], jnp.arange(C)[None]
    qk_Vij = jnp.eye(C) * jnp.sum(q_VCk * k_VCk, axis=-1)[..., None]
    kk_Vij = jnp.zeros_like(qk_Vij)
    size = 1
    while size < C:
        block_i, block_j = i // size, j // size
        behind = block_i % 2 == 1
        from_border = (block_j == block_i) & jnp.where(behind, j <= i, j > i)
        decay_VCk = jnp.exp(_gdn_masked_sums(from_border, g_VCk))
        joins = behind & (block_j == block_i - 1)
        near_VCk = k_VCk * decay_VCk
        qk_Vij = jnp.where(joins, einsum_f32("vik,vjk->vij", q_VCk * decay_VCk, near_VCk), qk_Vij)
        kk_Vij = jnp.where(joins, einsum_f32("vik,vjk->vij", near_VCk, near_VCk), kk_Vij)
        size *= 2
    return qk_Vij, kk_Vij


def _gdn_masked_sums(mask_ij: Array, g_VCk: Array) -> Array:
    """For each token i the sum of g over the tokens j of its mask."""
    return einsum_f32("ij,vjk->vik", mask_ij.astype(jnp.float32), g_VCk)


def _gdn_invert(lower_Vij: Array) -> Array:
    """(I + lower)^-1 for strictly lower triangular matrices, by doubling blocks on the diagonal.

    With X the inverse of the diagonal blocks of one size and E the blocks that join two
    neighbours, the inverse at twice the size is X - X E X. Unlike the power series
    I - A + A^2 - ... it stays accurate when keys repeat and powers of A grow like binomials.
    """
    C = lower_Vij.shape[-1]
    i, j = jnp.arange(C)[:, None], jnp.arange(C)[None]
    inverse = jnp.eye(C) - jnp.where((i % 2 == 1) & (j == i - 1), lower_Vij, 0)
    size = 2
    while size < C:
        joins = (i // size % 2 == 1) & (j // size == i // size - 1)
        step = einsum_f32("vij,vjk->vik", inverse, jnp.where(joins, lower_Vij, 0))
        inverse = inverse - einsum_f32("vij,vjk->vik", step, inverse)
        size *= 2
    return inverse


__all__ = ["gated_delta"]
