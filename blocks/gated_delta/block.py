"""Gated DeltaNet (arXiv:2412.06464): declared fields, weights, state, legal cuts and variants.

Semantics: ref.py. Layout and conventions as in Hugging Face transformers 5.24.
"""

from typing import Literal

from pydantic import Field

from ..core.declare import (
    BlockFields,
    FieldProblem,
    HeadCut,
    ModelDims,
    NormOverride,
    PagedState,
    SlotState,
    Variant,
    Weight,
    divisors,
)


class Fields(BlockFields):
    """num_v_heads value heads read num_qk_heads query/key heads (repeated) of head_dim each.

    head_k_dim/head_v_dim default to head_dim. conv_kernel: taps of the causal depthwise
    convolution over q, k and v. out_norm: the gated norm of each value head.
    """

    kind: Literal["gated_delta"]
    num_v_heads: int = Field(gt=0)
    num_qk_heads: int = Field(gt=0)
    head_dim: int = Field(gt=0)
    head_k_dim: int | None = Field(default=None, gt=0)
    head_v_dim: int | None = Field(default=None, gt=0)
    conv_kernel: int = Field(gt=1)
    out_norm: NormOverride = NormOverride()

    @property
    def dk(self) -> int:
        return self.head_k_dim or self.head_dim

    @property
    def dv(self) -> int:
        return self.head_v_dim or self.head_dim


SLOT = "mixer"

VARIANTS = (
    Variant(
        name="xla",
        module="moec.blocks.gated_delta.xla",
        backends=("cpu", "tpu"),
        note="recurrent step for decode rows, chunked UT transform for prefill rows",
    ),
)


def check(fields: Fields, dims: ModelDims) -> list[FieldProblem]:
    """Value heads must be a multiple of query/key heads."""
    if fields.num_v_heads % fields.num_qk_heads == 0:
        return []
    return [
        FieldProblem(
            ("num_qk_heads",),
            f"{fields.num_v_heads} value heads cannot share {fields.num_qk_heads} query/key heads evenly",
            f"valid: {', '.join(map(str, divisors(fields.num_v_heads)))}",
        )
    ]


def weights(fields: Fields, dims: ModelDims) -> dict[str, Weight]:
    """Projections [in, out], depthwise conv taps [channel, tap] (last tap = current token), decay parameters."""
    hidden, taps = dims.hidden_size, fields.conv_kernel
    qk, v = fields.num_qk_heads * fields.dk, fields.num_v_heads * fields.dv
    heads = fields.num_v_heads
    return {
        "w_q": Weight((hidden, qk), (None, "qk_heads"), "linear", linear=True),
        "w_k": Weight((hidden, qk), (None, "qk_heads"), "linear", linear=True),
        "w_v": Weight((hidden, v), (None, "v_heads"), "linear", linear=True),
        "w_z": Weight((hidden, v), (None, "v_heads"), "linear", linear=True),
        "w_b": Weight((hidden, heads), (None, "v_heads"), "linear", linear=True),
        "w_a": Weight((hidden, heads), (None, "v_heads"), "linear", linear=True),
        "conv_q": Weight((qk, taps), ("qk_heads", None), "gain"),
        "conv_k": Weight((qk, taps), ("qk_heads", None), "gain"),
        "conv_v": Weight((v, taps), ("v_heads", None), "gain"),
        "a_log": Weight((heads,), ("v_heads",), "decay", init="log_decay"),
        "dt_bias": Weight((heads,), ("v_heads",), "decay"),
        "out_norm": Weight((fields.dv,), (None,), "gain", init="gain"),
        "w_o": Weight((v, hidden), ("v_heads", None), "linear", linear=True),
    }


def state(fields: Fields, dims: ModelDims) -> tuple[PagedState | SlotState, ...]:
    """Conv window (taps-1 inputs, oldest first, channels q|k|v) and the recurrent matrix per value head."""
    channels = 2 * fields.num_qk_heads * fields.dk + fields.num_v_heads * fields.dv
    return (
        SlotState("conv", ((fields.conv_kernel - 1) * channels,), ("v_heads",), role="conv"),
        SlotState("state", (fields.num_v_heads, fields.dk, fields.dv), ("v_heads", None, None), role="state"),
    )


def cuts(fields: Fields) -> tuple[HeadCut, ...]:
    """Both head kinds are cut together, never replicated."""
    return (HeadCut("qk_heads", fields.num_qk_heads), HeadCut("v_heads", fields.num_v_heads))
