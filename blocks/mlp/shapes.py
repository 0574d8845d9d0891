"""Named shapes at which the dense MLP variants are tested and measured."""

from dataclasses import dataclass


@dataclass(frozen=True)
class MlpShape:
    """Tokens, width in and out, inner width (of all devices)."""

    tokens: int
    hidden: int
    intermediate: int


# Small enough for the float32 reference on a CPU.
TEST_SHAPES: dict[str, MlpShape] = {
    "one_token": MlpShape(1, 32, 16),
    "odd": MlpShape(13, 32, 24),
    "narrow": MlpShape(7, 96, 8),
    "wide": MlpShape(40, 24, 160),
}
