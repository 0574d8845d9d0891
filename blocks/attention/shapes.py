"""Named attention geometries: small ones for the numeric tests, full-size ones for compile checks."""

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class AttentionShape:
    """One attention block on one device (heads are local), and whether its options are on."""

    hidden: int
    num_q_heads: int
    num_kv_heads: int
    head_dim: int
    rope_dim: int
    rope_theta: float = 1e6
    rope_pairing: Literal["half", "interleaved"] = "half"
    qk_norm: bool = False
    zero_centered: bool = False
    output_gate: bool = False


TEST_SHAPES = {
    "gated_partial_rope": AttentionShape(24, 4, 2, 16, 8, qk_norm=True, zero_centered=True, output_gate=True),
    "plain_gqa": AttentionShape(24, 6, 2, 8, 8),
    "one_head_each": AttentionShape(16, 2, 2, 8, 0, qk_norm=True),
    "interleaved_one_kv": AttentionShape(16, 5, 1, 8, 4, rope_pairing="interleaved", output_gate=True),
}

FULL_SHAPES = {
    "32q_2kv_256": AttentionShape(4096, 32, 2, 256, 64, 1e7, qk_norm=True, zero_centered=True, output_gate=True),
    "4q_1kv_256": AttentionShape(4096, 4, 1, 256, 64, 1e7, qk_norm=True, zero_centered=True, output_gate=True),
}
