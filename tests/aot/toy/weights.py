"""Weights of the miniature program."""

from moec.blocks.core.array_info import ArrayInfo

IGNORE = ()
SCALE_SUFFIX = SCALE_BLOCK = None
LAYERS, HIDDEN, INTER, VOCAB = 3, 256, 512, 1024
EXPERTS = 2  # per device


def weights():
    experts = ("experts", None, None)
    return {
        "embed": ArrayInfo((VOCAB, HIDDEN), "bfloat16", (None, None)),
        "head": ArrayInfo((HIDDEN, VOCAB), "bfloat16", (None, "vocab")),
        "router": ArrayInfo((LAYERS, HIDDEN, 8 * EXPERTS), "bfloat16", (None, None, None)),
        "w_up": ArrayInfo((LAYERS, 8 * EXPERTS, HIDDEN, INTER), "bfloat16", (None, *experts)),
        "w_down": ArrayInfo((LAYERS, 8 * EXPERTS, INTER, HIDDEN), "bfloat16", (None, *experts)),
    }
