"""Prefill rows of Gated DeltaNet with a decay per key channel (arXiv:2510.26692): what differs from a decay per head.

Legend: as in tpu_fused_prefill.py; U units: P value heads, whose couplings lie side by side; L = log2(C) borders.

With G the running sum of g, the couplings of tokens i > j are sum_k k_i k_j e^(G_i - G_j) over the channels, where
e^(G_i) and e^(-G_j) alone may be 0 and infinite. As in xla.py, pairs are taken by the border between two neighbouring
blocks of 1, 2, 4, ... C/2 tokens that parts them: e^(G_i - G_border) and e^(G_border - G_j) are both <= 1, for any g.
So the couplings are one product per border, each masked to its pairs.
The exponents are sums of g over the tokens between, not differences of running sums, which would lose what small g
hold: one product of a 0/1 matrix with the three bfloat16 terms of g (24 bits, all of a float32) makes all of them.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from ..core.batch import Batch
from ..core.chip import ChipLimits
from .project import GdnHeads
from .tpu_fused_decode import gdn_terms
from .tpu_fused_prefill import (
    GdnPreRefs,
    gdn_pre_apply,
    gdn_pre_call,
    gdn_pre_diagonal,
    gdn_pre_invert,
    gdn_pre_keys,
    gdn_pre_masks,
    gdn_pre_product,
    gdn_pre_rows,
    gdn_pre_side_by_side,
    gdn_pre_terms,
    gdn_pre_x,
)

# Operands of GdnPreRefs in front of `rates`.
_GDN_CHAN_INPUTS = 10
# Tokens that the layout by heads takes at once.
_GDN_CHAN_TOKENS = 8
# Terms of a float32: bfloat16 holds 8 bits of its 24.
_GDN_CHAN_TERMS = 3


class _GdnChanRefs(NamedTuple):
    """The kernel's operands and scratch.

    Of `pre`, sums [1, C, lanes] holds the write strengths. decays [V, 3*C+8, 128] holds what each head meets its state
    with: keys, then queries, decayed since the chunk's start; keys decayed until its end; the chunk's whole decay.
    """

    pre: GdnPreRefs
    rates: jax.Ref  # HBM float32 [T+C, V, 128]: log decays
    rates_buf: jax.Ref  # float32 [2, C, V, 128]
    logs: jax.Ref  # float32 [C*Z, 128]: the chunk's log decays; Z: V rounded up to whole tiles
    spans: jax.Ref  # bfloat16 [(L+2)*C, 3*C]: see _gdn_chan_masks
    lower: jax.Ref  # float32 [U, C, P*C]: the couplings that `solve` inverts
    rates_sem: jax.Ref


def _gdn_chan_masks(refs: _GdnChanRefs) -> None:
    """0/1 matrices, made once: which tokens' log decays are summed for a token, the same for each of three terms.

    L matrices: those between the token and the border that it shares with its neighbouring block of 1, 2, 4, ...
    tokens; then those up to the token, then those after it.
    """
    gdn_pre_masks(refs.pre)
    chunk, width = refs.pre.out_buf.shape[0], refs.spans.shape[1]
    borders = refs.spans.shape[0] // chunk - 2
    i, lane = (lax.broadcasted_iota(jnp.int32, (chunk, width), axis) for axis in (0, 1))
    j = lane & (chunk - 1)
    masks = []
    for shift in range(borders):
        behind = (i >> shift) & 1 == 1
        between = (behind & (j <= i)) | (jnp.logical_not(behind) & (j > i))
        masks.append(between & (i >> shift == j >> shift))
    for place, mask in enumerate((*masks, j <= i, j > i)):
        refs.spans[place * chunk : (place + 1) * chunk] = jnp.where(mask, 1.0, 0.0).astype(jnp.bfloat16)


def _gdn_chan_gates(refs: _GdnChanRefs, first: Array, num_valid: Array, buf: Array) -> None:
    """The chunk's write strengths and log decays, 0 from num_valid on."""
    (_, chunk, lanes), (_, _, num, _) = refs.pre.sums.shape, refs.rates_buf.shape
    height = refs.logs.shape[0] // chunk
    token = lax.broadcasted_iota(jnp.int32, (chunk, lanes), 0)
    refs.pre.sums[0] = jnp.where(token < num_valid, refs.pre.gates[pl.ds(first, chunk), :], 0)

    def place(block: Array, carry: None) -> None:
        for t in range(_GDN_CHAN_TOKENS):
            at = block * _GDN_CHAN_TOKENS + t
            # Other rows' tokens may be anything: they are cleared.
            refs.logs[pl.ds(at * height, num), :] = jnp.where(at < num_valid, refs.rates_buf[buf, at], 0)

    lax.fori_loop(0, chunk // _GDN_CHAN_TOKENS, place, None)


def _gdn_chan_beta(refs: _GdnChanRefs, head: Array) -> Array:
    """A head's write strengths [C, 1]."""
    lane = lax.broadcasted_iota(jnp.int32, refs.pre.sums.shape[1:], 1)
    return jnp.sum(jnp.where(lane == head, refs.pre.sums[0], 0), axis=1, keepdims=True)


def _gdn_chan_decays(refs: _GdnChanRefs, unit: Array) -> Array:
    """Decays over the spans of a unit's heads, which lie side by side [(L+2)*C, P*128]; all <= 1."""
    chunk, pack = refs.pre.out_buf.shape[0], refs.pre.blocks.shape[0]
    height = refs.logs.shape[0] // chunk
    logs = [refs.logs[pl.ds(unit * pack + p, chunk, stride=height), :] for p in range(pack)]
    terms = [term.astype(jnp.bfloat16) for term in gdn_terms(jnp.concatenate(logs, axis=1), _GDN_CHAN_TERMS)]
    sums = jnp.dot(refs.spans[...], jnp.concatenate(terms, axis=0), preferred_element_type=jnp.float32)
    return jnp.exp(sums)


def _gdn_chan_pairs(refs: _GdnChanRefs, kq_Xk: Array, decays: Array) -> tuple[Array, Array]:
    """Decayed k.k for i > j and q.k for i >= j of a unit's heads, side by side; 0 elsewhere. [C, P*C] each.

    kq [2*C, P*128]: keys, then queries.
    """
    (steps, chunk, width), pack = refs.pre.joins.shape, refs.pre.blocks.shape[0]
    lanes = [slice(128 * p, 128 * (p + 1)) for p in range(pack)]
    itself = kq_Xk[:chunk] * kq_Xk[chunk:]
    diagonal = [jnp.sum(itself[:, lane], axis=1, keepdims=True) for lane in lanes]
    kk, qk = jnp.zeros((chunk, width), jnp.float32), refs.pre.joins[0] * gdn_pre_side_by_side(diagonal, (chunk, width))
    for border in range(steps - 1):
        decay = decays[border * chunk : (border + 1) * chunk]
        left = gdn_pre_terms(jnp.concatenate([kq_Xk[:chunk] * decay, kq_Xk[chunk:] * decay], axis=0))
        high, low = (gdn_pre_diagonal([term[:chunk, lane] for lane in lanes]) for term in left)
        pairs, join = gdn_pre_product(left, (high, low), (1, 1)), refs.pre.joins[1 + border]
        kk, qk = kk + join * pairs[:chunk], qk + join * pairs[chunk:]
    return kk, qk


def _gdn_chan_keep(refs: _GdnChanRefs, own: list[Array], kq_Xk: Array, decays: Array) -> None:
    """`decays` of a unit's heads. kq [2*C, P*128]; decays [2*C, P*128]: since the start, until the end."""
    chunk = refs.pre.out_buf.shape[0]
    since, until = decays[:chunk], decays[chunk:]
    for p, head in enumerate(own):
        lane = slice(128 * p, 128 * (p + 1))
        refs.pre.decays[head, :chunk] = (kq_Xk[:chunk] * since)[:, lane]
        refs.pre.decays[head, chunk : 2 * chunk] = (kq_Xk[chunk:] * since)[:, lane]
        refs.pre.decays[head, 2 * chunk : 3 * chunk] = (kq_Xk[:chunk] * until)[:, lane]
        refs.pre.decays[head, 3 * chunk : 3 * chunk + 1] = since[chunk - 1 :, lane]


def _gdn_chan_couplings(refs: _GdnChanRefs, heads: GdnHeads, unit: Array) -> None:
    """How the tokens of a chunk act on each other, of a unit: `lower` and `attend`; `decays` of its heads."""
    (_, chunk, width), pack, members = refs.pre.joins.shape, refs.pre.blocks.shape[0], heads.v // heads.qk
    own = [unit * pack + p for p in range(pack)]
    decays = _gdn_chan_decays(refs, unit)
    kq_Xk = jnp.concatenate([gdn_pre_keys(refs.pre, heads, lax.div(head, members)) for head in own], axis=1)
    _gdn_chan_keep(refs, own, kq_Xk, decays[-2 * chunk :])
    kk, qk = _gdn_chan_pairs(refs, kq_Xk, decays)
    refs.lower[unit] = gdn_pre_side_by_side([_gdn_chan_beta(refs, head) for head in own], (chunk, width)) * kk
    refs.pre.attend[unit, 0], refs.pre.attend[unit, 1] = gdn_pre_terms(qk)


def _gdn_chan_invert(refs: _GdnChanRefs, units: list[Array]) -> None:
    """`solve` of the units from their `lower`."""
    for unit, inverse in zip(units, gdn_pre_invert(refs.pre, [refs.lower[unit] for unit in units]), strict=True):
        refs.pre.solve[unit, 0], refs.pre.solve[unit, 1] = gdn_pre_terms(inverse)


def _gdn_chan_column(row_1k: Array) -> Array:
    """[1, 128] -> its values down the sublanes, each in all lanes [128, 128], exact."""
    place = lax.broadcasted_iota(jnp.int32, (8, 128), 0)
    terms = jnp.zeros((8, 128), jnp.float32)
    for term, part in enumerate(gdn_terms(row_1k, _GDN_CHAN_TERMS)):
        terms = jnp.where(place == term, part, terms)
    over_rows, ones = (((0,), (0,)), ((), ())), jnp.ones((8, 128), jnp.bfloat16)
    return lax.dot_general(terms.astype(jnp.bfloat16), ones, over_rows, preferred_element_type=jnp.float32)


def _gdn_chan_unit(refs: _GdnChanRefs, heads: GdnHeads, unit: Array) -> None:
    """A unit's outputs of the chunk and its states after it: xla.py's _gdn_channel_solve."""
    pre, chunk, pack = refs.pre, refs.pre.out_buf.shape[0], refs.pre.blocks.shape[0]
    height, own = pre.act.shape[0] // chunk, [unit * pack + p for p in range(pack)]
    places = [pl.ds(2 * heads.qk + head, chunk, stride=height) for head in own]
    reads, rest = [], []
    for head, place in zip(own, places, strict=True):
        # The decay goes to the vectors that read the state, not to the state they read.
        read = gdn_pre_product(gdn_pre_terms(pre.decays[head, : 2 * chunk]), gdn_pre_terms(pre.held[head]))
        rest.append(_gdn_chan_beta(refs, head) * (pre.act[place, :] - read[:chunk]))
        reads.append(read[chunk:])
    u_CVd = gdn_pre_apply(pre, pre.solve, unit, rest)
    writes = [u_CVd[:, 128 * p : 128 * (p + 1)] for p in range(pack)]
    parts = gdn_pre_apply(pre, pre.attend, unit, writes)
    for p, (head, place) in enumerate(zip(own, places, strict=True)):
        pre.act[place, :] = reads[p] + parts[:, 128 * p : 128 * (p + 1)]
        late = gdn_pre_terms(pre.decays[head, 2 * chunk : 3 * chunk])
        new_kd = gdn_pre_product(late, gdn_pre_terms(writes[p]), (0, 0))
        whole = _gdn_chan_column(pre.decays[head, 3 * chunk : 3 * chunk + 1])
        pre.held[head] = whole * pre.held[head] + new_kd


def _gdn_prefill_channel_kernel(*operands: jax.Ref, heads: GdnHeads) -> None:
    """All prefill rows; per chunk the couplings of all units, their inverses, then outputs and states."""
    inputs, rest = operands[:_GDN_CHAN_INPUTS], operands[_GDN_CHAN_INPUTS + 1 :]
    own = len(GdnPreRefs._fields) - _GDN_CHAN_INPUTS
    refs = _GdnChanRefs(GdnPreRefs(*inputs, *rest[:own]), operands[_GDN_CHAN_INPUTS], *rest[own:])
    chunk, units = refs.pre.out_buf.shape[0], heads.v // refs.pre.blocks.shape[0]
    # What one step of a loop takes: units' couplings next to each other hide their latency, more of them only spill.
    together = next(count for count in (8, 4, 2, 1) if units % count == 0)
    pair = 2 if units % 2 == 0 else 1

    def fetch(first: Array, buf: Array) -> tuple[Any, ...]:
        source, target = refs.rates.at[pl.ds(first, chunk)], refs.rates_buf.at[buf]
        return gdn_pre_x(refs.pre, first, buf), pltpu.make_async_copy(source, target, refs.rates_sem.at[buf])

    def couple(unit: Array, carry: None) -> None:
        _gdn_chan_couplings(refs, heads, unit)

    def invert(step: Array, carry: None) -> None:
        _gdn_chan_invert(refs, [step * together + place for place in range(together)])

    def add(unit: Array, carry: None) -> None:
        _gdn_chan_unit(refs, heads, unit)

    def mix(first: Array, num_valid: Array, buf: Array) -> None:
        _gdn_chan_gates(refs, first, num_valid, buf)
        lax.fori_loop(0, units, couple, None, unroll=pair)
        lax.fori_loop(0, units // together, invert, None)
        lax.fori_loop(0, units, add, None, unroll=pair)

    _gdn_chan_masks(refs)
    gdn_pre_rows(refs.pre, heads, fetch, mix)


def gdn_prefill_channel_rows(
    x_TH: Array,
    beta_TV: Array,
    g_TVk: Array,
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
    """As gdn_prefill_rows with log decays g [T, V, 128] float32."""
    room = x_TH.shape[0] - beta_TV.shape[0]
    gates = jnp.pad(beta_TV, ((0, room), (0, -heads.v % chip.lanes)))
    rates = jnp.pad(g_TVk, ((0, room), (0, 0), (0, 0)))
    f32, lanes, height = jnp.float32, chip.lanes, -(-heads.v // chip.sublanes) * chip.sublanes
    pack = max(p for p in (1, 2, 4) if p == 1 or (p * chunk <= lanes and heads.v % p == 0))
    spans = (chunk.bit_length() - 1 + 2) * chunk
    return gdn_pre_call(
        _gdn_prefill_channel_kernel, x_TH, gates, taps_KH, batch, layer, out_TV, conv_pool, state_pool, rates,
        heads=heads, chip=chip, chunk=chunk, pack=pack,
        sums=(1, chunk, gates.shape[1]), decays=(heads.v, 3 * chunk + chip.sublanes, lanes),
        scratch=(
            pltpu.VMEM((2, chunk, heads.v, lanes), f32),
            pltpu.VMEM((chunk * height, lanes), f32),
            pltpu.VMEM((spans, _GDN_CHAN_TERMS * chunk), jnp.bfloat16),
            pltpu.VMEM((heads.v // pack, chunk, pack * chunk), f32),
            pltpu.SemaphoreType.DMA((2,)),
        ),
    )  # fmt: skip


__all__ = ["gdn_prefill_channel_rows"]
