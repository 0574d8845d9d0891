"""Spec to graph: expand the layer pattern, resolve overrides and norms, keep the checkpoint table."""

from collections.abc import Mapping
from typing import Any

from moec.blocks.core.declare import BlockFields, ModelDims, NormFields

from ..spec.schema import Checkpoint, LayerEntry, LayerGroup, ModelSpec, Residual, TensorRule
from .ir import Addition, BlockInst, Branch, CheckpointSpec, Embed, Graph, Group, Head, Layer, Norm, TensorMap
from .sources import sources as sources  # part of this module's interface
from .weights import layer_weights as layer_weights


def build(spec: ModelSpec) -> Graph:
    """The graph of a checked spec (spec.load checks; semantics.check_model alone does too)."""
    instances = _Instances(spec)
    groups: list[Group] = []
    first = 0
    for group in spec.layers:
        layers = tuple(layer for entry in group.pattern for layer in _entry_layers(spec, group, entry, instances))
        groups.append(Group(group.repeat, layers, first))
        first += group.repeat * len(layers)
    return Graph(
        name=spec.name,
        dims=ModelDims(spec.hidden_size, spec.vocab_size, spec.defaults.norm, first),
        groups=tuple(groups),
        final_norm=spec.final_norm.resolve(spec.defaults.norm),
        embed=Embed(**dict(spec.embed)),
        head=Head(**dict(spec.head)),
        max_context=spec.max_context,
        checkpoint=_checkpoint(spec.checkpoint) if spec.checkpoint else None,
    )


def override_fields(fields: BlockFields, changes: Mapping[str, Any]) -> BlockFields:
    """The block's fields with a layer entry's changes merged in (pydantic's ValidationError when illegal)."""
    if not changes:
        return fields
    return type(fields).model_validate(merge(fields.model_dump(), changes))


def merge(base: Any, changes: Any) -> Any:
    """Nested mappings are merged key by key; anything else is replaced."""
    if not isinstance(base, Mapping) or not isinstance(changes, Mapping):
        return changes
    return {**base, **{key: merge(base.get(key), value) for key, value in changes.items()}}


class _Instances:
    """Names each distinct set of fields of a declared block once: gqa, then gqa_2, gqa_3, ..."""

    def __init__(self, spec: ModelSpec):
        self.spec = spec
        self.known: list[BlockInst] = []

    def get(self, name: str, changes: Mapping[str, Any]) -> BlockInst:
        fields = override_fields(self.spec.blocks[name], changes)
        base = fields.like or name
        for inst in self.known:
            if inst.base == base and inst.fields == fields:
                return inst
        inst = BlockInst(self._free_name(name, fields), fields.model_dump()["kind"], fields, base)
        self.known.append(inst)
        return inst

    def _free_name(self, name: str, fields: BlockFields) -> str:
        if fields == self.spec.blocks[name]:
            return name
        taken = {*self.spec.blocks, *(inst.name for inst in self.known)}
        number = 2
        while f"{name}_{number}" in taken:
            number += 1
        return f"{name}_{number}"


def _entry_layers(spec: ModelSpec, group: LayerGroup, entry: LayerEntry, instances: _Instances) -> list[Layer]:
    """The entry's layer, `repeat` times."""
    mixers = tuple(instances.get(name, entry.override.mixer) for name in (entry.mixer,) if name)
    ffns = tuple(instances.get(name, entry.override.ffn) for name in entry.ffn or group.ffn or ())
    residual = entry.residual or spec.defaults.residual
    return [residual_layer(mixers, ffns, residual, spec.defaults.norm)] * entry.repeat


def residual_layer(
    mixers: tuple[BlockInst, ...], ffns: tuple[BlockInst, ...], residual: Residual, norm: NormFields
) -> Layer:
    """The additions of a layer whose slots hold these blocks; an empty slot has none.

    Norms are called after their slot ("mixer_norm"), after nothing where a layer has one addition
    ("norm"), and after their block where blocks that share an addition have their own.
    """
    both = bool(mixers and ffns)
    if residual.form == "parallel" and both:
        return Layer((_addition("", mixers + ffns, residual, norm),), residual.layer_scale)
    ffn = residual.model_copy(
        update={
            "form": residual.ffn_form or residual.form,
            "scale": residual.scale if residual.ffn_scale is None else residual.ffn_scale,
            "skip": residual.skip if residual.ffn_skip is None else residual.ffn_skip,
        }
    )
    slots = (("mixer_" if both else "", mixers, residual), ("ffn_" if both else "", ffns, ffn))
    additions = tuple(_addition(slot, insts, form, norm) for slot, insts, form in slots if insts)
    return Layer(additions, residual.layer_scale)


def _addition(slot: str, insts: tuple[BlockInst, ...], residual: Residual, norm: NormFields) -> Addition:
    """One addition. slot: what its norms' names begin with."""
    before, after = residual.form != "post", residual.form in ("post", "sandwich")
    own = residual.branch_norms and len(insts) > 1
    pre, post = Norm(f"{slot}norm", norm), Norm(f"{slot}post_norm", norm)
    return Addition(
        branches=tuple(_branch(inst, norm, own and before, own and after) for inst in insts),
        norm=pre if before and not own else None,
        post_norm=post if after else None,
        skip=residual.skip,
        scale=residual.scale,
        keeps_normed=residual.form == "normed_skip",
    )


def _branch(inst: BlockInst, norm: NormFields, before: bool, after: bool) -> Branch:
    name = inst.base or inst.name
    return Branch(
        inst, Norm(f"{name}_norm", norm) if before else None, Norm(f"{name}_post_norm", norm) if after else None
    )


def _checkpoint(table: Checkpoint) -> CheckpointSpec:
    """The table with `{prefix}` written out: one line per prefix."""
    lines: list[TensorMap] = []
    for pattern, line in table.tensors.items():
        for rule in single_rules(line):
            into, op = rule_targets(rule)
            how = (rule.transpose, rule.groups or 1, rule.flat, rule.packed)
            lines += [TensorMap(name, into, op, *how) for name in expand_prefix(pattern, table.prefix)]
    return CheckpointSpec(
        tensors=tuple(lines),
        ignore=tuple(name for pattern in table.ignore for name in expand_prefix(pattern, table.prefix)),
        scale_suffix=table.scales.suffix if table.scales else None,
        scale_block=table.scales.block if table.scales else None,
    )


def single_rules(rule: TensorRule) -> tuple[TensorRule, ...]:
    """The rule itself, or for `either` one rule per weight."""
    if rule.either is None:
        return (rule,)
    return tuple(rule.model_copy(update={"into": name, "either": None}) for name in rule.either)


def rule_targets(rule: TensorRule) -> tuple[tuple[str, ...], Any]:
    """The weights a rule names, and how (TensorMap.op)."""
    if rule.split is not None:
        return rule.split, "split"
    if rule.interleave is not None:
        return rule.interleave, "interleave"
    return ((rule.into,) if rule.into is not None else ()), "whole"


def expand_prefix(pattern: str, prefixes: tuple[str, ...]) -> list[str]:
    """The pattern once per prefix."""
    if "{prefix}" not in pattern:
        return [pattern]
    return [pattern.replace("{prefix}", prefix) for prefix in prefixes]
