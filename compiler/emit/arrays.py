"""Program arrays from the graph and the plan: stacked shapes, dtypes, logical axes, checkpoint sources.

The graph knows one layer's logical weights; the program stacks them over the repeats of a
group (scan inputs) or over all layers of a block (expert stacks), in the plan's dtypes, with
key/value heads repeated where the tensor-parallel degree exceeds their number.
"""

import math
from dataclasses import dataclass, fields, replace

from moec.blocks.core.array_info import SCALED, ArrayInfo, Op, ScaleBlock, Source, scaled_block
from moec.blocks.core.declare import HeadCut, PagedState, SlotState, Variant, Weight
from moec.blocks.core.work import Dtypes, itemsize
from moec.blocks.registry import axis_roles
from moec.targets.target import load_target

from ..graph.build import sources
from ..graph.ir import BlockInst, Graph
from ..graph.weights import all_residual_weights, block_of, block_state, block_weights, model_weights
from ..plan.memory import pinned_rows
from ..plan.plan import Plan


@dataclass(frozen=True)
class StateArray:
    """One pool: key in the state tree, and its shape without the page or slot count.

    layers: number of layers of the block. paged: pages (tokens) or slots (sequences).
    inner: dims of one token's or sequence's entry (global); axes: their logical axes. row: the constant of the
    program that is the last of them; None: a number. carried: blocks update it inside the layer scan.
    """

    key: str
    block: str
    layers: int
    paged: bool
    inner: tuple[int, ...]
    axes: tuple[str | None, ...]
    dtype: str
    window: int | None = None
    row: str | None = None
    carried: bool = True

    @property
    def inner_text(self) -> str:
        """The dims of an entry as the program writes them."""
        sizes = [str(size) for size in self.inner]
        return ", ".join(sizes if self.row is None else (*sizes[:-1], self.row))

    @property
    def bytes_per_entry(self) -> int:
        """Bytes of one token (paged) or one sequence (slot) over all layers, all devices of a rank."""
        return self.layers * math.prod(self.inner) * itemsize(self.dtype)


def role_dtypes(plan: Plan) -> Dtypes:
    """The plan's dtype for every role of a weight or a state."""
    return Dtypes(**{field.name: getattr(plan.dtypes, field.name) for field in fields(Dtypes)})


def kv_copies(axis: str | None, cuts: tuple[HeadCut, ...], plan: Plan) -> tuple[int, int]:
    """(copies of each head, number of heads) of an axis that may be replicated; (1, 1) when it is not."""
    for cut in cuts:
        if cut.axis == axis and cut.replicate and axis_roles()[cut.axis] == "attention_tp" and plan.mesh.tp > cut.size:
            return plan.mesh.tp // cut.size, cut.size
    return 1, 1


def dense_arrays(graph: Graph, inst: BlockInst, plan: Plan, layers: tuple[int, ...]) -> dict[str, ArrayInfo]:
    """A block's scanned weights for the given layers: leading dim = layers."""
    declared = {key: w for key, w in block_weights(graph, inst).items() if not w.stacked}
    cuts = block_of(inst).cuts(inst.fields)
    return {key: _stacked(graph, f"{inst.name}.{key}", w, cuts, plan, layers) for key, w in declared.items()}


def expert_arrays(graph: Graph, inst: BlockInst, plan: Plan) -> dict[str, ArrayInfo]:
    """A block's loop-invariant stacks over all its layers, with block scales when their dtype has them."""
    declared = {key: w for key, w in block_weights(graph, inst).items() if w.stacked}
    cuts, layers = block_of(inst).cuts(inst.fields), graph.layers_of(inst.name)
    found = {}
    for key, weight in declared.items():
        found[key] = _stacked(graph, f"{inst.name}.{key}", weight, cuts, plan, layers)
        if found[key].dtype in SCALED:
            block = scaled_block(found[key].dtype, plan.dtypes.scale_block)
            found[f"{key}_scale"] = _scales(found[key], key, block)
    return found


def _stacked(
    graph: Graph, key: str, weight: Weight, cuts: tuple[HeadCut, ...], plan: Plan, layers: tuple[int, ...]
) -> ArrayInfo:
    shape = list(weight.shape)
    ops: tuple[Op, ...] = ()
    for dim, axis in enumerate(weight.axes):
        copies, heads = kv_copies(axis, cuts, plan)
        if copies > 1:
            ops = (*ops, ("repeat", dim - len(shape), shape[dim] // heads, copies))
            shape[dim] *= copies
    return ArrayInfo(
        shape=(len(layers), *shape),
        dtype=role_dtypes(plan).of(weight.role),
        axes=(None, *weight.axes),
        sources=_with_ops(sources(graph, key), ops),
        layers=layers,
        init=weight.init,
    )


def _with_ops(found: tuple[Source, ...], ops: tuple[Op, ...]) -> tuple[Source, ...]:
    return tuple(replace(source, ops=(*source.ops, *ops)) for source in found)


def _scales(info: ArrayInfo, key: str, block: ScaleBlock) -> ArrayInfo:
    """Their block is said where it is not that of the dtype."""
    shape = (*info.shape[:-2], *block.count(*info.shape[-2:]))
    own = None if block == SCALED[info.dtype] else (block.rows, block.columns)
    return ArrayInfo(shape, block.dtype, info.axes, layers=info.layers, scale_of=key, block=own)


def top_arrays(graph: Graph, plan: Plan) -> dict[str, ArrayInfo]:
    """Embedding, final norm and head, by checkpoint key."""
    dtypes, tiling = role_dtypes(plan), load_target(plan.target).tiling

    def one(key: str, weight: Weight) -> ArrayInfo:
        rows = pinned_rows(key, weight.shape, tiling)
        source = sources(graph, key)
        return ArrayInfo(weight.shape, dtypes.of(weight.role), weight.axes, source, init=weight.init, row_major=rows)

    return {key: one(key, weight) for key, weight in model_weights(graph).items()}


def residual_array(graph: Graph, key: str, plan: Plan, layers: tuple[int, ...]) -> ArrayInfo:
    """A layer's own weight, e.g. "layer.mixer_norm", over the given layers."""
    return _stacked(graph, key, all_residual_weights(graph)[key], (), plan, layers)


def state_arrays(graph: Graph, plan: Plan) -> tuple[StateArray, ...]:
    """Every pool of the model, in order of the blocks."""
    found = []
    for inst in graph.blocks().values():
        cuts = block_of(inst).cuts(inst.fields)
        for state in block_state(graph, inst):
            found.append(_state_array(graph, inst, state, cuts, plan))
    return tuple(found)


def chosen_variant(inst: BlockInst, plan: Plan) -> Variant:
    """The block's variant in the plan."""
    return next(one for one in block_of(inst).VARIANTS if one.name == plan.variants[inst.name])


def _state_array(
    graph: Graph, inst: BlockInst, state: PagedState | SlotState, cuts: tuple[HeadCut, ...], plan: Plan
) -> StateArray:
    name = "kv" if isinstance(state, PagedState) else state.name
    aligned = isinstance(state, PagedState) and state.row_aligned
    if isinstance(state, PagedState):
        shape, axes = state.shape, state.axes
    else:
        tiling = load_target(plan.target).tiling
        shape, axes = state.entry(tiling.sublanes, tiling.lanes, plan.mesh.tp)
    shape = (*shape[:-1], plan.tuning[f"{inst.name}.row"]) if aligned else shape
    inner = tuple(size * kv_copies(axis, cuts, plan)[0] for size, axis in zip(shape, axes, strict=True))
    return StateArray(
        key=f"{inst.name}.{name}",
        block=inst.name,
        layers=len(graph.layers_of(inst.name)),
        paged=isinstance(state, PagedState),
        inner=inner,
        axes=axes,
        dtype=role_dtypes(plan).of(state.role),
        window=state.window if isinstance(state, PagedState) else None,
        row=f"{inst.name.upper()}_ROW" if aligned else None,
        carried=isinstance(state, SlotState) or chosen_variant(inst, plan).updates_pages,
    )


def mesh_rules(graph: Graph, plan: Plan) -> dict[str, tuple[str, ...]]:
    """Logical axis of the model -> mesh axes. Vocabulary is cut tensor-major, so that the head gathers over tp last."""
    mesh = plan.mesh
    everything = mesh.attention_tp + mesh.attention_dp
    whole = tuple(name for name, _ in mesh.axes)
    roles = {
        "attention_dp": mesh.attention_dp,
        "attention_tp": mesh.attention_tp,
        "expert_ep": mesh.expert_ep,
        "expert_tp": mesh.expert_tp,
        "shared": whole if plan.shared_expert == "sharded" else (),
        "mlp": whole if plan.mlp == "sharded" else (),
        "embed": everything if plan.embed == "sharded" else (),
        "head": everything if plan.head == "sharded" else (),
    }
    return {axis: roles[role] for axis, role in axis_roles().items() if axis in _axes(graph)}


def _axes(graph: Graph) -> set[str | None]:
    """The logical axes the model's arrays have."""
    found: set[str | None] = {"rank", *(axis for weight in model_weights(graph).values() for axis in weight.axes)}
    for inst in graph.blocks().values():
        for array in (*block_weights(graph, inst).values(), *block_state(graph, inst)):
            found |= set(array.axes)
    return found
