"""Gated DeltaNet (arXiv:2412.06464) with Pallas kernels from the input projection to the output norm.

Legend: T tokens, S rows, D hidden, V value heads, H = 2*Q + V heads of convolution channels (q | k | v), R rates.

Decode rows: one kernel over the rows (tpu_fused_decode.py); windows and states are read once and written once, in
place, and rows that are not there cost nothing. Prefill rows: one kernel over their chunks (tpu_fused_prefill.py,
with a decay per channel tpu_fused_prefill_channel.py), absent from buckets of decode rows only; a row's state stays on
the chip across its chunks.
Head dims are one memory tile wide: 128. What the kernels do not take, tpu_cost.refuse names.
"""

from typing import Literal

import jax.numpy as jnp
from jax import Array

from ..core.batch import Batch, Rows
from ..core.chip import ChipLimits
from .project import GdnHeads, gdn_inputs, gdn_output
from .tpu_fused_decode import gdn_decode_rows
from .tpu_fused_prefill import gdn_prefill_rows
from .tpu_fused_prefill_channel import gdn_prefill_channel_rows


def gated_delta_fused(
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
    chip: ChipLimits,
    unroll: int,
) -> tuple[Array, Array, Array]:
    """As gated_delta of xla.py, with conv_pool [L, slots, W*F/128, 128] and state_pool [L, slots, V, 128, 128].

    chunk: prefill tokens solved together. unroll: groups of value heads that one pass of the decode update takes.
    """
    heads = GdnHeads(num_qk_heads, num_v_heads, head_k_dim, head_v_dim)
    assert head_k_dim == head_v_dim == chip.lanes, heads
    in_TF, beta_TV, g_T, taps_KF = gdn_inputs(
        h_TD, w, heads, channel_decay=channel_decay, decay_lower_bound=decay_lower_bound,
        negative_eigenvalues=negative_eigenvalues,
    )  # fmt: skip
    assert taps_KF.shape[0] == conv_kernel, (taps_KF.shape, conv_kernel)
    # Behind the last token, room for what the last chunk of the last row takes too many.
    spare = chunk if max_q > 1 else 0
    x_TH = jnp.pad(in_TF, ((0, spare), (0, 0))).reshape(-1, in_TF.shape[1] // chip.lanes, chip.lanes)
    taps_KH = taps_KF.reshape(conv_kernel, -1, chip.lanes)
    o_TVd, conv_pool, state_pool = gdn_decode_rows(
        x_TH, beta_TV, jnp.exp(g_T), taps_KH, batch, pool_layer, conv_pool, state_pool,
        heads=heads, chip=chip, unroll=unroll,
    )  # fmt: skip
    if max_q > 1:
        prefill = gdn_prefill_channel_rows if channel_decay else gdn_prefill_rows
        o_TVd, conv_pool, state_pool = prefill(
            x_TH, beta_TV, g_T, taps_KH, batch, pool_layer, o_TVd, conv_pool, state_pool,
            heads=heads, chip=chip, chunk=chunk,
        )  # fmt: skip
    # Nothing wrote the padding's outputs: they may be NaN.
    o_TVd = jnp.where(rows.valid[:, None, None], o_TVd[: h_TD.shape[0]], 0)
    y_TD = gdn_output(
        o_TVd, h_TD, w, norm_eps=norm_eps, norm_zero_centered=norm_zero_centered, gate_activation=gate_activation
    )
    return y_TD, conv_pool, state_pool


__all__ = ["gated_delta_fused"]
