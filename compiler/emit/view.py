"""The typed view the templates place: every name, number and line of the emitted program is computed here."""

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace

from moec.blocks.collectives.variants import XLA
from moec.blocks.core.array_info import SCALED
from moec.blocks.core.declare import NormFields
from moec.blocks.core.emission import Constant, Emission, Site
from moec.blocks.registry import BLOCKS, EMITTERS

from ..graph.ir import Addition, BlockInst, Branch, Graph, Group, Layer
from ..plan.plan import Plan
from ..spec.pins import WAY_BACK
from .arrays import StateArray, chosen_variant, mesh_rules, state_arrays
from .constants import WIDTH, chosen_part, chosen_way_back, constants, text, tuned, uses_kernels
from .ends import PoolView, bucket_text, embed_text, head_text, kv_writes, pool_view, times

# Said once per program, in its first group.
_TAPS = "The inputs of the layers leave the scan only in step_tapped; elsewhere they are dead code."


@dataclass(frozen=True)
class BlockView:
    """One emitted block function: from its input to its output.

    params, returns: what the function takes and gives back. setup: lines that unpack the pools it updates.
    """

    name: str
    function: str
    kind: str
    doc: str
    params: str
    returns: str
    setup: tuple[str, ...]
    fields: dict


@dataclass(frozen=True)
class LayerView:
    """One emitted function per distinct layer kind: norms, block calls, residual additions."""

    name: str
    doc: str
    params: str
    returns: str
    lines: tuple[str, ...]


@dataclass(frozen=True)
class StepView:
    """One layer of a group's scan body."""

    call: tuple[str, ...]  # lines


@dataclass(frozen=True)
class GroupView:
    """One scanned group. new_kv: lines that gather the body's new cache rows; scanned, outs: what leaves the scan, in
    the body and behind it; call: the group's line in `forward`."""

    name: str
    doc: str
    repeat: int
    steps: tuple[StepView, ...]
    new_kv: tuple[str, ...]
    scanned: str
    outs: str
    call: str
    notes: tuple[str, ...]  # comments on what the body returns


@dataclass(frozen=True)
class ProgramView:
    """Everything model.py.j2 places. reads, new_kv: what groups take and give for pools that are written after them.

    step_options: arguments of jit_step beyond those all programs give.
    """

    header: tuple[str, ...]
    title: str
    imports: tuple[tuple[str, str], ...]
    constants: tuple[Constant, ...]
    rules: tuple[tuple[str, str], ...]
    blocks: tuple[BlockView, ...]
    layers: tuple[LayerView, ...]
    groups: tuple[GroupView, ...]
    pools: tuple[PoolView, ...]
    carried_keys: tuple[str, ...]
    reads: str
    new_kv: str
    kv_writes: tuple[tuple[str, str], ...]
    hidden: str
    final_norm: str
    embed: str
    head: tuple[str, ...]
    buckets: tuple[tuple[str, str], ...]
    step_options: tuple[str, ...]


def identifier(name: str) -> str:
    """An importable slug: every run of other characters becomes one underscore."""
    slug = re.sub(r"\W+", "_", name)
    return f"_{slug}" if slug[0].isdigit() else slug


def variant_module(plan: Plan, part: str) -> str:
    """Import path of the variant the plan chose for a part of the program."""
    return f"moec.blocks.{part}.{plan.variants[part]}"


def block_function(inst: BlockInst) -> str:
    """Name of the emitted function of a block; the suffix keeps it apart from what it imports."""
    return f"{inst.name}_block"


def layer_functions(graph: Graph) -> dict[Layer, str]:
    """Name of the emitted function of every layer kind; kinds that differ in norms or factors only are numbered."""
    names: dict[Layer, str] = {}
    for _, layer in graph.distinct_layers():
        same = sum(other.kind == layer.kind for other in names)
        names[layer] = f"{layer.kind}_layer{same + 1 if same else ''}"
    return names


def wrapped(target: str, function: str, args: Sequence[str], indent: int) -> list[str]:
    """`target = function(args)` on one line, or the arguments on a line of their own when it is too long."""
    head, inner = f"{target} = {function}(", ", ".join(args)
    if indent + len(head) + len(inner) + 1 <= WIDTH:
        return [f"{head}{inner})"]
    return [head, f"    {inner}", ")"]


def norm_call(norm: NormFields, x: str, name: str) -> str:
    """The call that norms x with the parameters called `name`."""
    if norm.kind == "layer":
        bias = f'w["{name}_bias"]' if norm.bias else None
        return f'layer_norm({x}, w["{name}"], {bias}, eps={norm.eps!r})'
    return f'rms_norm({x}, w["{name}"], eps={norm.eps!r}, zero_centered={norm.zero_centered})'


def view(graph: Graph, plan: Plan, header: tuple[str, ...]) -> ProgramView:
    """Compute the whole view of one program."""
    pools = state_arrays(graph, plan)
    emissions = {inst.name: emission(inst, graph, plan) for inst in graph.blocks().values()}
    blocks = tuple(_block(inst, graph, emissions[inst.name], pools) for inst in graph.blocks().values())
    program = _Program(graph, pools, emissions, layer_functions(graph))
    return ProgramView(
        header=header,
        title=_title(graph, plan),
        imports=_imports(graph, plan, emissions, pools),
        constants=constants(graph, plan, emissions),
        rules=tuple((axis, text(axes)) for axis, axes in mesh_rules(graph, plan).items()),
        blocks=blocks,
        layers=tuple(_layer(layer, program) for layer in program.functions),
        groups=tuple(_group(i, group, program) for i, group in enumerate(graph.groups)),
        pools=tuple(pool_view(pool, plan) for pool in pools),
        carried_keys=tuple(p.key for p in pools if p.carried),
        reads="kv, " if program.reads_kv else "",
        new_kv="new_kv, " if program.reads_kv else "",
        kv_writes=kv_writes(graph, pools),
        hidden=_joined([f"hidden{i}" for i in range(len(graph.groups))]),
        final_norm=norm_call(graph.final_norm, "x_TD", "final_norm"),
        embed=embed_text(graph, plan),
        head=head_text(graph, plan),
        buckets=tuple((b.name, bucket_text(b)) for b in plan.buckets),
        step_options=("device=DEVICE",) if plan.device else (),
    )


def emission(inst: BlockInst, graph: Graph, plan: Plan) -> Emission:
    """What the block itself wants written, given its site in the plan."""
    mesh, variant, returns = plan.mesh, chosen_variant(inst, plan), chosen_way_back(plan)
    site = Site(
        name=inst.name,
        variant=variant,
        collectives=XLA,
        dims=graph.dims,
        dp=mesh.dp,
        tp=mesh.tp,
        ep=mesh.ep,
        etp=mesh.etp,
        shared_sharded=plan.shared_expert == "sharded",
        mlp_sharded=plan.mlp == "sharded",
        scaled=plan.dtypes.expert in SCALED,
        tuning=tuned(inst.name, plan),
        layers=graph.layers_of(inst.name),
        parts={part: chosen_part(part, inst, plan) for part in variant.parts},
        gathers_float8=plan.dtypes.gather != "activation",
        returns=returns if returns.kernel else None,
        returns_tuning=tuned(WAY_BACK, plan),
    )
    found = EMITTERS[inst.kind]().emit(inst.fields, site)
    layers = Constant(f"{site.prefix}_LAYERS", str(len(graph.layers_of(inst.name))), f"layers with {inst.name}")
    return replace(found, constants=(layers, *found.constants))


def _title(graph: Graph, plan: Plan) -> str:
    mesh = plan.mesh
    attention = f"DP{mesh.dp}" if mesh.tp == 1 else f"DP{mesh.dp} x TP{mesh.tp}" if mesh.dp > 1 else f"TP{mesh.tp}"
    experts = f"EP{mesh.ep}" if mesh.etp == 1 else f"EP{mesh.ep} x TP{mesh.etp}"
    return f"{graph.name} on {plan.target}: {graph.num_layers} layers, attention {attention}, experts {experts}."


def _imports(
    graph: Graph, plan: Plan, emissions: dict[str, Emission], pools: tuple[StateArray, ...]
) -> tuple[tuple[str, str], ...]:
    """(module, names) pairs, sorted, one line per module."""
    core = "moec.blocks.core"
    norms = {graph.final_norm.kind, *(norm.fields.kind for _, layer in graph.distinct_layers() for norm in layer.norms)}
    pairs = {
        (f"{core}.array_info", "ArrayInfo"),
        *((f"{core}.norm", f"{kind}_norm") for kind in norms),
        *([(f"{core}.chip", "ChipLimits")] if uses_kernels(graph, plan) else []),
        (variant_module(plan, "embed"), "lookup_sharded" if plan.embed == "sharded" else "lookup"),
        (variant_module(plan, "head"), "logits_sharded" if plan.head == "sharded" else "logits"),
        (variant_module(plan, "sampling"), "sample"),
        *((f"{core}.slots", name) for name in ("copy_slots", "zero_slots")),
        *((f"{core}.batch", name) for name in ("Bucket", "index_rows", "local", "ranked")),
        *(
            [(f"{core}.batch", "stack_layers"), (f"{core}.paged", "write_kv")]
            if any(not p.carried for p in pools)
            else []
        ),
        *(
            (f"{core}.program", name)
            for name in ("batch_info", "jit_slots", "jit_step", "make_mesh", "partition_specs")
        ),
        *(pair for emitted in emissions.values() for pair in emitted.imports),
    }
    modules = sorted({module for module, _ in pairs})
    return tuple((m, ", ".join(sorted((n for mod, n in pairs if mod == m), key=_import_order))) for m in modules)


def _import_order(name: str) -> tuple[bool, str]:
    return name[0].islower(), name.lower()


def group_doc(group: Group) -> str:
    """15 x [gdn_moe, gdn_moe, gdn_moe, gqa_moe]."""
    return f"{group.repeat} x [{', '.join(layer.kind for layer in group.layers)}]"


def _own_pools(inst: BlockInst, pools: tuple[StateArray, ...], carried: bool) -> tuple[StateArray, ...]:
    return tuple(p for p in pools if p.block == inst.name and p.carried == carried)


def _has_stack(inst: BlockInst, graph: Graph) -> bool:
    return any(w.stacked for w in BLOCKS[inst.kind]().weights(inst.fields, graph.dims).values())


@dataclass(frozen=True)
class _Program:
    """What the functions of layers and groups are computed from."""

    graph: Graph
    pools: tuple[StateArray, ...]
    emissions: dict[str, Emission]
    functions: dict[Layer, str]

    @property
    def reads_kv(self) -> bool:
        """Whether layers only read some pool, which is written after them."""
        return any(not pool.carried for pool in self.pools)

    @property
    def stacks(self) -> str:
        """The loop-invariant stacks, as `forward` names them."""
        return 'w["stacks"]' if any(_has_stack(inst, self.graph) for inst in self.graph.blocks().values()) else "{}"

    def outs(self, inst: BlockInst) -> list[str]:
        """What a block gives back beside its output."""
        pools = ["pools"] if _own_pools(inst, self.pools, True) else []
        return pools + (["new_kv_TC"] if _own_pools(inst, self.pools, False) else [])


def _block(inst: BlockInst, graph: Graph, emitted: Emission, pools: tuple[StateArray, ...]) -> BlockView:
    carried, read = _own_pools(inst, pools, True), _own_pools(inst, pools, False)
    packed = ", ".join(f'"{p.key}": {_local_name(p)}' for p in carried)
    returns = ["y_TD"] + (["pools | {" + packed + "}"] if carried else []) + (["new_kv_TC"] if read else [])
    first = ("h_TD", "x_TD", "w") if emitted.reads_residual else ("h_TD", "w")
    return BlockView(
        name=inst.name,
        function=block_function(inst),
        kind=inst.kind,
        doc=emitted.doc,
        params=", ".join(_params(inst, graph, pools, first, "stack", "layer")),
        returns=", ".join(returns),
        setup=tuple(f'{_local_name(p)} = pools["{p.key}"]' for p in carried),
        fields=emitted.fields,
    )


def _local_name(pool: StateArray) -> str:
    return f"{pool.key.rpartition('.')[2]}_pool"


def _params(
    inst: BlockInst, graph: Graph, pools: tuple[StateArray, ...], first: tuple[str, ...], stack: str, layer: str
) -> list[str]:
    """What a block function takes, in order; the same list is used for definition and call."""
    carried, read = _own_pools(inst, pools, True), _own_pools(inst, pools, False)
    assert len(read) <= 1, (inst.name, read)
    args = list(first)
    if carried:
        args.append("pools")
    if read:
        args.append("kv_pool" if stack == "stack" else f'kv["{read[0].key}"]')
    if _has_stack(inst, graph):
        args.append(stack)
    if carried or read:
        args.append("batch")
    return [*args, "rows", layer, "bucket"]


def _layer(layer: Layer, program: _Program) -> LayerView:
    lines = [line for addition in layer.additions for line in _addition(addition, program)]
    if layer.scaled:
        lines.append('x_TD = x_TD * w["scale"]')
    outs = [out for inst in layer.blocks for out in program.outs(inst)]
    params = _layer_params(layer, program.graph, program.pools, [f"{inst.name}_index" for inst in layer.blocks])
    return LayerView(
        name=program.functions[layer],
        doc=f"{', then '.join(_blocks_text(one) for one in layer.additions)}; each adds to the residual stream.",
        params=", ".join(["x_TD", "w", *params, "bucket"]),
        returns=", ".join(dict.fromkeys(["x_TD", *outs])),
        lines=tuple(lines),
    )


def _blocks_text(addition: Addition) -> str:
    return " beside ".join(branch.inst.name for branch in addition.branches)


def _addition(addition: Addition, program: _Program) -> list[str]:
    """Lines from x_TD to the x_TD after one residual addition."""
    lines = [f"h_TD = {norm_call(addition.norm.fields, 'x_TD', addition.norm.name)}"] if addition.norm else []
    shared = "h_TD" if addition.norm else "x_TD"
    outputs = ["y_TD"] if len(addition.branches) == 1 else [f"y_{b.inst.name}_TD" for b in addition.branches]
    for branch, output in zip(addition.branches, outputs, strict=True):
        lines += _branch(branch, shared, output, program)
    if len(outputs) > 1:
        lines.append(f"y_TD = {' + '.join(outputs)}")
    if addition.post_norm:
        lines.append(f"y_TD = {norm_call(addition.post_norm.fields, 'y_TD', addition.post_norm.name)}")
    kept = "h_TD" if addition.keeps_normed else "x_TD"
    return [*lines, f"x_TD = {times(addition.skip, kept)} + {times(addition.scale, 'y_TD')}"]


def _branch(branch: Branch, shared: str, output: str, program: _Program) -> list[str]:
    """Lines from a branch's input to its output."""
    inst, source, lines = branch.inst, shared, []
    if branch.norm:
        source = "h_TD"
        lines.append(f"h_TD = {norm_call(branch.norm.fields, 'x_TD', branch.norm.name)}")
    first = (source, "x_TD", "w") if program.emissions[inst.name].reads_residual else (source, "w")
    args = _params(inst, program.graph, program.pools, first, f'stacks["{inst.name}"]', f"{inst.name}_index")
    lines += wrapped(", ".join([output, *program.outs(inst)]), block_function(inst), args, 4)
    if branch.post_norm:
        lines.append(f"{output} = {norm_call(branch.post_norm.fields, output, branch.post_norm.name)}")
    return lines


def _layer_params(layer: Layer, graph: Graph, pools: tuple[StateArray, ...], ordinals: list[str]) -> list[str]:
    """What a layer function takes after x_TD and w: only what its blocks use."""
    insts = layer.blocks
    owned = [pool for inst in insts for pool in pools if pool.block == inst.name]
    used = ["pools"] if any(pool.carried for pool in owned) else []
    used += ["kv"] if any(not pool.carried for pool in owned) else []
    used += ["stacks"] if any(_has_stack(inst, graph) for inst in insts) else []
    used += ["batch"] if owned else []
    return [*used, "rows", *ordinals]


def _group(index: int, group: Group, program: _Program) -> GroupView:
    steps: list[StepView] = []
    new_kv: dict[str, list[str]] = {}
    for position, layer in enumerate(group.layers):
        outs = ["x_TD"]
        for inst in layer.blocks:
            if _own_pools(inst, program.pools, True):
                outs.append("pools")
            for pool in _own_pools(inst, program.pools, False):
                rows = f"{inst.name}_kv{position}"
                outs.append(rows)
                new_kv.setdefault(pool.key, []).append(rows)
        ordinals = [f"{inst.name}_index={_ordinal(inst, group, position, program.graph)}" for inst in layer.blocks]
        params = _layer_params(layer, program.graph, program.pools, ordinals)
        args = ["x_TD", f'w["layer{position}"]', *params, "bucket=bucket"]
        steps.append(StepView(tuple(wrapped(", ".join(dict.fromkeys(outs)), program.functions[layer], args, 8))))
    first, last = group.first_layer, group.first_layer + group.repeat * len(group.layers) - 1
    inputs = f"jnp.stack([{', '.join(f'in{i}_TD' for i in range(len(group.layers)))}])"
    return GroupView(
        name=f"group{index}",
        doc=f"Layers {first}-{last}: {group_doc(group)}, scanned.",
        repeat=group.repeat,
        steps=tuple(steps),
        new_kv=(_new_kv(new_kv),) if program.reads_kv else (),
        scanned=f"(new_kv, {inputs})" if program.reads_kv else inputs,
        outs="(new_kv, hidden)" if program.reads_kv else "hidden",
        call=_group_call(index, program),
        notes=(_TAPS,) if index == 0 else (),
    )


def _new_kv(rows: dict[str, list[str]]) -> str:
    """The new rows of every pool, stacked over the layers of the body."""
    return "new_kv = {" + ", ".join(f'"{key}": jnp.stack([{", ".join(names)}])' for key, names in rows.items()) + "}"


def _group_call(index: int, program: _Program) -> str:
    outs, read = (f"new_kv{index}, hidden{index}", "state, ") if program.reads_kv else (f"hidden{index}", "")
    args = f'x_TD, pools, {read}w["group{index}"], {program.stacks}, batch, rows, bucket'
    return f"x_TD, pools, {outs} = group{index}({args})"


def _ordinal(inst: BlockInst, group: Group, position: int, graph: Graph) -> str:
    """Which of the block's layers this is, as an expression in the scan index i."""
    before = sum(i < group.first_layer for i in graph.layers_of(inst.name))
    uses = [inst in layer.blocks for layer in group.layers]
    stride, offset = sum(uses), before + sum(uses[:position])
    if group.repeat == 1:
        return str(offset)
    scaled = "i" if stride == 1 else f"{stride} * i"
    return f"{scaled} + {offset}" if offset else scaled


def _joined(parts: list[str]) -> str:
    return parts[0] if len(parts) == 1 else f"jnp.concatenate([{', '.join(parts)}])"
