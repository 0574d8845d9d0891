"""Multi-head latent attention: declared fields, weights, cache, legal cuts and variants.

Semantics: ref.py. Sources: MLA (arXiv:2405.04434 section 2.1, arXiv:2412.19437 section 2.1.1), RoPE (arXiv:2104.09864);
projections, latent norms, YaRN factor of the softmax scale, query temperature and per-head gate as in Hugging Face
transformers 5.24.
"""

from typing import Literal

from pydantic import Field

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
from ..core.head_fields import OutputGate, Temperature, fused_width, gate_width
from ..core.rope_fields import RopeFields, check_rope, score_mscale


class Fields(BlockFields):
    """num_heads heads, whose keys and values are linear in one latent of kv_lora_rank values per token.

    A head's query and key are [nope | rope]; the rope part of the key is one for all heads.
    q_lora_rank: null = queries straight from the input, else through a normed latent too.
    rope: null = no positional encoding (the rope dims are then plain shared key dims).
    norm: what the two latent norms change of the model's default. scale: null = default_scale.
    bias: biases of the two down-projections and of the output.
    """

    kind: Literal["mla"]
    num_heads: int = Field(gt=0)
    q_lora_rank: int | None = Field(default=None, gt=0)
    kv_lora_rank: int = Field(gt=0)
    qk_nope_head_dim: int = Field(gt=0)
    qk_rope_head_dim: int = Field(gt=0)
    v_head_dim: int = Field(gt=0)
    rope: RopeFields | None = None
    norm: NormOverride = NormOverride()
    scale: float | None = Field(default=None, gt=0)
    temperature: Temperature | None = None
    output_gate: OutputGate | None = None
    bias: bool = False


SLOT = "mixer"
AXES: dict[str, AxisRole] = {"q_heads": "attention_tp"}

VARIANTS = (
    Variant(
        name="xla",
        module="moec.blocks.mla.xla",
        backends=("cpu", "tpu"),
        note="decode in latent space, prefill on expanded heads; the pool is written once after the layer scan",
        tiles=(
            ("q_block", "tokens of a row per prefill work item, at most"),
            ("kv_block", "cached keys such an item expands at once"),
        ),
    ),
    Variant(
        name="tpu_ragged",
        module="moec.blocks.mla.tpu_ragged",
        backends=("tpu",),
        note="latent attention over each row's own pages, in one kernel each for decode rows and prefill chunks",
        cost="tpu_cost",
        tiles=(
            ("decode_keys", "cached rows a decode step reads at once"),
            ("prefill_keys", "the same of a prefill item"),
            ("prefill_rows", "queries times heads of a prefill item"),
            ("buffers", "pieces of the cache on their way"),
        ),
        kernel=True,
        updates_pages=True,
    ),
)


def check(fields: Fields, dims: ModelDims) -> list[FieldProblem]:
    """Rope rotates exactly the rope dims; the latent norms are RMS norms."""
    problems = check_rope(fields.rope, fields.qk_rope_head_dim, scores=fields.scale is None)
    if fields.rope and fields.rope.dim < fields.qk_rope_head_dim:
        text = f"rope dim {fields.rope.dim} must be qk_rope_head_dim {fields.qk_rope_head_dim}"
        problems.append(FieldProblem(("rope", "dim"), text))
    return problems + rms_only(("norm",), fields.norm.resolve(dims.norm), "each latent norm is")


def weights(fields: Fields, dims: ModelDims) -> dict[str, Weight]:
    """Projections [in, out]; per head w_q and w_q_b hold columns [nope | rope | fused gate], w_kv_b rows [key | value].

    w_kv_b is [out, in], as checkpoints store it: each head's part is then one matrix, which the products per head in
    decode read in place; of [in, out] XLA makes a transposed copy in every layer.
    """
    hidden, heads, latent = dims.hidden_size, fields.num_heads, fields.kv_lora_rank
    q_width = heads * (query_dim(fields) + fused_width(fields.output_gate, fields.v_head_dim))
    kv_width = heads * (fields.qk_nope_head_dim + fields.v_head_dim)
    found = _query_weights(fields, hidden, q_width) | {
        "w_kv_a": _linear(hidden, latent + fields.qk_rope_head_dim),
        "kv_a_norm": _gain(latent),
        "w_kv_b": Weight((kv_width, latent), ("q_heads", None), "linear"),
        "w_o": Weight((heads * fields.v_head_dim, hidden), ("q_heads", None), "linear", linear=True),
    }
    if fields.output_gate and fields.output_gate.stored == "own":
        found["w_g"] = _linear(hidden, heads * gate_width(fields.output_gate, fields.v_head_dim), "q_heads")
    if fields.bias:
        found |= {"b_kv_a": _bias(latent + fields.qk_rope_head_dim), "b_o": _bias(hidden)}
    return found


def state(fields: Fields, dims: ModelDims) -> tuple[PagedState | SlotState, ...]:
    """One cached row per token, the same for all heads: the normed latent, the rotated shared key."""
    return (cached_row(fields),)


def cached_row(fields: Fields) -> PagedState:
    """What a token leaves in the cache; xla.py takes pools with longer rows."""
    return PagedState((row_values(fields),), (None,), row_aligned=True)


def row_values(fields: Fields) -> int:
    """Values computed per cached token, whatever the heads a device holds."""
    return fields.kv_lora_rank + fields.qk_rope_head_dim


def query_dim(fields: Fields) -> int:
    """Dims of a head's query and key."""
    return fields.qk_nope_head_dim + fields.qk_rope_head_dim


def cuts(fields: Fields) -> tuple[HeadCut, ...]:
    """Heads are cut; the cache is whole on every device."""
    return (HeadCut("q_heads", fields.num_heads),)


def default_scale(fields: Fields) -> float:
    """(nope + rope)^-1/2, times m(mscale_all_dim)^2 where YaRN declares it (see core/rope_fields.py)."""
    return query_dim(fields) ** -0.5 * score_mscale(fields.rope) ** 2


def _query_weights(fields: Fields, hidden: int, q_width: int) -> dict[str, Weight]:
    if fields.q_lora_rank is None:
        return {"w_q": _linear(hidden, q_width, "q_heads")}
    rank = fields.q_lora_rank
    found = {"w_q_a": _linear(hidden, rank), "q_a_norm": _gain(rank), "w_q_b": _linear(rank, q_width, "q_heads")}
    return found | {"b_q_a": _bias(rank)} if fields.bias else found


def _linear(rows: int, columns: int, axis: str | None = None) -> Weight:
    return Weight((rows, columns), (None, axis), "linear", linear=True)


def _gain(size: int) -> Weight:
    return Weight((size,), (None,), "gain", init="gain")


def _bias(size: int) -> Weight:
    return Weight((size,), (None,), "gain", init="bias")
