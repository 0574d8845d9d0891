"""Dense MLP in plain JAX; the experts of a mixture are the same function.

Legend: T tokens, D hidden (in and out), I intermediate (local).
"""

import jax.numpy as jnp
from jax import Array

from ..activation.names import Activation
from ..activation.xla import activate
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
    """down(activation(gate(x)) * up(x)) -> [T, D] float32, partial when I is cut.

    w_gate, w_up [D, I], w_down [I, D]; without w_gate down(activation(up(x))). Biases [I], [I],
    [D]; when I is cut, add_b_down is true on one of the devices that share it. Sums and
    activation in float32, the inner values are rounded to x's dtype.
    """
    gate_TI = None if w_gate is None else _mlp_linear(x_TD, w_gate, b_gate)
    up_TI = _mlp_linear(x_TD, w_up, b_up)
    inner_TI = activate(up_TI, activation) if gate_TI is None else _mlp_gated(gate_TI, up_TI, activation, clamp)
    if b_down is not None and add_b_down is not True:
        b_down = jnp.where(add_b_down, b_down, jnp.zeros_like(b_down))
    return _mlp_linear(inner_TI.astype(x_TD.dtype), w_down, b_down)


def _mlp_linear(x: Array, w: Array, bias: Array | None) -> Array:
    """x w + bias in float32."""
    y = jnp.dot(x, w, preferred_element_type=jnp.float32)
    return y if bias is None else y + bias.astype(jnp.float32)


def _mlp_gated(gate: Array, up: Array, activation: Activation, clamp: Clamp | None) -> Array:
    """activation(gate) * up within the limits of `clamp`."""
    if clamp is None:
        return activate(gate, activation) * up
    if clamp.place == "before":
        gate = jnp.minimum(gate, clamp.limit)
    gate = activate(gate, activation) if clamp.alpha == 1 else activate(gate * clamp.alpha, activation) / clamp.alpha
    if clamp.place == "after":
        gate = jnp.minimum(gate, clamp.limit)
    up = jnp.clip(up, -clamp.limit, clamp.limit)
    return gate * (up + clamp.up_offset if clamp.up_offset else up)
