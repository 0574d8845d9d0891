"""Named lightning attention geometries: small ones for the numeric tests, full-size ones for compile checks."""

from dataclasses import dataclass


@dataclass(frozen=True)
class LightningShape:
    """One lightning attention block: all its heads, and the absolute layers it stands in, of num_layers."""

    hidden: int
    num_heads: int
    head_dim: int
    layers: tuple[int, ...]
    num_layers: int


TEST_SHAPES = {
    "first_layers": LightningShape(24, 4, 8, (0, 1, 2), 8),
    "spread_layers": LightningShape(16, 6, 5, (0, 4, 7), 8),
    "one_head": LightningShape(12, 1, 16, (1, 2, 3), 4),
}

FULL_SHAPES = {"64_128": LightningShape(6144, 64, 128, tuple(i for i in range(80) if i % 8 != 7), 80)}
