"""Mixture of experts: the meaning, float32, one token and one expert at a time.

Legend: T tokens, D hidden, K top_k, E experts, I expert intermediate, L layers in a stack.
Same signatures as xla.py; not jittable.
"""

from typing import Literal

import jax
import jax.numpy as jnp
from jax import Array

from ..core.quant import dequantize_blocks


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
    w = w_router.astype(h_TD.dtype).astype(jnp.float32)
    index, weight = [], []
    for h in h_TD.astype(jnp.float32):
        # Rounded as a model that runs in h's dtype would have them.
        logits = jnp.einsum("d,de->e", h, w, precision="highest").astype(h_TD.dtype).astype(jnp.float32)
        scores = jnp.exp(logits - logits.max()) if score == "softmax" else 1 / (1 + jnp.exp(-logits))
        scores = scores / scores.sum() if score == "softmax" else scores
        best = jnp.argsort(-scores, stable=True)[:top_k]
        chosen = scores[best] / (scores[best].sum() + 1e-20) if renormalize else scores[best]
        index.append(best)
        weight.append(chosen * scale)
    return jnp.stack(index).astype(jnp.int32), jnp.stack(weight).astype(h_TD.dtype)


def _moe_mlp(x: Array, gate: Array, up: Array, down: Array) -> Array:
    """down(silu(gate(x)) * up(x)) of one token, float32."""
    g = jnp.einsum("d,di->i", x, gate, precision="highest")
    u = jnp.einsum("d,di->i", x, up, precision="highest")
    return jnp.einsum("i,id->d", g * jax.nn.sigmoid(g) * u, down, precision="highest")


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

    def matrices(expert: int) -> list[Array]:
        if scales is None:
            return [stack[layer, expert].astype(jnp.float32) for stack in stacks.values()]
        return [dequantize_blocks(w[layer, expert], scales[n][layer, expert], jnp.float32) for n, w in stacks.items()]

    rows = []
    for x, chosen, weights in zip(h_TD.astype(jnp.float32), index_TK, weight_TK.astype(jnp.float32), strict=True):
        total = jnp.zeros(h_TD.shape[1], jnp.float32)
        for e, weight in zip(chosen, weights, strict=True):
            if first_expert <= e < first_expert + w_gate.shape[1]:
                total += weight * _moe_mlp(x, *matrices(int(e) - int(first_expert)))
        rows.append(total)
    return jnp.stack(rows)


def shared_expert(
    h_TD: Array, w: dict[str, Array], *, gate: Literal["sigmoid", "none"], activation: Literal["silu"]
) -> Array:
    """The expert every token passes -> [T, D] float32."""
    assert activation == "silu", activation
    w = {name: value.astype(jnp.float32) for name, value in w.items()}
    rows = []
    for x in h_TD.astype(jnp.float32):
        y = _moe_mlp(x, w["shared_gate"], w["shared_up"], w["shared_down"])
        rows.append(y if gate == "none" else y * jax.nn.sigmoid(jnp.dot(x, w["shared_router"][:, 0])))
    return jnp.stack(rows)
