"""Mixture of experts: the meaning, float32, one token and one expert at a time.

Legend: T tokens, D hidden, K top_k, E experts, I expert intermediate, L layers in a stack.
Same signatures as xla.py; numpy inside, so not jittable.
"""

from typing import Literal

import jax.numpy as jnp
import numpy as np
from jax import Array

from ..core.quant import dequantize_on_host


def _moe_f32(x: Array) -> np.ndarray:
    """Any array as float32 in numpy."""
    return np.asarray(x).astype(np.float32)


def _moe_sigmoid(x: np.ndarray) -> np.ndarray:
    """1 / (1 + exp(-x)) without overflow."""
    return np.exp(-np.logaddexp(np.float32(0), -x))


def route(
    h_TD: Array,
    w_router: Array,
    *,
    top_k: int,
    score: Literal["softmax", "sigmoid"],
    renormalize: bool,
    scale: float = 1.0,
) -> tuple[Array, Array]:
    """Pick top_k experts per token -> (index [T, K] int32, weight [T, K] in h's dtype)."""
    w = _moe_f32(w_router.astype(h_TD.dtype))
    index, weight = [], []
    for h in _moe_f32(h_TD):
        # Rounded as a model that runs in h's dtype would have them.
        logits = (h @ w).astype(h_TD.dtype).astype(np.float32)
        if score == "softmax":
            scores = np.exp(logits - logits.max())
            scores = scores / scores.sum()
        else:
            scores = _moe_sigmoid(logits)
        # A stable sort leaves the lower index first among equals.
        best = np.argsort(-scores, kind="stable")[:top_k]
        chosen = scores[best] / (scores[best].sum() + np.float32(1e-20)) if renormalize else scores[best]
        index.append(best)
        weight.append(chosen * np.float32(scale))
    return jnp.asarray(np.stack(index), jnp.int32), jnp.asarray(np.stack(weight), h_TD.dtype)


def _moe_mlp(x: np.ndarray, gate: np.ndarray, up: np.ndarray, down: np.ndarray) -> np.ndarray:
    """down(silu(gate(x)) * up(x)) of one token."""
    g = x @ gate
    return (g * _moe_sigmoid(g) * (x @ up)) @ down


def experts(
    h_TD: Array,
    index_TK: Array,
    weight_TK: Array,
    w_gate: Array,
    w_up: Array,
    w_down: Array,
    scales: dict[str, Array] | None,
    *,
    layer: Array | int,
    first_expert: Array | int,
    activation: Literal["silu"],
    block_rows: int,
) -> Array:
    """Sum of weighted local experts per token -> [T, D] float32."""
    assert activation == "silu", activation
    stacks = {"w_gate": w_gate, "w_up": w_up, "w_down": w_down}
    # One layer only: e4m3 values times their block scales, or the values themselves.
    layer_E = [
        _moe_f32(w[layer]) if scales is None else dequantize_on_host(np.asarray(w[layer]), np.asarray(scales[k][layer]))
        for k, w in stacks.items()
    ]
    y_TD = np.zeros(h_TD.shape, np.float32)
    x_TD, weight = _moe_f32(h_TD), _moe_f32(weight_TK)
    for (token, choice), expert in np.ndenumerate(np.asarray(index_TK)):
        local = int(expert) - int(first_expert)
        if expert >= 0 and 0 <= local < w_gate.shape[1]:
            y_TD[token] += weight[token, choice] * _moe_mlp(x_TD[token], *(w_E[local] for w_E in layer_E))
    return jnp.asarray(y_TD)


def shared_expert(
    h_TD: Array, w: dict[str, Array], *, gate: Literal["sigmoid", "none"], activation: Literal["silu"]
) -> Array:
    """The expert every token passes -> [T, D] float32."""
    assert activation == "silu", activation
    matrices = [_moe_f32(w[name]) for name in ("shared_gate", "shared_up", "shared_down")]
    rows = []
    for x in _moe_f32(h_TD):
        y = _moe_mlp(x, *matrices)
        rows.append(y if gate == "none" else y * _moe_sigmoid(x @ _moe_f32(w["shared_router"])))
    return jnp.asarray(np.stack(rows))
