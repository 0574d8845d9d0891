"""Named Mamba geometries: small ones for the numeric tests, full-size ones for compile checks."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Mamba1Shape:
    """One Mamba block on one device (channels are local), and whether its options are on."""

    hidden: int
    inner: int
    state_size: int
    dt_rank: int
    conv_kernel: int = 4
    conv_bias: bool = False
    proj_bias: bool = False
    input_norms: bool = False
    zero_centered: bool = False


TEST_SHAPES = {
    "norms_conv_bias": Mamba1Shape(24, 32, 8, 3, conv_bias=True, input_norms=True),
    "plain": Mamba1Shape(16, 12, 5, 1),
    "all_options": Mamba1Shape(
        16, 20, 4, 2, conv_kernel=2, conv_bias=True, proj_bias=True, input_norms=True, zero_centered=True
    ),
}

FULL_SHAPES = {
    "8192_16_256": Mamba1Shape(4096, 8192, 16, 256, conv_bias=True, input_norms=True),
    "1024_16_256": Mamba1Shape(4096, 1024, 16, 256, conv_bias=True, input_norms=True),
}
