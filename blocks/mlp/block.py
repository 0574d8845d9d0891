"""Dense MLP: a gated or plain two-layer network on every token; weights, cuts, variants. Semantics: ref.py."""

from typing import Literal

from pydantic import Field

from ..activation.names import Activation
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
from .clamp_fields import ClampFields


class Fields(BlockFields):
    """down(activation(gate(x)) * up(x)), or down(activation(up(x))) when it is not gated."""

    kind: Literal["mlp"]
    intermediate_size: int = Field(gt=0)
    gated: bool = True
    activation: Activation = "silu"
    bias: bool = False
    clamp: ClampFields | None = None


SLOT = "ffn"
AXES: dict[str, AxisRole] = {"mlp_intermediate": "mlp"}

VARIANTS = (Variant(name="xla", module="moec.blocks.mlp.xla", backends=("cpu", "tpu"), note="two or three products"),)


def check(fields: Fields, dims: ModelDims) -> list[FieldProblem]:
    """A clamp needs a gate."""
    return check_clamp(fields.clamp, fields.gated)


def check_clamp(clamp: ClampFields | None, gated: bool) -> list[FieldProblem]:
    """The clamped form is one of gated networks."""
    if clamp is None or gated:
        return []
    return [FieldProblem(("clamp",), "only a gated network has the clamped form", "leave clamp out, or gated: true")]


def weights(fields: Fields, dims: ModelDims) -> dict[str, Weight]:
    """Gate, up and down matrices, then their biases."""
    return mlp_weights(dims.hidden_size, fields.intermediate_size, fields.gated, fields.bias, "mlp_intermediate", "")


def mlp_weights(hidden: int, width: int, gated: bool, bias: bool, axis: str, prefix: str) -> dict[str, Weight]:
    """The weights of a dense network whose inner dim is `axis`, named with a prefix: gate or w_gate, b_gate."""
    matrix, vector = ("", "b_") if prefix else ("w_", "b_")
    inner = ("gate", "up") if gated else ("up",)
    found = {f"{prefix}{matrix}{key}": Weight((hidden, width), (None, axis), "linear", linear=True) for key in inner}
    found[f"{prefix}{matrix}down"] = Weight((width, hidden), (axis, None), "linear", linear=True)
    if bias:
        for key in inner:
            found[f"{prefix}{vector}{key}"] = Weight((width,), (axis,), "gain", init="bias")
        found[f"{prefix}{vector}down"] = Weight((hidden,), (None,), "gain", init="bias")
    return found


def state(fields: Fields, dims: ModelDims) -> tuple[PagedState | SlotState, ...]:
    """An MLP keeps nothing between steps."""
    return ()


def cuts(fields: Fields) -> tuple[HeadCut, ...]:
    """The inner dim, over all devices."""
    return (HeadCut("mlp_intermediate", fields.intermediate_size),)
