"""Grouped-query attention: declared fields, weights, cache, legal cuts and variants.

Semantics: ref.py. Sources: GQA (arXiv:2305.13245), RoPE (arXiv:2104.09864), sinks (arXiv:2309.17453),
query temperature (arXiv:2501.19399), window, chunks, query/key norms and gates as in Hugging Face
transformers 5.24.
"""

from typing import Literal

from pydantic import Field

from ..core.declare import (
    AxisRole,
    BlockFields,
    Declared,
    FieldProblem,
    HeadCut,
    ModelDims,
    NormOverride,
    PagedState,
    SlotState,
    Variant,
    Weight,
    divisors,
    rms_only,
)
from ..core.head_fields import OutputGate, Temperature, fused_width, gate_width
from ..core.rope_fields import RopeFields, check_rope


class Bias(Declared):
    """Which projections have a bias: queries, keys and values; the output."""

    qkv: bool = False
    out: bool = False


class Fields(BlockFields):
    """num_q_heads query heads share num_kv_heads key/value heads of head_dim each.

    v_head_dim: dims of a value head, null = head_dim.

    rope: null = no positional encoding. qk_norm: RMS norm of queries and keys, "head": each head, "full": all
    heads together, "l2": each head, without gain. v_norm: "head" = RMS norm of each value head, without gain.
    norm: what these norms change of the model's default. keys_as_values: values are the keys before norm and
    rope. clip_qkv: queries, keys and values are clipped to this size, before rope.
    window: keys a query sees at most, itself included; chunk: it sees those of its own chunk of positions.
    sinks: a learned logit per head in the softmax's denominator. softcap: scores s become softcap * tanh(s / softcap).
    scale: factor of the scores, null = head_dim^-1/2. value_scale: factor of the values.
    """

    kind: Literal["attention"]
    num_q_heads: int = Field(gt=0)
    num_kv_heads: int = Field(gt=0)
    head_dim: int = Field(gt=0)
    v_head_dim: int | None = Field(default=None, gt=0)
    rope: RopeFields | None = None
    qk_norm: Literal["none", "head", "full", "l2"] = "none"
    qk_norm_place: Literal["before_rope", "after_rope"] = "before_rope"
    v_norm: Literal["none", "head"] = "none"
    norm: NormOverride = NormOverride()
    bias: Bias = Bias()
    keys_as_values: bool = False
    clip_qkv: float | None = Field(default=None, gt=0)
    window: int | None = Field(default=None, gt=0)
    chunk: int | None = Field(default=None, gt=0)
    sinks: bool = False
    softcap: float | None = Field(default=None, gt=0)
    scale: float | None = Field(default=None, gt=0)
    value_scale: float = Field(default=1.0, gt=0)
    temperature: Temperature | None = None
    output_gate: OutputGate | None = None


SLOT = "mixer"
AXES: dict[str, AxisRole] = {"q_heads": "attention_tp", "kv_heads": "attention_tp"}

VARIANTS = (
    Variant(
        name="xla",
        module="moec.blocks.attention.xla",
        backends=("cpu", "tpu"),
        note="online softmax over pages in a loop; the pool is written once after the layer scan",
        tiles=(
            ("q_block", "tokens of a row per prefill work item, at most"),
            ("kv_block", "cached keys such an item reads at once"),
        ),
    ),
    Variant(
        name="tpu_ragged",
        module="moec.blocks.attention.tpu_ragged",
        backends=("tpu",),
        note="each row's own pages, a kernel each for decode rows and prefill chunks, which also write the new keys",
        cost="tpu_cost",
        tiles=(
            ("q_block", "tokens of a chunk per prefill work item"),
            ("kv_block", "cached keys such an item multiplies at once"),
            ("decode_block", "keys of a decode row fetched and multiplied at once"),
            ("decode_tail", "the same in a row's last block"),
            ("decode_slots", "such blocks in vector memory"),
        ),
        kernel=True,
        updates_pages=True,
    ),
)


def check(fields: Fields, dims: ModelDims) -> list[FieldProblem]:
    """Head counts must divide, rope must fit in the head, and what has no effect is refused."""
    problems = [*check_rope(fields.rope, fields.head_dim, scores=False), *_check_norms(fields, dims)]
    if fields.num_q_heads % fields.num_kv_heads:
        problems.append(
            FieldProblem(
                ("num_kv_heads",),
                f"{fields.num_q_heads} query heads cannot share {fields.num_kv_heads} key/value heads evenly",
                f"valid: {', '.join(map(str, divisors(fields.num_q_heads)))}",
            )
        )
    if fields.window is not None and fields.chunk is not None:
        problems.append(FieldProblem(("chunk",), "window and chunk exclude each other", "remove one of them"))
    if fields.keys_as_values and value_dim(fields) != fields.head_dim:
        text = f"keys of {fields.head_dim} dims cannot be values of {fields.v_head_dim}"
        problems.append(FieldProblem(("v_head_dim",), text, "remove v_head_dim, or keys_as_values"))
    return problems


def _check_norms(fields: Fields, dims: ModelDims) -> list[FieldProblem]:
    problems = []
    if fields.qk_norm_place == "after_rope" and (fields.qk_norm == "none" or fields.rope is None):
        text = "qk_norm_place has no effect without qk_norm and rope"
        problems.append(FieldProblem(("qk_norm_place",), text, "remove it"))
    if fields.qk_norm == "none" and fields.v_norm == "none":
        if fields.norm != NormOverride():
            text = "norm has no effect with qk_norm 'none'"
            problems.append(FieldProblem(("norm",), text, "set qk_norm: head, or remove norm"))
        return problems
    problems += rms_only(("norm",), fields.norm.resolve(dims.norm), "each norm of queries, keys and values is")
    if not has_gains(fields) and fields.norm.zero_centered is not None:
        text = "zero_centered has no effect on a norm without gain"
        problems.append(FieldProblem(("norm", "zero_centered"), text, "remove it"))
    return problems


def value_dim(fields: Fields) -> int:
    """Dims of a value head."""
    return fields.v_head_dim or fields.head_dim


def has_gains(fields: Fields) -> bool:
    """Whether the query/key norm has weights."""
    return fields.qk_norm in ("head", "full")


def reach(fields: Fields) -> int | None:
    """The most keys a query sees, itself included; None = all."""
    return fields.window or fields.chunk


def weights(fields: Fields, dims: ModelDims) -> dict[str, Weight]:
    """Projections [in, out]; w_q holds [query | gate] per head when the gate is fused."""
    hidden, gate = dims.hidden_size, fields.output_gate
    q_width = fields.num_q_heads * (fields.head_dim + fused_width(gate, value_dim(fields)))
    widths = {"q": (q_width, "q_heads"), "k": (fields.num_kv_heads * fields.head_dim, "kv_heads")}
    if not fields.keys_as_values:
        widths["v"] = (fields.num_kv_heads * value_dim(fields), "kv_heads")
    found = {
        f"w_{name}": Weight((hidden, wide), (None, ax), "linear", linear=True) for name, (wide, ax) in widths.items()
    }
    out_width = fields.num_q_heads * value_dim(fields)
    found["w_o"] = Weight((out_width, hidden), ("q_heads", None), "linear", linear=True)
    if gate and gate.stored == "own":
        g_width = fields.num_q_heads * gate_width(gate, value_dim(fields))
        found["w_g"] = Weight((hidden, g_width), (None, "q_heads"), "linear", linear=True)
    if fields.bias.qkv:
        found |= {f"b_{name}": Weight((wide,), (ax,), "gain", init="bias") for name, (wide, ax) in widths.items()}
    if fields.bias.out:
        found["b_o"] = Weight((hidden,), (None,), "gain", init="bias")
    if has_gains(fields):
        found |= _gains(fields)
    if fields.sinks:
        found["sinks"] = Weight((fields.num_q_heads,), ("q_heads",), "gain", init="bias")
    return found


def _gains(fields: Fields) -> dict[str, Weight]:
    if fields.qk_norm == "head":
        return {name: Weight((fields.head_dim,), (None,), "gain", init="gain") for name in ("q_norm", "k_norm")}
    return {
        "q_norm": Weight((fields.num_q_heads * fields.head_dim,), ("q_heads",), "gain", init="gain"),
        "k_norm": Weight((fields.num_kv_heads * fields.head_dim,), ("kv_heads",), "gain", init="gain"),
    }


def state(fields: Fields, dims: ModelDims) -> tuple[PagedState | SlotState, ...]:
    """One cached row per token: all key heads, then all value heads."""
    width = fields.num_kv_heads * (fields.head_dim + value_dim(fields))
    return (PagedState((width,), ("kv_heads",), window=reach(fields)),)


def cuts(fields: Fields) -> tuple[HeadCut, ...]:
    """Query heads are cut; a key/value head may be given to several devices."""
    return (HeadCut("q_heads", fields.num_q_heads), HeadCut("kv_heads", fields.num_kv_heads, replicate=True))
