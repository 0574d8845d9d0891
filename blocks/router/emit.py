"""The arguments of an emitted route() call: only what differs from the function's defaults."""

from ..core.declare import ModelDims
from .router_fields import Router, router_norm

# Options whose field and argument have the same name and default.
SAME = (
    "logits_dtype",
    "logits_scale",
    "logits_softcap",
    "score",
    "weights",
    "jitter",
    "renormalize",
    "renorm_power",
    "renorm_min",
    "renorm_eps",
    "scale",
    "cast",
)


def route_arguments(router: Router, dims: ModelDims, block: str, top_k: str) -> tuple[str, ...]:
    """Arguments in the order of route(). block: whose weights hold the router's; top_k: its constant."""
    used = {"top_k": top_k, **_norm(router, dims, block), **_selection(router, block)}
    for name in SAME:
        value = getattr(router, name)
        if value != Router.model_fields[name].default:
            used[name] = f'"{value}"' if isinstance(value, str) else repr(value)
    if router.bias:
        used["bias_E"] = f'w["{block}"]["router_bias"]'
    if router.expert_scale:
        used["expert_scale_E"] = f'w["{block}"]["expert_scale"]'
    source = "x_TD" if router.input == "residual" else "h_TD"
    return source, f'w["{block}"]["router"]', *(f"{name}={used[name]}" for name in ORDER if name in used)


def _norm(router: Router, dims: ModelDims, block: str) -> dict[str, str]:
    """Arguments of the norm on the router's input."""
    norm = router_norm(router, dims)
    if norm is None:
        return {}
    found = {"norm_D": f'w["{block}"]["router_norm"]', "norm_eps": repr(norm.eps)}
    return found | ({"norm_zero_centered": "True"} if norm.zero_centered else {})


def _selection(router: Router, block: str) -> dict[str, str]:
    """Arguments of what the choice is made on."""
    found = {}
    if router.correction != "none":
        found["correction_E"] = f'w["{block}"]["router_correction"]'
    if router.correction == "logit":
        found["correct"] = '"logit"'
    if groups := router.groups:
        found |= {"num_groups": str(groups.num), "keep_groups": str(groups.keep)}
        found |= {"group_metric": '"max"'} if groups.metric == "max" else {}
        found |= {"group_masked": '"zero"'} if groups.masked == "zero" else {}
    return found


# Arguments of route(), in its order.
ORDER = (
    "top_k",
    "norm_D",
    "norm_eps",
    "norm_zero_centered",
    "logits_dtype",
    "bias_E",
    "logits_scale",
    "logits_softcap",
    "score",
    "correction_E",
    "correct",
    "num_groups",
    "keep_groups",
    "group_metric",
    "group_masked",
    "weights",
    "jitter",
    "renormalize",
    "renorm_power",
    "renorm_min",
    "renorm_eps",
    "scale",
    "expert_scale_E",
    "cast",
)
