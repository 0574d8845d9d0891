"""Named Mamba-2 geometries: small ones for the numeric tests, full-size ones for compile checks."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Mamba2Shape:
    """One Mamba-2 block on one device (heads and groups are local), and whether its options are on."""

    hidden: int
    num_heads: int
    num_groups: int
    head_dim: int
    state_size: int
    conv_kernel: int = 4
    conv_bias: bool = False
    proj_bias: bool = False
    zero_centered: bool = False
    time_step_min: float = 0.0
    time_step_max: float | None = None


TEST_SHAPES = {
    "two_groups_conv_bias": Mamba2Shape(24, 4, 2, 8, 12, conv_bias=True, time_step_min=0.05),
    "one_group_all_biases": Mamba2Shape(16, 3, 1, 4, 16, conv_bias=True, proj_bias=True, time_step_max=0.7),
    "own_groups_two_taps": Mamba2Shape(16, 2, 2, 6, 5, conv_kernel=2, zero_centered=True),
}

FULL_SHAPES = {
    "128h_8g_64_128": Mamba2Shape(4096, 128, 8, 64, 128, conv_bias=True),
    "16h_1g_64_256": Mamba2Shape(4096, 16, 1, 64, 256, conv_bias=True),
}
