"""XLA's own operations at the shapes where our kernels replace them. Nothing to install."""

import jax
import jax.numpy as jnp
from jax import lax

from benchmarks.kernels.case import Arg, Case

TOKENS, EXPERTS, TOP_K = 512, 512, 10  # DP8/EP8: every device routes the tokens of all eight


def _top_k(chip, mesh, tiles):
    return lambda logits: lax.top_k(jax.nn.softmax(logits, axis=-1), TOP_K)


def _argsorts(chip, mesh, tiles):
    """Order of (token, choice) pairs by expert, and its inverse: what sorts tokens into groups and back."""

    def run(index_TK):
        order = jnp.argsort(index_TK.reshape(-1))
        return order, jnp.argsort(order)

    return run


CASES = tuple(
    case
    for tokens in (64, TOKENS)
    for case in (
        Case(
            name=f"xla-top-k-{tokens}",
            block="moe",
            variant="xla",
            build=_top_k,
            args=(Arg((tokens, EXPERTS), "float32"),),
            unit="token",
            units=tokens,
            floor_bytes=tokens * (EXPERTS * 4 + TOP_K * 8),
        ),
        Case(
            name=f"xla-argsorts-{tokens}",
            block="moe",
            variant="xla",
            build=_argsorts,
            args=(Arg((tokens, TOP_K), "int32"),),
            unit="token",
            units=tokens,
            floor_bytes=tokens * TOP_K * 4 * 3,
        ),
    )
)
