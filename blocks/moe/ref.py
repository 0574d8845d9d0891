"""Mixture of experts: the meaning, float32, one token and one expert at a time. Which experts: ../router/ref.py.

Legend: T tokens, D hidden (of the routed experts: their own width), K top_k, E experts, I expert
intermediate, L layers in a stack. Same signatures as xla.py; numpy inside, so not jittable.
"""

from typing import Literal

import jax.numpy as jnp
import numpy as np
from jax import Array

from ..activation.names import Activation
from ..activation.ref import sigmoid_of
from ..core.quant import dequantize_on_host
from ..mlp.clamp import Clamp
from ..mlp.ref import dense_mlp, mlp_of_token


def _moe_f32(x: Array) -> np.ndarray:
    """Any array as float32 in numpy."""
    return np.asarray(x).astype(np.float32)


def _moe_layer(stack: Array | None, scale: Array | None, layer: int) -> np.ndarray | None:
    """One layer of a stack: stored values times their block scales, or the values themselves."""
    if stack is None:
        return None
    if scale is None:
        return _moe_f32(stack[layer])
    return dequantize_on_host(np.asarray(stack[layer]), np.asarray(scale[layer]))


def experts(
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
    block_rows: int,
    activation: Activation = "silu",
    biases: dict[str, Array] | None = None,
    add_b_down: Array | bool = True,
    clamp: Clamp | None = None,
    weigh: Literal["output", "input"] = "output",
) -> Array:
    """Sum of weighted local experts per token -> [T, D] float32."""
    stacks = {"w_gate": w_gate, "w_up": w_up, "w_down": w_down}
    matrices = [_moe_layer(w, scales[k] if scales and w is not None else None, int(layer)) for k, w in stacks.items()]
    vectors = [_moe_layer((biases or {}).get(key), None, int(layer)) for key in ("b_gate", "b_up", "b_down")]
    if not bool(add_b_down):
        vectors[2] = None
    y_TD = np.zeros(h_TD.shape, np.float32)
    x_TD, weight = _moe_f32(h_TD), _moe_f32(weight_TK)
    for (token, choice), expert in np.ndenumerate(np.asarray(index_TK)):
        local = int(expert) - int(first_expert)
        if expert >= 0 and 0 <= local < w_up.shape[1]:
            one, by = np.float32(1), weight[token, choice]
            before, after = (by, one) if weigh == "input" else (one, by)
            own, own_biases = ([None if a is None else a[local] for a in found] for found in (matrices, vectors))
            y_TD[token] += after * mlp_of_token(before * x_TD[token], own, own_biases, activation, clamp)
    return jnp.asarray(y_TD)


def latent_projection(x: Array, w: Array) -> Array:
    """x w: hidden to the width of the routed experts, or their sum back."""
    return jnp.asarray(_moe_f32(x) @ _moe_f32(w), x.dtype)


def shared_expert(
    h_TD: Array,
    w: dict[str, Array],
    *,
    gate: Literal["sigmoid", "none"] = "none",
    gated: bool = True,
    activation: Activation = "silu",
    bias: bool = False,
    add_b_down: Array | bool = True,
    clamp: Clamp | None = None,
    scale: float = 1.0,
) -> Array:
    """The expert every token passes -> [T, D] float32."""
    y_TD = dense_mlp(
        h_TD,
        w["shared_gate"] if gated else None,
        w["shared_up"],
        w["shared_down"],
        activation=activation,
        b_gate=w["shared_b_gate"] if bias and gated else None,
        b_up=w["shared_b_up"] if bias else None,
        b_down=w["shared_b_down"] if bias else None,
        add_b_down=add_b_down,
        clamp=clamp,
    )
    if gate == "sigmoid":
        y_TD = y_TD * sigmoid_of(_moe_f32(h_TD) @ _moe_f32(w["shared_router"]))
    return y_TD * jnp.float32(scale)
