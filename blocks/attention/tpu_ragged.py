"""Attention over a paged cache as Pallas kernels: the pool is written where it is read.

Legend: T tokens, S rows, P pages per row, D hidden, N q heads, G kv heads, M queries per kv head (N/G, padded to whole
tiles in the kernels), H head_dim, C = 2*G*H (one cached token: all key heads, then all value heads), L lanes.

Two kernels: tpu_ragged_kernel.py for decode rows, tpu_ragged_prefill.py for chunks, which only a bucket with max_q > 1
holds. Projections, norms, rope and gates are those of xla.py and stay XLA's.
"""

from dataclasses import replace
from math import e, log2
from typing import Literal

import jax.numpy as jnp
from jax import Array

from ..core.batch import Batch, Rows
from ..core.chip import ChipLimits
from ..core.heads import gated
from ..core.linear import linear
from ..core.paged import to_cache
from ..core.rope_spec import Rope
from .project import AttnTokenRules, attn_project
from .tpu_ragged_kernel import RpaShape, rpa_decode
from .tpu_ragged_prefill import rpa_prefill


def attention_ragged(
    h_TD: Array,
    w: dict[str, Array],
    kv_pool: Array,
    batch: Batch,
    rows: Rows,
    *,
    pool_layer: Array | int,
    num_pages: int,
    num_q_heads: int,
    num_kv_heads: int,
    head_dim: int,
    v_head_dim: int | None = None,
    rope: Rope | None = None,
    qk_norm: Literal["none", "head", "full", "l2"] = "none",
    qk_norm_place: Literal["before_rope", "after_rope"] = "before_rope",
    v_norm: bool = False,
    norm_eps: float = 1e-6,
    norm_zero_centered: bool = False,
    qkv_bias: bool = False,
    keys_as_values: bool = False,
    clip_qkv: float | None = None,
    window: int | None = None,
    chunk: int | None = None,
    sinks: bool = False,
    softcap: float | None = None,
    scale: float,
    value_scale: float = 1.0,
    temperature: tuple[int, float, int] | None = None,
    output_gate: Literal["sigmoid", "softplus"] | None = None,
    gate_stored: Literal["fused", "own"] = "fused",
    sum_axes: tuple[str, ...] = (),
    max_q: int,
    chip: ChipLimits,
    q_block: int,
    kv_block: int,
    decode_block: int,
    decode_tail: int,
    decode_slots: int,
) -> tuple[Array, Array]:
    """xla.attention with the cache updated here: kv_pool is donated, and returned with this step's rows in place.

    q_block: tokens of a chunk per work item, whole tiles of them; kv_block: keys it multiplies at a time. decode_block:
    keys of a decode row fetched and multiplied at a time; decode_tail: the same in its last block; decode_slots: such
    blocks on the chip.
    Returns out [T, D] in h's dtype, partial over tensor parallelism and without b_o, and the pool.
    """
    N, G, H = num_q_heads, num_kv_heads, head_dim
    assert v_head_dim in (None, H) and kv_pool.shape[2] == 2 * G * H, (kv_pool.shape, G, H, v_head_dim)
    tokens = AttnTokenRules(
        num_q_heads=N, num_kv_heads=G, head_dim=H, rope=rope, qk_norm=qk_norm, qk_norm_place=qk_norm_place,
        v_norm=v_norm, norm_eps=norm_eps, norm_zero_centered=norm_zero_centered, qkv_bias=qkv_bias,
        keys_as_values=keys_as_values, clip_qkv=clip_qkv, value_scale=value_scale, temperature=temperature,
        output_gate=output_gate, gate_stored=gate_stored, sum_axes=sum_axes,
    )  # fmt: skip
    q_TNH, k_TF, v_TF, gate_TNX = attn_project(h_TD, w, batch.positions, tokens)
    new_TC = to_cache(jnp.concatenate([k_TF, v_TF], axis=-1), kv_pool.dtype)

    shape = _rpa_shape(
        kv_pool, batch.page_table.shape[1], q_TNH, G, window=window, chunk=chunk, softcap=softcap,
        block=decode_block, tail=decode_tail, slots=decode_slots, chip=chip,
    )  # fmt: skip
    # The kernels do not check bounds, and an entry past a row's end may be anything.
    pages_SP = jnp.clip(batch.page_table, 0, num_pages - 1) + pool_layer * num_pages
    sink_GM = w["sinks"].astype(jnp.float32).reshape(G, N // G) * log2(e) if sinks else None
    argument = scale * log2(e) if softcap is None else scale / softcap
    q_TGMH = q_TNH.reshape(-1, G, N // G, H)
    out_TGMH, kv_pool = _rpa_decode_rows(q_TGMH, new_TC, sink_GM, kv_pool, pages_SP, batch, argument, shape, chip)
    if max_q > 1:
        group = _rpa_round_up(N // G, chip.sublanes * 4 // q_TNH.dtype.itemsize)  # whole tiles of two or four bytes
        assert kv_block % shape.page_size == kv_block % chip.lanes == 0, (kv_block, shape.page_size)
        shape = replace(shape, group=group, block=kv_block, tail=kv_block, slots=2, split=False)
        chunks_TGMH, kv_pool = rpa_prefill(
            q_TGMH, new_TC, sink_GM, kv_pool, pages_SP, batch, rows, argument,
            shape=shape, q_block=q_block, chip=chip,
        )  # fmt: skip
        is_chunk_T = rows.valid & (rows.row >= batch.distribution[0])
        out_TGMH = jnp.where(is_chunk_T[:, None, None, None], chunks_TGMH, out_TGMH)
    out_TNH = out_TGMH.reshape(-1, N, H)
    if output_gate is not None and gate_TNX is not None:
        out_TNH = gated(out_TNH, gate_TNX, output_gate)
    return linear(out_TNH.reshape(-1, N * H), w["w_o"]), kv_pool


def _rpa_shape(
    kv_pool: Array, pages_per_seq: int, q_TNH: Array, num_kv_heads: int, *, window: int | None, chunk: int | None,
    softcap: float | None, block: int, tail: int, slots: int, chip: ChipLimits,
) -> RpaShape:  # fmt: skip
    (_, page_size, _), (_, N, H) = kv_pool.shape, q_TNH.shape
    tile_rows = chip.sublanes * 4 // kv_pool.dtype.itemsize
    assert H % chip.lanes == 0 and page_size % tile_rows == 0, (H, page_size, tile_rows)
    assert block % page_size == block % tail == tail % tile_rows == tail % chip.lanes == 0, (block, tail, page_size)
    assert slots >= 4 and slots & (slots - 1) == 0, slots
    float8 = jnp.dtype(jnp.float8_e4m3fn)
    split = kv_pool.dtype == float8 and q_TNH.dtype == jnp.bfloat16 and float8.name in chip.mxu_dtypes
    return RpaShape(
        num_kv_heads=num_kv_heads, group=_rpa_round_up(N // num_kv_heads, chip.sublanes), head_dim=H,
        page_size=page_size, pages_per_seq=pages_per_seq, block=block, slots=slots, tail=tail, tile_rows=tile_rows,
        split=split, window=window, chunk=chunk, softcap=None if softcap is None else softcap * log2(e),
    )  # fmt: skip


def _rpa_round_up(x: int, multiple: int) -> int:
    return -(-x // multiple) * multiple


def _rpa_decode_rows(
    q_TGMH: Array,
    new_TC: Array,
    sink_GM: Array | None,
    kv_pool: Array,
    pages_SP: Array,
    batch: Batch,
    argument: float,
    shape: RpaShape,
    chip: ChipLimits,
) -> tuple[Array, Array]:
    """The decode rows (token s belongs to row s), zeros for other tokens [T, G, M, H]; and the pool with their rows."""
    (T, _, M, _), S = q_TGMH.shape, min(q_TGMH.shape[0], pages_SP.shape[0])
    pad = shape.group - M
    scale_S, factor_S = jnp.ones(S, jnp.float32), jnp.full(S, argument, jnp.float32)
    if shape.split:
        scale_S = _rpa_scale(q_TGMH[:S])
        factor_S /= scale_S
    q_SGMH = jnp.pad(q_TGMH[:S], ((0, 0), (0, 0), (0, pad), (0, 0)))
    if sink_GM is not None:
        sink_GM = jnp.pad(sink_GM, ((0, 0), (0, pad)))
    sink_GML = None if sink_GM is None else jnp.broadcast_to(sink_GM[..., None], (*sink_GM.shape, chip.lanes))
    out_SGMH, kv_pool = rpa_decode(
        batch.distribution[:1], batch.kv_len[:S], pages_SP[:S], factor_S, scale_S, q_SGMH,
        _rpa_replicated(new_TC[:S]), sink_GML, kv_pool, shape=shape, chip=chip,
    )  # fmt: skip
    return jnp.pad(out_SGMH[:, :, :M], ((0, T - S), (0, 0), (0, 0), (0, 0))), kv_pool


def _rpa_scale(q_SGMH: Array) -> Array:
    """The power of two [S] that brings a row's largest query value into [128, 256): float8 ends at 448."""
    top_S = jnp.max(jnp.abs(q_SGMH.reshape(q_SGMH.shape[0], -1)), axis=1)
    _, exponent_S = jnp.frexp(top_S.astype(jnp.float32))
    # Both the scale and its inverse are powers of two that float32 has.
    return jnp.exp2(jnp.clip(8 - exponent_S, -100, 100).astype(jnp.float32))


def _rpa_replicated(new_SC: Array) -> Array:
    """Cache rows as 32-bit words that hold a value in every part."""
    parts = 4 // new_SC.dtype.itemsize
    unsigned = {1: jnp.uint8, 2: jnp.uint16, 4: jnp.uint32}[new_SC.dtype.itemsize]
    words = new_SC.view(unsigned).astype(jnp.uint32)
    return words * sum(1 << (part * 32 // parts) for part in range(parts))


__all__ = ["attention_ragged"]
