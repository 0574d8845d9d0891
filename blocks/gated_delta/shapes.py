"""Named Gated DeltaNet geometries: small ones for the numeric tests, full-size ones for compile checks."""

from dataclasses import dataclass

from .block import Decay, Gate

PER_HEAD, SILU = Decay(), Gate()


@dataclass(frozen=True)
class GatedDeltaShape:
    """One Gated DeltaNet block on one device (heads are local). Options as in block.py."""

    hidden: int
    num_qk_heads: int
    num_v_heads: int
    head_k_dim: int
    head_v_dim: int
    conv_kernel: int = 4
    decay: Decay = PER_HEAD
    gate: Gate = SILU
    negative_eigenvalues: bool = False


TEST_SHAPES = {
    "shared_keys": GatedDeltaShape(24, 2, 4, 16, 16),
    "one_key_two_taps": GatedDeltaShape(16, 1, 3, 8, 8, conv_kernel=2),
    "channel_decay_low_rank": GatedDeltaShape(
        16, 2, 4, 8, 12, decay=Decay(per="channel", rank=6), gate=Gate(activation="sigmoid", rank=10)
    ),
    "channel_decay_bounded": GatedDeltaShape(
        16, 3, 3, 8, 8, decay=Decay(per="channel", lower_bound=-5.0), gate=Gate(activation="sigmoid")
    ),
    "negative_eigenvalues": GatedDeltaShape(16, 2, 2, 8, 12, negative_eigenvalues=True),
}

FULL_SHAPES = {
    "16qk_64v_128": GatedDeltaShape(4096, 16, 64, 128, 128),
    "2qk_8v_128": GatedDeltaShape(4096, 2, 8, 128, 128),
    "32_128_channel_decay": GatedDeltaShape(
        2304, 32, 32, 128, 128, decay=Decay(per="channel", rank=128), gate=Gate(activation="sigmoid", rank=128)
    ),
}
