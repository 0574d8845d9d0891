"""Named attention geometries: small ones for the numeric tests, full-size ones for compile checks."""

from dataclasses import dataclass, fields
from typing import Any, Literal

from ..core.rope_spec import ProportionalScaling, Rope, YarnScaling


@dataclass(frozen=True)
class AttentionShape:
    """One attention block on one device (heads are local), and its options as xla.attention has them."""

    hidden: int
    num_q_heads: int
    num_kv_heads: int
    head_dim: int
    rope: Rope | None = None
    v_head_dim: int | None = None
    qk_norm: Literal["none", "head", "full", "l2"] = "none"
    qk_norm_place: Literal["before_rope", "after_rope"] = "before_rope"
    v_norm: bool = False
    norm_zero_centered: bool = False
    qkv_bias: bool = False
    keys_as_values: bool = False
    clip_qkv: float | None = None
    window: int | None = None
    chunk: int | None = None
    sinks: bool = False
    softcap: float | None = None
    scale: float | None = None
    value_scale: float = 1.0
    temperature: tuple[int, float, int] | None = None
    output_gate: Literal["sigmoid", "softplus"] | None = None
    gate_per: Literal["element", "head"] = "element"
    gate_stored: Literal["fused", "own"] = "fused"

    @property
    def value_dim(self) -> int:
        """Dims of a value head."""
        return self.v_head_dim or self.head_dim

    @property
    def gate_width(self) -> int:
        """Gate values per head; 0 without a gate."""
        return 0 if self.output_gate is None else 1 if self.gate_per == "head" else self.value_dim

    def options(self) -> dict[str, Any]:
        """Keywords of xla.attention and ref.attention that the shape decides."""
        mine = {"hidden", "scale", "gate_per"}
        options = {field.name: getattr(self, field.name) for field in fields(self) if field.name not in mine}
        return options | {"scale": self.head_dim**-0.5 if self.scale is None else self.scale}


TEST_SHAPES = {
    "gated_partial_rope": AttentionShape(
        24, 4, 2, 16, Rope(8, 1e6), qk_norm="head", norm_zero_centered=True, output_gate="sigmoid"
    ),
    "plain_gqa": AttentionShape(24, 6, 2, 8, Rope(8, 1e6)),
    "interleaved_one_kv": AttentionShape(16, 5, 1, 8, Rope(4, 1e6, "interleaved"), output_gate="sigmoid"),
    # Window that ends inside pages, sinks, biases and YaRN with its factor on queries and keys.
    "window_sinks_bias": AttentionShape(
        16, 4, 2, 8, Rope(8, 1.5e5, scaling=YarnScaling(32.0, 64, truncate=False), attention_factor=1.3465735902799727),
        window=21, sinks=True, qkv_bias=True,
    ),
    # Values of other dims than keys, scaled; window of a page; a gate per head with its own matrix; warm queries.
    "window_wide_values": AttentionShape(
        16, 6, 3, 8, Rope(2, 1e4), v_head_dim=12, window=8, value_scale=0.707, output_gate="sigmoid",
        gate_per="head", gate_stored="own", temperature=(16, 0.3, 1), scale=0.5,
    ),
    "chunks_l2_after_rope": AttentionShape(
        16, 4, 1, 8, Rope(8, 5e5, "interleaved"), qk_norm="l2", qk_norm_place="after_rope", chunk=20
    ),
    "full_norm_keys_as_values": AttentionShape(
        16, 4, 2, 8, Rope(8, 1e6, scaling=ProportionalScaling(4)), qk_norm="full", v_norm=True, keys_as_values=True,
        clip_qkv=0.8, softcap=3.0, output_gate="softplus", gate_stored="own",
    ),
    # As many key/value heads as query heads.
    "norm_after_rope_fused_head_gate": AttentionShape(
        16, 2, 2, 8, Rope(8, 1e4), v_head_dim=6, qk_norm="head", qk_norm_place="after_rope", output_gate="softplus",
        gate_per="head", sinks=True, window=1,
    ),
}  # fmt: skip

_FULL_ROPE = Rope(64, 1e7)
FULL_SHAPES = {
    "32q_2kv_256": AttentionShape(
        4096, 32, 2, 256, _FULL_ROPE, qk_norm="head", norm_zero_centered=True, output_gate="sigmoid"
    ),
    "4q_1kv_256": AttentionShape(
        4096, 4, 1, 256, _FULL_ROPE, qk_norm="head", norm_zero_centered=True, output_gate="sigmoid"
    ),
    "64q_8kv_64_window_128": AttentionShape(
        4096, 64, 8, 64, Rope(64, 1.5e5, scaling=YarnScaling(32.0, 4096, truncate=False)), qkv_bias=True,
        window=128, sinks=True,
    ),
}  # fmt: skip
