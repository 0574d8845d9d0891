"""Router: the meaning, float32, one token at a time.

Legend: T tokens, D hidden, E experts, K top_k. Same signature as xla.py; numpy inside, so not jittable.
"""

from collections.abc import Callable
from typing import Literal

import jax.numpy as jnp
import numpy as np
from jax import Array

from ..activation.ref import MEANINGS, sigmoid_of
from ..core.norm import rms_norm
from .names import Score, Weighing


def _softmax(x: np.ndarray) -> np.ndarray:
    """Over all entries of x."""
    shares = np.exp(x - x.max())
    return shares / shares.sum()


SCORES: dict[Score, Callable[[np.ndarray], np.ndarray]] = {
    "softmax": _softmax,
    "sigmoid": sigmoid_of,
    "sqrt_softplus": lambda logits_E: np.sqrt(MEANINGS["softplus"](logits_E)),
    "none": lambda logits_E: logits_E,
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
    """Pick top_k experts per token -> (index [T, K] int32, weight [T, K] in h's dtype, float32 without cast)."""
    if norm_D is not None:
        h_TD = rms_norm(h_TD, norm_D, eps=norm_eps, zero_centered=norm_zero_centered)
    index, weight = [], []
    for logits_E in _logits(h_TD, w_router, logits_dtype, bias_E):
        logits_E = logits_E * np.float32(logits_scale)
        if logits_softcap is not None:
            logits_E = np.float32(logits_softcap) * np.tanh(logits_E / np.float32(logits_softcap))
        score_E = SCORES[score](logits_E)
        select_E = score_E
        if correction_E is not None:
            # Only the choice is corrected, never the weights.
            select_E = (score_E if correct == "score" else logits_E) + _f32(correction_E)
        if num_groups is not None:
            select_E = _mask_groups(select_E, num_groups, keep_groups, group_metric, group_masked)
        # A stable sort leaves the lower index first among equals.
        best_K = np.argsort(-select_E, kind="stable")[:top_k]
        weight_K = _weigh(best_K, score_E, logits_E, weights, jitter)
        if renormalize:
            total = (np.abs(weight_K) ** renorm_power).sum() ** (1 / renorm_power)
            weight_K = weight_K / np.float32(max(total, renorm_min or 0) + renorm_eps)
        weight_K = weight_K * np.float32(scale)
        index.append(best_K)
        weight.append(weight_K if expert_scale_E is None else weight_K * _f32(expert_scale_E)[best_K])
    return jnp.asarray(np.stack(index), jnp.int32), jnp.asarray(np.stack(weight), h_TD.dtype if cast else jnp.float32)


def _f32(x: Array) -> np.ndarray:
    return np.asarray(x).astype(np.float32)


def _logits(h_TD: Array, w: Array, dtype: Literal["activation", "float32"], bias_E: Array | None) -> np.ndarray:
    """[T, E]; rounded as a model that runs in h's dtype would have them, or a float32 product."""
    if dtype == "float32":
        return _f32(h_TD) @ _f32(w) + (0 if bias_E is None else _f32(bias_E))
    logits_TE = _f32(h_TD) @ _f32(w.astype(h_TD.dtype))
    if bias_E is not None:
        logits_TE = logits_TE + _f32(bias_E.astype(h_TD.dtype))
    return logits_TE.astype(h_TD.dtype).astype(np.float32)


def _mask_groups(
    select_E: np.ndarray, num: int, keep: int, metric: Literal["top2_sum", "max"], masked: Literal["-inf", "zero"]
) -> np.ndarray:
    """Keep the best groups: by their best value, or by the sum of their two best."""
    groups = select_E.reshape(num, -1)
    counted = 1 if metric == "max" else 2
    best_G = np.sort(groups, axis=1)[:, -counted:].sum(axis=1)
    found = np.full_like(groups, -np.inf if masked == "-inf" else 0)
    for group in np.argsort(-best_G, kind="stable")[:keep]:
        found[group] = groups[group]
    return found.reshape(-1)


def _weigh(
    best_K: np.ndarray, score_E: np.ndarray, logits_E: np.ndarray, weights: Weighing, jitter: float
) -> np.ndarray:
    """Weights of the selected experts: their score, or a function of their logits."""
    if weights == "score":
        return score_E[best_K]
    if weights == "sparsemixer":
        return _sparsemixer(best_K, logits_E, jitter)
    return _softmax(logits_E[best_K]) if weights == "softmax" else sigmoid_of(logits_E[best_K])


def _sparsemixer(best_K: np.ndarray, logits_E: np.ndarray, jitter: float) -> np.ndarray:
    """One expert after the other: its softmax share among what is left, less what lies far below it."""
    left_E, found = logits_E.copy(), []
    for best in best_K:
        peak = left_E[best]
        far_E = (peak - logits_E) / np.maximum(np.abs(logits_E), peak) > 2 * jitter
        found.append(_softmax(np.where(far_E, -np.inf, left_E))[best])
        left_E[best] = -np.inf
    return np.asarray(found, np.float32)
