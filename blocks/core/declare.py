"""What a block declares of itself: fields, weights, state, sharding rules, variants.

Pure data, no jax and no chip: `moec check` and `moec plan` read only this.
"""

import math
from dataclasses import dataclass
from typing import Any, Literal, Protocol

from pydantic import BaseModel, ConfigDict, Field

# The plan gives each role a dtype.
#   linear: projections; expert: routed expert matrices; embed/head: vocabulary matrices;
#   gain: norms and other 1-D parameters; router: router matrix; decay: A_log, dt_bias (float32 math)
Role = Literal["linear", "expert", "embed", "head", "gain", "router", "decay"]


# The plan's degrees: which of them cuts a logical axis is declared beside the axis (AXES of a block).
AxisRole = Literal["attention_dp", "attention_tp", "expert_ep", "expert_tp", "shared", "mlp", "embed", "head"]

# Axes of what is in every program: ranks of the state and the batch, vocabulary matrices.
AXES: dict[str, AxisRole] = {"rank": "attention_dp", "embed_vocab": "embed", "head_vocab": "head"}


class Declared(BaseModel):
    """Base of everything a spec declares: frozen, unknown keys refused."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)


class BlockFields(Declared):
    """Base of every block's declared fields.

    like: the block whose other fields this one has too, and whose checkpoint lines it shares.
    """

    like: str | None = None


class NormFields(Declared):
    """A norm as the spec declares it; blocks/core/norm.py computes it.

    kind: rms, or layer = LayerNorm (the mean is removed too). bias: added at the end.
    """

    kind: Literal["rms", "layer"] = "rms"
    eps: float = Field(default=1e-6, gt=0)
    zero_centered: bool = False
    bias: bool = False


class NormOverride(Declared):
    """What one norm changes of the model's default norm; null = as the default."""

    kind: Literal["rms", "layer"] | None = None
    eps: float | None = Field(default=None, gt=0)
    zero_centered: bool | None = None
    bias: bool | None = None

    def resolve(self, default: NormFields) -> NormFields:
        """The default norm with this override's fields on top."""
        return default.model_copy(update=self.model_dump(exclude_none=True))


@dataclass(frozen=True)
class ModelDims:
    """The sizes and defaults a block may read from the model around it.

    num_layers: of the whole model; None = a block looked at alone, or layers that are not known yet.
    """

    hidden_size: int
    vocab_size: int
    norm: NormFields
    num_layers: int | None = None


@dataclass(frozen=True)
class Weight:
    """A weight as the model means it: unsharded, one layer, [in, out] for matrices.

    axes: logical axis per dim (None = never cut).
    linear: True when Hugging Face checkpoints store it transposed ([out, in]).
    stacked: True for arrays that all layers keep in one loop-invariant stack (experts).
    active_fraction: the share of the values one token uses (top_k / num_experts).
    init: the distribution of random values: "normal", "gain", "bias", "log_decay".
    """

    shape: tuple[int, ...]
    axes: tuple[str | None, ...]
    role: Role
    linear: bool = False
    stacked: bool = False
    init: str = "normal"
    active_fraction: float = 1.0


@dataclass(frozen=True)
class PagedState:
    """Per-token cache of one layer: shape and axes of what one token stores. A block declares at most one.

    window: how many tokens a step looks back at most, its own included; None = all.
    row_aligned: the block takes pools whose rows are longer, with unused values behind its own, and should get rows
    of whole tiles where memory has tiles: with others the compiler may store tokens of a page side by side, and then
    copies the whole pool to write one row. The last dim is then never cut.
    """

    shape: tuple[int, ...]
    axes: tuple[str | None, ...]
    role: Literal["kv"] = "kv"
    window: int | None = None
    row_aligned: bool = False

    def row(self, lanes: int) -> tuple[int, ...]:
        """What one token takes in the pool where memory has tiles of `lanes` values (1: no tiles).

        A row shorter than a tile stays as it is: the compiler lays such pools out with the least padding itself.
        """
        assert not self.row_aligned or self.axes[-1] is None
        *lead, values = self.shape
        if not self.row_aligned or values < lanes:
            return self.shape
        return (*lead, -(-values // lanes) * lanes)


@dataclass(frozen=True)
class SlotState:
    """Per-sequence state of one layer: shape and axes of what one sequence stores."""

    name: str
    shape: tuple[int, ...]
    axes: tuple[str | None, ...]
    role: Literal["state", "conv"] = "state"

    def entry(self, sublanes: int, lanes: int, degree: int) -> tuple[tuple[int, ...], tuple[str | None, ...]]:
        """Shape and axes in the pool, where memory has tiles of sublanes x lanes (lanes 1: no tiles) and axes are cut.

        A flat state takes rows of whole tiles where it divides into tiles: a slot of a [slots, values] array lies
        strewn over as many tiles as it has rows of lanes, and no kernel could copy it in one piece. Where it does not,
        the compiler would choose smaller tiles for it, and copy the pool to use it.
        """
        (size, *more), tile = self.shape, sublanes * lanes * degree
        if more or lanes == 1 or size % tile:
            return self.shape, self.axes
        return (size // lanes, lanes), (*self.axes, None)


@dataclass(frozen=True)
class HeadCut:
    """How tensor parallelism may cut a block: `size` heads of one kind.

    axis: the logical axis that is cut. replicate: True when a degree above `size` is legal
    by giving several devices the same head (KV heads).
    """

    axis: str
    size: int
    replicate: bool = False


@dataclass(frozen=True)
class FieldProblem:
    """A semantic problem inside one block: path relative to the block, reason, hint."""

    path: tuple[str | int, ...]
    text: str
    hint: str = ""


@dataclass(frozen=True)
class Variant:
    """An implementation the planner may pick, and the backends it runs on.

    module: import path; it offers the block's functions with the signatures of ref.py, but for tiles and chip.
    note: how it works. parts: what else of blocks/ (PARTS of blocks/registry.py) the emitted lines call.
    cost: module of the block's folder with its work, tuning, temp_bytes and, of a kernel, refuse,
    vmem_bytes and kernels (what its functions launch; `moec verify --aot` looks for it in the compiled step).
    tiles: tuned arguments of its function, each with what it is. kernel: its functions also take the chip's limits, and
    their names end in the variant's word. updates_pages: its function writes the page pool and gives it back.
    unpermutes: its function sums experts' rows on the TensorCore or on the SparseCores, as Load.unpermute says.
    """

    name: str
    module: str
    backends: tuple[str, ...]
    note: str = ""
    parts: tuple[str, ...] = ()
    cost: str = "cost"
    tiles: tuple[tuple[str, str], ...] = ()
    kernel: bool = False
    updates_pages: bool = False
    unpermutes: bool = False

    def function(self, name: str) -> str:
        """What this variant calls the block's function `name`."""
        return f"{name}_{self.name.removeprefix('tpu_')}" if self.kernel else name


def rms_only(path: tuple[str | int, ...], norm: NormFields, what: str) -> list[FieldProblem]:
    """A problem where another norm is declared than the block computes. what: whose norm, with its verb."""
    if norm.kind == "rms" and not norm.bias:
        return []
    return [FieldProblem(path, f"{what} an RMS norm without bias", "set {kind: rms, bias: false}")]


def divisors(number: int) -> tuple[int, ...]:
    """All positive divisors, ascending; for hints. Above a million only those up to 1000 and what goes with them."""
    low = [n for n in range(1, min(math.isqrt(number), 1000) + 1) if number % n == 0]
    return (*low, *(number // n for n in reversed(low) if n * n != number))


class Block(Protocol):
    """What `blocks/<kind>/block.py` offers as module-level names."""

    Fields: type[BlockFields]
    SLOT: Literal["mixer", "ffn"]  # the residual slot of a layer the block fills
    AXES: dict[str, AxisRole]  # logical axes of its weights and state -> the degree that cuts them
    VARIANTS: tuple[Variant, ...]

    def check(self, fields: Any, dims: ModelDims) -> list[FieldProblem]: ...

    def weights(self, fields: Any, dims: ModelDims) -> dict[str, Weight]: ...

    def state(self, fields: Any, dims: ModelDims) -> tuple[PagedState | SlotState, ...]: ...

    def cuts(self, fields: Any) -> tuple[HeadCut, ...]: ...
