"""The graph: groups x layers x block instances, with shapes and logical axes. Frozen data only."""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
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
class Norm:
    """A norm somewhere in a layer. name: its gain's weight key without "layer.", e.g. "mixer_norm"."""

    name: str
    fields: NormFields


@dataclass(frozen=True)
class Branch:
    """One block of a residual addition, with norms of its own on its input and output where it has them."""

    inst: BlockInst
    norm: Norm | None = None
    post_norm: Norm | None = None


@dataclass(frozen=True)
class Addition:
    """One addition to the residual stream: x = skip * kept + scale * post_norm(sum of branches(norm(x))).

    norm: of the input all branches share; None = x itself. post_norm: of the sum; None = none.
    keeps_normed: what is kept is norm(x), not x.
    """

    branches: tuple[Branch, ...]
    norm: Norm | None = None
    post_norm: Norm | None = None
    skip: float = 1.0
    scale: float = 1.0
    keeps_normed: bool = False


@dataclass(frozen=True)
class Layer:
    """One layer kind at one position of a group: its additions in order. scaled: layer.scale multiplies the result."""

    additions: tuple[Addition, ...]
    scaled: bool = False

    @cached_property
    def blocks(self) -> tuple[BlockInst, ...]:
        """The blocks in order of execution."""
        return tuple(branch.inst for addition in self.additions for branch in addition.branches)

    @property
    def kind(self) -> str:
        """Identifier of the layer kind, e.g. "gdn_moe"."""
        return "_".join(inst.name for inst in self.blocks)

    @cached_property
    def norms(self) -> tuple[Norm, ...]:
        """Every norm of the layer, in order of execution."""
        found: list[Norm | None] = []
        for one in self.additions:
            found.append(one.norm)
            for branch in one.branches:
                found += [branch.norm, branch.post_norm]
            found.append(one.post_norm)
        return tuple(norm for norm in found if norm)


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
    groups: split within each of so many equal groups of out rows.
    flat: the experts' matrices one below the other, [experts * rows, columns].
    packed: format of 4-bit values, blocks.core.array_info.PACKED.
    """

    tensor: str
    into: tuple[str, ...]
    op: Literal["whole", "split", "interleave"] = "whole"
    transpose: bool | None = None
    groups: int = 1
    flat: bool = False
    packed: str | None = None


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
class Embed:
    """scale: factor of the embedding rows."""

    scale: float = 1.0


@dataclass(frozen=True)
class Head:
    """logits = cap * tanh(scale * (h @ w + bias) / cap). tied: w is the embedding table; softcap None = no cap."""

    tied: bool = False
    bias: bool = False
    scale: float = 1.0
    softcap: float | None = None


@dataclass(frozen=True)
class Graph:
    """A whole model."""

    name: str
    dims: ModelDims
    groups: tuple[Group, ...]
    final_norm: NormFields
    embed: Embed
    head: Head
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

    def distinct_layers(self) -> tuple[tuple[int, Layer], ...]:
        """Each different layer once, with the index of the first."""
        found: dict[Layer, int] = {}
        for group in self.groups:
            for position, layer in enumerate(group.layers):
                found.setdefault(layer, group.first_layer + position)
        return tuple((index, layer) for layer, index in found.items())

    def layers_of(self, name: str) -> tuple[int, ...]:
        """Absolute indices of the layers that use a block instance."""
        return self._uses.get(name, ())

    @cached_property
    def _uses(self) -> dict[str, tuple[int, ...]]:
        found: dict[str, list[int]] = {}
        for index, layer in self.layers():
            for name in dict.fromkeys(inst.name for inst in layer.blocks):
                found.setdefault(name, []).append(index)
        return {name: tuple(indices) for name, indices in found.items()}

    def blocks(self) -> dict[str, BlockInst]:
        """Distinct block instances by name, in order of first use."""
        return dict(self._blocks)

    @cached_property
    def _blocks(self) -> dict[str, BlockInst]:
        found: dict[str, BlockInst] = {}
        for group in self.groups:
            for layer in group.layers:
                for inst in layer.blocks:
                    found.setdefault(inst.name, inst)
        return found
