"""Routed experts as one kernel over the sorted rows: gate, up, SwiGLU and down per expert, nothing in between in HBM.

Each expert with rows streams its weights once from the whole stack, (layer, expert) at a time into one of two slots;
experts without rows are neither read nor computed. Token rows are gathered by the kernel from where they are, results
go to the expert's sorted places.

Float8 weights keep their block scales exactly: out = sum over blocks of K of scale * (x q) is computed as (x * scale) q
by the matrix unit, x * scale being made anew for every block of columns while weights load. A row's scale and the
peak of a column of scales are powers of two taken out before. `row_parts` 1: x * scale is rounded to one float8
(relative error up to 2**-4 each); 2: it is the sum of two, which keep 8 significant bits, as bfloat16 has; 0: rows stay
as they are and the weights are widened to bfloat16 in VMEM, once per expert, which is cheaper for blocks of many rows.

Legend: T tokens, D hidden, K top_k, P = T*K rows, E local experts, I expert intermediate, L layers in a stack, J words
of a row (tpu_grouped_rows.py), U units an expert's intermediate is cut into, W words of scales.
"""

from functools import partial
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from ..activation.names import Activation
from ..collectives.tpu_chunked import combine_reduce_scatter
from ..collectives.xla import reduce_scatter_tokens
from ..core.chip import ChipLimits
from ..mlp.clamp import Clamp
from .tpu_combine import combine_rows, combine_stream
from .tpu_dispatch import dispatch
from .tpu_grouped_kernel import GmmPlan, GmmScale, grouped_kernel
from .tpu_grouped_rows import pack_rows
from .tpu_sparsecore_emulation import unpermute_sparsecore


def experts_grouped(
    h_TD: Array,
    index_TK: Array,
    weight_TK: Array,
    w_gate: Array | None,
    w_up: Array,
    w_down: Array,
    scales: dict[str, Array] | None,
    *,
    layer: Array | int,
    first_expert: Array | int,
    activation: Activation = "silu",
    biases: dict[str, Array] | None = None,
    add_b_down: Array | bool = True,
    clamp: Clamp | None = None,
    weigh: Literal["output", "input"] = "output",
    chip: ChipLimits,
    block_rows: int,
    combine_tokens: int,
    stream_rows: int = 0,
    sparsecore_rows: int = 0,
    inner_tile: int | None = None,
    row_parts: int = 0,
) -> Array:
    """Sum of weighted local experts per token -> [T, D] float32, partial over ep and etp; arguments as in xla.py.

    Only gated SwiGLU experts without biases and limits. block_rows, inner_tile, row_parts: expert_rows_grouped.
    combine_tokens: tokens whose sums leave together. stream_rows: rows that are added at once, with the sums of all
    tokens in VMEM; 0: rows are fetched token by token, however many tokens. sparsecore_rows: rows a subcore copies at
    a time where the SparseCores sum instead; 0: the TensorCore does.
    """
    plain = biases is None and clamp is None and weigh == "output" and add_b_down is True
    assert w_gate is not None and activation == "silu" and plain, "options that tpu_cost.refuse names"
    order = dispatch(index_TK, first_expert=first_expert, num_local=w_up.shape[1], chip=chip)
    rows = expert_rows_grouped(
        h_TD,
        order.token_P,
        order.start_E,
        w_gate,
        w_up,
        w_down,
        scales,
        layer=layer,
        chip=chip,
        block_rows=block_rows,
        inner_tile=inner_tile,
        row_parts=row_parts,
    )
    width = h_TD.shape[1]
    if sparsecore_rows:
        return unpermute_sparsecore(rows, order.place_TK, weight_TK, width=width, chip=chip, copy_rows=sparsecore_rows)
    if not stream_rows:
        return combine_rows(rows, order.place_TK, weight_TK, width=width, chip=chip, tile_tokens=combine_tokens)
    return combine_stream(
        rows,
        order.token_P,
        order.choice_P,
        order.start_E,
        weight_TK,
        width=width,
        chip=chip,
        tile_tokens=combine_tokens,
        tile_rows=stream_rows,
    )


def experts_reduce_scatter_grouped(
    h_AD: Array,
    index_AK: Array,
    weight_AK: Array,
    w_gate: Array,
    w_up: Array,
    w_down: Array,
    scales: dict[str, Array] | None,
    *,
    layer: Array | int,
    first_expert: Array | int,
    axes: tuple[str, ...],
    return_chunks: int,
    chip: ChipLimits,
    block_rows: int,
    combine_tokens: int,
    stream_rows: int = 0,
    sparsecore_rows: int = 0,
    inner_tile: int | None = None,
    row_parts: int = 0,
) -> Array:
    """experts_grouped of the tokens A of all shards of `axes`, summed over them, back to this shard's -> [T, D].

    Partial sums travel as h's dtype, in return_chunks messages: one is on its way while the next is summed, by token,
    as a chunk takes the same share of every shard's tokens. Other arguments as in experts_grouped.
    """
    if return_chunks == 1:
        y_AD = experts_grouped(
            h_AD,
            index_AK,
            weight_AK,
            w_gate,
            w_up,
            w_down,
            scales,
            layer=layer,
            first_expert=first_expert,
            chip=chip,
            block_rows=block_rows,
            combine_tokens=combine_tokens,
            stream_rows=stream_rows,
            sparsecore_rows=sparsecore_rows,
            inner_tile=inner_tile,
            row_parts=row_parts,
        )
        return reduce_scatter_tokens(y_AD.astype(h_AD.dtype), axes)
    assert not sparsecore_rows, "the compiler's reduce-scatters are on the SparseCores: sums there return whole"
    order = dispatch(index_AK, first_expert=first_expert, num_local=w_up.shape[1], chip=chip)
    rows = expert_rows_grouped(
        h_AD,
        order.token_P,
        order.start_E,
        w_gate,
        w_up,
        w_down,
        scales,
        layer=layer,
        chip=chip,
        block_rows=block_rows,
        inner_tile=inner_tile,
        row_parts=row_parts,
    )
    return combine_reduce_scatter(
        partial(combine_rows, rows, width=h_AD.shape[1], chip=chip, tile_tokens=combine_tokens),
        order.place_TK,
        weight_AK,
        axes,
        scatter=reduce_scatter_tokens,
        num_chunks=return_chunks,
        dtype=h_AD.dtype,
    )


def expert_rows_grouped(
    h_TD: Array,
    token_P: Array,
    start_E: Array,
    w_gate: Array,
    w_up: Array,
    w_down: Array,
    scales: dict[str, Array] | None,
    *,
    layer: Array | int,
    chip: ChipLimits,
    block_rows: int,
    inner_tile: int | None = None,
    row_parts: int = 0,
) -> Array:
    """Every local expert's unweighted output rows as words [P + block_rows, J, 128], at their sorted places.

    token_P, start_E: as dispatch gives them; rows from start_E[E] on are undefined. block_rows: rows of one product,
    a multiple of 8 (16 where h is bfloat16); an expert with more loops over blocks. inner_tile: columns of I that are
    in VMEM at once (None: all of them, and weights then stream once however many rows).
    """
    _, num_local, hidden, inner = w_up.shape
    words = pack_rows(h_TD)
    plan, scale = _gmm_plan(words, w_up, scales, layer, block_rows, inner_tile or inner, row_parts)
    out_rows = token_P.shape[0] + block_rows
    # Rows of whole tiles lie one behind the other, so that several are one copy.
    flat = plan.words == plan.stride
    out_shape = (out_rows * plan.words, 128) if flat else (out_rows, plan.words, 128)
    anywhere, scalar = pl.BlockSpec(memory_space=pl.ANY), pl.BlockSpec(memory_space=pltpu.SMEM)
    out = pl.pallas_call(
        partial(grouped_kernel, plan=plan),
        in_specs=[scalar] * 3 + [anywhere] * 5,
        out_specs=anywhere,
        out_shape=jax.ShapeDtypeStruct(out_shape, words.dtype),
        scratch_shapes=_gmm_scratch(plan, w_up.dtype, words.dtype, scale.shape[2:]),
        compiler_params=pltpu.CompilerParams(vmem_limit_bytes=chip.vmem_bytes, disable_bounds_checks=True),
        name=f"grouped_{num_local}x{hidden}x{inner}_{w_up.dtype.name}_rows{block_rows}",
    )(jnp.asarray(layer, jnp.int32).reshape(1), start_E, token_P, words, w_gate, w_up, w_down, scale)
    return out.reshape(out_rows, plan.words, 128)


def _gmm_plan(
    words: Array,
    w_up: Array,
    scales: dict[str, Array] | None,
    layer: Array | int,
    block_rows: int,
    inner: int,
    row_parts: int,
) -> tuple[GmmPlan, Array]:
    """What the kernel is specialised for, and the scale words of each expert's units [E, U, W, 128]."""
    _, num_local, hidden, whole = w_up.shape
    units = whole // inner
    assert inner % 128 == 0 and units * inner == whole, (whole, inner)
    assert row_parts in (0, 1, 2) and (scales is not None or not row_parts), row_parts
    found: tuple[GmmScale, ...] = ()
    scale = jnp.zeros((num_local, units, 8, 128), jnp.float32)
    if scales is not None:
        found, scale = _gmm_scale_words(scales, layer, hidden, inner, units)
    count = words.shape[1]
    return GmmPlan(num_local, block_rows, hidden, inner, units, row_parts, count, -(-count // 8) * 8, found), scale


def _gmm_scale_words(
    scales: dict[str, Array], layer: Array | int, hidden: int, inner: int, units: int
) -> tuple[tuple[GmmScale, ...], Array]:
    """Scales of one layer as the kernel reads them: per matrix ratio [K, N] below 2, and peak [N], powers of two."""
    places, parts, offset = [], [], 0
    for key in ("w_gate", "w_up", "w_down"):
        s = lax.dynamic_index_in_dim(scales[key], layer, keepdims=False)
        experts, tall, wide = s.shape
        cut = (tall // units, wide) if key == "w_down" else (tall, wide // units)
        s_EUKN = s.reshape(experts, tall // cut[0], cut[0], wide // cut[1], cut[1])
        s_EUKN = jnp.moveaxis(s_EUKN, 3, 2).reshape(experts, units, *cut)
        bits = lax.bitcast_convert_type(s_EUKN.max(axis=2), jnp.int32) & jnp.int32(0x7F800000)
        peak_EUN = lax.bitcast_convert_type(jnp.maximum(bits, jnp.int32(1 << 23)), jnp.float32)
        k, n = (inner, hidden) if key == "w_down" else (hidden, inner)
        places.append(GmmScale(offset, offset + cut[0] * cut[1], k // cut[0], n // cut[1], cut[1]))
        ratio = (s_EUKN / peak_EUN[:, :, None]).reshape(experts, units, -1)
        parts += [ratio, peak_EUN]
        offset += (cut[0] + 1) * cut[1]
    flat = jnp.concatenate(parts, axis=2)
    flat = jnp.pad(flat, ((0, 0), (0, 0), (0, -offset % 1024)))
    return tuple(places), flat.reshape(*flat.shape[:2], -1, 128)


def _gmm_scratch(plan: GmmPlan, weight: Any, word: Any, scale_words: tuple[int, ...]) -> list[Any]:
    """VMEM and SMEM of the kernel, in its order."""
    rows, hidden, inner = plan.rows, plan.hidden, plan.inner
    scaled = plan.parts > 0
    wide = [(hidden, inner), (hidden, inner), (inner, hidden)] if plan.widen else [(16, 128)] * 3
    compute = jnp.float32 if scaled or word == jnp.float32 else jnp.bfloat16

    left = pltpu.VMEM((hidden // 128, rows, 128) if scaled else (rows, hidden), compute)
    # Rounded values of act, which scaled products make from gated.
    act = pltpu.VMEM((8, 128) if scaled else (rows, inner), compute)
    return [
        pltpu.VMEM((2, hidden, inner), weight),
        pltpu.VMEM((2, hidden, inner), weight),
        pltpu.VMEM((2, inner, hidden), weight),
        tuple(pltpu.VMEM(shape, jnp.bfloat16) for shape in wide),
        pltpu.SMEM((2, *scale_words), jnp.float32),
        pltpu.VMEM((rows * plan.stride, 128), word),
        pltpu.VMEM((rows * plan.stride, 128), word),
        left,
        pltpu.VMEM((rows, 128), jnp.float32),
        pltpu.VMEM((inner // 128, rows, 128), jnp.float32),
        act,
        pltpu.VMEM((rows, 128), jnp.float32),
        pltpu.VMEM((hidden // 128, rows, 128), jnp.float32),
        pltpu.SemaphoreType.DMA((2,)),
        pltpu.SemaphoreType.DMA((1,)),
        pltpu.SemaphoreType.DMA((1,)),
    ]
