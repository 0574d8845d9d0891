"""Abstract arrays: what an emitted program says of each weight and state array.

One tree of ArrayInfo gives shapes, dtypes, shardings (through the program's RULES
table), where the checkpoint keeps the values, and how to draw random ones.
This file imports no jax, so that `moec check` and `moec plan` start fast.
"""

from dataclasses import dataclass, replace

# One step of the path from a stored tensor to a weight. The first entry names it:
#   ("stack", n)                   [n * rows, columns] -> [n, rows, columns] (experts stored one below the other)
#   ("slice", dim, start, stop)    keep [start, stop) of a dim (dims may be negative)
#   ("group_slice", dim, groups, start, stop)  keep [start, stop) of each of `groups` equal runs of a dim
#   ("stride", dim, start, step)   keep start, start+step, ... of a dim (interleaved halves)
#   ("transpose",)                 swap the last two dims ([out, in] -> [in, out])
#   ("repeat", dim, size, times)   repeat each run of `size` entries `times` times (KV replication)
Op = tuple[str | int, ...]


@dataclass(frozen=True)
class ScaleBlock:
    """rows x columns of a weight [in, out] that share one scale, and the dtype of the scales."""

    rows: int
    columns: int
    dtype: str

    def count(self, rows: int, columns: int) -> tuple[int, int]:
        """Scales along each dim of a matrix; ragged last blocks count."""
        return -(-rows // self.rows), -(-columns // self.columns)


# The dtypes of weights that carry block scales. float8: 128 x 128 as released checkpoints have it. 4 bit: 32 values
# along the in dim, as OCP MX formats (v1.0) and pack-quantized checkpoints have it; their scales are exact in
# bfloat16, and float32 ones would be a quarter of the weight's bytes.
SCALED: dict[str, ScaleBlock] = {
    "float8_e4m3fn": ScaleBlock(128, 128, "float32"),
    "float4_e2m1fn": ScaleBlock(32, 1, "bfloat16"),
    "int4": ScaleBlock(32, 1, "bfloat16"),
}
# Edges of the squares of float8 values that may share one scale: as released checkpoints have it, then what they are
# requantised to where a plan pins it (compiler/plan/scales.py).
E4M3, FLOAT8_EDGES = "float8_e4m3fn", (128, 512)


def scaled_block(dtype: str, edge: int) -> ScaleBlock:
    """What shares one scale in a weight of a dtype in SCALED. edge: of FLOAT8_EDGES, of float8's squares."""
    block = SCALED[dtype]
    return replace(block, rows=edge, columns=edge) if dtype == E4M3 else block


@dataclass(frozen=True)
class PackedFormat:
    """How checkpoints store a 4-bit matrix [out, in]: two values a byte, the even in index in the low half.

    dtype: of the values. values, scales, shape: endings of the stored tensors' names (shape: not all
    checkpoints have it). stored: dtype of the words; word: values in one. split: the words of one scale
    are a dim of their own, [..., in / 32, 16].
    """

    dtype: str
    values: str
    scales: str
    shape: str | None
    stored: str
    word: int
    split: bool

    def side(self, tensor: str, ending: str) -> str:
        """The stored name beside the values' one."""
        return tensor.removesuffix(self.values) + ending


# mxfp4: e2m1 values, e8m0 scales in uint8, as Hugging Face transformers 5.24 reads them
# (integrations/mxfp4.py). int4: offset-binary values (stored = value + 8) in int32, as the format "pack-quantized" of
# https://github.com/vllm-project/compressed-tensors has them (pack_to_int32).
PACKED: dict[str, PackedFormat] = {
    "mxfp4": PackedFormat("float4_e2m1fn", "_blocks", "_scales", None, "uint8", 2, split=True),
    "int4": PackedFormat("int4", "_packed", "_scale", "_shape", "int32", 8, split=False),
}


@dataclass(frozen=True)
class Source:
    """One place where a checkpoint may keep a weight.

    tensor: stored name; `{layer}` stands for the layer index, `{expert}` for the expert
        index. Without `{expert}` a weight with an experts dim is stored stacked.
    ops: applied in order to the stored tensor, after unpacking. For a stacked
        tensor, dims are counted from the end, so that the same ops fit both layouts.
    packed: the format of PACKED in which the tensor holds 4-bit values; None: the values as they are.
    """

    tensor: str
    ops: tuple[Op, ...] = ()
    packed: str | None = None


@dataclass(frozen=True)
class ArrayInfo:
    """Shape, dtype, logical axes and origin of one array of an emitted program.

    shape: global (unsharded) shape.
    dtype: numpy/ml_dtypes name, e.g. "bfloat16", "float8_e4m3fn".
    axes: one logical axis name or None per dim; the program's RULES map it to mesh axes.
    sources: alternatives in the checkpoint, () for state.
    layers: for a weight stacked over layers, the absolute layer index of each entry of
        dim 0; () when dim 0 is not a layer dim.
    init: "normal", "gain", "bias" or "log_decay": the distribution for random weights.
    scale_of: for block scales, the name of the sibling weight they belong to.
    block: for block scales, (rows, columns) of the weight [in, out] under one; None = as SCALED has it for the dtype.
    row_major: its rows lie one behind the other in device memory although another order of dims would pad less,
        because the program gathers rows: the compiler would re-lay out all of it in every step.
    """

    shape: tuple[int, ...]
    dtype: str
    axes: tuple[str | None, ...]
    sources: tuple[Source, ...] = ()
    layers: tuple[int, ...] = ()
    init: str = "normal"
    scale_of: str | None = None
    block: tuple[int, int] | None = None
    row_major: bool = False

    def __post_init__(self) -> None:
        assert len(self.shape) == len(self.axes), (self.shape, self.axes)
        assert not self.layers or len(self.layers) == self.shape[0], (self.shape, self.layers)
