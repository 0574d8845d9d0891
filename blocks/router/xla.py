"""Router in plain JAX: which experts a token visits, and with which weights.

Legend: T tokens, D hidden, E experts, G groups of experts, S experts of a group, K top_k.
"""

from collections.abc import Callable
from typing import Literal

import jax
import jax.numpy as jnp
from jax import Array, lax

from ..core.norm import rms_norm
from .names import Score, Weighing

_SCORES: dict[Score, Callable[[Array], Array]] = {
    "softmax": lambda logits_TE: jax.nn.softmax(logits_TE, axis=-1),
    "sigmoid": jax.nn.sigmoid,
    "sqrt_softplus": lambda logits_TE: jnp.sqrt(jax.nn.softplus(logits_TE)),
    "none": lambda logits_TE: logits_TE,
}


def route(
    h_TD: Array,
    w_router: Array,
    *,
    top_k: int,
    norm_D: Array | None = None,
    norm_eps: float = 1e-6,
    norm_zero_centered: bool = False,
    logits_dtype: Literal["activation", "float32"] = "activation",
    bias_E: Array | None = None,
    logits_scale: float = 1.0,
    logits_softcap: float | None = None,
    score: Score = "softmax",
    correction_E: Array | None = None,
    correct: Literal["score", "logit"] = "score",
    num_groups: int | None = None,
    keep_groups: int = 1,
    group_metric: Literal["top2_sum", "max"] = "top2_sum",
    group_masked: Literal["-inf", "zero"] = "-inf",
    weights: Weighing = "score",
    jitter: float = 0.01,
    renormalize: bool = True,
    renorm_power: float = 1.0,
    renorm_min: float | None = None,
    renorm_eps: float = 1e-20,
    scale: float = 1.0,
    expert_scale_E: Array | None = None,
    cast: bool = True,
) -> tuple[Array, Array]:
    """Pick top_k experts per token -> (index [T, K] int32, weight [T, K] in h's dtype, float32 without cast).

    w_router [D, E]; None and the defaults mean that the option is off. Options act in the order
    they are listed (ref.py has their meaning). Scores are float32 over all experts; equal values
    take the lower index.
    """
    if norm_D is not None:
        h_TD = rms_norm(h_TD, norm_D, eps=norm_eps, zero_centered=norm_zero_centered)
    logits_TE = _route_logits(h_TD, w_router, logits_dtype, bias_E)
    if logits_scale != 1:
        logits_TE = logits_TE * logits_scale
    if logits_softcap is not None:
        logits_TE = jnp.tanh(logits_TE / logits_softcap) * logits_softcap
    score_TE = _SCORES[score](logits_TE)
    select_TE = score_TE
    if correction_E is not None:
        select_TE = (score_TE if correct == "score" else logits_TE) + correction_E.astype(jnp.float32)
    if num_groups is not None:
        select_TE = _route_mask_groups(select_TE, num_groups, keep_groups, group_metric, group_masked)
    value_TK, index_TK = lax.top_k(select_TE, top_k)
    index_TK = index_TK.astype(jnp.int32)
    source_TE = score_TE if weights == "score" else logits_TE
    # What was selected on need not be fetched again.
    picked_TK = value_TK if source_TE is select_TE else _route_pick(source_TE, index_TK)
    weight_TK = _route_weigh(picked_TK, logits_TE, index_TK, weights, jitter)
    if renormalize:
        weight_TK = weight_TK / _route_total(weight_TK, renorm_power, renorm_min, renorm_eps)
    weight_TK = weight_TK * scale
    if expert_scale_E is not None:
        weight_TK = weight_TK * _route_pick(expert_scale_E.astype(jnp.float32)[None], index_TK)
    return index_TK, weight_TK.astype(h_TD.dtype) if cast else weight_TK


def _route_logits(h_TD: Array, w_router: Array, dtype: Literal["activation", "float32"], bias_E: Array | None) -> Array:
    """Logits in float32 [T, E], rounded to h's dtype unless the product itself is a float32 one."""
    if dtype == "float32":
        # Written out: the default precision of a TPU multiplies float32 in bfloat16.
        operands = h_TD.astype(jnp.float32), w_router.astype(jnp.float32)
        logits_TE = jnp.dot(*operands, precision=lax.Precision.HIGHEST)
        return logits_TE if bias_E is None else logits_TE + bias_E.astype(jnp.float32)
    info = jnp.finfo(h_TD.dtype)
    logits_TE = jnp.dot(h_TD, w_router.astype(h_TD.dtype), preferred_element_type=jnp.float32)
    if bias_E is not None:
        logits_TE = logits_TE + bias_E.astype(h_TD.dtype).astype(jnp.float32)
    # XLA may drop a cast to bfloat16 and back; reduce_precision it must keep.
    return lax.reduce_precision(logits_TE, info.nexp, info.nmant)


def _route_mask_groups(
    select_TE: Array, num: int, keep: int, metric: Literal["top2_sum", "max"], masked: Literal["-inf", "zero"]
) -> Array:
    """Values outside the best `keep` of `num` equal groups become -inf or 0."""
    select_TGS = select_TE.reshape(select_TE.shape[0], num, -1)
    best_TG = select_TGS.max(axis=-1) if metric == "max" else lax.top_k(select_TGS, 2)[0].sum(axis=-1)
    _, kept = lax.top_k(best_TG, keep)
    kept_TG = (kept[:, :, None] == jnp.arange(num)).any(axis=1)
    other = -jnp.inf if masked == "-inf" else 0.0
    return jnp.where(kept_TG[:, :, None], select_TGS, other).reshape(select_TE.shape)


def _route_pick(value_TE: Array, index_TK: Array) -> Array:
    """value[t, index[t, k]]; value may be [1, E]. A one-hot sum instead of a gather of 1-word rows; exact."""
    mine_TKE = index_TK[:, :, None] == jnp.arange(value_TE.shape[1], dtype=jnp.int32)
    return jnp.where(mine_TKE, value_TE[:, None, :], 0.0).sum(axis=-1)


def _route_weigh(picked_TK: Array, logits_TE: Array, index_TK: Array, weights: Weighing, jitter: float) -> Array:
    """Weights of the selected experts before they are renormalised; picked: their scores or logits."""
    if weights == "softmax":
        return jax.nn.softmax(picked_TK, axis=-1)
    if weights == "sigmoid":
        return jax.nn.sigmoid(picked_TK)
    return picked_TK if weights == "score" else _route_sparsemixer(picked_TK, logits_TE, index_TK, jitter)


def _route_sparsemixer(picked_TK: Array, logits_TE: Array, index_TK: Array, jitter: float) -> Array:
    """Each selected expert's softmax share among the not yet selected that come near it (arXiv:2409.12136)."""
    best_TK1, logits_T1E = picked_TK[:, :, None], logits_TE[:, None, :]
    far_TKE = (best_TK1 - logits_T1E) / jnp.maximum(jnp.abs(logits_T1E), best_TK1) > 2 * jitter
    mine_TKE = index_TK[:, :, None] == jnp.arange(logits_TE.shape[1], dtype=jnp.int32)
    earlier_TKE = jnp.cumsum(mine_TKE, axis=1) - mine_TKE > 0
    return 1 / jnp.where(far_TKE | earlier_TKE, 0.0, jnp.exp(logits_T1E - best_TK1)).sum(axis=-1)


def _route_total(weight_TK: Array, power: float, minimum: float | None, eps: float) -> Array:
    """What the weights of a token are divided by, [T, 1].

    An eps of 1e-20 only matters when all sigmoids underflow: zeros then, not NaN.
    """
    if power == 1:
        total_T1 = weight_TK.sum(axis=-1, keepdims=True)
    else:
        total_T1 = (jnp.abs(weight_TK) ** power).sum(axis=-1, keepdims=True) ** (1 / power)
    return (total_T1 if minimum is None else jnp.maximum(total_T1, minimum)) + eps
