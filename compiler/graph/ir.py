"""The graph: groups x layers x block instances, with shapes and logical axes. Frozen data only."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from moec.blocks.core.declare import BlockFields, ModelDims, NormFields


@dataclass(frozen=True)
class BlockInst:
    """One declared block: spec name (unique per distinct fields), kind and fields.

    base: the name the spec declares; differs from `name` where a layer overrides fields.
        The checkpoint table speaks of base names.
    """

    name: str
    kind: str
    fields: BlockFields
    base: str = ""


@dataclass(frozen=True)
class Layer:
    """One layer kind at one position of a group: two pre-norm residual slots."""

    mixer: BlockInst
    ffn: BlockInst
    mixer_norm: NormFields
    ffn_norm: NormFields
    residual: Literal["pre"] = "pre"

    @property
    def kind(self) -> str:
        """Identifier of the layer kind, e.g. "gdn_moe"."""
        return f"{self.mixer.name}_{self.ffn.name}"


@dataclass(frozen=True)
class Group:
    """`repeat` times the same sequence of layers; first_layer is the absolute index of its first layer."""

    repeat: int
    layers: tuple[Layer, ...]
    first_layer: int

    def layer_indices(self, position: int) -> tuple[int, ...]:
        """Absolute layer indices of one position over the repeats."""
        return tuple(self.first_layer + r * len(self.layers) + position for r in range(self.repeat))


@dataclass(frozen=True)
class TensorMap:
    """One line of the checkpoint table: a stored tensor pattern and the weights it holds.

    into: weight keys ("gdn.w_q", "embed.table", "layer.mixer_norm", "final_norm", "head.w").
    op: "whole" (one weight), "split" (rows of the out dim in order), "interleave"
        (out rows alternate over `into`).
    transpose: None = as the weight declares (linear weights are stored [out, in]).
    """

    tensor: str
    into: tuple[str, ...]
    op: Literal["whole", "split", "interleave"] = "whole"
    transpose: bool | None = None


@dataclass(frozen=True)
class CheckpointSpec:
    """The checkpoint table of the spec.

    scale_suffix/scale_block: block scales of quantised tensors, stored as NAME + suffix,
        W = q * scale; ignore: fnmatch patterns of tensors nobody needs.
    """

    tensors: tuple[TensorMap, ...]
    ignore: tuple[str, ...] = ()
    scale_suffix: str | None = None
    scale_block: tuple[int, int] | None = None


@dataclass(frozen=True)
class Graph:
    """A whole model."""

    name: str
    dims: ModelDims
    groups: tuple[Group, ...]
    final_norm: NormFields
    tied_head: bool
    max_context: int
    checkpoint: CheckpointSpec | None

    @property
    def num_layers(self) -> int:
        return sum(g.repeat * len(g.layers) for g in self.groups)

    def layers(self) -> Iterator[tuple[int, Layer]]:
        """All layers in execution order with their absolute indices."""
        for group in self.groups:
            for r in range(group.repeat):
                for p, layer in enumerate(group.layers):
                    yield group.first_layer + r * len(group.layers) + p, layer

    def layers_of(self, name: str) -> tuple[int, ...]:
        """Absolute indices of the layers that use a block instance."""
        return tuple(index for index, layer in self.layers() if name in (layer.mixer.name, layer.ffn.name))

    def blocks(self) -> dict[str, BlockInst]:
        """Distinct block instances by name, in order of first use."""
        found: dict[str, BlockInst] = {}
        for group in self.groups:
            for layer in group.layers:
                for inst in (layer.mixer, layer.ffn):
                    found.setdefault(inst.name, inst)
        return found
