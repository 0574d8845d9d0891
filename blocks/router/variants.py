"""Implementations of the router that a plan may pick; a part of blocks, with variants of its own."""

from ..core.declare import Variant

VARIANTS = (
    Variant(
        name="xla",
        module="moec.blocks.router.xla",
        backends=("cpu", "tpu"),
        note="product, scores and XLA's top_k, which sorts all experts of every token",
    ),
    Variant(
        name="tpu_fused",
        module="moec.blocks.router.tpu_fused",
        backends=("tpu",),
        note="product, scores, choice and weights in one kernel, which sorts nothing",
        cost="tpu_cost",
        tiles=(
            ("route_tokens", "tokens a block of the router takes"),
            ("route_hidden", "rows of its matrix it multiplies at a time"),
        ),
        kernel=True,
    ),
)
