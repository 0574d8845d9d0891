"""Mixture of experts: router language, routed experts and shared expert; weights, cuts, variants.

Semantics: ref.py. Router fields are orthogonal; together they say how scores become weights.
"""

from typing import Literal

from pydantic import Field

from ..core.declare import (
    BlockFields,
    FieldProblem,
    HeadCut,
    ModelDims,
    PagedState,
    SlotState,
    Variant,
    Weight,
)


class Router(BlockFields):
    """score the num_experts logits, select top_k, weigh.

    renormalize: divide the selected scores by their sum. scale: multiply the weights at the end.
    """

    num_experts: int = Field(gt=0)
    top_k: int = Field(gt=0)
    score: Literal["softmax", "sigmoid"] = "softmax"
    renormalize: bool = True
    scale: float = Field(default=1.0, gt=0)


class Experts(BlockFields):
    """Gated MLP experts: down(activation(gate(x)) * up(x))."""

    intermediate_size: int = Field(gt=0)
    activation: Literal["silu"] = "silu"


class Shared(BlockFields):
    """An expert every token passes. gate: "sigmoid" scales it by sigmoid(x . shared_router)."""

    intermediate_size: int = Field(gt=0)
    gate: Literal["none", "sigmoid"] = "none"


class Fields(BlockFields):
    """Router, routed experts and an optional shared expert."""

    kind: Literal["moe"]
    router: Router
    experts: Experts
    shared: Shared | None = None


SLOT = "ffn"

VARIANTS = (
    Variant(
        name="xla",
        module="moec.blocks.moe.xla",
        backends=("cpu", "tpu"),
        note="assignments sorted by expert, padded to row blocks, one dynamic weight slice per block",
    ),
)


def check(fields: Fields, dims: ModelDims) -> list[FieldProblem]:
    """top_k cannot exceed the number of experts."""
    router = fields.router
    if router.top_k <= router.num_experts:
        return []
    return [
        FieldProblem(
            ("router", "top_k"),
            f"top_k {router.top_k} exceeds num_experts {router.num_experts}",
            f"valid: 1 to {router.num_experts}",
        )
    ]


def weights(fields: Fields, dims: ModelDims) -> dict[str, Weight]:
    """Router, shared expert, and the routed experts as loop-invariant stacks."""
    hidden, num = dims.hidden_size, fields.router.num_experts
    inner = fields.experts.intermediate_size
    used = fields.router.top_k / num
    up_axes = ("experts", None, "expert_intermediate")
    found = {
        "router": Weight((hidden, num), (None, None), "router", linear=True),
        "w_gate": Weight((num, hidden, inner), up_axes, "expert", True, True, active_fraction=used),
        "w_up": Weight((num, hidden, inner), up_axes, "expert", True, True, active_fraction=used),
        "w_down": Weight(
            (num, inner, hidden), ("experts", "expert_intermediate", None), "expert", True, True, active_fraction=used
        ),
    }
    if fields.shared:
        width = fields.shared.intermediate_size
        found["shared_gate"] = Weight((hidden, width), (None, "shared_intermediate"), "linear", linear=True)
        found["shared_up"] = Weight((hidden, width), (None, "shared_intermediate"), "linear", linear=True)
        found["shared_down"] = Weight((width, hidden), ("shared_intermediate", None), "linear", linear=True)
        if fields.shared.gate == "sigmoid":
            found["shared_router"] = Weight((hidden, 1), (None, None), "linear", linear=True)
    return found


def state(fields: Fields, dims: ModelDims) -> tuple[PagedState | SlotState, ...]:
    """Experts keep nothing between steps."""
    return ()


def cuts(fields: Fields) -> tuple[HeadCut, ...]:
    """Experts over expert-parallel axes, their intermediate dim over expert-tensor axes."""
    found = [
        HeadCut("experts", fields.router.num_experts),
        HeadCut("expert_intermediate", fields.experts.intermediate_size),
    ]
    if fields.shared:
        found.append(HeadCut("shared_intermediate", fields.shared.intermediate_size))
    return tuple(found)
