"""Named latent-attention geometries: small ones for the numeric tests, full-size ones for compile checks."""

from dataclasses import dataclass
from typing import Literal

from ..core.rope_spec import Rope, YarnScaling


@dataclass(frozen=True)
class MlaShape:
    """One block on one device (heads are local), and its options as xla.mla has them.

    gate: gate values per head. padded: values of a cached row, unused ones included; null = cached.
    """

    hidden: int
    num_heads: int
    q_lora_rank: int | None
    kv_lora_rank: int
    nope: int
    rope: int
    v: int
    rope_spec: Rope | None = None
    zero_centered: bool = False
    temperature: tuple[int, float, int] | None = None
    output_gate: Literal["sigmoid", "softplus"] | None = None
    gate: int = 0
    gate_stored: Literal["fused", "own"] = "fused"
    bias: bool = False
    padded: int | None = None

    @property
    def cached(self) -> int:
        """Values cached per token."""
        return self.kv_lora_rank + self.rope

    @property
    def width(self) -> int:
        """Values of a pool's row."""
        return self.padded or self.cached


_YARN = Rope(8, 1e4, "interleaved", YarnScaling(4.0, 64, beta_fast=8.0), attention_factor=1.1)

TEST_SHAPES = {
    "query_latent_yarn": MlaShape(24, 4, 12, 16, 8, 8, 12, rope_spec=_YARN),
    "no_position": MlaShape(20, 3, None, 10, 6, 5, 7),
    "heated_bias": MlaShape(
        16, 6, 9, 12, 4, 6, 4, rope_spec=Rope(6, 1e5), zero_centered=True, temperature=(16, 0.3, 0), bias=True
    ),
    # A pool whose rows are longer than what is cached; the gate in a matrix of its own, one value per head.
    "gated": MlaShape(
        16, 4, None, 20, 8, 4, 8, rope_spec=Rope(4, 1e6, "interleaved"), output_gate="sigmoid", gate=1,
        gate_stored="own", bias=True, padded=32,
    ),
    # The gate behind each head's queries, one value per element; queries grow from position 1 on.
    "fused_gate": MlaShape(
        16, 2, 8, 8, 8, 4, 6, rope_spec=Rope(4, 1e6, "interleaved"), temperature=(8, 0.2, 7), output_gate="softplus",
        gate=6,
    ),
}  # fmt: skip

_FULL_ROPE = Rope(64, 1e4, "interleaved", YarnScaling(40.0, 4096))
FULL_SHAPES = {
    "128h_512": MlaShape(7168, 128, 1536, 512, 128, 64, 128, rope_spec=_FULL_ROPE, padded=640),
    "16h_512": MlaShape(7168, 16, 1536, 512, 128, 64, 128, rope_spec=_FULL_ROPE, padded=640),
}
