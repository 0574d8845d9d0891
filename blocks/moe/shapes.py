"""Named shapes at which the MoE variants are tested and measured."""

from dataclasses import dataclass


@dataclass(frozen=True)
class MoeShape:
    """tokens that reach a rank, its local experts of num_experts, matrix sizes, rows per block."""

    tokens: int
    hidden: int
    intermediate: int
    num_experts: int
    local_experts: int
    top_k: int
    layers: int
    block_rows: int


# Small enough for the float32 reference on a CPU.
TEST_SHAPES: dict[str, MoeShape] = {
    "one_token": MoeShape(1, 32, 16, 8, 8, 2, 2, 1),
    "odd": MoeShape(13, 32, 24, 8, 8, 3, 2, 4),
    "one_of_two_ranks": MoeShape(13, 32, 24, 8, 4, 3, 2, 4),
    "ragged_scale_blocks": MoeShape(7, 176, 144, 6, 6, 3, 2, 4),
    "experts_share_no_block": MoeShape(40, 32, 24, 4, 4, 1, 2, 64),
    "many_blocks": MoeShape(61, 32, 16, 3, 3, 2, 2, 2),
}
