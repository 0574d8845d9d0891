"""The activations a spec may name; each has one line here, one in ref.py and one in xla.py (a test sees to it)."""

from typing import Literal

Activation = Literal[
    "silu",
    "gelu",
    "gelu_tanh",
    "relu",
    "relu2",
    "sigmoid",
    "softplus",
    "tanh",
]
