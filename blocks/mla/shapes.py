"""Named latent-attention geometries: small ones for the numeric tests, full-size ones for compile checks."""

from dataclasses import dataclass

from ..core.rope_spec import Rope, YarnScaling
from .block import row_width


@dataclass(frozen=True)
class MlaShape:
    """One block on one device (heads are local), and whether its options are on. gate: gate values per head."""

    hidden: int
    num_heads: int
    q_lora_rank: int | None
    kv_lora_rank: int
    nope: int
    rope: int
    v: int
    rope_spec: Rope | None = None
    zero_centered: bool = False
    temperature: tuple[int, float] | None = None
    gate: int = 0
    bias: bool = False

    @property
    def cached(self) -> int:
        """Values cached per token."""
        return self.kv_lora_rank + self.rope

    @property
    def width(self) -> int:
        """Values of a cached row, the unused ones at its end included."""
        return row_width(self.cached)


_YARN = Rope(8, 1e4, "interleaved", YarnScaling(4.0, 64, beta_fast=8.0), attention_factor=1.1)

TEST_SHAPES = {
    "query_latent_yarn": MlaShape(24, 4, 12, 16, 8, 8, 12, rope_spec=_YARN),
    "no_position": MlaShape(20, 3, None, 10, 6, 5, 7),
    "heated_bias": MlaShape(
        16, 6, 9, 12, 4, 6, 4, rope_spec=Rope(6, 1e5), zero_centered=True, temperature=(16, 0.3), bias=True
    ),
    "gated": MlaShape(16, 4, None, 130, 8, 4, 8, rope_spec=Rope(4, 1e6, "interleaved"), gate=1, bias=True),
    "gated_elements": MlaShape(16, 1, 8, 8, 8, 4, 6, rope_spec=Rope(4, 1e6, "interleaved"), gate=6),
}

_FULL_ROPE = Rope(64, 1e4, "interleaved", YarnScaling(40.0, 4096))
FULL_SHAPES = {
    "128h_512": MlaShape(7168, 128, 1536, 512, 128, 64, 128, rope_spec=_FULL_ROPE),
    "16h_512": MlaShape(7168, 16, 1536, 512, 128, 64, 128, rope_spec=_FULL_ROPE),
}
