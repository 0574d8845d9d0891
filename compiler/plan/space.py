"""What the planner may choose: every sharding and placement on a number of devices, and the mesh of each."""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise, product

from moec.blocks.core.array_info import SCALED, ScaleBlock, scaled_block
from moec.blocks.core.declare import AxisRole, HeadCut
from moec.blocks.core.work import Degrees
from moec.blocks.registry import axis_roles

from ..graph.ir import BlockInst, Graph
from ..graph.weights import block_of, block_weights
from .plan import MeshPlan, Placement

PLACEMENTS: tuple[Placement, Placement] = ("replicated", "sharded")


@dataclass(frozen=True)
class Option:
    """One point of the search space. dp x tp and ep x etp each use all devices."""

    dp: int
    tp: int
    ep: int
    etp: int
    embed: Placement
    head: Placement
    shared_expert: Placement
    mlp: Placement

    @property
    def num_devices(self) -> int:
        return self.dp * self.tp

    @property
    def attention(self) -> str:
        """E.g. "DP8", "DP4xTP2", "TP8"."""
        return _product_name(("DP", self.dp), ("TP", self.tp))

    @property
    def experts(self) -> str:
        """E.g. "EP8", "EP4xTP2"."""
        return _product_name(("EP", self.ep), ("TP", self.etp))

    @property
    def sharded(self) -> int:
        """How many of embed, head, shared expert and dense MLPs are cut."""
        return (self.embed, self.head, self.shared_expert, self.mlp).count("sharded")

    @property
    def degrees(self) -> Degrees:
        """The degree of every role; a cut placement uses all devices."""
        cut = {"replicated": 1, "sharded": self.num_devices}
        return Degrees(
            dp=self.dp,
            tp=self.tp,
            ep=self.ep,
            etp=self.etp,
            shared=cut[self.shared_expert],
            embed=cut[self.embed],
            head=cut[self.head],
            mlp=cut[self.mlp],
        )


def _product_name(*parts: tuple[str, int]) -> str:
    named = [f"{name}{size}" for name, size in parts if size > 1]
    return "x".join(named) or f"{parts[0][0]}1"


def enumerate_options(graph: Graph, num_devices: int) -> Iterator[Option]:
    """Every option in a fixed order. A tied head is placed as the embedding; one device has nothing to cut."""
    splits = factor_pairs(num_devices)
    placements: tuple[Placement, ...] = PLACEMENTS if num_devices > 1 else ("replicated",)
    shared: tuple[Placement, ...] = placements if has_cut(graph, "shared") else ("replicated",)
    mlp: tuple[Placement, ...] = placements if has_cut(graph, "mlp") else ("replicated",)
    expert_splits = splits if has_cut(graph, "expert_ep") else ((num_devices, 1),)
    for (dp, tp), (ep, etp) in product(splits, expert_splits):
        for embed, head, shared_expert, dense in product(placements, placements, shared, mlp):
            if not graph.head.tied or embed == head:
                yield Option(dp, tp, ep, etp, embed, head, shared_expert, dense)


def factor_pairs(number: int) -> tuple[tuple[int, int], ...]:
    """(a, b) with a * b = number, a falling."""
    return tuple((a, number // a) for a in range(number, 0, -1) if number % a == 0)


def has_cut(graph: Graph, role: AxisRole) -> bool:
    """Whether a weight of the model has a dim of this role."""
    axes = {axis for inst in graph.blocks().values() for w in block_weights(graph, inst).values() for axis in w.axes}
    return any(axis_roles()[axis] == role for axis in axes if axis)


def mesh_of(option: Option) -> MeshPlan | None:
    """Mesh axes that refine both attention (dp major, tp minor) and experts (ep major, etp minor).

    None when neither of dp and ep divides the other: then no common axes exist.
    """
    inner, outer = sorted((option.dp, option.ep))
    if outer % inner:
        return None
    bounds = [1, inner, outer, option.num_devices]
    sizes = [b // a for a, b in pairwise(bounds) if b > a] or [1]
    ends = [_prefix(sizes, i) for i in range(len(sizes))]
    names = _axis_names([end <= option.dp for end in ends])
    dp = tuple(name for name, end in zip(names, ends, strict=True) if end <= option.dp)
    ep = tuple(name for name, end in zip(names, ends, strict=True) if end <= option.ep)
    return MeshPlan(
        axes=tuple(zip(names, sizes, strict=True)),
        attention_dp=dp,
        attention_tp=names[len(dp) :],
        expert_ep=ep,
        expert_tp=names[len(ep) :],
    )


def _prefix(sizes: list[int], index: int) -> int:
    """Devices of the axes up to and including `index`."""
    total = 1
    for size in sizes[: index + 1]:
        total *= size
    return total


def _axis_names(is_dp: list[bool]) -> tuple[str, ...]:
    """The first dp axis is "data", the last tp axis "tensor", one between them "inner"."""
    names = []
    for i, dp in enumerate(is_dp):
        first, last = i == 0, i == len(is_dp) - 1
        names.append(("data" if first else "inner") if dp else ("tensor" if last else "inner"))
    return tuple(names)


@dataclass(frozen=True)
class Indivisible:
    """A dim that a degree does not divide."""

    scope: str
    what: str
    size: int
    degree: int

    def __str__(self) -> str:
        return f"{self.scope}: {self.size} {self.what} over {self.degree} devices"


def indivisible(graph: Graph, option: Option, expert_dtype: str, scale_block: int = 128) -> Indivisible | None:
    """The first dim the option cannot cut evenly. scale_block: edge of float8 experts' blocks of scales."""
    degrees = option.degrees
    block = scaled_block(expert_dtype, scale_block) if expert_dtype in SCALED else None
    for inst in graph.blocks().values():
        for cut in block_of(inst).cuts(inst.fields):
            degree = degrees.of(axis_roles()[cut.axis])
            if not _divides(cut, degree):
                return Indivisible(inst.name, cut.axis, cut.size, degree)
        if block and (found := _cut_scales(graph, inst, option, block)):
            return found
    for what, degree in (("embed", degrees.embed), ("head", degrees.head)):
        if graph.dims.vocab_size % degree:
            return Indivisible(what, "vocabulary entries", graph.dims.vocab_size, degree)
    return None


def _divides(cut: HeadCut, degree: int) -> bool:
    if cut.size % degree == 0:
        return True
    return cut.replicate and degree % cut.size == 0


def _cut_scales(graph: Graph, inst: BlockInst, option: Option, block: ScaleBlock) -> Indivisible | None:
    """Block scales must be cut where their weights are."""
    for weight in block_weights(graph, inst).values():
        if weight.role != "expert" or option.etp == 1:
            continue
        for size, axis, edge in zip(weight.shape[-2:], weight.axes[-2:], (block.rows, block.columns), strict=True):
            if axis and axis_roles()[axis] == "expert_tp" and size % (edge * option.etp):
                return Indivisible(inst.name, f"scale blocks of {edge} {axis}", -(-size // edge), option.etp)
    return None
