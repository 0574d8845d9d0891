"""Mamba selective state space mixer (arXiv:2312.00752): declared fields, weights, state, legal cuts and variants.

Semantics: ref.py. Layout and conventions as in Hugging Face transformers 5.24.
"""

from typing import Literal

from pydantic import Field

from ..core.declare import (
    AxisRole,
    BlockFields,
    FieldProblem,
    HeadCut,
    ModelDims,
    NormOverride,
    PagedState,
    SlotState,
    Variant,
    Weight,
    rms_only,
)


class Fields(BlockFields):
    """inner_size channels, each with a state of state_size; dt, B and C are computed from the convolved channels.

    dt_rank: width dt passes through. conv_kernel: taps of the causal depthwise convolution.
    input_norms: RMS norms of dt (before its second projection), B and C, and what they change of
    the model's default norm; null = none.
    """

    kind: Literal["mamba1"]
    inner_size: int = Field(gt=0)
    state_size: int = Field(gt=0)
    dt_rank: int = Field(gt=0)
    conv_kernel: int = Field(gt=1)
    conv_bias: bool = False
    proj_bias: bool = False
    input_norms: NormOverride | None = None


SLOT = "mixer"
AXES: dict[str, AxisRole] = {"ssm_channels": "attention_tp"}

VARIANTS = (
    Variant(
        name="xla",
        module="moec.blocks.mamba1.xla",
        backends=("cpu", "tpu"),
        note="recurrent step for decode rows, associative scan of a chunk for prefill rows",
        tiles=(("chunk", "prefill tokens scanned at once"),),
    ),
)


def check(fields: Fields, dims: ModelDims) -> list[FieldProblem]:
    """The norms, where there are any, are of the implemented kind."""
    if fields.input_norms is None:
        return []
    return rms_only(("input_norms",), fields.input_norms.resolve(dims.norm), "each norm of dt, B and C is")


def weights(fields: Fields, dims: ModelDims) -> dict[str, Weight]:
    """Projections [in, out], depthwise conv taps [channel, tap] (last tap = current token), parameters of a channel.

    x_dt, x_b and x_c read the convolved channels; w_dt takes dt from its rank to every channel.
    """
    hidden, inner, size, rank = dims.hidden_size, fields.inner_size, fields.state_size, fields.dt_rank
    axis, parts = "ssm_channels", {"dt": rank, "b": size, "c": size}
    found = {f"w_{part}": Weight((hidden, inner), (None, axis), "linear", linear=True) for part in ("x", "z")}
    if fields.proj_bias:
        found |= {f"b_{part}": Weight((inner,), (axis,), "gain", init="bias") for part in ("x", "z")}
    found["conv"] = Weight((inner, fields.conv_kernel), (axis, None), "gain")
    if fields.conv_bias:
        found["conv_bias"] = Weight((inner,), (axis,), "gain", init="bias")
    found |= {f"x_{part}": Weight((inner, n), (axis, None), "linear", linear=True) for part, n in parts.items()}
    if fields.input_norms is not None:
        found |= {f"{part}_norm": Weight((n,), (None,), "gain", init="gain") for part, n in parts.items()}
    found |= {
        "w_dt": Weight((rank, inner), (None, axis), "linear", linear=True),
        "dt_bias": Weight((inner,), (axis,), "decay"),
        "a_log": Weight((inner, size), (axis, None), "decay", init="log_decay"),
        "d": Weight((inner,), (axis,), "decay", init="gain"),
        "w_o": Weight((inner, hidden), (axis, None), "linear", linear=True),
    }
    if fields.proj_bias:
        found["b_o"] = Weight((hidden,), (None,), "gain", init="bias")
    return found


def state(fields: Fields, dims: ModelDims) -> tuple[PagedState | SlotState, ...]:
    """Conv window (taps-1 inputs, oldest first) and the state, channels last: they are many, state_size is small."""
    return (
        SlotState("conv", ((fields.conv_kernel - 1) * fields.inner_size,), ("ssm_channels",), role="conv"),
        SlotState("state", (fields.state_size, fields.inner_size), (None, "ssm_channels"), role="state"),
    )


def cuts(fields: Fields) -> tuple[HeadCut, ...]:
    """Any even share of the channels."""
    return (HeadCut("ssm_channels", fields.inner_size),)
