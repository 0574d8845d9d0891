"""Bytes per device: arguments exactly as the compiler lays them out, temporaries by a calibrated formula."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from itertools import permutations
from math import inf, prod

from moec.blocks.core.array_info import SCALED, scaled_block
from moec.blocks.core.declare import PagedState, SlotState, Variant, Weight
from moec.blocks.core.work import Degrees, Dtypes, Load, itembits, itemsize, touched
from moec.blocks.embed import cost as embed_cost
from moec.blocks.head import cost as head_cost
from moec.blocks.registry import axis_roles, cost
from moec.targets.target import Target, Tiling

from ..graph.ir import BlockInst, Graph
from ..graph.weights import block_of, block_state, block_weights, model_weights, residual_weights
from .plan import CachePool, MemoryPlan
from .steps import Steps

# Bar of the acceptance check: planned and compiled bytes differ by at most this.
BAND_PCT = 2.0

Shape = tuple[int, ...]


def padded_bytes(shape: Shape, dtype: str, tiling: Tiling, row_major: bool = False) -> int:
    """Bytes of an array in device memory; see _padded."""
    return _padded(shape, itembits(dtype), tiling.sublanes, tiling.lanes, row_major)


def pinned_rows(key: str, shape: Shape, tiling: Tiling) -> bool:
    """Whether a weight outside the layers is row major where the compiler would choose another order: an embedding
    table whose rows are no whole tiles. It would re-lay out the table in every step to gather rows from it."""
    return key == "embed.table" and shape[-1] % tiling.lanes > 0


@cache
def _padded(shape: Shape, bits: int, sublanes: int, lanes: int, row_major: bool) -> int:
    """Bytes of values of `bits` each.

    The compiler orders dims so that padding is least: one dim in lanes, one in sublanes (fewer
    rows than a tile take a smaller tile), the others unpadded. One-dimensional arrays come in
    tiles of 128 to 1024 values.
    """
    if lanes == 1:
        return -(-prod(shape) * bits // 8)
    if len(shape) == 1:
        tile = min(max(_power_of_two(shape[0]), lanes), lanes * sublanes)
        return _round_up(shape[0], tile) * bits // 8
    whole = prod(shape)
    least = min(
        whole // (rows * columns) * _round_up(columns, lanes) * _padded_rows(rows, bits, sublanes)
        for rows, columns in ([shape[-2:]] if row_major else permutations(shape, 2))
    )
    return least * bits // 8


def _padded_rows(rows: int, bits: int, sublanes: int) -> int:
    """Rows are packed in 32-bit words: at least 32 // bits of them."""
    return _round_up(rows, min(max(_power_of_two(rows), 32 // bits), sublanes))


def _round_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple


def _power_of_two(value: int) -> int:
    """Smallest power of two at least `value`."""
    return 1 << (value - 1).bit_length()


@dataclass(frozen=True)
class LocalArray:
    """One array of the program on one device. component: what it counts as in the plan."""

    component: str
    shape: Shape
    dtype: str
    row_major: bool = False


def local_shape(inst: BlockInst | None, shape: Shape, axes: tuple[str | None, ...], degrees: Degrees) -> Shape:
    """A dim with a degree above its head count is cut once per head: several devices hold the same head."""
    heads = {cut.axis: cut.size for cut in block_of(inst).cuts(inst.fields) if cut.replicate} if inst else {}

    def local(size: int, axis: str | None) -> int:
        if axis is None:
            return size
        degree = degrees.of(axis_roles()[axis])
        return size // min(degree, heads.get(axis, degree))

    return tuple(local(size, axis) for size, axis in zip(shape, axes, strict=True))


def vocabulary_arrays(graph: Graph, degrees: Degrees, dtypes: Dtypes, tiling: Tiling) -> Iterator[LocalArray]:
    """Embedding, head and final norm on one device."""
    for key, weight in model_weights(graph).items():
        shape = local_shape(None, weight.shape, weight.axes, degrees)
        yield LocalArray(key.partition(".")[0], shape, dtypes.of(weight.role), pinned_rows(key, shape, tiling))


def layer_arrays(graph: Graph, degrees: Degrees, dtypes: Dtypes) -> Iterator[LocalArray]:
    """Every weight array of the layers on one device, as the emitted program stacks them."""
    for group in graph.groups:
        for layer in group.layers:
            for weight in residual_weights(graph, layer).values():
                yield LocalArray("norms", (group.repeat, *weight.shape), dtypes.of(weight.role))
            for inst in layer.blocks:
                yield from _scanned(graph, inst, group.repeat, degrees, dtypes)
    for inst in graph.blocks().values():
        yield from _stacked(graph, inst, len(graph.layers_of(inst.name)), degrees, dtypes)


def _scanned(graph: Graph, inst: BlockInst, repeat: int, degrees: Degrees, dtypes: Dtypes) -> Iterator[LocalArray]:
    for weight in block_weights(graph, inst).values():
        if not weight.stacked:
            shape = local_shape(inst, weight.shape, weight.axes, degrees)
            yield LocalArray(inst.name, (repeat, *shape), dtypes.of(weight.role))


def _stacked(graph: Graph, inst: BlockInst, layers: int, degrees: Degrees, dtypes: Dtypes) -> Iterator[LocalArray]:
    """Expert stacks over all layers, and their block scales when their dtype has them."""
    for weight in block_weights(graph, inst).values():
        if weight.stacked:
            dtype = dtypes.of(weight.role)
            shape = local_shape(inst, weight.shape, weight.axes, degrees)
            yield LocalArray(f"{inst.name}.experts", (layers, *shape), dtype)
            if dtype in SCALED:
                block = scaled_block(dtype, dtypes.scale_block)
                scales = (*shape[:-2], *block.count(*shape[-2:]))
                yield LocalArray(f"{inst.name}.scales", (layers, *scales), block.dtype)


def state_arrays(graph: Graph, degrees: Degrees, dtypes: Dtypes, steps: Steps, tiling: Tiling) -> Iterator[LocalArray]:
    """Page pools [1, L * pages, page, row], slot pools [1, L, slots, ...] and the sampled tokens."""
    for inst in graph.blocks().values():
        layers = len(graph.layers_of(inst.name))
        for state in block_state(graph, inst):
            inner = _entry(inst, state, degrees, tiling.lanes, tiling.sublanes)
            if isinstance(state, PagedState):
                shape = (1, layers * steps.num_pages, steps.page_size, *inner)
            else:
                shape = (1, layers, steps.num_slots, *inner)
            yield LocalArray(f"{inst.name}.{_state_name(state)}", shape, dtypes.of(state.role))
    yield LocalArray("sampled", (1, steps.num_slots), "int32")


def _entry(inst: BlockInst, state: PagedState | SlotState, degrees: Degrees, lanes: int, sublanes: int = 1) -> Shape:
    """What one token or one sequence takes on one device."""
    if isinstance(state, PagedState):
        return local_shape(inst, state.row(lanes), state.axes, degrees)
    return local_shape(inst, *state.entry(sublanes, lanes, degrees.tp), degrees)


def _state_name(state: PagedState | SlotState) -> str:
    return "kv" if isinstance(state, PagedState) else state.name


def cache_pools(graph: Graph, degrees: Degrees, dtypes: Dtypes, steps: Steps, tiling: Tiling) -> tuple[CachePool, ...]:
    """Pages and slots share one budget: what each pool's entry takes, tiles included, and how many a sequence needs."""
    arrays = {array.component: array for array in state_arrays(graph, degrees, dtypes, steps, tiling)}
    paged = {f"{inst.name}.kv" for inst in graph.blocks().values() if _has_pages(graph, inst)}
    found = []
    for key, array in arrays.items():
        entries = steps.num_pages if key in paged else steps.num_slots
        found.append(
            CachePool(
                key=key,
                kind="pages" if key in paged else "slots",
                entries=entries,
                bytes=prod(array.shape) * itembits(array.dtype) // 8 // entries,
                padded_bytes=padded_bytes(array.shape, array.dtype, tiling) / entries,
                per_sequence=steps.pages_per_seq if key in paged else 1,
            )
        )
    return tuple(found)


def _has_pages(graph: Graph, inst: BlockInst) -> bool:
    return any(isinstance(state, PagedState) for state in block_state(graph, inst))


def batch_arrays(steps: Steps, tokens: int) -> Iterator[LocalArray]:
    """The fields of blocks.core.batch.Batch on one device."""
    rows = steps.seqs
    integers: tuple[Shape, ...] = (
        *((tokens,), (tokens,), (rows + 1,), (rows,)),  # tokens, positions, cu_q, kv_len
        *((rows, steps.pages_per_seq), (rows,), (3,), (rows,)),  # page_table, slot, distribution, top_k
    )
    floats: tuple[Shape, ...] = ((rows,), (rows,))  # temperature, top_p
    others = {"int32": integers, "float32": floats, "uint32": ((rows,),), "bool": ((rows,),)}  # ..., seed, has_state
    for dtype, shapes in others.items():
        for shape in shapes:
            yield LocalArray("batch", (1, *shape), dtype)


def component_bytes(arrays: Iterator[LocalArray], tiling: Tiling) -> dict[str, int]:
    """Padded bytes per component."""
    found: dict[str, int] = {}
    for array in arrays:
        size = padded_bytes(array.shape, array.dtype, tiling, array.row_major)
        found[array.component] = found.get(array.component, 0) + size
    return found


@dataclass(frozen=True)
class TempModel:
    """Temporaries of a step = base + scale * (what is alive at once by the blocks' own account).

    Calibrated against AOT compiles of emitted programs; see the table in docs/planner.md.
    residual_copies: residual streams alive beside a block's intermediates.
    """

    base_bytes: int = 8 * 2**20
    scale: float = 1.0
    residual_copies: int = 1


def temp_bytes(graph: Graph, load: Load, variants: Mapping[str, Variant], model: TempModel) -> int:
    """Largest block, residual streams, and the cache rows of all layers that are written after the scan."""
    insts = graph.blocks().values()
    blocks = [cost(i.kind, variants[i.name]).temp_bytes(i.fields, graph.dims, load) for i in insts]
    peak = max(*blocks, embed_cost.temp_bytes(graph.dims, load), head_cost.temp_bytes(graph.dims, load))
    residual = model.residual_copies * load.tokens * graph.dims.hidden_size * itemsize(load.dtypes.activation)
    return int(model.base_bytes + model.scale * (peak + residual + new_rows_bytes(graph, load, variants)))


def new_rows_bytes(graph: Graph, load: Load, variants: Mapping[str, Variant]) -> int:
    """Cache rows of this step's tokens over all layers, in one array; variants that update pages leave none."""
    total = 0
    for inst in graph.blocks().values():
        for state in block_state(graph, inst):
            if isinstance(state, PagedState) and not variants[inst.name].updates_pages:
                row = prod(_entry(inst, state, load.degrees, load.lanes)) * itemsize(load.dtypes.kv)
                total += len(graph.layers_of(inst.name)) * load.tokens * row
    return total


def memory_plan(
    graph: Graph,
    target: Target,
    steps: Steps,
    loads: dict[str, Load],
    weights: dict[str, int],
    variants: Mapping[str, Variant],
    model: TempModel,
) -> MemoryPlan:
    """Bytes per device. weights: component_bytes of vocabulary_arrays and layer_arrays, the same for all batches."""
    load = next(iter(loads.values()))
    state = component_bytes(state_arrays(graph, load.degrees, load.dtypes, steps, target.tiling), target.tiling)
    batch = component_bytes(batch_arrays(steps, steps.mixed_tokens), target.tiling)
    components = {**weights, **state, **batch}
    return MemoryPlan(
        components=components,
        arguments_bytes=sum(components.values()),
        temp_bytes={name: temp_bytes(graph, load, variants, model) for name, load in loads.items()},
        reserve_bytes=target.reserve_bytes,
        usable_bytes=target.usable_bytes,
    )


def needed_bytes(memory: MemoryPlan) -> int:
    """Arguments and the larger bucket's temporaries."""
    return memory.arguments_bytes + max(memory.temp_bytes.values())


def available_bytes(memory: MemoryPlan) -> int:
    """What a program may use once the runtime has its reserve."""
    return memory.usable_bytes - memory.reserve_bytes


def largest(fits: Callable[[int], bool], start: int) -> int:
    """Largest n >= 0 for which fits(n) holds, fits being monotone. start: a first guess."""
    low, high = 0, max(start, 1)
    while fits(high):
        low, high = high, 2 * high
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low


def streamed_bytes(graph: Graph, load: Load) -> dict[str, float]:
    """Bytes one decode step must move per device: weights once, caches read, recurrent state read and written.

    Experts count by the expected share the step's tokens touch (uniform routing). The embedding
    table is not streamed.
    """

    def moved(inst: BlockInst | None, weight: Weight) -> float:
        share = touched(load.valid_tokens, weight.active_fraction)
        size = prod(local_shape(inst, weight.shape, weight.axes, load.degrees))
        return size * share * itembits(load.dtypes.of(weight.role)) / 8

    outside = {key: weight for key, weight in model_weights(graph).items() if key != "embed.table"}
    found = {"weights": sum(moved(None, weight) for weight in outside.values())}
    for _, layer in graph.layers():
        found["weights"] += sum(moved(None, weight) for weight in residual_weights(graph, layer).values())
    for inst in graph.blocks().values():
        layers = len(graph.layers_of(inst.name))
        found["weights"] += layers * sum(moved(inst, weight) for weight in block_weights(graph, inst).values())
        for state in block_state(graph, inst):
            inner = prod(_entry(inst, state, load.degrees, load.lanes)) * itemsize(load.dtypes.of(state.role))
            times = min(load.decode_context, state.window or inf) if isinstance(state, PagedState) else 2
            name = _state_name(state)
            found[name] = found.get(name, 0.0) + layers * load.decode_rows * inner * times
    return found
