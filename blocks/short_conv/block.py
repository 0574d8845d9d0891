"""Gated short convolution: declared fields, weights, state, legal cuts and variants.

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
    PagedState,
    SlotState,
    Variant,
    Weight,
)


class Fields(BlockFields):
    """channels: width between the projections. conv_kernel: taps of the causal depthwise convolution.

    bias: of the projections and of the convolution.
    """

    kind: Literal["short_conv"]
    channels: int = Field(gt=0)
    conv_kernel: int = Field(gt=1)
    bias: bool = False


SLOT = "mixer"
AXES: dict[str, AxisRole] = {"conv_channels": "attention_tp"}

VARIANTS = (
    Variant(
        name="xla",
        module="moec.blocks.short_conv.xla",
        backends=("cpu", "tpu"),
        note="all rows at once, shifted inputs and old windows",
    ),
)


def check(fields: Fields, dims: ModelDims) -> list[FieldProblem]:
    """Every combination of fields is legal."""
    return []


def weights(fields: Fields, dims: ModelDims) -> dict[str, Weight]:
    """Projections [in, out] and depthwise conv taps [channel, tap] (last tap = current token)."""
    hidden, width, axis = dims.hidden_size, fields.channels, "conv_channels"
    found = {f"w_{part}": Weight((hidden, width), (None, axis), "linear", linear=True) for part in ("b", "c", "x")}
    if fields.bias:
        found |= {f"b_{part}": Weight((width,), (axis,), "gain", init="bias") for part in ("b", "c", "x")}
    found["conv"] = Weight((width, fields.conv_kernel), (axis, None), "gain")
    if fields.bias:
        found["conv_bias"] = Weight((width,), (axis,), "gain", init="bias")
    found["w_o"] = Weight((width, hidden), (axis, None), "linear", linear=True)
    if fields.bias:
        found["b_o"] = Weight((hidden,), (None,), "gain", init="bias")
    return found


def state(fields: Fields, dims: ModelDims) -> tuple[PagedState | SlotState, ...]:
    """The conv window: taps-1 inputs, oldest first."""
    return (SlotState("conv", ((fields.conv_kernel - 1) * fields.channels,), ("conv_channels",), role="conv"),)


def cuts(fields: Fields) -> tuple[HeadCut, ...]:
    """Any even share of the channels."""
    return (HeadCut("conv_channels", fields.channels),)
