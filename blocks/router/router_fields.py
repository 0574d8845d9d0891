"""How a spec declares a router: orthogonal fields, the weights they need, how they relate. Meaning: ref.py."""

from typing import Literal

from pydantic import Field

from ..core.declare import Declared, FieldProblem, ModelDims, NormFields, NormOverride, Weight, rms_only
from .names import Score, Weighing


class Groups(Declared):
    """Selection in two steps: of `num` equal groups of experts keep the best `keep`, then select among theirs.

    metric: a group counts the sum of its two best, or its best. masked: what the others' values become.
    """

    num: int = Field(gt=0)
    keep: int = Field(gt=0)
    metric: Literal["top2_sum", "max"] = "top2_sum"
    masked: Literal["-inf", "zero"] = "-inf"


class Router(Declared):
    """Logits of the num_experts experts, selection of top_k, their weights; fields in the order they act."""

    num_experts: int = Field(gt=0)
    top_k: int = Field(gt=0)
    input: Literal["normed", "residual"] = "normed"
    in_norm: NormOverride | None = None
    logits_dtype: Literal["activation", "float32"] = "activation"
    bias: bool = False
    logits_scale: float = Field(default=1.0, gt=0)
    logits_softcap: float | None = Field(default=None, gt=0)
    score: Score = "softmax"
    correction: Literal["none", "score", "logit"] = "none"
    groups: Groups | None = None
    weights: Weighing = "score"
    jitter: float = Field(default=0.01, gt=0)
    renormalize: bool = True
    renorm_power: float = Field(default=1.0, gt=0)
    renorm_min: float | None = Field(default=None, gt=0)
    renorm_eps: float = Field(default=1e-20, ge=0)
    scale: float = Field(default=1.0, gt=0)
    expert_scale: bool = False
    apply: Literal["output", "input"] = "output"
    cast: bool = True


def router_norm(router: Router, dims: ModelDims) -> NormFields | None:
    """The norm of the router's own input."""
    return router.in_norm.resolve(dims.norm) if router.in_norm is not None else None


def router_weights(router: Router, dims: ModelDims) -> dict[str, Weight]:
    """The matrix, and what the options add. The correction decides near ties, so it is kept in float32 (role decay)."""
    num, hidden = router.num_experts, dims.hidden_size
    found = {"router": Weight((hidden, num), (None, None), "router", linear=True)}
    if router.in_norm is not None:
        found["router_norm"] = Weight((hidden,), (None,), "gain", init="gain")
    if router.bias:
        found["router_bias"] = Weight((num,), (None,), "gain", init="bias")
    if router.correction != "none":
        found["router_correction"] = Weight((num,), (None,), "decay", init="bias")
    if router.expert_scale:
        found["expert_scale"] = Weight((num,), (None,), "gain", init="gain")
    return found


def check_router(router: Router, dims: ModelDims) -> list[FieldProblem]:
    """Relations between a router's fields; paths are relative to the router. What has no effect is refused."""
    found = _check_effects(router)
    if router.top_k > router.num_experts:
        text = f"top_k {router.top_k} exceeds num_experts {router.num_experts}"
        found.append(FieldProblem(("top_k",), text, f"valid: 1 to {router.num_experts}"))
    norm = router_norm(router, dims)
    found += rms_only(("in_norm",), norm, "a router's own norm is") if norm else []
    if router.weights == "sparsemixer" and router.renormalize:
        text = "the weights of sparsemixer are complete as they are"
        found.append(FieldProblem(("renormalize",), text, "valid: false"))
    return found + (_check_groups(router, router.groups) if router.groups else [])


def _check_effects(router: Router) -> list[FieldProblem]:
    """Options that nothing would read."""
    found = []

    def unread(name: str, why: str, hint: str) -> None:
        if getattr(router, name) != Router.model_fields[name].default:
            found.append(FieldProblem((name,), f"{name} has no effect {why}", hint))

    if not router.renormalize:
        for name in ("renorm_power", "renorm_min", "renorm_eps"):
            unread(name, "without renormalize", "remove it, or renormalize: true")
    if router.weights != "sparsemixer":
        unread("jitter", f"on weights '{router.weights}'", "remove it, or weights: sparsemixer")
    if router.correction == "logit" and router.weights != "score" and router.score != "none":
        unread("score", "when both choice and weights are made of the logits", "valid: none")
    return found


def _check_groups(router: Router, groups: Groups) -> list[FieldProblem]:
    """Equal groups, and enough experts in those that are kept."""
    if router.num_experts % groups.num:
        text = f"{router.num_experts} experts cannot form {groups.num} equal groups"
        return [FieldProblem(("groups", "num"), text, "valid: a divisor of num_experts")]
    if groups.num == 1:
        return [FieldProblem(("groups", "num"), "a single group has no effect", "remove groups, or num: 2 or more")]
    if groups.keep >= groups.num:
        text = f"to keep {groups.keep} of {groups.num} groups leaves none out"
        return [FieldProblem(("groups", "keep"), text, f"valid: 1 to {groups.num - 1}, or remove groups")]
    size = router.num_experts // groups.num
    if groups.metric == "top2_sum" and size < 2:
        return [FieldProblem(("groups", "metric"), "a group of one expert has no two best", "valid: max")]
    if groups.keep * size < router.top_k:
        text = f"{groups.keep} groups of {size} experts are fewer than top_k {router.top_k}"
        return [FieldProblem(("groups", "keep"), text, _enough(router, groups, size))]
    return []


def _enough(router: Router, groups: Groups, size: int) -> str:
    """Hint: how many groups hold top_k experts, when not all of them are needed."""
    least = -(-router.top_k // size)
    return f"valid: {least} to {groups.num - 1}, or remove groups" if least < groups.num else "remove groups"
