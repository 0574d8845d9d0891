"""Spec to graph: expand the layer pattern, resolve overrides and norms, keep the checkpoint table."""

from collections.abc import Mapping
from typing import Any

from moec.blocks.core.declare import BlockFields, ModelDims

from ..spec.schema import Checkpoint, LayerEntry, LayerGroup, ModelSpec, TensorRule
from .ir import BlockInst, CheckpointSpec, Graph, Group, Layer, TensorMap
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
        dims=ModelDims(spec.hidden_size, spec.vocab_size, spec.defaults.norm),
        groups=tuple(groups),
        final_norm=spec.final_norm.resolve(spec.defaults.norm),
        tied_head=spec.head.tied,
        max_context=spec.max_context,
        checkpoint=_checkpoint(spec.checkpoint) if spec.checkpoint else None,
    )


def override_fields(fields: BlockFields, changes: Mapping[str, Any]) -> BlockFields:
    """The block's fields with a layer entry's changes merged in (pydantic's ValidationError when illegal)."""
    if not changes:
        return fields
    return type(fields).model_validate(_merge(fields.model_dump(), changes))


def _merge(base: Any, changes: Any) -> Any:
    """Nested mappings are merged key by key; anything else is replaced."""
    if not isinstance(base, Mapping) or not isinstance(changes, Mapping):
        return changes
    return {**base, **{key: _merge(base.get(key), value) for key, value in changes.items()}}


class _Instances:
    """Names each distinct set of fields of a declared block once: gqa, then gqa_2, gqa_3, ..."""

    def __init__(self, spec: ModelSpec):
        self.spec = spec
        self.known: list[BlockInst] = []

    def get(self, base: str, changes: Mapping[str, Any]) -> BlockInst:
        fields = override_fields(self.spec.blocks[base], changes)
        for inst in self.known:
            if inst.base == base and inst.fields == fields:
                return inst
        inst = BlockInst(self._free_name(base, fields), fields.model_dump()["kind"], fields, base)
        self.known.append(inst)
        return inst

    def _free_name(self, base: str, fields: BlockFields) -> str:
        if fields == self.spec.blocks[base]:
            return base
        taken = {*self.spec.blocks, *(inst.name for inst in self.known)}
        number = 2
        while f"{base}_{number}" in taken:
            number += 1
        return f"{base}_{number}"


def _entry_layers(spec: ModelSpec, group: LayerGroup, entry: LayerEntry, instances: _Instances) -> list[Layer]:
    ffn = entry.ffn or group.ffn
    assert ffn is not None, "semantics.check_model refuses entries without an ffn"
    norm = spec.defaults.norm
    layer = Layer(
        mixer=instances.get(entry.mixer, entry.override.mixer),
        ffn=instances.get(ffn, entry.override.ffn),
        mixer_norm=norm,
        ffn_norm=norm,
        residual=spec.defaults.residual,
    )
    return [layer] * entry.repeat


def _checkpoint(table: Checkpoint) -> CheckpointSpec:
    """The table with `{prefix}` written out: one line per prefix."""
    lines: list[TensorMap] = []
    for pattern, rule in table.tensors.items():
        into, op = rule_targets(rule)
        lines += [TensorMap(name, into, op, rule.transpose) for name in expand_prefix(pattern, table.prefix)]
    return CheckpointSpec(
        tensors=tuple(lines),
        ignore=tuple(name for pattern in table.ignore for name in expand_prefix(pattern, table.prefix)),
        scale_suffix=table.scales.suffix if table.scales else None,
        scale_block=table.scales.block if table.scales else None,
    )


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
