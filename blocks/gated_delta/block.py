"""Gated DeltaNet (arXiv:2412.06464), also with a decay per channel (arXiv:2510.26692): declared fields, weights,
state, legal cuts and variants.

Semantics: ref.py. Layout and conventions as in Hugging Face transformers 5.24.
"""

from typing import Literal

from pydantic import Field

from ..core.declare import (
    AxisRole,
    BlockFields,
    Declared,
    FieldProblem,
    HeadCut,
    ModelDims,
    NormOverride,
    PagedState,
    SlotState,
    Variant,
    Weight,
    divisors,
    rms_only,
)


class Decay(Declared):
    """How fast the state of a value head fades: one rate per head, or one per key channel.

    rank: the rates' projection is low-rank, through that many values; null = one matrix.
    lower_bound: the log decay is lower_bound * sigmoid(exp(a_log) * (a + dt_bias)), so never below
    it; null = -exp(a_log) * softplus(a + dt_bias).
    """

    per: Literal["head", "channel"] = "head"
    rank: int | None = Field(default=None, gt=0)
    lower_bound: float | None = Field(default=None, lt=0)


class Gate(Declared):
    """The output gate. rank: its projection is low-rank, through that many values; null = one matrix."""

    activation: Literal["silu", "sigmoid"] = "silu"
    rank: int | None = Field(default=None, gt=0)


class Fields(BlockFields):
    """num_v_heads value heads read num_qk_heads query/key heads (repeated) of head_dim each.

    head_k_dim/head_v_dim default to head_dim. conv_kernel: taps of the causal depthwise
    convolution over q, k and v. out_norm: the gated norm of each value head.
    negative_eigenvalues: write strengths reach from 0 to 2, not to 1 (arXiv:2411.12537).
    """

    kind: Literal["gated_delta"]
    num_v_heads: int = Field(gt=0)
    num_qk_heads: int = Field(gt=0)
    head_dim: int = Field(gt=0)
    head_k_dim: int | None = Field(default=None, gt=0)
    head_v_dim: int | None = Field(default=None, gt=0)
    conv_kernel: int = Field(gt=1)
    decay: Decay = Decay()
    gate: Gate = Gate()
    negative_eigenvalues: bool = False
    out_norm: NormOverride = NormOverride()

    @property
    def dk(self) -> int:
        return self.head_k_dim or self.head_dim

    @property
    def dv(self) -> int:
        return self.head_v_dim or self.head_dim

    @property
    def decay_width(self) -> int:
        """Decay rates of one token."""
        return self.num_v_heads * (self.dk if self.decay.per == "channel" else 1)


SLOT = "mixer"
AXES: dict[str, AxisRole] = {"qk_heads": "attention_tp", "v_heads": "attention_tp"}

VARIANTS = (
    Variant(
        name="xla",
        module="moec.blocks.gated_delta.xla",
        backends=("cpu", "tpu"),
        note="recurrent step for decode rows, chunked UT transform for prefill rows",
        tiles=(("chunk", "prefill tokens solved at once"),),
    ),
    Variant(
        name="tpu_fused",
        module="moec.blocks.gated_delta.tpu_fused",
        backends=("tpu",),
        note="convolution and recurrence in one kernel; window and state are read once and written once per row",
        cost="tpu_cost",
        tiles=(
            ("chunk", "prefill tokens solved at once"),
            ("unroll", "groups of value heads a pass of the decode update takes"),
        ),
        kernel=True,
    ),
)


def check(fields: Fields, dims: ModelDims) -> list[FieldProblem]:
    """Value heads must be a multiple of query/key heads; the gated norm is an RMS norm."""
    problems = []
    if fields.num_v_heads % fields.num_qk_heads:
        problems.append(
            FieldProblem(
                ("num_qk_heads",),
                f"{fields.num_v_heads} value heads cannot share {fields.num_qk_heads} query/key heads evenly",
                f"valid: {', '.join(map(str, divisors(fields.num_v_heads)))}",
            )
        )
    return problems + rms_only(("out_norm",), fields.out_norm.resolve(dims.norm), "the gated norm is")


def weights(fields: Fields, dims: ModelDims) -> dict[str, Weight]:
    """Projections [in, out], depthwise conv taps [channel, tap] (last tap = current token), decay parameters."""
    hidden, taps = dims.hidden_size, fields.conv_kernel
    qk, v = fields.num_qk_heads * fields.dk, fields.num_v_heads * fields.dv
    heads, rates = fields.num_v_heads, fields.decay_width
    return {
        "w_q": Weight((hidden, qk), (None, "qk_heads"), "linear", linear=True),
        "w_k": Weight((hidden, qk), (None, "qk_heads"), "linear", linear=True),
        "w_v": Weight((hidden, v), (None, "v_heads"), "linear", linear=True),
        **_projection("w_z", "g", hidden, fields.gate.rank, v),
        "w_b": Weight((hidden, heads), (None, "v_heads"), "linear", linear=True),
        **_projection("w_a", "f", hidden, fields.decay.rank, rates),
        "conv_q": Weight((qk, taps), ("qk_heads", None), "gain"),
        "conv_k": Weight((qk, taps), ("qk_heads", None), "gain"),
        "conv_v": Weight((v, taps), ("v_heads", None), "gain"),
        "a_log": Weight((heads,), ("v_heads",), "decay", init="log_decay"),
        "dt_bias": Weight((rates,), ("v_heads",), "decay"),
        "out_norm": Weight((fields.dv,), (None,), "gain", init="gain"),
        "w_o": Weight((v, hidden), ("v_heads", None), "linear", linear=True),
    }


def _projection(whole: str, halves: str, hidden: int, rank: int | None, width: int) -> dict[str, Weight]:
    """One matrix, or the two of a low-rank one; the first of these every device has in full."""
    if rank is None:
        return {whole: Weight((hidden, width), (None, "v_heads"), "linear", linear=True)}
    return {
        f"{halves}_a": Weight((hidden, rank), (None, None), "linear", linear=True),
        f"{halves}_b": Weight((rank, width), (None, "v_heads"), "linear", linear=True),
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
