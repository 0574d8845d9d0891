"""Latent attention as a Pallas kernel over ragged rows: absorbed, the pool updated in place.

Legend: see xla.py; W new rows written as one group, Y groups, C a pool's row.

Projections, the absorbed products with w_kv_b, gate and output projection are XLA, as in xla.py. Between them one
kernel attends for all decode rows and, where the bucket may hold prefill rows, a second one for those. Both update the
pool they are given, which a program therefore carries through its layer scan instead of stacking new rows.
"""

from functools import partial
from typing import Literal

import jax
import jax.numpy as jnp
from jax import Array
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from ..core.batch import Batch, Rows
from ..core.chip import ChipLimits
from ..core.online_softmax import einsum_wide
from ..core.paged import to_cache
from ..core.rope_spec import Rope
from .project import MlaTokenRules, mla_output, mla_project
from .tpu_ragged_kernel import MlaKernelShape, mla_ragged_kernel
from .tpu_ragged_sizes import mla_contraction, mla_group, mla_query_block, mla_tile_rows, mla_vmem_bytes

_MLA_LOG2_E = 1.4426950408889634


def mla_ragged(
    h_TD: Array,
    w: dict[str, Array],
    kv_pool: Array,
    batch: Batch,
    rows: Rows,
    *,
    pool_layer: Array | int,
    num_pages: int,
    num_heads: int,
    kv_lora_rank: int,
    qk_nope_head_dim: int,
    v_head_dim: int,
    norm_eps: float,
    scale: float,
    max_q: int,
    rope_spec: Rope | None = None,
    norm_zero_centered: bool = False,
    query_latent: bool = False,
    temperature: tuple[int, float, int] | None = None,
    output_gate: Literal["sigmoid", "softplus"] | None = None,
    gate_stored: Literal["fused", "own"] = "fused",
    bias: bool = False,
    chip: ChipLimits,
    decode_keys: int,
    prefill_keys: int,
    prefill_rows: int,
    buffers: int,
) -> tuple[Array, Array]:
    """As xla.mla, but returns the updated pool instead of the new rows; kv_pool has to be donated for that.

    decode_keys, prefill_keys: cached keys of one step, whole pages. prefill_rows: queries times heads that a prefill
    step takes at once. buffers: steps whose pages are in VMEM or in flight.
    """
    N, R, H = num_heads, kv_lora_rank, qk_nope_head_dim
    tokens = MlaTokenRules(
        num_heads=N, kv_lora_rank=R, qk_nope_head_dim=H, norm_eps=norm_eps, rope_spec=rope_spec,
        norm_zero_centered=norm_zero_centered, query_latent=query_latent, temperature=temperature,
        output_gate=output_gate, gate_stored=gate_stored, bias=bias,
    )  # fmt: skip
    q_TNX, new_TC, gate_TNY = mla_project(h_TD, w, batch.positions, tokens)
    rope_dims, unused = new_TC.shape[1] - R, kv_pool.shape[2] - new_TC.shape[1]
    new_TC = jnp.pad(to_cache(new_TC, kv_pool.dtype), ((0, 0), (0, unused)))
    w_NXR = w["w_kv_b"].reshape(N, H + v_head_dim, R)
    dtype = jnp.dtype(jnp.float32) if jnp.float32 in (h_TD.dtype, kv_pool.dtype) else h_TD.dtype
    # Whole tiles of heads: a block of tokens then is a matrix of [tokens * heads] as it lies in memory.
    spare = -N % mla_tile_rows(dtype.name)
    latent_TNR = einsum_wide("nhr,tnh->tnr", w_NXR[:, :H], q_TNX[..., :H]).astype(dtype)
    latent_TNR = jnp.pad(latent_TNR, ((0, 0), (0, spare), (0, 0)))
    q_TNE = jnp.pad(q_TNX[..., H:].astype(dtype), ((0, 0), (0, spare), (0, unused)))

    call = partial(
        mla_attend_rows, batch=batch, rows=rows, base=pool_layer * num_pages, rope=rope_dims, scale=scale, chip=chip,
        buffers=buffers,
    )  # fmt: skip
    out_TNR, kv_pool = call(latent_TNR, q_TNE, new_TC, kv_pool, None, keys=decode_keys, block_rows=N + spare)
    if max_q > 1:
        out_TNR, kv_pool = call(latent_TNR, q_TNE, new_TC, kv_pool, out_TNR, keys=prefill_keys, block_rows=prefill_rows)
    # Nothing was written for padding tokens.
    out_TNR = jnp.where(rows.valid[:, None, None], out_TNR[:, :N], 0)
    out_TNV = einsum_wide("nvr,tnr->tnv", w_NXR[:, H:], out_TNR).astype(h_TD.dtype)
    return mla_output(out_TNV, gate_TNY, w, output_gate), kv_pool


def mla_attend_rows(
    latent_TNR: Array, q_TNE: Array, new_TC: Array, kv_pool: Array, old_TNR: Array | None, *, batch: Batch, rows: Rows,
    base: Array | int, rope: int, scale: float, chip: ChipLimits, keys: int, block_rows: int, buffers: int,
) -> tuple[Array, Array]:  # fmt: skip
    """One kernel over the decode rows (old_TNR None) or the prefill rows: outputs [T, N, R] and the pool."""
    (T, N, R), (S, P), (_, page_size, C) = latent_TNR.shape, batch.page_table.shape, kv_pool.shape
    prefill = old_TNR is not None
    assert keys % page_size == 0 and keys % 128 == 0, (keys, page_size)
    block, tile = mla_query_block(block_rows, N, T) if prefill else (1, 1)
    shape = MlaKernelShape(
        prefill=prefill, pages_per_seq=P, page_size=page_size, block_tokens=block, tile_tokens=tile, num_heads=N,
        latent=R, rope=rope, row=C, keys=keys, buffers=buffers, group=mla_group(page_size),
        contraction=mla_contraction(tile * N, R), exponent_scale=scale * _MLA_LOG2_E,
    )  # fmt: skip
    decode_end, prefill_end = batch.distribution[0], batch.distribution[1]
    first, end = (decode_end, prefill_end) if prefill else (jnp.int32(0), decode_end)
    span = jnp.stack([first, end, jnp.asarray(base, jnp.int32)]).astype(jnp.int32)
    scalars = (span, rows.start, rows.q_len, batch.cu_q[:S], batch.page_table.reshape(S * P))
    new = _mla_groups(new_TC, batch, rows, shape.group) if prefill else new_TC[:S].astype(jnp.float32)
    operands = (latent_TNR, q_TNE, new, kv_pool) + ((old_TNR,) if prefill else ())
    anywhere, in_vmem = pl.BlockSpec(memory_space=pl.ANY), pl.BlockSpec(memory_space=pltpu.VMEM)
    dtype, M = latent_TNR.dtype, block * N
    scratch = (
        pltpu.VMEM((buffers, keys, C), kv_pool.dtype),
        pltpu.VMEM((2, block, N, R), dtype),
        pltpu.VMEM((2, block, N, C - R), dtype),
        pltpu.VMEM((M, 128), jnp.float32),
        pltpu.VMEM((M, 128), jnp.float32),
        pltpu.VMEM((M, R), jnp.float32),
        pltpu.VMEM((2, block, N, R), dtype),
        pltpu.VMEM((2, shape.group, C), kv_pool.dtype),
        pltpu.SMEM((2,), jnp.int32),
        pltpu.SemaphoreType.DMA((buffers,)),
        *(pltpu.SemaphoreType.DMA((2,)) for _ in range(3)),
    )
    return pl.pallas_call(
        partial(_mla_kernel_of, shape=shape),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=len(scalars),
            grid=(),
            in_specs=[anywhere, anywhere, anywhere if prefill else in_vmem, *[anywhere] * (len(operands) - 3)],
            out_specs=[anywhere, anywhere],
            scratch_shapes=scratch,
        ),
        out_shape=[jax.ShapeDtypeStruct((T, N, R), dtype), jax.ShapeDtypeStruct(kv_pool.shape, kv_pool.dtype)],
        input_output_aliases={len(scalars) + 3: 1} | ({len(scalars) + 4: 0} if prefill else {}),
        compiler_params=pltpu.CompilerParams(
            vmem_limit_bytes=min(chip.vmem_bytes, mla_vmem_bytes(shape, S, T, dtype.name, kv_pool.dtype.name)),
            disable_bounds_checks=True,
        ),
        name="mla_prefill" if prefill else "mla_decode",
    )(*scalars, *operands)


def _mla_kernel_of(*refs: Array, shape: MlaKernelShape) -> None:
    """The prefill kernel has one operand more, the outputs of the decode rows, whose place it takes."""
    mla_ragged_kernel(*refs[:9], *(() if shape.prefill else (None,)), *refs[9:], shape=shape)


def _mla_groups(new_TC: Array, batch: Batch, rows: Rows, W: int) -> Array:
    """Prefill rows' new rows as they lie in the pages, in groups of W [Y, W, C]: row after row, none left out.

    The first group of a row may begin with, the last end with zeros.
    """
    T, S = new_TC.shape[0], batch.kv_len.shape[0]
    index_S = jnp.arange(S)
    prefill_S = (index_S >= batch.distribution[0]) & (index_S < batch.distribution[1]) & (rows.q_len > 0)
    groups_S = jnp.where(prefill_S, (batch.kv_len - 1) // W - rows.start // W + 1, 0)
    ends_S = jnp.cumsum(groups_S)
    group_Y = jnp.arange(pl.cdiv(T, W) + 2 * S)
    row_Y = jnp.minimum(jnp.sum(group_Y[:, None] >= ends_S, axis=1), S - 1)
    position_Y = (rows.start // W - ends_S + groups_S)[row_Y] * W + group_Y * W
    offset_YW = position_Y[:, None] + jnp.arange(W) - rows.start[row_Y][:, None]
    mine_YW = (offset_YW >= 0) & (offset_YW < rows.q_len[row_Y][:, None])
    token_YW = jnp.where(mine_YW, batch.cu_q[row_Y][:, None] + offset_YW, 0)
    return jnp.where(mine_YW[..., None], new_TC[token_YW], 0)


__all__ = ["mla_attend_rows", "mla_ragged"]
