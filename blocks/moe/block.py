"""Mixture of experts: router, routed experts and shared expert; weights, cuts, variants.

Semantics: ref.py, ../router/ref.py. The router's fields are a language of their own: ../router/router_fields.py.
"""

from dataclasses import replace
from typing import Literal

from pydantic import Field

from ..activation.names import Activation
from ..core.declare import (
    AxisRole,
    BlockFields,
    Declared,
    FieldProblem,
    HeadCut,
    ModelDims,
    PagedState,
    SlotState,
    Variant,
    Weight,
)
from ..mlp.block import check_clamp, mlp_weights
from ..mlp.clamp_fields import ClampFields
from ..router.router_fields import Router, check_router, router_weights


class Experts(Declared):
    """MLP experts: down(activation(gate(x)) * up(x)), or down(activation(up(x))) when they are not gated.

    latent_size: the routed experts work on x projected to that width, and their sum is projected back.
    """

    intermediate_size: int = Field(gt=0)
    gated: bool = True
    activation: Activation = "silu"
    bias: bool = False
    clamp: ClampFields | None = None
    latent_size: int | None = Field(default=None, gt=0)


class Shared(Declared):
    """`num` experts of intermediate_size every token passes, as one wide one.

    gated, activation: null = as the routed experts. bias, clamp: its own, whatever the routed experts have.
    gate: "sigmoid" scales it by sigmoid(x . shared_router). scale: factor of its output.
    """

    num: int = Field(default=1, gt=0)
    intermediate_size: int = Field(gt=0)
    gate: Literal["none", "sigmoid"] = "none"
    gated: bool | None = None
    activation: Activation | None = None
    bias: bool = False
    clamp: ClampFields | None = None
    scale: float = Field(default=1.0, gt=0)

    @property
    def width(self) -> int:
        """Inner dim of all of them."""
        return self.num * self.intermediate_size


class Fields(BlockFields):
    """Router, routed experts and an optional shared expert."""

    kind: Literal["moe"]
    router: Router
    experts: Experts
    shared: Shared | None = None

    @property
    def shared_is_gated(self) -> bool:
        """Whether the shared expert has a gate matrix."""
        assert self.shared is not None
        return self.experts.gated if self.shared.gated is None else self.shared.gated

    @property
    def shared_activation(self) -> Activation:
        """The shared expert's activation."""
        assert self.shared is not None
        return self.shared.activation or self.experts.activation

    def expert_width(self, dims: ModelDims) -> int:
        """Width of what the routed experts take and give."""
        return self.experts.latent_size or dims.hidden_size


SLOT = "ffn"
AXES: dict[str, AxisRole] = {
    "experts": "expert_ep",
    "expert_intermediate": "expert_tp",
    "shared_intermediate": "shared",
}

VARIANTS = (
    Variant(
        name="xla",
        module="moec.blocks.moe.xla",
        backends=("cpu", "tpu"),
        note="assignments sorted by expert, padded to row blocks, one dynamic weight slice per block",
        parts=("router",),
        tiles=(("block_rows", "token rows of one expert's GEMM block"),),
    ),
    Variant(
        name="tpu_grouped",
        module="moec.blocks.moe.tpu_grouped",
        backends=("tpu",),
        note="assignments counted, not sorted; an expert's products in one kernel; rows summed by another",
        parts=("router",),
        cost="tpu_cost",
        tiles=(
            ("block_rows", "token rows of one expert's product"),
            ("inner_tile", "columns of an expert in vector memory at once"),
            ("combine_tokens", "tokens whose sums leave together"),
            ("stream_rows", "rows summed at once with all sums in vector memory; 0 = fetched by token"),
        ),
        kernel=True,
        unpermutes=True,
    ),
)


def check(fields: Fields, dims: ModelDims) -> list[FieldProblem]:
    """What the router's and the networks' fields say of each other."""
    found = _inside("router", check_router(fields.router, dims))
    found += _inside("experts", check_clamp(fields.experts.clamp, fields.experts.gated))
    if fields.router.apply == "input" and fields.experts.bias:
        text = "weights on the experts' input go with experts without bias"
        found.append(FieldProblem(("experts", "bias"), text, "valid: false, or router.apply: output"))
    if fields.shared:
        found += _inside("shared", check_clamp(fields.shared.clamp, fields.shared_is_gated))
    return found


def _inside(name: str, problems: list[FieldProblem]) -> list[FieldProblem]:
    return [FieldProblem((name, *one.path), one.text, one.hint) for one in problems]


def weights(fields: Fields, dims: ModelDims) -> dict[str, Weight]:
    """Router, shared expert, and the routed experts as loop-invariant stacks."""
    found = router_weights(fields.router, dims) | _expert_weights(fields, dims)
    hidden, latent = dims.hidden_size, fields.experts.latent_size
    if latent:
        found["latent_in"] = Weight((hidden, latent), (None, None), "linear", linear=True)
        found["latent_out"] = Weight((latent, hidden), (None, None), "linear", linear=True)
    if fields.shared:
        shared, axis = fields.shared, "shared_intermediate"
        found |= mlp_weights(hidden, shared.width, fields.shared_is_gated, shared.bias, axis, "shared_")
        if shared.gate == "sigmoid":
            found["shared_router"] = Weight((hidden, 1), (None, None), "linear", linear=True)
    return found


def _expert_weights(fields: Fields, dims: ModelDims) -> dict[str, Weight]:
    """Stacks of the routed experts: matrices, then biases."""
    width, num, inner = fields.expert_width(dims), fields.router.num_experts, fields.experts.intermediate_size
    used = fields.router.top_k / num
    axes = ("experts", None, "expert_intermediate")
    up = Weight((num, width, inner), axes, "expert", linear=True, stacked=True, active_fraction=used)
    down = replace(up, shape=(num, inner, width), axes=("experts", "expert_intermediate", None))
    matrices = {"gate": up, "up": up, "down": down} if fields.experts.gated else {"up": up, "down": down}
    found = {f"w_{key}": matrix for key, matrix in matrices.items()}
    if fields.experts.bias:
        found |= {f"b_{key}": _bias_of(matrix) for key, matrix in matrices.items()}
    return found


def _bias_of(matrix: Weight) -> Weight:
    """The bias of what a stacked matrix [E, in, out] yields, [E, out]."""
    shape, axes = (matrix.shape[0], matrix.shape[2]), (matrix.axes[0], matrix.axes[2])
    return Weight(shape, axes, "gain", stacked=True, init="bias", active_fraction=matrix.active_fraction)


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
        found.append(HeadCut("shared_intermediate", fields.shared.width))
    return tuple(found)
