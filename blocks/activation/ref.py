"""The activations: their meaning, in numpy, in the dtype of x (float32 in references)."""

from collections.abc import Callable
from math import erf, pi, sqrt

import numpy as np

from .names import Activation


def sigmoid_of(x: np.ndarray) -> np.ndarray:
    """1 / (1 + exp(-x)) without overflow."""
    return np.exp(-np.logaddexp(np.float32(0), -x))


# Float64 inside erf and tanh: the reference rounds once, at the end.
MEANINGS: dict[Activation, Callable[[np.ndarray], np.ndarray]] = {
    "silu": lambda x: x * sigmoid_of(x),
    "gelu": lambda x: x * (0.5 + 0.5 * np.vectorize(erf, otypes=[np.float64])(x / sqrt(2))),
    "gelu_tanh": lambda x: x * (0.5 + 0.5 * np.tanh(sqrt(2 / pi) * (x + 0.044715 * x.astype(np.float64) ** 3))),
    "relu": lambda x: np.maximum(x, 0),
    "relu2": lambda x: np.maximum(x, 0) ** 2,
    "sigmoid": sigmoid_of,
    "softplus": lambda x: np.logaddexp(np.float32(0), x),
    "tanh": np.tanh,
}


def activate(x: np.ndarray, activation: Activation) -> np.ndarray:
    """The activation of every value of x; returns x.dtype."""
    return MEANINGS[activation](x).astype(x.dtype)
