"""Dense MLP: the meaning, float32, one token at a time.

Legend: T tokens, D hidden. Same signature as xla.py; numpy inside, so not jittable.
"""

import jax.numpy as jnp
import numpy as np
from jax import Array

from ..activation.names import Activation
from ..activation.ref import activate
from .clamp import Clamp


def dense_mlp(
    x_TD: Array,
    w_gate: Array | None,
    w_up: Array,
    w_down: Array,
    *,
    activation: Activation = "silu",
    b_gate: Array | None = None,
    b_up: Array | None = None,
    b_down: Array | None = None,
    add_b_down: Array | bool = True,
    clamp: Clamp | None = None,
) -> Array:
    """down(activation(gate(x)) * up(x)), or down(activation(up(x))) without w_gate -> [T, D] float32."""
    matrices = [None if w is None else np.asarray(w).astype(np.float32) for w in (w_gate, w_up, w_down)]
    biases = [None if b is None else np.asarray(b).astype(np.float32) for b in (b_gate, b_up, b_down)]
    if not bool(add_b_down):
        biases[2] = None
    tokens = np.asarray(x_TD).astype(np.float32)
    return jnp.asarray(np.stack([mlp_of_token(x, matrices, biases, activation, clamp) for x in tokens]))


def mlp_of_token(
    x: np.ndarray,
    matrices: list[np.ndarray | None],
    biases: list[np.ndarray | None],
    activation: Activation,
    clamp: Clamp | None,
) -> np.ndarray:
    """One token through (gate, up, down) matrices and biases, each of which may be missing; float32."""
    gate, up = _linear(x, matrices[0], biases[0]), _linear(x, matrices[1], biases[1])
    assert up is not None
    inner = activate(up, activation) if gate is None else gated(gate, up, activation, clamp)
    y = _linear(inner, matrices[2], biases[2])
    assert y is not None
    return y


def gated(gate: np.ndarray, up: np.ndarray, activation: Activation, clamp: Clamp | None) -> np.ndarray:
    """activation(gate) * up, with the limits of `clamp`."""
    if clamp is None:
        return activate(gate, activation) * up
    limit, alpha = np.float32(clamp.limit), np.float32(clamp.alpha)
    up = np.maximum(np.minimum(up, limit), -limit) + np.float32(clamp.up_offset)
    if clamp.place == "before":
        return activate(alpha * np.minimum(gate, limit), activation) / alpha * up
    return np.minimum(activate(alpha * gate, activation) / alpha, limit) * up


def _linear(x: np.ndarray, w: np.ndarray | None, bias: np.ndarray | None) -> np.ndarray | None:
    if w is None:
        return None
    return x @ w if bias is None else x @ w + bias
