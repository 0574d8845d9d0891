"""Dtypes of a plan: the target's defaults, the user's pins, and what neither can do."""

from moec.blocks.core.array_info import FP8_BLOCK
from moec.blocks.core.work import Dtypes
from moec.targets.target import Target

from ..graph.ir import Graph
from ..problems import Problem
from ..spec.schema import PlanPins

# Storage formats a block turns into the activation dtype before its products.
DEQUANTISED = ("float8_e4m3fn",)


def resolve_dtypes(graph: Graph, target: Target, pins: PlanPins) -> Dtypes:
    """Pins over the target's defaults. Experts take the scaled default only if the checkpoint table has scales."""
    default = target.dtypes
    scaled = graph.checkpoint is not None and graph.checkpoint.scale_suffix is not None
    expert = default.scaled_expert if scaled else default.expert
    wanted = pins.dtypes
    return Dtypes(
        activation=wanted.activation or default.activation,
        weight=wanted.weight or default.weight,
        expert=wanted.expert or expert,
        kv=wanted.kv or default.kv,
        state=wanted.state or default.state,
        conv=wanted.conv or default.conv,
    )


def check_dtypes(graph: Graph, target: Target, dtypes: Dtypes) -> list[Problem]:
    """Operands must be native to the matrix units; experts may be stored in a format that is dequantised."""
    native = target.matrix_dtypes()
    problems = [
        Problem(
            f"plan.dtypes.{role}",
            f"UNSUPPORTED: the matrix units of {target.chip} do not take {dtype}",
            f"valid: {', '.join(valid)}",
        )
        for role, dtype, valid in (
            ("activation", dtypes.activation, native),
            ("weight", dtypes.weight, native),
            ("expert", dtypes.expert, tuple(dict.fromkeys((*native, *DEQUANTISED)))),
        )
        if dtype not in valid
    ]
    if dtypes.weight in DEQUANTISED:
        text = f"UNSUPPORTED: only expert stacks carry block scales, so other weights cannot be {dtypes.weight}"
        problems.append(Problem("plan.dtypes.weight", text, "valid: bfloat16, float32"))
    table = graph.checkpoint
    if dtypes.expert in DEQUANTISED and table is not None and table.scale_suffix is None:
        text = f"UNSUPPORTED: experts in {dtypes.expert} need block scales, and the checkpoint table has none"
        problems.append(Problem("plan.dtypes.expert", text, "declare model.checkpoint.scales"))
    if dtypes.expert in DEQUANTISED and table and table.scale_block and set(table.scale_block) != {FP8_BLOCK}:
        text = f"UNSUPPORTED: experts in {dtypes.expert} take one scale per {FP8_BLOCK} x {FP8_BLOCK} values"
        text += ", the checkpoint table says {} x {}".format(*table.scale_block)
        hint = "plan.dtypes.expert=bfloat16 dequantises them when they are loaded"
        problems.append(Problem("model.checkpoint.scales.block", text, hint))
    return problems
