"""Named Gated DeltaNet geometries: small ones for the numeric tests, full-size ones for compile checks."""

from dataclasses import dataclass


@dataclass(frozen=True)
class GatedDeltaShape:
    """One Gated DeltaNet block on one device (heads are local)."""

    hidden: int
    num_qk_heads: int
    num_v_heads: int
    head_k_dim: int
    head_v_dim: int
    conv_kernel: int = 4


TEST_SHAPES = {
    "shared_keys": GatedDeltaShape(24, 2, 4, 16, 16),
    "own_keys_wide_value": GatedDeltaShape(16, 2, 2, 8, 12),
    "one_key_two_taps": GatedDeltaShape(16, 1, 3, 8, 8, conv_kernel=2),
}

FULL_SHAPES = {
    "16qk_64v_128": GatedDeltaShape(4096, 16, 64, 128, 128),
    "2qk_8v_128": GatedDeltaShape(4096, 2, 8, 128, 128),
}
