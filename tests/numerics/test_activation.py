"""Activations in JAX against their meaning in numpy.

Tolerance: values of order 1 to 400, a few float32 roundings each: 2e-6 of the value or of 1.
"""

from typing import get_args

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from moec.blocks.activation import ref, xla
from moec.blocks.activation.names import Activation

NAMES = get_args(Activation)
X = np.concatenate([np.linspace(-20, 20, 401), [-200.0, 200.0, 1e-20, -1e-20]]).astype(np.float32)
# Three values of each at -1, 1 and 2, from the formulas; so that ref.py is no echo of xla.py.
KNOWN = {
    "silu": (-0.26894142, 0.73105858, 1.76159416),
    "gelu": (-0.15865525, 0.84134475, 1.95449974),
    "gelu_tanh": (-0.15880801, 0.84119199, 1.95459769),
    "relu": (0, 1, 2),
    "relu2": (0, 1, 4),
    "sigmoid": (0.26894142, 0.73105858, 0.88079708),
    "softplus": (0.31326169, 1.31326169, 2.12692801),
    "tanh": (-0.76159416, 0.76159416, 0.96402758),
}


def test_the_three_files_name_the_same_activations_in_the_same_order() -> None:
    assert tuple(ref.MEANINGS) == tuple(xla._ACTIVATIONS) == NAMES


@pytest.mark.parametrize("name", NAMES)
def test_xla_matches_the_meaning(name: Activation) -> None:
    found = jax.jit(xla.activate, static_argnums=1)(jnp.asarray(X), name)
    want = ref.activate(X, name)
    assert found.dtype == want.dtype == np.float32
    np.testing.assert_allclose(found, want, atol=2e-6, rtol=2e-6)


@pytest.mark.parametrize("name", KNOWN)
def test_known_values(name: Activation) -> None:
    np.testing.assert_allclose(ref.activate(np.float32([-1, 1, 2]), name), KNOWN[name], atol=1e-6, rtol=0)
