"""Dtypes of a plan: the target's defaults, the user's pins, and what neither can do."""

from moec.blocks.core.array_info import E4M3, FLOAT8_EDGES, PACKED, SCALED
from moec.blocks.core.work import Dtypes
from moec.targets.target import Target

from ..graph.ir import Graph
from ..graph.weights import all_weights, table_key
from ..problems import Problem
from ..spec.schema import PlanPins

# Dtypes with block scales: a block turns them into the activation dtype before its products.
DEQUANTISED = tuple(SCALED)


def resolve_dtypes(graph: Graph, target: Target, pins: PlanPins) -> Dtypes:
    """Pins over the target's defaults. What experts take by default depends on how the checkpoint table stores them."""
    default = target.dtypes
    scaled = graph.checkpoint is not None and graph.checkpoint.scale_suffix is not None
    expert: str = default.scaled_expert if scaled else default.expert
    if packed := packed_experts(graph):
        expert = packed if default.packed_expert == "stored" else default.packed_expert
    wanted = pins.dtypes
    return Dtypes(
        activation=wanted.activation or default.activation,
        weight=wanted.weight or default.weight,
        expert=wanted.expert or expert,
        kv=wanted.kv or default.kv,
        state=wanted.state or default.state,
        conv=wanted.conv or default.conv,
        gather=wanted.gather or default.gather,
        expert_rows=wanted.expert_rows or default.expert_rows,
        scale_block=wanted.scale_block or FLOAT8_EDGES[0],
    )


def packed_experts(graph: Graph) -> str | None:
    """The 4-bit dtype in which the checkpoint table stores experts, in the first of its lines that does."""
    experts = {table_key(graph, key) for key, weight in all_weights(graph).items() if weight.role == "expert"}
    for line in graph.checkpoint.tensors if graph.checkpoint else ():
        if line.packed and experts.intersection(line.into):
            return PACKED[line.packed].dtype
    return None


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
    if dtypes.expert_rows != "activation" and dtypes.expert != E4M3:
        text = f"UNSUPPORTED: rows in {dtypes.expert_rows} go with experts in {E4M3}, and these are {dtypes.expert}"
        problems.append(Problem("plan.dtypes.expert_rows", text, "valid: activation"))
    table = graph.checkpoint
    if dtypes.expert == E4M3 and table is not None and table.scale_suffix is None:
        text = f"UNSUPPORTED: experts in {dtypes.expert} need block scales, and the checkpoint table has none"
        problems.append(Problem("plan.dtypes.expert", text, "declare model.checkpoint.scales"))
    return problems + _ragged_blocks(graph, dtypes.expert) + refuse_scale_block(graph, dtypes)


def stored_edge(graph: Graph) -> int | None:
    """Edge of the square of values that share a scale in the checkpoint table; None where they are no squares."""
    usual = FLOAT8_EDGES[0]
    rows, columns = (graph.checkpoint and graph.checkpoint.scale_block) or (usual, usual)
    return rows if rows == columns else None


def refuse_scale_block(graph: Graph, dtypes: Dtypes) -> list[Problem]:
    """The usual edge takes stored scales as they are; a wider one goes with float8 and whole blocks."""
    edge, usual, pin = dtypes.scale_block, FLOAT8_EDGES[0], "plan.dtypes.scale_block"
    if edge != usual and dtypes.expert != E4M3:
        text = f"UNSUPPORTED: one scale per {edge} x {edge} values goes with experts in {E4M3}"
        return [Problem(pin, f"{text}, and these are {dtypes.expert}", "leave it out")]
    if dtypes.expert != E4M3:
        return []
    table = graph.checkpoint
    if edge == usual and table and table.scale_block and stored_edge(graph) != usual:
        text = f"UNSUPPORTED: experts in {dtypes.expert} take one scale per {edge} x {edge} values"
        text += ", the checkpoint table says {} x {}".format(*table.scale_block)
        hint = "plan.dtypes.expert=bfloat16 dequantises them when they are loaded"
        if stored_edge(graph) in FLOAT8_EDGES:
            hint = f"{pin}={stored_edge(graph)}"
        return [Problem("model.checkpoint.scales.block", text, hint)]
    for key, weight in all_weights(graph).items():
        ragged = [size for size in weight.shape[-2:] if size % edge]
        if edge != usual and weight.role == "expert" and ragged:
            text = f"UNSUPPORTED: one scale per {edge} x {edge} values goes with multiples of {edge}"
            return [Problem(pin, f"{text}, and {key} is {weight.shape[-2]} x {weight.shape[-1]}", f"valid: {usual}")]
    return []


def _ragged_blocks(graph: Graph, dtype: str) -> list[Problem]:
    """4-bit experts have whole blocks of scales; one problem for the first that has not."""
    if dtype not in SCALED or dtype == E4M3:
        return []
    rows = SCALED[dtype].rows
    for key, weight in all_weights(graph).items():
        if weight.role == "expert" and weight.shape[-2] % rows:
            text = f"UNSUPPORTED: experts in {dtype} have one scale per {rows} values of the in dim"
            text += f", and {key} has {weight.shape[-2]}"
            return [Problem("plan.dtypes.expert", text, "valid: bfloat16, float32")]
    return []
