"""Next-token sampling without sorting the vocabulary.

Legend: S rows (sequences) of this rank, V vocabulary; helpers see a few rows at a time.
A filter keeps the shortest prefix of the order (larger value first, then lower index) that
reaches a target mass. The value where that prefix ends is found by a search over the bits
of float32: exact, and each of its steps is one fused pass over the logits, where a sort of
the vocabulary takes a pass per comparison stage.
"""

import jax
import jax.numpy as jnp
from jax import Array, lax

from ..core.batch import Sampling

_SAMPLING_MINUS_INF = 0x00800000  # order code of -inf; lower codes are NaNs
# Rows drawn together. A draw keeps about seven arrays [rows, V] alive, so all rows at once would take seven times the
# logits; and one row with a temperature makes its whole group draw. The tokens do not depend on it.
_SAMPLING_GROUP = 8
_SAMPLING_TINY = 1.1754944e-38  # smallest positive normal float32


def _sampling_argmax(x_SV: Array) -> Array:
    """Lowest index of the largest entry -> [S] int32.

    Two plain reductions: XLA:CPU runs the paired reduction of jnp.argmax element by element.
    """
    last = x_SV.shape[1] - 1
    index_V = jnp.arange(last + 1, dtype=jnp.int32)
    return jnp.min(jnp.where(x_SV == jnp.max(x_SV, axis=1, keepdims=True), index_V, last), axis=1)


def _sampling_decode(code_S: Array) -> Array:
    """Order code (uint32, larger = larger float, -0.0 = 0.0) -> float32."""
    signed = lax.bitcast_convert_type(code_S ^ jnp.uint32(1 << 31), jnp.int32)
    bits = jnp.where(signed < 0, jnp.int32(-(2**31)) - signed, signed)
    return lax.bitcast_convert_type(bits, jnp.float32)


def _sampling_threshold(x_SV: Array, mass_SV: Array, target_S: Array) -> Array:
    """Largest t per row such that entries x >= t hold at least the target mass -> [S].

    x may be one row [1, V] for all.
    The mass above t only falls as t rises, so the bits of t settle from the top.
    """

    def step(n: Array, code_S: Array) -> Array:
        tried_S = code_S | (jnp.uint32(1 << 31) >> n.astype(jnp.uint32))
        above_SV = x_SV >= _sampling_decode(tried_S)[:, None]
        held_S = jnp.sum(jnp.where(above_SV, mass_SV, 0.0), axis=1)
        return jnp.where(held_S >= target_S, tried_S, code_S)

    code_S = lax.fori_loop(0, 32, step, jnp.zeros(target_S.shape, jnp.uint32))
    # Rounding may leave the sum of everything just below the target: then keep everything.
    return _sampling_decode(jnp.maximum(code_S, _SAMPLING_MINUS_INF))


def _sampling_keep(x_SV: Array, mass_SV: Array, target_S: Array) -> Array:
    """The shortest prefix of (x falling, index rising) with the target mass, as a mask [S, V]."""
    cut_S = _sampling_threshold(x_SV, mass_SV, target_S)
    above_SV, tie_SV = x_SV > cut_S[:, None], x_SV == cut_S[:, None]
    # float32 counts exactly to 2**24, more than any vocabulary.
    backward_1V = -jnp.arange(x_SV.shape[1], dtype=jnp.float32)[None, :]

    def split_ties() -> Array:
        missing_S = target_S - jnp.sum(jnp.where(above_SV, mass_SV, 0.0), axis=1)
        tie_mass_SV = jnp.where(tie_SV, mass_SV, 0.0)
        last_S = _sampling_threshold(backward_1V, tie_mass_SV, jnp.maximum(missing_S, _SAMPLING_TINY))
        return above_SV | (tie_SV & (backward_1V >= last_S[:, None]))

    return lax.cond(jnp.any(jnp.sum(tie_SV, axis=1) > 1), split_ties, lambda: above_SV | tie_SV)


def _sampling_top_k(x_SV: Array, top_k_S: Array, limited_S: Array) -> Array:
    """-inf outside the k first entries of the limited rows."""
    # Rows without a limit take the cheapest target; their result is not used.
    target_S = jnp.where(limited_S, top_k_S, 1).astype(jnp.float32)
    kept_SV = _sampling_keep(x_SV, jnp.ones_like(x_SV), target_S)
    return jnp.where(kept_SV | ~limited_S[:, None], x_SV, -jnp.inf)


def _sampling_top_p(x_SV: Array, top_p_S: Array, limited_S: Array) -> Array:
    """-inf outside the shortest prefix with the top_p share of the limited rows' mass."""
    mass_SV = jnp.exp(x_SV)
    share_S = jnp.where(limited_S, top_p_S, 0.0) * jnp.sum(mass_SV, axis=1)
    # The likeliest token always stays, even at top_p 0.
    kept_SV = _sampling_keep(x_SV, mass_SV, jnp.maximum(share_S, _SAMPLING_TINY))
    return jnp.where(kept_SV | ~limited_S[:, None], x_SV, -jnp.inf)


def _sampling_filter(x_SV: Array, sampling: Sampling) -> Array:
    """-inf where top-k, then top-p of what is left, drop a token. x: scaled logits, maximum 0."""
    by_count_S = (sampling.top_k > 0) & (sampling.top_k < x_SV.shape[1])
    by_mass_S = sampling.top_p < 1
    x_SV = lax.cond(jnp.any(by_count_S), _sampling_top_k, lambda x, *_: x, x_SV, sampling.top_k, by_count_S)
    return lax.cond(jnp.any(by_mass_S), _sampling_top_p, lambda x, *_: x, x_SV, sampling.top_p, by_mass_S)


def _sampling_gumbel(seed: Array, position: Array, vocabulary: int) -> Array:
    """Gumbel noise of one row, from its seed and position only -> [V]."""
    key = jax.random.fold_in(jax.random.key(seed, impl="threefry2x32"), position)
    return jax.random.gumbel(key, (vocabulary,), jnp.float32)


def _sampling_draw(logits_SV: Array, sampling: Sampling, position_S: Array) -> Array:
    """Filtered draws of a few rows -> tokens [S]; rows at temperature 0 get anything."""
    temperature_S = jnp.where(sampling.temperature > 0, sampling.temperature, 1.0)
    # Relative to the maximum, so that a tiny temperature cannot overflow.
    x_SV = (logits_SV - jnp.max(logits_SV, axis=1, keepdims=True)) / temperature_S[:, None]
    x_SV = _sampling_filter(x_SV, sampling)
    noise_SV = jax.vmap(_sampling_gumbel, (0, 0, None))(sampling.seed, position_S, logits_SV.shape[1])
    return _sampling_argmax(x_SV + noise_SV)


def sample(logits_SV: Array, sampling: Sampling, position_S: Array) -> tuple[Array, Array]:
    """Choose one token per row -> (tokens [S] int32, logprob [S] float32).

    temperature 0: the largest logit, lowest index first. Else: logits / temperature, top-k,
    top-p, then a draw that depends on the row's logits, seed and position and on no other
    row. position_S: position of the token being chosen. logprob: of the chosen token under
    the unfiltered distribution at temperature 1.
    """
    logits_SV = logits_SV.astype(jnp.float32)
    num_rows = logits_SV.shape[0]
    rows = min(_SAMPLING_GROUP, num_rows)

    def group(n: Array, tokens_S: Array) -> Array:
        # The last group may overlap the one before: it draws the same tokens again.
        start = jnp.minimum(n * rows, num_rows - rows)
        args = (tokens_S, logits_SV, sampling, position_S)
        mine, *args = jax.tree.map(lambda a: lax.dynamic_slice_in_dim(a, start, rows), args)
        hot = args[1].temperature > 0
        mine = lax.cond(jnp.any(hot), lambda: jnp.where(hot, _sampling_draw(*args), mine), lambda: mine)
        return lax.dynamic_update_slice_in_dim(tokens_S, mine, start, axis=0)

    greedy_S = _sampling_argmax(logits_SV)
    tokens_S = lax.fori_loop(0, -(-num_rows // rows), group, greedy_S)
    chosen_S = jnp.take_along_axis(logits_SV, tokens_S[:, None], axis=1)[:, 0]
    return tokens_S, chosen_S - jax.nn.logsumexp(logits_SV, axis=1)
