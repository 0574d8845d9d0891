"""Gated short convolution in plain XLA: decode and prefill rows alike, all at once.

Legend: T tokens, D hidden, F channels, W = taps - 1 (window).
"""

import jax.numpy as jnp
from jax import Array

from ..core.batch import Batch, Rows
from ..core.causal_conv import causal_conv
from ..core.linear import linear


def short_conv(
    h_TD: Array,
    w: dict[str, Array],
    conv_pool: Array,
    batch: Batch,
    rows: Rows,
    *,
    pool_layer: Array | int,
    conv_kernel: int,
    max_q: int,
    bias: bool = False,
) -> tuple[Array, Array]:
    """y = c * conv(b * x) of every row, from its slot's window (zeros without has_state) and back into it.

    conv_pool [L, slots, W*F] (oldest input first); pool_layer may be traced. Channels are the
    local ones. max_q: the longest row this bucket may hold. bias: of the projections and the convolution.
    Returns out [T, D] in h's dtype, partial over tensor parallelism and without b_o, and the pool.
    """
    assert w["conv"].shape[1] == conv_kernel, (w["conv"].shape, conv_kernel)
    part = {name: linear(h_TD, w[f"w_{name}"], w[f"b_{name}"] if bias else None) for name in ("b", "c", "x")}
    conv_TF, conv_pool = causal_conv(
        part["b"] * part["x"], w["conv"], w["conv_bias"] if bias else None, conv_pool, batch, rows,
        pool_layer=pool_layer, max_q=max_q,
    )  # fmt: skip
    y_TF = (part["c"].astype(jnp.float32) * conv_TF).astype(h_TD.dtype)
    return linear(y_TF, w["w_o"]), conv_pool


__all__ = ["short_conv"]
