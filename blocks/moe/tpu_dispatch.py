"""Order of the experts' rows: a counting sort of the assignments (token, choice) by local expert, in one kernel.

Legend: T tokens, K top_k, E local experts, P = T*K rows; in the kernel B tokens of a block (on lanes), C experts worked
on at once, H rows of 128 places.

Nothing is compared with anything but constants: counts before a token are a product with a triangle of ones, and
the inverse (the token of each place) is a product of two one-hot matrices, place // 128 by token and token by
place % 128. A product adds one value and zeros, so it is exact as long as that value fits a bfloat16: tokens are
counted within their block.
"""

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from ..core.chip import ChipLimits

_DISPATCH_BLOCK = 256  # tokens; 256 and all that is less is exact in bfloat16
_DISPATCH_EXPERTS = 64
_DISPATCH_PLACES = 64  # rows of 128 places that one product fills at most
_DISPATCH_LANES = 128


class Dispatch(NamedTuple):
    """token_P [P]: token of each row; choice_P [P]: its entry t*K + k of index_TK. start_E [E+1]: first row of each
    expert. place_TK [T, K]: row, or -1. All int32."""

    token_P: Array
    start_E: Array
    place_TK: Array
    choice_P: Array


def dispatch(index_TK: Array, *, first_expert: Array | int, num_local: int, chip: ChipLimits) -> Dispatch:
    """Rows of the local experts first, by expert, tokens rising within one; all int32.

    Rows from start_E[E] on name token 0. Choices of other ranks' experts and of padding (index -1) have place -1.
    """
    tokens, top_k = index_TK.shape
    assert top_k <= _DISPATCH_LANES, f"top_k {top_k} exceeds {_DISPATCH_LANES}"
    assert tokens * top_k < 2**24, f"{tokens} * {top_k} assignments are not counted exactly in float32"
    padded = -(-tokens // _DISPATCH_BLOCK) * _DISPATCH_BLOCK
    index_TK = jnp.pad(index_TK, ((0, padded - tokens), (0, 0)), constant_values=-1)
    rows = -(-tokens * top_k // (8 * _DISPATCH_LANES)) * 8
    step = min(_DISPATCH_PLACES, rows)
    rows = -(-rows // step) * step
    experts = -(-num_local // 8) * 8
    chunk = min(experts, _DISPATCH_EXPERTS)
    experts = -(-experts // chunk) * chunk
    bounds = -(-(num_local + 1) // _DISPATCH_LANES) * _DISPATCH_LANES
    sublanes = -(-top_k // 8) * 8
    whole = pl.BlockSpec(memory_space=pltpu.VMEM)
    token_HL, choice_HL, start, place_TK = pl.pallas_call(
        partial(_dispatch_kernel, num_local=num_local, chunk=chunk, step=step),
        name="moe_dispatch",
        in_specs=[pl.BlockSpec(memory_space=pltpu.SMEM), whole],
        out_specs=[whole] * 4,
        out_shape=[
            jax.ShapeDtypeStruct((rows, _DISPATCH_LANES), jnp.int32),
            jax.ShapeDtypeStruct((rows, _DISPATCH_LANES), jnp.int32),
            jax.ShapeDtypeStruct((1, bounds), jnp.int32),
            jax.ShapeDtypeStruct((padded, top_k), jnp.int32),
        ],
        scratch_shapes=[
            pltpu.VMEM((sublanes, padded), jnp.int32),
            pltpu.VMEM((sublanes, padded), jnp.int32),
            pltpu.VMEM((experts, padded), jnp.bfloat16),
            pltpu.VMEM((experts, _DISPATCH_LANES), jnp.float32),
            pltpu.VMEM((rows, _DISPATCH_LANES), jnp.float32),
        ],
        compiler_params=pltpu.CompilerParams(vmem_limit_bytes=chip.vmem_bytes),
    )(jnp.asarray(first_expert, jnp.int32).reshape(1), index_TK)
    num = tokens * top_k
    return Dispatch(
        token_HL.reshape(-1)[:num], start[0, : num_local + 1], place_TK[:tokens], choice_HL.reshape(-1)[:num]
    )


def _dispatch_kernel(
    first_ref: Any,
    index_ref: Any,
    token_ref: Any,
    choice_ref: Any,
    start_ref: Any,
    place_ref: Any,
    local_ref: Any,
    place_KT_ref: Any,
    mine_ref: Any,
    count_ref: Any,
    found_ref: Any,
    *,
    num_local: int,
    chunk: int,
    step: int,
) -> None:
    """Count, place, invert; each a loop over blocks of tokens.

    local [K, T]: local expert or -1; mine [E, T]: how often a token names an expert; count [E, 128]: rows of an
    expert, then the first free one, the same on every lane; found [H, 128]: choice of each place, plus 1.
    """
    top_k, blocks = index_ref.shape[1], index_ref.shape[0] // _DISPATCH_BLOCK
    count_ref[...] = jnp.zeros(count_ref.shape, jnp.float32)
    found_ref[...] = jnp.zeros(found_ref.shape, jnp.float32)
    local_ref[...] = jnp.full(local_ref.shape, -1, jnp.int32)

    def count(b: Array, _: None) -> None:
        at = pl.ds(pl.multiple_of(b * _DISPATCH_BLOCK, _DISPATCH_BLOCK), _DISPATCH_BLOCK)
        local = index_ref[at, :] - first_ref[0]
        local = jnp.where((local >= 0) & (local < num_local), local, -1).T
        local_ref[:top_k, at] = local
        _dispatch_count(local, at, mine_ref, count_ref, chunk)

    lax.fori_loop(0, blocks, count, None)
    start_ref[...] = _dispatch_bounds(count_ref[...], start_ref.shape[1])
    rows = jnp.max(start_ref[...])
    count_ref[...] = _dispatch_starts(count_ref[...])

    def place(b: Array, _: None) -> None:
        at = pl.ds(pl.multiple_of(b * _DISPATCH_BLOCK, _DISPATCH_BLOCK), _DISPATCH_BLOCK)
        _dispatch_place(local_ref, place_KT_ref, at, mine_ref, count_ref, chunk)
        place_ref[at, :] = place_KT_ref[:top_k, at].T
        _dispatch_invert(place_KT_ref, found_ref, b, at, top_k, step, rows)

    lax.fori_loop(0, blocks, place, None)
    choice = found_ref[...] - 1.0
    # Half a choice keeps the quotient off the integers, where a rounded product could fall short.
    token = ((choice + 0.5) * (1.0 / top_k)).astype(jnp.int32)
    token_ref[...] = jnp.where(choice < 0, 0, token)
    choice_ref[...] = jnp.maximum(choice, 0.0).astype(jnp.int32)


def _dispatch_count(local: Array, at: Any, mine_ref: Any, count_ref: Any, chunk: int) -> None:
    """How often each token of a block names each expert; adds up the experts' rows."""
    ones = jnp.ones((_DISPATCH_BLOCK, _DISPATCH_LANES), jnp.bfloat16)
    expert = lax.broadcasted_iota(jnp.int32, (chunk, _DISPATCH_BLOCK), 0).astype(jnp.float32).astype(jnp.bfloat16)
    one, zero = jnp.ones((), jnp.bfloat16), jnp.zeros((), jnp.bfloat16)
    for c in range(0, mine_ref.shape[0], chunk):
        # Rounded where they lie far outside the chunk: still outside.
        here = (local - c).astype(jnp.float32).astype(jnp.bfloat16)
        mine = jnp.zeros(expert.shape, jnp.bfloat16)
        for k in range(local.shape[0]):
            mine += jnp.where(here[k : k + 1] == expert, one, zero)
        mine_ref[c : c + chunk, at] = mine
        count_ref[c : c + chunk] += jnp.dot(mine, ones, preferred_element_type=jnp.float32)


def _dispatch_bounds(count_EL: Array, width: int) -> Array:
    """Rows of all experts before e in lane e, [1, width] int32; lanes from E on hold the number of rows."""
    cuts = []
    for c in range(0, width, _DISPATCH_LANES):
        expert = lax.broadcasted_iota(jnp.int32, count_EL.shape, 0)
        lane = c + lax.broadcasted_iota(jnp.int32, count_EL.shape, 1)
        cuts.append(jnp.sum(jnp.where(expert < lane, count_EL, 0.0), axis=0, keepdims=True))
    return jnp.concatenate(cuts, axis=1).astype(jnp.int32)


def _dispatch_starts(count_EL: Array) -> Array:
    """Rows of all experts before e in row e, on every lane."""
    num = count_EL.shape[0]
    above = lax.broadcasted_iota(jnp.int32, (num, num), 1) < lax.broadcasted_iota(jnp.int32, (num, num), 0)
    # Counts exceed what a bfloat16 holds: a float32 product.
    return jnp.dot(
        above.astype(jnp.float32), count_EL, precision=lax.Precision.HIGHEST, preferred_element_type=jnp.float32
    )


def _dispatch_place(local_ref: Any, place_ref: Any, at: Any, mine_ref: Any, count_ref: Any, chunk: int) -> None:
    """Places of a block's choices: the expert's first free row, and one more for each earlier choice of it."""
    earlier = lax.broadcasted_iota(jnp.int32, (_DISPATCH_BLOCK, _DISPATCH_BLOCK), 0)
    earlier = earlier < lax.broadcasted_iota(jnp.int32, (_DISPATCH_BLOCK, _DISPATCH_BLOCK), 1)
    triangle = earlier.astype(jnp.bfloat16)
    ones = jnp.ones((_DISPATCH_BLOCK, _DISPATCH_LANES), jnp.bfloat16)
    local = [local_ref[k : k + 8, at] for k in range(0, local_ref.shape[0], 8)]
    place = _dispatch_repeats(local)
    for c in range(0, mine_ref.shape[0], chunk):
        mine, free = mine_ref[c : c + chunk, at], count_ref[c : c + chunk]
        base = jnp.dot(mine, triangle, preferred_element_type=jnp.float32)
        base += jnp.concatenate([free] * (_DISPATCH_BLOCK // _DISPATCH_LANES), axis=1)
        count_ref[c : c + chunk] = free + jnp.dot(mine, ones, preferred_element_type=jnp.float32)
        for e in range(0, chunk, 8):
            # Eight experts are the sublanes of a register, and eight choices fetch from it at once.
            for g, one in enumerate(local):
                value = jnp.take_along_axis(base[e : e + 8], one & 7, axis=0, mode="promise_in_bounds")
                place[g] = place[g] + jnp.where(one >> 3 == (c + e) // 8, value, 0.0)
    for g, one in enumerate(local):
        place_ref[8 * g : 8 * g + 8, at] = jnp.where(one < 0, -1, place[g].astype(jnp.int32))


def _dispatch_repeats(local: list[Array]) -> list[Array]:
    """How often an earlier choice of the same token names the same expert, [8, B] float32 per eight choices."""
    choice = lax.broadcasted_iota(jnp.int32, local[0].shape, 0)
    found = []
    for g, one in enumerate(local):
        count = jnp.zeros(one.shape, jnp.float32)
        for before in range(8 * g + 8):
            same = (one == local[before // 8][before % 8 : before % 8 + 1]) & (choice + 8 * g > before)
            count += same.astype(jnp.float32)
        found.append(count)
    return found


def _dispatch_invert(place_ref: Any, found_ref: Any, b: Array, at: Any, top_k: int, step: int, rows: Array) -> None:
    """Write a block's choices, plus 1, to their places."""

    def wide(x: Array) -> Array:
        return x.astype(jnp.float32).astype(jnp.bfloat16)

    lane = wide(lax.broadcasted_iota(jnp.int32, (_DISPATCH_LANES, _DISPATCH_BLOCK), 0))
    row = wide(lax.broadcasted_iota(jnp.int32, (step, _DISPATCH_BLOCK), 0))
    token = wide(lax.broadcasted_iota(jnp.int32, (_DISPATCH_LANES, _DISPATCH_BLOCK), 1) + 1)
    one, zero = jnp.ones((), jnp.bfloat16), jnp.zeros((), jnp.bfloat16)
    first = (b * (_DISPATCH_BLOCK * top_k)).astype(jnp.float32)

    def fill(s: Array, _: None) -> None:
        here = pl.ds(pl.multiple_of(s * step, step), step)
        found = found_ref[here, :]
        place = place_ref[:, at]
        high, low = wide((place >> 7) - s * step), wide(place & 127)
        for k in range(top_k):
            high_HB = jnp.where(row == high[k : k + 1], one, zero)
            low_LB = jnp.where(lane == low[k : k + 1], token, zero)
            hit = lax.dot_general(high_HB, low_LB, (((1,), (1,)), ((), ())), preferred_element_type=jnp.float32)
            # Token t of the block arrives as t + 1, its choice plus 1 is (first + t) * K + k + 1.
            found = jnp.where(hit > 0, hit * top_k + (first + (k + 1 - top_k)), found)
        found_ref[here, :] = found

    places = step * _DISPATCH_LANES
    lax.fori_loop(0, lax.div(rows + (places - 1), places), fill, None)
