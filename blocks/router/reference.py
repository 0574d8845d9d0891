"""How a declared router is interpreted in float32."""

from jax import Array

from ..core.declare import ModelDims
from . import ref
from .router_fields import Router, router_norm


def apply_router(router: Router, dims: ModelDims, h_TD: Array, x_TD: Array, w: dict[str, Array]) -> tuple[Array, Array]:
    """(index [T, K], weight [T, K]); h: the block's normed input, x: the residual stream before the norm."""
    norm, groups = router_norm(router, dims), router.groups
    return ref.route(
        x_TD if router.input == "residual" else h_TD,
        w["router"],
        top_k=router.top_k,
        norm_D=w["router_norm"] if norm else None,
        norm_eps=norm.eps if norm else 1e-6,
        norm_zero_centered=norm.zero_centered if norm else False,
        logits_dtype=router.logits_dtype,
        bias_E=w["router_bias"] if router.bias else None,
        logits_scale=router.logits_scale,
        logits_softcap=router.logits_softcap,
        score=router.score,
        correction_E=w["router_correction"] if router.correction != "none" else None,
        correct="logit" if router.correction == "logit" else "score",
        num_groups=groups.num if groups else None,
        keep_groups=groups.keep if groups else 1,
        group_metric=groups.metric if groups else "top2_sum",
        group_masked=groups.masked if groups else "-inf",
        weights=router.weights,
        jitter=router.jitter,
        renormalize=router.renormalize,
        renorm_power=router.renorm_power,
        renorm_min=router.renorm_min,
        renorm_eps=router.renorm_eps,
        scale=router.scale,
        expert_scale_E=w["expert_scale"] if router.expert_scale else None,
        cast=router.cast,
    )
