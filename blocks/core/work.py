"""Work: what a block costs, without knowing any chip.

A block's cost.py turns its fields and a Load (one device's share of one step) into terms.
Terms with the same `op` run at the same time (one fused operator, or a loop XLA pipelines);
different ops run one after the other. compiler/plan/cost.py turns terms into seconds.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from math import prod
from typing import Literal

from .array_info import SCALED, ScaleBlock, scaled_block
from .chip import NO_LIMITS, ChipLimits
from .declare import AxisRole

CollectiveKind = Literal["all-gather", "reduce-scatter", "all-reduce", "all-to-all"]
Unpermute = Literal["tensorcore", "sparsecore"]

_ITEMBITS = {
    "float32": 32,
    "int32": 32,
    "uint32": 32,
    "bfloat16": 16,
    "float8_e4m3fn": 8,
    "float8_e5m2": 8,
    "int8": 8,
    "bool": 8,
    "float4_e2m1fn": 4,
    "int4": 4,
}


def itembits(dtype: str) -> int:
    """Bits of one element in device memory."""
    return _ITEMBITS[dtype]


def itemsize(dtype: str) -> int:
    """Bytes of one element of a dtype that has whole ones."""
    size, rest = divmod(_ITEMBITS[dtype], 8)
    assert not rest, f"{dtype} has no whole bytes"
    return size


def touched(num_tokens: float, fraction: float) -> float:
    """Expected share of a weight's values that num_tokens tokens touch when each uses `fraction`, uniformly."""
    return 1.0 - (1.0 - fraction) ** num_tokens if fraction < 1 else 1.0


@dataclass(frozen=True)
class Dtypes:
    """The plan's dtypes by role (numpy/ml_dtypes names). gather: of hidden states on their way to the experts.

    expert_rows: of token rows in products with float8 experts. "activation" = as they are.
    scale_block: edge of the squares of float8 experts under one scale (array_info.FLOAT8_EDGES).
    """

    activation: str
    weight: str
    expert: str
    kv: str
    state: str
    conv: str
    gather: str = "activation"
    expert_rows: str = "activation"
    scale_block: int = 128

    @property
    def expert_block(self) -> ScaleBlock | None:
        """What shares one scale in a routed expert's matrix; None where its dtype has no scales."""
        return scaled_block(self.expert, self.scale_block) if self.expert in SCALED else None

    def of(self, role: str) -> str:
        """Dtype of a weight or state role; decay parameters are float32, as the gate math is."""
        named = {"expert": self.expert, "kv": self.kv, "state": self.state, "conv": self.conv, "decay": "float32"}
        return named.get(role, self.weight)


@dataclass(frozen=True)
class Degrees:
    """By how many devices each thing is divided; shared, mlp, embed and head are 1 when replicated."""

    dp: int = 1
    tp: int = 1
    ep: int = 1
    etp: int = 1
    shared: int = 1
    embed: int = 1
    head: int = 1
    mlp: int = 1

    def of(self, role: AxisRole) -> int:
        """Degree that cuts the axes of a role."""
        return {
            "attention_dp": self.dp,
            "attention_tp": self.tp,
            "expert_ep": self.ep,
            "expert_tp": self.etp,
            "shared": self.shared,
            "mlp": self.mlp,
            "embed": self.embed,
            "head": self.head,
        }[role]


@dataclass(frozen=True)
class Load:
    """One attention-DP rank's rows in one step; every device of the rank sees them.

    tokens: static step size, padding included. seqs: static rows. decode_rows: rows of one
    token; decode_context: keys such a row reads on average, decode_longest: the longest one.
    prefill_tokens: tokens in prefill chunks; prefill_context: keys one of them sees on average.
    row_tile: rows a product takes at least (fewer cost the same); row_full: rows from which
    on loading weights no longer shows. lanes: values of a memory tile's row, 1 where memory has no tiles.
    pages_per_seq: entries of a row in the step's page table, which may hold more than the longest row needs.
    chip: what a kernel must respect. kernel_returns: a kernel brings tokens back from the experts, no collective of the
    compiler's. unpermute: which cores sum a token's expert rows, where a variant has the choice.
    tuned: by kernel (`<block>.<variant>`) and tuned_key, tiles that go before a variant's own.
    """

    tokens: int
    seqs: int
    decode_rows: float
    decode_context: float
    decode_longest: float
    prefill_tokens: float
    prefill_context: float
    page_size: int
    degrees: Degrees
    dtypes: Dtypes
    row_tile: int
    row_full: int
    lanes: int = 1
    chip: ChipLimits = NO_LIMITS
    kernel_returns: bool = False
    unpermute: Unpermute = "tensorcore"
    pages_per_seq: int = 0
    tuned: Mapping[str, Mapping[str, Mapping[str, int]]] = field(default_factory=dict)

    def tuned_tiles(self, kernel: str, key: str) -> Mapping[str, int]:
        """The tuned tiles of a kernel at one shape; {} where none are."""
        return self.tuned.get(kernel, {}).get(key, {})

    @property
    def table_bytes(self) -> int:
        """The step's page table: 32 bits per entry."""
        return self.seqs * self.pages_per_seq * 4

    @property
    def gathered_tokens(self) -> int:
        """Tokens after all ranks' tokens are gathered."""
        return self.tokens * self.degrees.dp

    @property
    def valid_tokens(self) -> float:
        """Tokens of all ranks that are no padding."""
        return (self.decode_rows + self.prefill_tokens) * self.degrees.dp


def tuned_key(names: tuple[str, ...], **sizes: int | str) -> str:
    """What tuned tiles are kept by: `name=value,...`, a cost module's TUNED_BY with this device's sizes."""
    assert tuple(sizes) == names, (tuple(sizes), names)
    return ",".join(f"{name}={value}" for name, value in sizes.items())


def off_steps(tiles: Mapping[str, int], steps: Mapping[str, int]) -> list[str]:
    """Reasons why a kernel does not take tiles: each is at least one step, in whole ones."""
    bad = {name: step for name, step in steps.items() if tiles[name] < step or tiles[name] % step}
    return [f"{name} {tiles[name]}: the kernel takes multiples of {step}" for name, step in bad.items()]


@dataclass(frozen=True)
class Gemm:
    """`count` products [m, k] x [k, n] of operands in `dtype`.

    weight_dtype: dtype of the [k, n] operand in HBM, read once per product; None when both
    operands are already counted (a Stream) or stay on the chip.
    """

    op: str
    m: float
    n: float
    k: float
    dtype: str
    weight_dtype: str | None = None
    count: float = 1.0

    @property
    def flops(self) -> float:
        return 2.0 * self.m * self.n * self.k * self.count

    @property
    def weight_bytes(self) -> float:
        return self.count * self.k * self.n * itembits(self.weight_dtype) / 8 if self.weight_dtype else 0.0

    @property
    def activation_bytes(self) -> float:
        return self.count * self.m * (self.k + self.n) * itemsize(self.dtype) if self.weight_dtype else 0.0


@dataclass(frozen=True)
class Stream:
    """HBM traffic, in pieces of chunk_bytes (small pieces do not reach full bandwidth)."""

    op: str
    bytes: float
    chunk_bytes: float


def prefetched(op: str, num_bytes: float) -> Stream:
    """Traffic of a kernel that requests pieces before it needs them: one stream, however small the pieces."""
    return Stream(op, num_bytes, num_bytes)


@dataclass(frozen=True)
class Vector:
    """Elementwise float32 operations."""

    op: str
    flops: float


@dataclass(frozen=True)
class Subcore:
    """Instruction bundles of a kernel on the SparseCores: those of the busiest subcore. starts: kernels started."""

    op: str
    bundles: float
    starts: int = 0


@dataclass(frozen=True)
class Round:
    """One exchange of every device with one other. link: within a chip or between neighbours; bytes: one way.

    devices: of one chip, that use a link at the same time.
    """

    link: Literal["D2D", "ICI"]
    bytes: int
    devices: int = 1


@dataclass(frozen=True)
class Collective:
    """One message exchange between devices.

    axes: roles ("attention_dp", "attention_tp") the plan maps to mesh axes. shape: the full
    array: what an all-gather yields, what a reduce-scatter takes, what an all-reduce sums,
    what one device holds before an all-to-all.
    rounds: how a kernel exchanges it, in `batches` pieces that are in different rounds at a time; () = as the compiler
    sees fit.
    """

    op: str
    kind: CollectiveKind
    axes: tuple[str, ...]
    dtype: str
    shape: tuple[int, ...]
    what: str
    rounds: tuple[Round, ...] = ()
    batches: int = 1

    @property
    def payload_bytes(self) -> int:
        return prod(self.shape) * itemsize(self.dtype)


Term = Gemm | Stream | Vector | Subcore | Collective
