"""Prefill rows of Gated DeltaNet in one Pallas kernel: convolution, gates and the chunked delta rule of xla.py.

Legend: T tokens, S rows, Q query/key heads, V value heads, k = d = 128 lanes, H = 2*Q + V heads of conv channels
(q | k | v), Y rows of a token in scratch (H rounded up to whole tiles), K conv taps, W = K - 1, C tokens of a chunk,
G value heads of a query/key head, P of them side by side in the lanes of one [C, P*C] array, i and j: two tokens.

A row's state stays on the chip, in float32, from its first chunk to its last. Chunks start where the row starts, so
neighbouring rows share no chunk; the tokens that a last chunk has too many count as beta = 0, g = 0, inputs 0.
Products of float32 values are products of bfloat16 terms, two of each value (8 + 8 bits).
"""

from collections.abc import Callable
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
from .tpu_fused_decode import gdn_terms

# Tokens and heads that the convolution takes at once: what fits the registers.
_GDN_PRE_TOKENS, _GDN_PRE_HEADS = 8, 16


GdnPreFetch = Callable[[Array, Array], tuple[Any, ...]]
GdnPreMix = Callable[[Array, Array, Array], None]


class GdnPreRefs(NamedTuple):
    """The kernel's operands (HBM unless said), outputs and VMEM scratch."""

    scalars: jax.Ref  # SMEM int32 [3]: layer, first prefill row, end of the prefill rows
    cu: jax.Ref  # SMEM int32 [S+1]
    slot: jax.Ref  # SMEM int32 [S]
    has: jax.Ref  # SMEM int32 [S]
    x: jax.Ref  # [T+C, H, 128]
    gates: jax.Ref  # VMEM float32 [T+C, lanes]: beta of the value heads, then g
    taps: jax.Ref  # VMEM float32 [K, H, 128]
    out_in: jax.Ref  # input aliases of the outputs: unused
    conv_in: jax.Ref
    state_in: jax.Ref
    out: jax.Ref  # [T+C, V, 128]
    conv: jax.Ref  # [L, slots, W*H, 128]
    state: jax.Ref  # [L, slots, V, 128, 128]
    x_buf: jax.Ref  # [2, W+C, H, 128]: the window, then the chunk
    window: jax.Ref  # [W*H, 128]
    stage: jax.Ref  # [V, 128, 128] in the pool's dtype
    held: jax.Ref  # float32 [V, 128, 128]: the row's state
    out_buf: jax.Ref  # [C, V, 128]
    act: jax.Ref  # float32 [C*Y, 128]: convolved and activated inputs; then outputs where the values were
    sums: jax.Ref  # float32 [2, C, lanes]: gates, and their running sums; [1, C, lanes] for decays per channel
    decays: jax.Ref  # float32 [lanes, C]: the running sums, transposed; for decays per channel: see there
    joins: jax.Ref  # float32 [steps, C, P*C], blocks: bfloat16 [P, C, P*C]: see gdn_pre_masks
    blocks: jax.Ref
    solve: jax.Ref  # bfloat16 [V/P, 2, C, P*C]: both terms of (I + lower)^-1 of the value heads, P side by side
    attend: jax.Ref  # the same of the decayed q.k
    x_sem: jax.Ref
    out_sem: jax.Ref
    slot_sem: jax.Ref  # [2]: window, state


def gdn_pre_x(refs: GdnPreRefs, first: Array, buf: Array) -> Any:
    """The copy of a chunk's inputs, behind the window."""
    window, chunk = refs.x_buf.shape[1] - refs.out_buf.shape[0], refs.out_buf.shape[0]
    target = refs.x_buf.at[buf, pl.ds(window, chunk)]
    return pltpu.make_async_copy(refs.x.at[pl.ds(first, chunk)], target, refs.x_sem.at[buf])


def _gdn_pre_out(refs: GdnPreRefs, first: Array) -> Any:
    """The copy of a chunk's outputs. Those it has too many land on tokens of later rows, which are written later."""
    return pltpu.make_async_copy(refs.out_buf, refs.out.at[pl.ds(first, refs.out_buf.shape[0])], refs.out_sem)


def _gdn_pre_slot(refs: GdnPreRefs, row: Array, inwards: bool) -> tuple[Any, ...]:
    """The copies of a row's window and state between their slot and the chip."""
    place = (refs.scalars[0], refs.slot[row])
    found = []
    for i, (slot, chip) in enumerate(((refs.conv.at[place], refs.window), (refs.state.at[place], refs.stage))):
        source, target = (slot, chip) if inwards else (chip, slot)
        found.append(pltpu.make_async_copy(source, target, refs.slot_sem.at[i]))
    return tuple(found)


def _gdn_pre_load(refs: GdnPreRefs, row: Array) -> None:
    """The row's window in front of its first chunk, its state in `held`; zeros, and no copy, without state."""
    num = refs.taps.shape[1]
    window, heads = refs.window.shape[0] // num, refs.held.shape[0]

    @pl.when(refs.has[row] != 0)
    def _() -> None:
        copies = _gdn_pre_slot(refs, row, inwards=True)
        for copy in copies:
            copy.start()
        for copy in copies:
            copy.wait()

        def widen(head: Array, carry: None) -> None:
            refs.held[head] = refs.stage[head].astype(jnp.float32)

        lax.fori_loop(0, heads, widen, None)
        for token in range(window):
            refs.x_buf[0, token] = refs.window[token * num : (token + 1) * num].astype(refs.x_buf.dtype)

    @pl.when(refs.has[row] == 0)
    def _() -> None:
        def clear(head: Array, carry: None) -> None:
            refs.held[head] = jnp.zeros(refs.held.shape[1:], jnp.float32)

        lax.fori_loop(0, heads, clear, None)
        refs.x_buf[0, :window] = jnp.zeros((window, *refs.x_buf.shape[2:]), refs.x_buf.dtype)


def _gdn_pre_save(refs: GdnPreRefs, row: Array, buf: Array) -> None:
    """The row's state and the window that its last chunk left in front of buffer `buf`, into their slot."""
    num = refs.taps.shape[1]
    for token in range(refs.window.shape[0] // num):
        refs.window[token * num : (token + 1) * num] = refs.x_buf[buf, token].astype(refs.window.dtype)

    def narrow(head: Array, carry: None) -> None:
        refs.stage[head] = refs.held[head].astype(refs.stage.dtype)

    lax.fori_loop(0, refs.held.shape[0], narrow, None)
    copies = _gdn_pre_slot(refs, row, inwards=False)
    for copy in copies:
        copy.start()
    for copy in copies:
        copy.wait()


def _gdn_pre_convolve(refs: GdnPreRefs, buf: Array, num_valid: Array) -> None:
    """The chunk's inputs convolved and activated into `act`, zeros from num_valid on; the next window."""
    (chunk, _, _), (taps, num, _) = refs.out_buf.shape, refs.taps.shape
    height, step = refs.act.shape[0] // chunk, _GDN_PRE_TOKENS

    def add(block: Array, carry: None) -> None:
        first = block * step
        for head in range(0, num, _GDN_PRE_HEADS):
            here = slice(head, min(head + _GDN_PRE_HEADS, num))
            x = [refs.x_buf[buf, first + t, here].astype(jnp.float32) for t in range(step + taps - 1)]
            weight = [refs.taps[tap, here] for tap in range(taps)]
            for t in range(step):
                total = sum((x[t + tap] * weight[tap] for tap in range(1, taps)), x[t] * weight[0])
                # Other rows' tokens may be NaN: they are cleared, not weighted by 0.
                active = jnp.where(first + t < num_valid, total / (1 + jnp.exp(-total)), 0)
                refs.act[pl.ds((first + t) * height + head, active.shape[0]), :] = active

    def clear(block: Array, carry: None) -> None:
        refs.act[pl.ds(block * step * height, step * height), :] = jnp.zeros((step * height, 128), jnp.float32)

    blocks = lax.div(num_valid + step - 1, step)
    lax.fori_loop(0, blocks, add, None)
    lax.fori_loop(blocks, chunk // step, clear, None)
    for token in range(taps - 1):
        refs.x_buf[1 - buf, token] = refs.x_buf[buf, num_valid + token]


def _gdn_pre_gates(refs: GdnPreRefs, first: Array, num_valid: Array) -> None:
    """The chunk's write strengths and log decays, 0 from num_valid on, and their running sums, also transposed."""
    _, chunk, lanes = refs.sums.shape
    token = lax.broadcasted_iota(jnp.int32, (chunk, lanes), 0)
    gates_Cl = jnp.where(token < num_valid, refs.gates[pl.ds(first, chunk), :], 0)
    i, j = (lax.broadcasted_iota(jnp.int32, (chunk, chunk), axis) for axis in (0, 1))
    ones_ij = jnp.where(i >= j, 1.0, 0.0).astype(jnp.bfloat16)
    parts = [
        jnp.dot(ones_ij, term.astype(jnp.bfloat16), preferred_element_type=jnp.float32)
        for term in gdn_terms(gates_Cl, 3)
    ]
    sums_Cl = parts[0] + parts[1] + parts[2]
    refs.sums[0], refs.sums[1] = gates_Cl, sums_Cl
    refs.decays[...] = sums_Cl.T


def gdn_pre_terms(x: Array) -> tuple[Array, Array]:
    """A float32 matrix as two bfloat16 terms, the first one rounded to nearest (by its bits: see gdn_terms)."""
    bits = (lax.bitcast_convert_type(x, jnp.uint32) + jnp.uint32(0x8000)) & jnp.uint32(0xFFFF0000)
    high = lax.bitcast_convert_type(bits, jnp.float32)
    return high.astype(jnp.bfloat16), (x - high).astype(jnp.bfloat16)


def gdn_pre_product(left: tuple[Array, Array], right: tuple[Array, Array], over: tuple[int, int] = (1, 0)) -> Array:
    """The product over the given axes of two float32 matrices, each as its terms.

    high*high + low*high + high*low is one contraction three times as long, which the matrix unit sums up itself;
    low*low is 2^-16 of the product at most.
    """
    (high, low), (high_right, low_right) = left, right
    long_left = jnp.concatenate([high, low, high], axis=over[0])
    long_right = jnp.concatenate([high_right, high_right, low_right], axis=over[1])
    numbers = (((over[0],), (over[1],)), ((), ()))
    return lax.dot_general(long_left, long_right, numbers, preferred_element_type=jnp.float32)


def _gdn_pre_small_product(left: tuple[Array, Array], right: tuple[Array, Array]) -> Array:
    """As gdn_pre_product over (1, 0), for matrices that leave half of the matrix unit empty.

    Terms lie below and next to each other instead: as few values go into the unit as for one of the products.
    """
    rows, columns = left[0].shape[0], right[0].shape[1]
    terms = jnp.dot(jnp.concatenate(left, axis=0), jnp.concatenate(right, axis=1), preferred_element_type=jnp.float32)
    return terms[:rows, :columns] + (terms[rows:, :columns] + terms[:rows, columns:])


def gdn_pre_diagonal(parts: list[Array]) -> Array:
    """Matrices of one shape as the blocks on a diagonal."""
    zeros = jnp.zeros_like(parts[0])
    lines = [[part if at == place else zeros for at in range(len(parts))] for place, part in enumerate(parts)]
    return jnp.concatenate([jnp.concatenate(line, axis=1) for line in lines], axis=0)


def _gdn_pre_blocks(refs: GdnPreRefs, terms: tuple[Array, Array]) -> tuple[Array, Array]:
    """Terms of [C, P*C], P matrices side by side -> of the same on a diagonal [P*C, P*C]."""
    pack = refs.blocks.shape[0]
    if pack == 1:
        return terms
    high, low = (jnp.concatenate([term * refs.blocks[p] for p in range(pack)], axis=0) for term in terms)
    return high, low


def gdn_pre_masks(refs: GdnPreRefs) -> None:
    """0/1 matrices that the chunks' math multiplies with, made once.

    joins[0]: the diagonal; joins[s]: what joins two neighbouring diagonal blocks of 2^(s-1) tokens.
    """
    _, chunk, width = refs.joins.shape
    i, lane = (lax.broadcasted_iota(jnp.int32, (chunk, width), axis) for axis in (0, 1))
    j = lane & (chunk - 1)
    refs.joins[0] = jnp.where(i == j, 1.0, 0.0)
    for shift in range(refs.joins.shape[0] - 1):
        behind = ((i >> shift) & 1 == 1) & (j >> shift == (i >> shift) - 1)
        refs.joins[1 + shift] = jnp.where(behind, 1.0, 0.0)
    for p in range(refs.blocks.shape[0]):
        here = (lane >= p * chunk) & (lane < (p + 1) * chunk)
        refs.blocks[p] = jnp.where(here, 1.0, 0.0).astype(jnp.bfloat16)


def gdn_pre_invert(refs: GdnPreRefs, lower: list[Array]) -> list[Array]:
    """(I + lower)^-1 of strictly lower triangular matrices, P side by side in each, by doubling blocks: see xla.py.

    All of them step by step: alone, each would wait for its own products.
    """
    inverse = [refs.joins[0] - refs.joins[1] * x for x in lower]
    for shift in range(2, refs.joins.shape[0]):
        terms = [gdn_pre_terms(x) for x in inverse]
        joined = [_gdn_pre_blocks(refs, gdn_pre_terms(refs.joins[shift] * x)) for x in lower]
        steps = [gdn_pre_terms(_gdn_pre_small_product(x, y)) for x, y in zip(terms, joined, strict=True)]
        inverse = [
            x - _gdn_pre_small_product(step, _gdn_pre_blocks(refs, x_terms))
            for x, x_terms, step in zip(inverse, terms, steps, strict=True)
        ]
    return inverse


class _GdnPreHead(NamedTuple):
    """Gates of one value head: write strength and running log decay per token [C, 1], the latter also as a row."""

    beta: Array
    sum: Array
    sum_row: Array  # [1, C]


def _gdn_pre_head(refs: GdnPreRefs, head: Array, num_heads: int) -> _GdnPreHead:
    _, chunk, lanes = refs.sums.shape
    lane = lax.broadcasted_iota(jnp.int32, (chunk, lanes), 1)
    beta, total = (
        jnp.sum(jnp.where(lane == place, refs.sums[kind], 0), axis=1, keepdims=True)
        for kind, place in enumerate((head, head + num_heads))
    )
    return _GdnPreHead(beta, total, refs.decays[pl.ds(head + num_heads, 1), :])


def gdn_pre_side_by_side(columns: list[Array], shape: tuple[int, int]) -> Array:
    """P columns [C, 1] -> [C, P*C]: each over the lanes of its matrix."""
    lane = lax.broadcasted_iota(jnp.int32, shape, 1)
    wide = jnp.broadcast_to(columns[0], shape)
    for place, column in enumerate(columns[1:], 1):
        wide = jnp.where(lane >= place * shape[0], column, wide)
    return wide


def gdn_pre_keys(refs: GdnPreRefs, heads: GdnHeads, group: Array) -> Array:
    """Unit keys, then unit queries times dk^-1/2, of a query/key head's tokens [2*C, k]."""
    chunk = refs.out_buf.shape[0]
    height = refs.act.shape[0] // chunk

    def unit(place: Array) -> Array:
        x = refs.act[pl.ds(place, chunk, stride=height), :]
        return x * lax.rsqrt(jnp.sum(x * x, axis=-1, keepdims=True) + GDN_L2_EPS)

    return jnp.concatenate([unit(group + heads.qk), unit(group) * heads.dk**-0.5], axis=0)


def _gdn_pre_couplings(refs: GdnPreRefs, heads: GdnHeads, groups: list[Array]) -> None:
    """How the tokens of a chunk act on each other, per value head of the groups: `solve` and `attend`."""
    (_, chunk, width), pack, members = refs.joins.shape, refs.blocks.shape[0], heads.v // heads.qk
    i, lane = (lax.broadcasted_iota(jnp.int32, (chunk, width), axis) for axis in (0, 1))
    j = lane & (chunk - 1)
    lower, attend, places = [], [], []
    for group in groups:
        kq_Xk = gdn_pre_keys(refs, heads, group)
        repeated = jnp.concatenate([kq_Xk[:chunk]] * pack, axis=0)
        pairs = gdn_pre_product(gdn_pre_terms(kq_Xk), gdn_pre_terms(repeated), (1, 1))
        for start in range(0, members, pack):
            head = group * members + start
            gates = [_gdn_pre_head(refs, head + p, heads.v) for p in range(pack)]
            sum_i = gdn_pre_side_by_side([gate.sum for gate in gates], (chunk, width))
            beta_i = gdn_pre_side_by_side([gate.beta for gate in gates], (chunk, width))
            sum_j = jnp.concatenate([gate.sum_row for gate in gates], axis=1)
            decay = jnp.exp(jnp.where(i >= j, sum_i - sum_j, -jnp.inf))
            lower.append(jnp.where(i > j, beta_i * pairs[:chunk] * decay, 0))
            attend.append(pairs[chunk:] * decay)
            places.append(group * (members // pack) + start // pack)
    for place, inverse, x in zip(places, gdn_pre_invert(refs, lower), attend, strict=True):
        for couplings, matrix in ((refs.solve, inverse), (refs.attend, x)):
            couplings[place, 0], couplings[place, 1] = gdn_pre_terms(matrix)


def _gdn_pre_group(refs: GdnPreRefs, heads: GdnHeads, group: Array) -> None:
    """One query/key head and its value heads: outputs of the chunk and the states after it: xla.py's _gdn_solve."""
    chunk, members = refs.out_buf.shape[0], heads.v // heads.qk
    height, first = refs.act.shape[0] // chunk, group * members
    kq_Xk = gdn_pre_keys(refs, heads, group)
    old_kVd = jnp.concatenate([refs.held[first + member] for member in range(members)], axis=1)
    reads = gdn_pre_product(gdn_pre_terms(kq_Xk), gdn_pre_terms(old_kVd))
    gates = [_gdn_pre_head(refs, first + member, heads.v) for member in range(members)]
    decays = [jnp.exp(gate.sum) for gate in gates]
    places = [pl.ds(2 * heads.qk + first + member, chunk, stride=height) for member in range(members)]
    lanes = [slice(128 * member, 128 * (member + 1)) for member in range(members)]
    rest = [
        gate.beta * (refs.act[place, :] - decay * reads[:chunk, lane])
        for gate, place, decay, lane in zip(gates, places, decays, lanes, strict=True)
    ]
    u_CVd = gdn_pre_apply(refs, refs.solve, group, rest)
    parts = gdn_pre_apply(refs, refs.attend, group, [u_CVd[:, lane] for lane in lanes])
    ends = [gate.sum_row[:, chunk - 1 :] for gate in gates]
    late = [jnp.exp(end - gate.sum) * u_CVd[:, lane] for end, gate, lane in zip(ends, gates, lanes, strict=True)]
    late_CVd = jnp.concatenate(late, axis=1)
    new_kVd = gdn_pre_product(gdn_pre_terms(kq_Xk[:chunk]), gdn_pre_terms(late_CVd), (0, 0))
    for member, (place, lane) in enumerate(zip(places, lanes, strict=True)):
        refs.act[place, :] = decays[member] * reads[chunk:, lane] + parts[:, lane]
        refs.held[first + member] = jnp.exp(ends[member]) * refs.held[first + member] + new_kVd[:, lane]


def gdn_pre_apply(refs: GdnPreRefs, couplings: jax.Ref, group: Array, x: list[Array]) -> Array:
    """A group's couplings times its value heads' [C, d], which come out side by side."""
    pack = refs.blocks.shape[0]
    count = len(x) // pack
    parts = []
    for first in range(count):
        place = group * count + first
        right = gdn_pre_terms(gdn_pre_diagonal(x[first * pack : (first + 1) * pack]))
        parts.append(gdn_pre_product((couplings[place, 0], couplings[place, 1]), right))
    return jnp.concatenate(parts, axis=1)


def _gdn_pre_mix(refs: GdnPreRefs, heads: GdnHeads, first: Array, num_valid: Array) -> None:
    """A convolved chunk's outputs where its values were, and the states after it."""
    _gdn_pre_gates(refs, first, num_valid)

    together = next(count for count in (4, 2, 1) if heads.qk % count == 0)

    def couple(step: Array, carry: None) -> None:
        _gdn_pre_couplings(refs, heads, [step * together + place for place in range(together)])

    def add(group: Array, carry: None) -> None:
        _gdn_pre_group(refs, heads, group)

    lax.fori_loop(0, heads.qk // together, couple, None)
    lax.fori_loop(0, heads.qk, add, None)


def _gdn_pre_chunk(
    refs: GdnPreRefs, heads: GdnHeads, fetch: GdnPreFetch, mix: GdnPreMix, row: Array, item: Array
) -> None:
    """One chunk of a row while the next one's inputs come in and the last one's outputs go out."""
    chunk, buf = refs.out_buf.shape[0], item % 2
    begin, end = refs.cu[row], refs.cu[row + 1]
    first = begin + item * chunk
    num_valid = jnp.minimum(end - first, chunk)
    for copy in fetch(first, buf):
        copy.wait()

    @pl.when(first + chunk < end)
    def _() -> None:
        for copy in fetch(first + chunk, 1 - buf):
            copy.start()

    _gdn_pre_convolve(refs, buf, num_valid)
    mix(first, num_valid, buf)

    @pl.when(item > 0)
    def _() -> None:
        _gdn_pre_out(refs, first - chunk).wait()

    height = refs.act.shape[0] // chunk

    def narrow(token: Array, carry: None) -> None:
        o_Vd = refs.act[pl.ds(token * height + 2 * heads.qk, heads.v), :]
        refs.out_buf[token] = o_Vd.astype(refs.out_buf.dtype)

    lax.fori_loop(0, chunk, narrow, None)
    _gdn_pre_out(refs, first).start()


def gdn_pre_rows(refs: GdnPreRefs, heads: GdnHeads, fetch: GdnPreFetch, mix: GdnPreMix) -> None:
    """All prefill rows, one after the other.

    fetch(first token, buffer): the copies that bring a chunk in. mix(first token, valid tokens, buffer): what happens
    to a chunk between its convolution and its outputs.
    """
    chunk = refs.out_buf.shape[0]

    def add_row(row: Array, carry: None) -> None:
        begin, length = refs.cu[row], refs.cu[row + 1] - refs.cu[row]
        items = lax.div(length + chunk - 1, chunk)

        @pl.when(length > 0)
        def _() -> None:
            for copy in fetch(begin, jnp.int32(0)):
                copy.start()
            _gdn_pre_load(refs, row)

            def add_chunk(item: Array, carry: None) -> None:
                _gdn_pre_chunk(refs, heads, fetch, mix, row, item)

            lax.fori_loop(0, items, add_chunk, None)
            _gdn_pre_save(refs, row, items % 2)
            _gdn_pre_out(refs, begin + (items - 1) * chunk).wait()

    lax.fori_loop(refs.scalars[1], refs.scalars[2], add_row, None)


def _gdn_prefill_kernel(*operands: jax.Ref, heads: GdnHeads) -> None:
    """With a decay per head."""
    refs = GdnPreRefs(*operands)

    def fetch(first: Array, buf: Array) -> tuple[Any, ...]:
        return (gdn_pre_x(refs, first, buf),)

    def mix(first: Array, num_valid: Array, buf: Array) -> None:
        _gdn_pre_mix(refs, heads, first, num_valid)

    gdn_pre_masks(refs)
    gdn_pre_rows(refs, heads, fetch, mix)


def gdn_prefill_rows(
    x_TH: Array,
    beta_TV: Array,
    g_TV: Array,
    taps_KH: Array,
    batch: Batch,
    layer: Array | int,
    out_TV: Array,
    conv_pool: Array,
    state_pool: Array,
    *,
    heads: GdnHeads,
    chip: ChipLimits,
    chunk: int,
) -> tuple[Array, Array, Array]:
    """The prefill rows: their tokens' outputs in out_TV (decode rows' stay), and the two pools.

    x [T+C, H, 128] and out [T+C, V, 128] with C tokens of room; beta, g [T, V] float32; taps [K, H, 128] float32.
    conv_pool [L, slots, W*H, 128], state_pool [L, slots, V, 128, 128].
    """
    members = heads.v // heads.qk
    gates = jnp.concatenate([beta_TV, g_TV], axis=1)
    gates = jnp.pad(gates, ((0, x_TH.shape[0] - gates.shape[0]), (0, -gates.shape[1] % chip.lanes)))
    return gdn_pre_call(
        _gdn_prefill_kernel, x_TH, gates, taps_KH, batch, layer, out_TV, conv_pool, state_pool, heads=heads, chip=chip,
        chunk=chunk, pack=max(p for p in (1, 2, 4) if p == 1 or (p * chunk <= chip.lanes and members % p == 0)),
        sums=(2, chunk, gates.shape[1]), decays=(gates.shape[1], chunk),
    )  # fmt: skip


def gdn_pre_call(
    kernel: Callable[..., None],
    x_TH: Array,
    gates: Array,
    taps_KH: Array,
    batch: Batch,
    layer: Array | int,
    out_TV: Array,
    conv_pool: Array,
    state_pool: Array,
    *more: Array,
    heads: GdnHeads,
    chip: ChipLimits,
    chunk: int,
    pack: int,
    sums: tuple[int, ...],
    decays: tuple[int, ...],
    scratch: tuple[Any, ...] = (),
) -> tuple[Array, Array, Array]:
    """A prefill kernel over GdnPreRefs. more: operands in HBM behind the pools; scratch: behind the refs' own."""
    scalars = jnp.stack([jnp.asarray(layer, jnp.int32), batch.distribution[0], batch.distribution[1]])
    smem, vmem, hbm = (pl.BlockSpec(memory_space=space) for space in (pltpu.SMEM, pltpu.VMEM, pl.ANY))
    f32, (num, tile), window = jnp.float32, x_TH.shape[1:], taps_KH.shape[0] - 1
    height = -(-num // chip.sublanes) * chip.sublanes
    state = state_pool.shape[2:]
    own = (
        pltpu.VMEM((2, window + chunk, num, tile), x_TH.dtype),
        pltpu.VMEM(conv_pool.shape[2:], conv_pool.dtype),
        pltpu.VMEM(state, state_pool.dtype),
        pltpu.VMEM(state, f32),
        pltpu.VMEM((chunk, heads.v, tile), out_TV.dtype),
        pltpu.VMEM((chunk * height, tile), f32),
        pltpu.VMEM(sums, f32),
        pltpu.VMEM(decays, f32),
        pltpu.VMEM((chunk.bit_length(), chunk, pack * chunk), f32),
        pltpu.VMEM((pack, chunk, pack * chunk), jnp.bfloat16),
        pltpu.VMEM((heads.v // pack, 2, chunk, pack * chunk), jnp.bfloat16),
        pltpu.VMEM((heads.v // pack, 2, chunk, pack * chunk), jnp.bfloat16),
        pltpu.SemaphoreType.DMA((2,)),
        pltpu.SemaphoreType.DMA,
        pltpu.SemaphoreType.DMA((2,)),
    )
    return pl.pallas_call(
        partial(kernel, heads=heads),
        out_shape=tuple(jax.ShapeDtypeStruct(x.shape, x.dtype) for x in (out_TV, conv_pool, state_pool)),
        in_specs=[smem, smem, smem, smem, hbm, vmem, vmem, hbm, hbm, hbm, *(hbm for _ in more)],
        out_specs=[hbm, hbm, hbm],
        scratch_shapes=own + scratch,
        input_output_aliases={7: 0, 8: 1, 9: 2},
        compiler_params=pltpu.CompilerParams(vmem_limit_bytes=chip.vmem_bytes),
        name="gdn_prefill",
    )(
        scalars, batch.cu_q, batch.slot, batch.has_state.astype(jnp.int32), x_TH, gates, taps_KH, out_TV, conv_pool,
        state_pool, *more,
    )  # fmt: skip


__all__ = [
    "GdnPreRefs",
    "gdn_pre_apply",
    "gdn_pre_call",
    "gdn_pre_diagonal",
    "gdn_pre_invert",
    "gdn_pre_keys",
    "gdn_pre_masks",
    "gdn_pre_product",
    "gdn_pre_rows",
    "gdn_pre_side_by_side",
    "gdn_pre_terms",
    "gdn_pre_x",
    "gdn_prefill_rows",
]
