"""The activations in plain JAX, elementwise in the dtype of x (callers pass float32)."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import Array

from .names import Activation

_ACTIVATIONS: dict[Activation, Callable[[Array], Array]] = {
    "silu": jax.nn.silu,
    "gelu": lambda x: jax.nn.gelu(x, approximate=False),
    "gelu_tanh": lambda x: jax.nn.gelu(x, approximate=True),
    "relu": jax.nn.relu,
    "relu2": lambda x: jnp.square(jax.nn.relu(x)),
    "sigmoid": jax.nn.sigmoid,
    "softplus": jax.nn.softplus,
    "tanh": jnp.tanh,
}


def activate(x: Array, activation: Activation) -> Array:
    """The activation of every value of x; same shape and dtype."""
    return _ACTIVATIONS[activation](x)
