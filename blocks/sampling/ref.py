"""Next-token sampling: the meaning, one row at a time, by sorting.

Legend: S rows (sequences), V vocabulary.
"""

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from ..core.batch import Sampling


def allowed(logits_V: Array, temperature: float, top_k: int, top_p: float) -> np.ndarray:
    """The token ids a row may draw, likeliest first (equal logits: lower id first)."""
    logits = np.asarray(logits_V, np.float64)
    order = np.argsort(-logits, kind="stable")
    if temperature == 0:
        return order[:1]
    order = order[: top_k or None]
    mass = np.exp((logits[order] - logits.max()) / temperature)
    before = np.cumsum(mass) - mass
    # A token stays while those before it have not yet reached top_p; the first always stays.
    return order if top_p >= 1 else order[(before < top_p * mass.sum()) | (np.arange(order.size) == 0)]


def sample(logits_SV: Array, sampling: Sampling, position_S: Array) -> tuple[Array, Array]:
    """Choose one token per row -> (tokens [S] int32, logprob [S] float32)."""
    tokens, logprobs = [], []
    for row, logits in enumerate(logits_SV.astype(jnp.float32)):
        temperature = float(sampling.temperature[row])
        ids = allowed(logits, temperature, int(sampling.top_k[row]), float(sampling.top_p[row]))
        key = jax.random.fold_in(jax.random.key(sampling.seed[row], impl="threefry2x32"), position_S[row])
        noise = jax.random.gumbel(key, logits.shape, jnp.float32)
        x = (logits - logits.max()) / (temperature or 1.0)
        tokens.append(ids[int(jnp.argmax((x + noise)[ids]))])
        logprobs.append(jax.nn.log_softmax(logits)[tokens[-1]])
    return jnp.asarray(tokens, jnp.int32), jnp.stack(logprobs)
