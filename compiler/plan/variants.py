"""Which implementation of each block a program uses. One per block and backend so far."""

from moec.blocks.core.declare import Variant
from moec.targets.target import Target

from ..graph.ir import BlockInst, Graph
from ..graph.weights import block_of
from ..problems import Problem

# What is no declared block and exists in plain XLA only: parts of every program, and parts that some blocks call.
OTHERS = ("collectives", "embed", "head", "sampling")
PARTS = ("router",)


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
    """Block instance name, `<block>.<part>` for what its variant calls, and OTHERS -> variant name."""
    chosen = {inst.name: usable(inst, target)[0] for inst in graph.blocks().values()}
    parts = [(name, part) for name, variant in chosen.items() for part in variant.parts]
    assert {part for _, part in parts} <= set(PARTS), parts
    blocks = {name: variant.name for name, variant in chosen.items()}
    return blocks | {f"{name}.{part}": "xla" for name, part in parts} | dict.fromkeys(OTHERS, "xla")
