"""Named shapes at which the MoE variants are tested and measured.

Full sizes are one expert-parallel rank's share, to compile ahead of time; the others run
on a CPU in a test.
"""

from dataclasses import dataclass


@dataclass(frozen=True)
class MoeShape:
    """tokens that reach this rank, its local experts of num_experts, and matrix sizes."""

    tokens: int
    hidden: int
    intermediate: int
    num_experts: int
    local_experts: int
    top_k: int
    layers: int
    block_rows: int


MOE_SHAPES: dict[str, MoeShape] = {
    "one_token": MoeShape(1, 32, 16, 8, 8, 2, 2, 1),
    "odd": MoeShape(13, 32, 24, 8, 8, 3, 2, 4),
    "ragged_blocks": MoeShape(7, 256, 160, 16, 16, 3, 2, 4),
    "few_per_block": MoeShape(40, 32, 24, 4, 4, 1, 2, 64),
    "decode_full": MoeShape(512, 4096, 1024, 512, 64, 10, 60, 64),
    "mixed_full": MoeShape(8192, 4096, 1024, 512, 64, 10, 60, 128),
}
