"""Which implementation of each block a program uses. One per block and backend so far."""

from moec.blocks.core.declare import Variant
from moec.targets.target import Target

from ..graph.ir import BlockInst, Graph
from ..graph.weights import block_of
from ..problems import Problem

# Parts of every program that are no declared block; they exist in plain XLA only.
OTHERS = ("collectives", "embed", "head", "sampling")


def usable(inst: BlockInst, target: Target) -> list[Variant]:
    """Variants that run on the target's backend, best first."""
    return [variant for variant in block_of(inst).VARIANTS if target.platform in variant.backends]


def check_variants(graph: Graph, target: Target) -> list[Problem]:
    """Every block needs a variant for the backend."""
    return [
        Problem(
            f"model.blocks.{inst.name}", f"UNSUPPORTED: block kind {inst.kind} has no variant for {target.platform}"
        )
        for inst in graph.blocks().values()
        if not usable(inst, target)
    ]


def pick_variants(graph: Graph, target: Target) -> dict[str, str]:
    """Block instance name (and OTHERS) -> variant name."""
    blocks = {inst.name: usable(inst, target)[0].name for inst in graph.blocks().values()}
    return blocks | dict.fromkeys(OTHERS, "xla")
