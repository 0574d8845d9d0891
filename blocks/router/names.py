"""What a router may make of its logits; each score has one line here, one in ref.py and one in xla.py."""

from typing import Literal

# Of all experts' logits, float32 [T, E]. none: the logits themselves.
Score = Literal[
    "softmax",
    "sigmoid",
    "sqrt_softplus",
    "none",
]

# Weights of the selected experts: their score, or a function of their logits.
Weighing = Literal["score", "softmax", "sigmoid", "sparsemixer"]
