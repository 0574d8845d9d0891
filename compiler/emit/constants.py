"""The UPPER constants at the top of an emitted program, and which variants it uses."""

import textwrap
from collections.abc import Iterable

from moec.blocks.core.declare import Variant
from moec.blocks.core.emission import Constant, Emission, variant_constants
from moec.blocks.registry import COLLECTIVES, PARTS

from ..graph.ir import BlockInst, Graph
from ..plan.plan import Plan
from ..spec.pins import WAY_BACK
from .arrays import chosen_variant

WIDTH = 110  # of emitted lines


def text(value: object) -> str:
    """A value as Python text with double quotes, as formatters write it."""
    return repr(value).replace("'", '"')


def chosen_part(part: str, inst: BlockInst, plan: Plan) -> Variant:
    """The variant the plan chose for a part that a block calls."""
    return next(one for one in PARTS[part]().VARIANTS if one.name == plan.variants[f"{inst.name}.{part}"])


def chosen_way_back(plan: Plan) -> Variant:
    """The variant through which tokens return to their rank."""
    return next(one for one in COLLECTIVES().VARIANTS if one.name == plan.variants[WAY_BACK])


def tuned(owner: str, plan: Plan) -> dict[str, object]:
    """What the plan tunes for a block or place: {"chunk": 64, "block_rows": {"decode": 8}} of its flat keys."""
    nested: dict[str, object] = {}
    for key, value in plan.tuning.items():
        whose, _, tile = key.partition(".")
        name, _, bucket = tile.partition(".")
        if whose == owner:
            nested[name] = {**dict(nested.get(name, {})), bucket: value} if bucket else value  # type: ignore[call-overload]
    return nested


def uses_kernels(graph: Graph, plan: Plan) -> bool:
    """Whether any function of the program takes the chip's limits."""
    insts = graph.blocks().values()
    blocks = [chosen_variant(inst, plan) for inst in insts]
    parts = [chosen_part(part, inst, plan) for inst, one in zip(insts, blocks, strict=True) for part in one.parts]
    return any(one.kernel for one in (*blocks, *parts, chosen_way_back(plan)))


def constants(graph: Graph, plan: Plan, emissions: dict[str, Emission]) -> tuple[Constant, ...]:
    mesh, dims = plan.mesh, graph.dims
    axes = "{" + ", ".join(f'"{name}": {size}' for name, size in mesh.axes) + "}"
    head = [
        Constant("MESH_AXES", axes, f"{mesh.num_devices} devices"),
        Constant("DATA", text(mesh.attention_dp), "attention data parallel: each rank has its own sequences"),
        Constant("TENSOR", text(mesh.attention_tp), "attention tensor parallel: heads are cut"),
        Constant("EXPERT", text(mesh.expert_ep), "expert parallel: each device has its own experts"),
        Constant("NUM_RANKS", str(mesh.dp), "attention data-parallel ranks"),
        Constant("VOCAB", str(dims.vocab_size), "token ids"),
        Constant("ACTIVATION", f'"{plan.dtypes.activation}"', "dtype of the residual stream"),
        Constant("MATMUL_PRECISION", f'"{plan.matmul_precision}"', "of matrix products while tracing"),
        Constant("PAGE_SIZE", str(plan.page_size), "tokens per KV page"),
        Constant("MAX_CONTEXT", str(plan.max_context), "tokens per sequence"),
        Constant("NUM_PAGES", str(plan.pages_per_rank), "KV pages per rank the plan budgets, page 0 is the sink"),
        Constant("NUM_SLOTS", str(plan.slots_per_rank), "sequences per rank the plan budgets, slot 0 is the sink"),
    ]
    if uses_kernels(graph, plan):
        head.append(Constant("CHIP", chip_text(plan), f"what the kernels must respect of a device of {plan.target}"))
    if plan.device:
        reason = "what jax calls a device and its TensorCores: SparseCore kernels are traced for one kind"
        head.append(Constant("DEVICE", text(plan.device), reason))
    head += variant_constants(WAY_BACK.upper(), chosen_way_back(plan), tuned(WAY_BACK, plan))
    return (*head, *(c for emitted in emissions.values() for c in emitted.constants))


def chip_text(plan: Plan) -> str:
    """The plan's limits as a literal; what is at its default is left out."""
    fields = [f"{name}={text(value)}" for name, value in plan.chip.items() if value]
    return "\n".join(["ChipLimits(", *(f"    {line}" for line in item_lines(fields, ",", WIDTH - 4)), ")"])


def item_lines(items: Iterable[str], end: str, width: int = WIDTH) -> list[str]:
    """Items with commas between them, as many on a line as fit: lines break between items, never inside one."""
    joined = ", ".join(item.replace(" ", "\0") for item in items) + end
    return [line.replace("\0", " ") for line in textwrap.wrap(joined, width, break_long_words=False)]
