"""Named short-convolution geometries: small ones for the numeric tests, full-size ones for compile checks."""

from dataclasses import dataclass


@dataclass(frozen=True)
class ShortConvShape:
    """One short-convolution block on one device (channels are local), and whether it has biases."""

    hidden: int
    channels: int
    conv_kernel: int = 3
    bias: bool = False


TEST_SHAPES = {
    "biases": ShortConvShape(16, 20, bias=True),
    "two_taps": ShortConvShape(16, 12, conv_kernel=2),
    "five_taps": ShortConvShape(16, 12, conv_kernel=5, bias=True),
}

FULL_SHAPES = {"2048": ShortConvShape(2048, 2048), "256": ShortConvShape(2048, 256)}
