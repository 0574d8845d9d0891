"""Lightning attention (arXiv:2401.04658, arXiv:2501.08313): declared fields, weights, state, legal cuts and variants.

Semantics: ref.py. Layout and conventions as in Hugging Face transformers 5.24.
"""

from typing import Literal

from pydantic import Field

from ..activation.names import Activation
from ..core.declare import (
    AxisRole,
    BlockFields,
    FieldProblem,
    HeadCut,
    ModelDims,
    NormOverride,
    PagedState,
    SlotState,
    Variant,
    Weight,
    rms_only,
)


class Fields(BlockFields):
    """num_heads heads of head_dim each; every head has its own queries, keys and values.

    decay_layers: the layer count the decay slopes are spread over (they fall with the layer's
    absolute index, see xla.py), at least the model's. activation: of q, k and v. out_norm: over all
    heads' outputs together.
    """

    kind: Literal["lightning"]
    num_heads: int = Field(gt=0)
    head_dim: int = Field(gt=0)
    decay_layers: int = Field(gt=0)
    activation: Activation = "silu"
    out_norm: NormOverride = NormOverride()


SLOT = "mixer"
AXES: dict[str, AxisRole] = {"q_heads": "attention_tp"}

VARIANTS = (
    Variant(
        name="xla",
        module="moec.blocks.lightning.xla",
        backends=("cpu", "tpu"),
        note="recurrent step for decode rows, decayed products of chunks for prefill rows",
        tiles=(("chunk", "prefill tokens of one step"),),
    ),
)


def check(fields: Fields, dims: ModelDims) -> list[FieldProblem]:
    """The output norm is an RMS norm; every layer of the model decays."""
    found = rms_only(("out_norm",), fields.out_norm.resolve(dims.norm), "the output norm is")
    if dims.num_layers is not None and fields.decay_layers < dims.num_layers:
        text = f"decays spread over {fields.decay_layers} layers would be growth in the last of {dims.num_layers}"
        found.append(FieldProblem(("decay_layers",), text, f"at least {dims.num_layers}"))
    return found


def weights(fields: Fields, dims: ModelDims) -> dict[str, Weight]:
    """Projections [in, out] and the gain of the output norm."""
    hidden, width = dims.hidden_size, fields.num_heads * fields.head_dim
    return {
        "w_q": Weight((hidden, width), (None, "q_heads"), "linear", linear=True),
        "w_k": Weight((hidden, width), (None, "q_heads"), "linear", linear=True),
        "w_v": Weight((hidden, width), (None, "q_heads"), "linear", linear=True),
        "w_g": Weight((hidden, width), (None, "q_heads"), "linear", linear=True),
        "out_norm": Weight((width,), ("q_heads",), "gain", init="gain"),
        "w_o": Weight((width, hidden), ("q_heads", None), "linear", linear=True),
    }


def state(fields: Fields, dims: ModelDims) -> tuple[PagedState | SlotState, ...]:
    """The decayed sum of key-value products of each head."""
    heads, dim = fields.num_heads, fields.head_dim
    return (SlotState("state", (heads, dim, dim), ("q_heads", None, None), role="state"),)


def cuts(fields: Fields) -> tuple[HeadCut, ...]:
    """Heads are cut, never replicated."""
    return (HeadCut("q_heads", fields.num_heads),)
