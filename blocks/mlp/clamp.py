"""The clamped form of a gated MLP, as emitted programs and kernels name it. No jax."""

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class Clamp:
    """Limits between the up products and the down product of a gated MLP.

    The gate is cut to at most `limit` before or after its activation, up to [-limit, limit];
    the activation of g is activation(alpha g) / alpha (silu: g sigmoid(alpha g)); up_offset is
    added to the cut up.
    """

    limit: float
    alpha: float = 1.0
    up_offset: float = 0.0
    place: Literal["before", "after"] = "before"
