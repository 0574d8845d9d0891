"""The weights of the fake program: one per way a program may declare them."""

from moec.blocks.core.array_info import ArrayInfo, Source

IGNORE = ("mtp.*",)
SCALE_SUFFIX = "_scale_inv"
SCALE_BLOCK = (128, 128)


def weights():
    """Abstract weights."""
    return {"final_norm": ArrayInfo((4,), "float32", (None,), (Source("model.norm.weight"),), init="gain")}
