"""Grouped-query attention: declared fields, weights, cache, legal cuts and variants.

Semantics: ref.py. Sources: GQA (arXiv:2305.13245), RoPE (arXiv:2104.09864), per-head
query/key norm and sigmoid output gate as in Hugging Face transformers 5.24.
"""

from typing import Literal

from pydantic import Field

from ..core.declare import (
    BlockFields,
    FieldProblem,
    HeadCut,
    ModelDims,
    NormOverride,
    PagedState,
    SlotState,
    Variant,
    Weight,
    divisors,
)


class Rope(BlockFields):
    """Rotary embedding on the first `dim` dims of each head. pairing: half = (i, i+dim/2), interleaved = (2i, 2i+1)."""

    dim: int = Field(gt=0)
    theta: float = Field(gt=0)
    pairing: Literal["half", "interleaved"] = "half"


class Fields(BlockFields):
    """num_q_heads query heads share num_kv_heads key/value heads of head_dim each.

    rope: null = no positional encoding. qk_norm: "head" = RMS norm of every query and key
    head before rope; norm: what that norm changes of the model's default. output_gate:
    "sigmoid" = q_proj also yields a gate per head and dim.
    """

    kind: Literal["attention"]
    num_q_heads: int = Field(gt=0)
    num_kv_heads: int = Field(gt=0)
    head_dim: int = Field(gt=0)
    rope: Rope | None = None
    qk_norm: Literal["none", "head"] = "none"
    norm: NormOverride = NormOverride()
    output_gate: Literal["none", "sigmoid"] = "none"


SLOT = "mixer"

VARIANTS = (
    Variant(
        name="xla",
        module="moec.blocks.attention.xla",
        backends=("cpu", "tpu"),
        note="online softmax over pages in a loop; the pool is written once after the layer scan",
    ),
)


def check(fields: Fields, dims: ModelDims) -> list[FieldProblem]:
    """Head counts must divide; rope must fit in the head; a norm that nothing uses is refused."""
    problems = []
    if fields.num_q_heads % fields.num_kv_heads:
        problems.append(
            FieldProblem(
                ("num_kv_heads",),
                f"{fields.num_q_heads} query heads cannot share {fields.num_kv_heads} key/value heads evenly",
                f"valid: {', '.join(map(str, divisors(fields.num_q_heads)))}",
            )
        )
    if fields.rope and (fields.rope.dim > fields.head_dim or fields.rope.dim % 2):
        problems.append(
            FieldProblem(
                ("rope", "dim"),
                f"rope dim {fields.rope.dim} must be even and at most head_dim {fields.head_dim}",
            )
        )
    if fields.qk_norm == "none" and fields.norm != NormOverride():
        problems.append(
            FieldProblem(("norm",), "norm has no effect with qk_norm 'none'", "set qk_norm: head, or remove norm")
        )
    return problems


def weights(fields: Fields, dims: ModelDims) -> dict[str, Weight]:
    """Projections [in, out]; w_q holds [query | gate] per head when the output is gated."""
    hidden, head = dims.hidden_size, fields.head_dim
    q_width = fields.num_q_heads * head
    kv_width = fields.num_kv_heads * head
    gate = 2 if fields.output_gate == "sigmoid" else 1
    found = {
        "w_q": Weight((hidden, q_width * gate), (None, "q_heads"), "linear", linear=True),
        "w_k": Weight((hidden, kv_width), (None, "kv_heads"), "linear", linear=True),
        "w_v": Weight((hidden, kv_width), (None, "kv_heads"), "linear", linear=True),
        "w_o": Weight((q_width, hidden), ("q_heads", None), "linear", linear=True),
    }
    if fields.qk_norm == "head":
        found["q_norm"] = Weight((head,), (None,), "gain", init="gain")
        found["k_norm"] = Weight((head,), (None,), "gain", init="gain")
    return found


def state(fields: Fields, dims: ModelDims) -> tuple[PagedState | SlotState, ...]:
    """One cached row per token: all key heads, then all value heads."""
    return (PagedState((2 * fields.num_kv_heads * fields.head_dim,), ("kv_heads",)),)


def cuts(fields: Fields) -> tuple[HeadCut, ...]:
    """Query heads are cut; a key/value head may be given to several devices."""
    return (HeadCut("q_heads", fields.num_q_heads), HeadCut("kv_heads", fields.num_kv_heads, replicate=True))
