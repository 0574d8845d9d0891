"""Mamba-2 state space mixer (arXiv:2405.21060): declared fields, weights, state, legal cuts and variants.

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


class TimeStep(Declared):
    """Limits of every time step, after softplus; max null = none."""

    min: float = Field(default=0.0, ge=0)
    max: float | None = Field(default=None, gt=0)


class Fields(BlockFields):
    """num_heads heads of head_dim channels; those of one of num_groups groups share B and C of state_size.

    conv_kernel: taps of the causal depthwise convolution over x, B and C. out_norm: the gated
    norm, one group of channels at a time.
    """

    kind: Literal["mamba2"]
    num_heads: int = Field(gt=0)
    head_dim: int = Field(gt=0)
    num_groups: int = Field(gt=0)
    state_size: int = Field(gt=0)
    conv_kernel: int = Field(gt=1)
    conv_bias: bool = False
    proj_bias: bool = False
    time_step: TimeStep = TimeStep()
    out_norm: NormOverride = NormOverride()

    @property
    def inner(self) -> int:
        """Channels of x, z and the output."""
        return self.num_heads * self.head_dim


SLOT = "mixer"
AXES: dict[str, AxisRole] = {"ssm_heads": "attention_tp", "ssm_groups": "attention_tp"}

VARIANTS = (
    Variant(
        name="xla",
        module="moec.blocks.mamba2.xla",
        backends=("cpu", "tpu"),
        note="recurrent step for decode rows, chunked state space duality for prefill rows",
        tiles=(("chunk", "prefill tokens solved at once"),),
    ),
)


def check(fields: Fields, dims: ModelDims) -> list[FieldProblem]:
    """Heads fill their groups, the limits leave something between them, and the norm is one that is implemented."""
    found = []
    if fields.num_heads % fields.num_groups:
        text = f"{fields.num_heads} heads cannot share {fields.num_groups} groups evenly"
        found.append(FieldProblem(("num_groups",), text, f"valid: {', '.join(map(str, divisors(fields.num_heads)))}"))
    limits = fields.time_step
    if limits.max is not None and limits.max <= limits.min:
        found.append(FieldProblem(("time_step", "max"), f"{limits.max} is not above time_step.min = {limits.min}"))
    return found + rms_only(("out_norm",), fields.out_norm.resolve(dims.norm), "the gated norm is")


def weights(fields: Fields, dims: ModelDims) -> dict[str, Weight]:
    """Projections [in, out], depthwise conv taps [channel, tap] (last tap = current token), parameters of a head."""
    hidden, inner, bc = dims.hidden_size, fields.inner, fields.num_groups * fields.state_size
    widths = {
        "z": (inner, "ssm_heads"),
        "x": (inner, "ssm_heads"),
        "b": (bc, "ssm_groups"),
        "c": (bc, "ssm_groups"),
        "dt": (fields.num_heads, "ssm_heads"),
    }
    mixed = {part: widths[part] for part in ("x", "b", "c")}
    head = (fields.num_heads,)
    found = {
        f"w_{part}": Weight((hidden, n), (None, axis), "linear", linear=True) for part, (n, axis) in widths.items()
    }
    if fields.proj_bias:
        found |= {f"b_{p}": Weight((n,), (axis,), "gain", init="bias") for p, (n, axis) in widths.items()}
    found |= {f"conv_{p}": Weight((n, fields.conv_kernel), (axis, None), "gain") for p, (n, axis) in mixed.items()}
    if fields.conv_bias:
        found |= {f"conv_{p}_bias": Weight((n,), (axis,), "gain", init="bias") for p, (n, axis) in mixed.items()}
    found |= {
        "a_log": Weight(head, ("ssm_heads",), "decay", init="log_decay"),
        "d": Weight(head, ("ssm_heads",), "decay", init="gain"),
        "dt_bias": Weight(head, ("ssm_heads",), "decay"),
        "out_norm": Weight((inner,), ("ssm_heads",), "gain", init="gain"),
        "w_o": Weight((inner, hidden), ("ssm_heads", None), "linear", linear=True),
    }
    if fields.proj_bias:
        found["b_o"] = Weight((hidden,), (None,), "gain", init="bias")
    return found


def state(fields: Fields, dims: ModelDims) -> tuple[PagedState | SlotState, ...]:
    """Conv windows (taps-1 inputs, oldest first) of x and of B | C, and the state matrix of each head.

    Two windows: heads and groups may be cut into different numbers of parts.
    """
    window, bc = fields.conv_kernel - 1, fields.num_groups * fields.state_size
    return (
        SlotState("conv", (window * fields.inner,), ("ssm_heads",), role="conv"),
        SlotState("conv_bc", (window * 2 * bc,), ("ssm_groups",), role="conv"),
        SlotState(
            "state", (fields.num_heads, fields.head_dim, fields.state_size), ("ssm_heads", None, None), role="state"
        ),
    )


def cuts(fields: Fields) -> tuple[HeadCut, ...]:
    """Groups are cut with their heads; above their number several devices share one."""
    return (HeadCut("ssm_heads", fields.num_heads), HeadCut("ssm_groups", fields.num_groups, replicate=True))
