"""Abstract arrays: what an emitted program says of each weight and state array.

One tree of ArrayInfo gives shapes, dtypes, shardings (through the program's RULES
table), where the checkpoint keeps the values, and how to draw random ones.
This file imports no jax, so that `moec check` and `moec plan` start fast.
"""

from dataclasses import dataclass

# One step of the path from a stored tensor to a weight. The first entry names it:
#   ("slice", dim, start, stop)    keep [start, stop) of a dim (dims may be negative)
#   ("stride", dim, start, step)   keep start, start+step, ... of a dim (interleaved halves)
#   ("transpose",)                 swap the last two dims ([out, in] -> [in, out])
#   ("reshape", d0, d1, ...)       new shape, row-major
#   ("repeat", dim, size, times)   repeat each run of `size` entries `times` times (KV replication)
Op = tuple[str | int, ...]

FP8 = "float8_e4m3fn"  # the dtype of weights with block scales
FP8_BLOCK = 128  # rows and columns under one float8 scale, as released checkpoints store them


@dataclass(frozen=True)
class Source:
    """One place where a checkpoint may keep a weight.

    tensor: stored name; `{layer}` stands for the layer index, `{expert}` for the expert
        index. Without `{expert}` a weight with an experts dim is stored stacked.
    ops: applied in order to the stored tensor, after dequantisation. For a stacked
        tensor, dims are counted from the end, so that the same ops fit both layouts.
    """

    tensor: str
    ops: tuple[Op, ...] = ()


@dataclass(frozen=True)
class ArrayInfo:
    """Shape, dtype, logical axes and origin of one array of an emitted program.

    shape: global (unsharded) shape.
    dtype: numpy/ml_dtypes name, e.g. "bfloat16", "float8_e4m3fn".
    axes: one logical axis name or None per dim; the program's RULES map it to mesh axes.
    sources: alternatives in the checkpoint, () for state.
    layers: for a weight stacked over layers, the absolute layer index of each entry of
        dim 0; () when dim 0 is not a layer dim.
    init: "normal", "ones", "zeros", "log_decay" or "gain": the distribution for random weights.
    scale_of: for block scales, the name of the sibling weight they belong to.
    """

    shape: tuple[int, ...]
    dtype: str
    axes: tuple[str | None, ...]
    sources: tuple[Source, ...] = ()
    layers: tuple[int, ...] = ()
    init: str = "normal"
    scale_of: str | None = None

    def __post_init__(self) -> None:
        assert len(self.shape) == len(self.axes), (self.shape, self.axes)
        assert not self.layers or len(self.layers) == self.shape[0], (self.shape, self.layers)
