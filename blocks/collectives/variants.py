"""Ways in which partial sums return to their rank: one for the whole program, as all blocks return through it.

What gathers tokens and sums over heads is in xla.py, whatever is chosen here.
"""

from ..core.declare import Variant

XLA = "moec.blocks.collectives.xla"

VARIANTS = (
    Variant(
        name="xla",
        module=XLA,
        backends=("cpu", "tpu"),
        note="the compiler's reduce-scatter",
    ),
    Variant(
        name="tpu_hierarchical",
        module="moec.blocks.collectives.tpu_hierarchical",
        backends=("tpu",),
        note="a kernel of remote copies: the cores of a chip add up before their sums leave it",
        cost="tpu_cost",
        tiles=(
            ("micro_batches", "pieces of what returns, in different rounds at a time"),
            ("shards_per_chip", "ranks that share a chip and add up over its own link first"),
        ),
        kernel=True,
    ),
)
