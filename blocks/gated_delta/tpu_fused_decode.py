"""Decode rows of Gated DeltaNet in one Pallas kernel: convolution, gates, delta rule; windows, states updated in place.

Legend: T tokens, S rows, Q query/key heads, V value heads, k = d = 128 lanes, H = 2*Q + V heads of conv channels
(q | k | v), K conv taps, W = K - 1, N groups: value heads that share one read vector (Q groups of V/Q heads, or V of
one head where each channel decays on its own).

Per row, with b = beta, e = e^g, S the old state:  u = b (v - e S^T k);  o = e S^T q + (k.q) u;  S <- e S + k u^T.
* S^T k and S^T q of a group are one matrix product whose left side is k and q, each cut into three bfloat16 terms
  (8 + 8 + 8 bits: all of a float32). A bfloat16 state is its own right side, so the product is exact; a float32 state
  goes in as two terms. Eight left rows cost what one costs.
* k as a column (a value per sublane, the same in all lanes) comes from the same terms times a 0/1 matrix.
* What is left for the vector unit is the state's e S + k u^T: three operations per value.
"""

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from ..core.batch import Batch
from ..core.chip import ChipLimits
from .project import GDN_L2_EPS, GdnHeads

# Rows of a float32 tile: what one group's terms take in the left side of its product.
_GDN_DEC_TILE = 8
# Terms of a float32: bfloat16 holds 8 bits of its 24.
_GDN_DEC_TERMS = 3


class _GdnDecRefs(NamedTuple):
    """The kernel's operands (HBM unless said), outputs and VMEM scratch.

    Two buffers each for what comes in and goes out of a row, so that its neighbours' copies run beside its math.
    """

    scalars: jax.Ref  # SMEM int32 [2]: layer, number of decode rows
    slot: jax.Ref  # SMEM int32 [S]
    has: jax.Ref  # SMEM int32 [S]
    x: jax.Ref  # [T, H, 128]
    beta: jax.Ref  # VMEM float32 [S, lanes]: write strengths of the value heads
    decay: jax.Ref  # VMEM float32 [S, lanes] e^g; HBM float32 [S, V, 128] where each channel has its own
    taps: jax.Ref  # VMEM float32 [K, H, 128]
    conv_in: jax.Ref  # the pools' input aliases: unused
    state_in: jax.Ref
    out: jax.Ref  # [T, V, 128]
    conv: jax.Ref  # [L, slots, W*H, 128]
    state: jax.Ref  # [L, slots, V, 128, 128]
    x_buf: jax.Ref  # [2, H, 128]
    window_buf: jax.Ref  # [2, W*H, 128], oldest token first
    window_new: jax.Ref  # [2, W*H, 128]
    state_buf: jax.Ref  # [2, V, 128, 128]
    state_new: jax.Ref  # [2, V, 128, 128]
    out_buf: jax.Ref  # [2, V, 128]
    decay_buf: jax.Ref  # float32 [2, V, 128]
    act: jax.Ref  # float32 [H, 128]
    left: jax.Ref  # float32 [N*8, 128]: terms of the group's k and q
    column: jax.Ref  # float32 [N*8, 128]: terms of k and of the decay, where each channel has its own
    spread: jax.Ref  # float32 [1 or 2, N, 128, 128]: k (and decays) as columns, in all lanes
    read: jax.Ref  # float32 [V*8, 128]: left times state
    head: jax.Ref  # float32 [4, V, 128]: per value head: u, e, (k, k.q of its key head)
    in_sem: jax.Ref
    out_sem: jax.Ref


def _gdn_dec_fetch(refs: _GdnDecRefs, row: Array, action: str) -> None:
    """Start or wait for the copies that bring a row in; a row without state gets zeros, and nothing is read for it."""
    buf, layer, slot = row % 2, refs.scalars[0], refs.slot[row]
    sem = refs.in_sem.at[buf]

    def act(source: jax.Ref, target: jax.Ref) -> None:
        getattr(pltpu.make_async_copy(source, target, sem), action)()

    act(refs.x.at[row], refs.x_buf.at[buf])
    if refs.decay.ndim == 3:
        act(refs.decay.at[row], refs.decay_buf.at[buf])

    @pl.when(refs.has[row] != 0)
    def _() -> None:
        act(refs.conv.at[layer, slot], refs.window_buf.at[buf])
        act(refs.state.at[layer, slot], refs.state_buf.at[buf])

    @pl.when(refs.has[row] == 0)
    def _() -> None:
        if action == "start":
            refs.state_buf[buf] = jnp.zeros(refs.state_buf.shape[1:], refs.state_buf.dtype)


def _gdn_dec_store(refs: _GdnDecRefs, row: Array, action: str) -> None:
    """Start or wait for the copies that take a row's output, window and state out."""
    buf, layer, slot = row % 2, refs.scalars[0], refs.slot[row]
    pairs = (
        (refs.out_buf.at[buf], refs.out.at[row]),
        (refs.window_new.at[buf], refs.conv.at[layer, slot]),
        (refs.state_new.at[buf], refs.state.at[layer, slot]),
    )
    for source, target in pairs:
        getattr(pltpu.make_async_copy(source, target, refs.out_sem.at[buf]), action)()


def gdn_terms(x: Array, count: int) -> list[Array]:
    """float32 values cut into `count` terms of 8 bits, each exact in bfloat16.

    Bits are masked, not rounded and subtracted: a compiler may take a round trip through bfloat16 out.
    """
    terms = []
    for _ in range(count - 1):
        bits = lax.bitcast_convert_type(x, jnp.uint32) & jnp.uint32(0xFFFF0000)
        terms.append(lax.bitcast_convert_type(bits, jnp.float32))
        x = x - terms[-1]
    return [*terms, x]


def _gdn_dec_convolve(refs: _GdnDecRefs, row: Array) -> None:
    """Convolve and activate the row's inputs into `act`; the window moves on by one token."""
    buf, num = row % 2, refs.act.shape[0]
    window = refs.window_buf.shape[1] // num
    x, has = refs.x_buf[buf], refs.has[row] != 0
    total = x.astype(jnp.float32) * refs.taps[window]
    for tap in range(window):
        # What an unread buffer holds may be NaN.
        old = jnp.where(has, refs.window_buf[buf, tap * num : (tap + 1) * num].astype(jnp.float32), 0)
        total = total + old * refs.taps[tap]
        if tap:
            refs.window_new[buf, (tap - 1) * num : tap * num] = old.astype(refs.window_new.dtype)
    refs.window_new[buf, (window - 1) * num :] = x.astype(refs.window_new.dtype)
    refs.act[...] = total / (1 + jnp.exp(-total))


def _gdn_dec_unit(x: Array) -> Array:
    return x * lax.rsqrt(jnp.sum(x * x, axis=-1, keepdims=True) + GDN_L2_EPS)


def _gdn_dec_column(row_1v: Array, num: int) -> Array:
    """[1, lanes] -> its first `num` values as [num, 128], each in all lanes."""
    lanes = row_1v.shape[1]
    i, j = (lax.broadcasted_iota(jnp.int32, (num, lanes), axis) for axis in (0, 1))
    return jnp.broadcast_to(jnp.sum(jnp.where(i == j, row_1v, 0), axis=1, keepdims=True), (num, 128))


def _gdn_dec_vectors(refs: _GdnDecRefs, heads: GdnHeads, row: Array) -> None:
    """Unit queries and keys, the left sides of the products with the state, the decays."""
    group = heads.v // heads.qk
    q_Qk = _gdn_dec_unit(refs.act[: heads.qk]) * heads.dk**-0.5
    k_Qk = _gdn_dec_unit(refs.act[heads.qk : 2 * heads.qk])
    dot_Qk = jnp.broadcast_to(jnp.sum(q_Qk * k_Qk, axis=1, keepdims=True), q_Qk.shape)
    for member in range(group):
        refs.head[3, pl.ds(member, heads.qk, stride=group), :] = dot_Qk
    if refs.decay.ndim == 2:
        refs.head[1] = _gdn_dec_column(refs.decay[pl.ds(row, 1), :], heads.v)
        _gdn_dec_spread(refs.left, k_Qk, q_Qk)
        return
    for place, x_Qk in ((0, q_Qk), (2, k_Qk)):
        for member in range(group):
            refs.head[place, pl.ds(member, heads.qk, stride=group), :] = x_Qk
    decay_Vk = refs.decay_buf[row % 2]
    q_Vk, k_Vk = refs.head[0], refs.head[2]
    # The decay goes to the vectors that read the state, not to the state they read.
    _gdn_dec_spread(refs.left, decay_Vk * k_Vk, decay_Vk * q_Vk)
    _gdn_dec_spread(refs.column, k_Vk, decay_Vk)


def _gdn_dec_spread(target: jax.Ref, a_Nk: Array, b_Nk: Array) -> None:
    """Tile n of the target: the terms of a[n] in rows 0, 2, 4, those of b[n] in rows 1, 3, 5; 6 and 7 stay zeros."""
    for first, x_Nk in enumerate((a_Nk, b_Nk)):
        for term, part_Nk in enumerate(gdn_terms(x_Nk, _GDN_DEC_TERMS)):
            target[pl.ds(2 * term + first, x_Nk.shape[0], stride=_GDN_DEC_TILE), :] = part_Nk


def _gdn_dec_read(refs: _GdnDecRefs, buf: Array, group: Array, members: int) -> None:
    """The products of a group's k and q terms with the states of its value heads."""
    tile = _GDN_DEC_TILE
    left = refs.left[pl.ds(group * tile, tile), :].astype(jnp.bfloat16)
    # Two heads side by side fill the matrix unit's 256 columns: half the pushes of one at a time.
    for first in range(0, members, 2):
        here = [group * members + member for member in range(first, min(first + 2, members))]
        states = [refs.state_buf[buf, head] for head in here]
        whole = states[0].dtype == jnp.bfloat16
        parts = zip(*([state] if whole else gdn_terms(state, 2) for state in states), strict=True)
        rights = [jnp.concatenate([x.astype(jnp.bfloat16) for x in part], axis=1) for part in parts]
        products = [jnp.dot(left, right, preferred_element_type=jnp.float32) for right in rights]
        total = sum(products[1:], products[0])
        for place, head in enumerate(here):
            refs.read[pl.ds(head * tile, tile), :] = total[:, 128 * place : 128 * (place + 1)]


def _gdn_dec_writes(refs: _GdnDecRefs, heads: GdnHeads, row: Array) -> None:
    """What each value head writes (u), and the row's outputs."""
    tile = _GDN_DEC_TILE
    rows = [refs.read[pl.ds(i, heads.v, stride=tile), :] for i in range(2 * _GDN_DEC_TERMS)]
    read_Vd, kept_Vd = (rows[first] + rows[first + 2] + rows[first + 4] for first in (0, 1))
    if refs.decay.ndim == 2:
        decay_Vd = refs.head[1]
        read_Vd, kept_Vd = decay_Vd * read_Vd, decay_Vd * kept_Vd
    beta_Vd = _gdn_dec_column(refs.beta[pl.ds(row, 1), :], heads.v)
    u_Vd = beta_Vd * (refs.act[2 * heads.qk :] - read_Vd)
    refs.out_buf[row % 2] = (kept_Vd + refs.head[3] * u_Vd).astype(refs.out_buf.dtype)
    refs.head[0] = u_Vd


def _gdn_dec_columns(refs: _GdnDecRefs, group: Array) -> None:
    """A group's k (and decay) down the sublanes, the same in all lanes: [128, 128] each."""
    by_channel = refs.decay.ndim == 3
    terms_ref, tile = refs.column if by_channel else refs.left, _GDN_DEC_TILE
    terms = terms_ref[pl.ds(group * tile, tile), :].astype(jnp.bfloat16)
    count = refs.spread.shape[0]
    row, lane = (lax.broadcasted_iota(jnp.int32, (tile, count * 128), axis) for axis in (0, 1))
    chosen = jnp.where((row & 1 == 0) == (lane < 128), 1.0, 0.0).astype(jnp.bfloat16)
    over_rows = (((0,), (0,)), ((), ()))
    columns = lax.dot_general(terms, chosen, over_rows, preferred_element_type=jnp.float32)
    for place in range(count):
        refs.spread[place, group] = columns[:, 128 * place : 128 * (place + 1)]


def _gdn_dec_update(refs: _GdnDecRefs, buf: Array, group: Array, members: int) -> None:
    """The states of a group's value heads, decayed and written to."""
    by_channel = refs.decay.ndim == 3
    k_k1 = refs.spread[0, group]
    for member in range(members):
        head = group * members + member
        decay = refs.spread[1, group] if by_channel else refs.head[1, pl.ds(head, 1), :]
        old = refs.state_buf[buf, head].astype(jnp.float32)
        new = old * decay + k_k1 * refs.head[0, pl.ds(head, 1), :]
        refs.state_new[buf, head] = new.astype(refs.state_new.dtype)


def _gdn_dec_row(row: Array, refs: _GdnDecRefs, heads: GdnHeads, unroll: int) -> None:
    """One decode row while the next one's copies come in and the last one's go out."""
    count, buf = refs.scalars[1], row % 2

    @pl.when(row + 1 < count)
    def _() -> None:
        _gdn_dec_fetch(refs, row + 1, "start")

    @pl.when(row >= 2)
    def _() -> None:
        _gdn_dec_store(refs, row - 2, "wait")

    _gdn_dec_fetch(refs, row, "wait")
    _gdn_dec_convolve(refs, row)
    _gdn_dec_vectors(refs, heads, row)
    groups = refs.left.shape[0] // _GDN_DEC_TILE
    members = heads.v // groups

    def read(group: Array, carry: None) -> None:
        _gdn_dec_columns(refs, group)
        _gdn_dec_read(refs, buf, group, members)

    def update(group: Array, carry: None) -> None:
        _gdn_dec_update(refs, buf, group, members)

    lax.fori_loop(0, groups, read, None, unroll=groups)
    _gdn_dec_writes(refs, heads, row)
    lax.fori_loop(0, groups, update, None, unroll=unroll)
    _gdn_dec_store(refs, row, "start")


def _gdn_decode_kernel(*operands: jax.Ref, heads: GdnHeads, unroll: int) -> None:
    """All decode rows; a batch without any costs the set-up."""
    refs = _GdnDecRefs(*operands)
    count = refs.scalars[1]

    @pl.when(count > 0)
    def _() -> None:
        refs.left[...] = jnp.zeros(refs.left.shape, refs.left.dtype)
        refs.column[...] = jnp.zeros(refs.column.shape, refs.column.dtype)
        _gdn_dec_fetch(refs, jnp.int32(0), "start")

    def add_row(row: Array, carry: None) -> None:
        _gdn_dec_row(row, refs, heads, unroll)

    lax.fori_loop(0, count, add_row, None)
    for back in (2, 1):

        @pl.when(count >= back)
        def _(back: int = back) -> None:
            _gdn_dec_store(refs, count - back, "wait")


def gdn_decode_rows(
    x_TH: Array,
    beta_TV: Array,
    decay_T: Array,
    taps_KH: Array,
    batch: Batch,
    layer: Array | int,
    conv_pool: Array,
    state_pool: Array,
    *,
    heads: GdnHeads,
    chip: ChipLimits,
    unroll: int,
) -> tuple[Array, Array, Array]:
    """The decode rows (token s belongs to row s): outputs [T, V, 128] (anything for other tokens), and the two pools.

    x [T, H, 128], taps [K, H, 128] float32; conv_pool [L, slots, W*H, 128], state_pool [L, slots, V, 128, 128].
    decay: e^g, [T, V] or [T, V, 128]; float32 as beta is.
    """
    S, by_channel = min(beta_TV.shape[0], batch.slot.shape[0]), decay_T.ndim == 3
    pad = ((0, 0), (0, -heads.v % chip.lanes))
    beta_SV = jnp.pad(beta_TV[:S], pad)
    decay_S = decay_T[:S] if by_channel else jnp.pad(decay_T[:S], pad)
    scalars = jnp.stack([jnp.asarray(layer, jnp.int32), batch.distribution[0]])
    smem, vmem, hbm = (pl.BlockSpec(memory_space=space) for space in (pltpu.SMEM, pltpu.VMEM, pl.ANY))
    out = jax.ShapeDtypeStruct((x_TH.shape[0], heads.v, chip.lanes), x_TH.dtype)
    return pl.pallas_call(
        partial(_gdn_decode_kernel, heads=heads, unroll=unroll),
        out_shape=(out, *(jax.ShapeDtypeStruct(pool.shape, pool.dtype) for pool in (conv_pool, state_pool))),
        in_specs=[smem, smem, smem, hbm, vmem, hbm if by_channel else vmem, vmem, hbm, hbm],
        out_specs=[hbm, hbm, hbm],
        scratch_shapes=_gdn_dec_scratch(x_TH, conv_pool, state_pool, heads, by_channel),
        input_output_aliases={7: 1, 8: 2},
        compiler_params=pltpu.CompilerParams(vmem_limit_bytes=chip.vmem_bytes),
        name="gdn_decode",
    )(
        scalars, batch.slot, batch.has_state.astype(jnp.int32), x_TH, beta_SV, decay_S, taps_KH, conv_pool, state_pool
    )  # fmt: skip


def _gdn_dec_scratch(
    x_TH: Array, conv_pool: Array, state_pool: Array, heads: GdnHeads, by_channel: bool
) -> tuple[Any, ...]:
    """Scratch of the kernel, in the order of _GdnDecRefs. tpu_cost.vmem_bytes counts the same."""
    f32, tile, act = jnp.float32, x_TH.shape[2], x_TH.shape[1:]
    groups = heads.v if by_channel else heads.qk
    window, state = conv_pool.shape[2:], state_pool.shape[2:]
    return (
        pltpu.VMEM((2, *act), x_TH.dtype),
        pltpu.VMEM((2, *window), conv_pool.dtype),
        pltpu.VMEM((2, *window), conv_pool.dtype),
        pltpu.VMEM((2, *state), state_pool.dtype),
        pltpu.VMEM((2, *state), state_pool.dtype),
        pltpu.VMEM((2, heads.v, tile), x_TH.dtype),
        pltpu.VMEM((2, heads.v if by_channel else 1, tile), f32),
        pltpu.VMEM(act, f32),
        pltpu.VMEM((groups * _GDN_DEC_TILE, tile), f32),
        pltpu.VMEM((groups * _GDN_DEC_TILE if by_channel else 1, tile), f32),
        pltpu.VMEM((1 + by_channel, groups, tile, tile), f32),
        pltpu.VMEM((heads.v * _GDN_DEC_TILE, tile), f32),
        pltpu.VMEM((4, heads.v, tile), f32),
        pltpu.SemaphoreType.DMA((2,)),
        pltpu.SemaphoreType.DMA((2,)),
    )


__all__ = ["gdn_decode_rows", "gdn_terms"]
