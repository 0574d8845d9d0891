"""The spec language as types: one model file, one workload file, the planner's pins.

Frozen, unknown keys refused, no silent conversion. Relations between fields are checked
in semantics.py, so that every problem of a file comes in one pass.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, SerializeAsAny, model_validator
from pydantic_core import PydanticCustomError

from moec.blocks.core.declare import BlockFields, NormFields, NormOverride
from moec.targets.target import ExpertFloat, Float, FloatOrFp8, Target

from ..problems import Problem

if TYPE_CHECKING:
    from ..graph.ir import Graph

Positive = Annotated[int, Field(gt=0)]
Name = Annotated[str, Field(pattern=r"^[a-z0-9][a-z0-9._-]*$")]
BlockName = Annotated[str, Field(min_length=1)]
# A bare name is spread to a list of one (validate.spread_sugar).
BlockNames = Annotated[tuple[BlockName, ...], Field(strict=False, min_length=1)]
# YAML has lists only; strictness applies to the items.
Strings = Annotated[tuple[str, ...], Field(strict=False)]
Placement = Literal["replicated", "sharded"]


def _integer(value: Any) -> Any:
    """Literal compares with ==, and true and 1.0 equal 1."""
    if isinstance(value, bool | float):
        raise PydanticCustomError("literal_error", "must be an integer")
    return value


_PATTERN = "[gdn, gdn, gdn, gqa] or [{mixer: gdn, ffn: moe, repeat: 3}, {mixer: gqa, ffn: moe}]"


class Frozen(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)


class Residual(Frozen):
    """How blocks add to the residual stream; a bare form means {form: ...}.

    form: pre x + f(n(x)); post x + n(f(x)); sandwich x + n2(f(n1(x))); parallel x + f(n(x)) + g(n(x));
    normed_skip n(x) + f(n(x)). scale: factor of what is added; skip: of what is kept; ffn_form, ffn_scale,
    ffn_skip: those of the ffn slot where they differ. branch_norms: blocks that share an addition have norms of
    their own. layer_scale: a stored scalar multiplies the layer's result.
    """

    form: Literal["pre", "post", "sandwich", "parallel", "normed_skip"] = "pre"
    scale: float = 1.0
    skip: float = 1.0
    ffn_form: Literal["pre", "post", "sandwich", "normed_skip"] | None = None
    ffn_scale: float | None = None
    ffn_skip: float | None = None
    branch_norms: bool = False
    layer_scale: bool = False


class Defaults(Frozen):
    """What every layer uses unless it says otherwise."""

    norm: NormFields = NormFields()
    residual: Residual = Residual()


class Embed(Frozen):
    """scale: factor of the embedding rows."""

    scale: float = 1.0


class Override(Frozen):
    """Block fields one layer entry changes."""

    mixer: dict[str, Any] = {}
    ffn: dict[str, Any] = {}


class LayerEntry(Frozen):
    """`repeat` equal layers: names of declared blocks for the two residual slots, one of which may stay empty.

    ffn: null = the group's ffn; several blocks run side by side. residual: null = the model's default.
    """

    mixer: BlockName | None = None
    ffn: BlockNames | None = None
    repeat: Positive = 1
    residual: Residual | None = None
    override: Override = Override()


class LayerGroup(Frozen):
    """`repeat` times the pattern. An entry that is only a name means {mixer: name}."""

    repeat: Positive = 1
    pattern: Annotated[tuple[LayerEntry, ...], Field(strict=False, min_length=1, examples=[_PATTERN])]
    ffn: BlockNames | None = None

    @property
    def num_layers(self) -> int:
        return self.repeat * sum(entry.repeat for entry in self.pattern)


class Head(Frozen):
    """logits = cap * tanh(scale * (h @ w + bias) / cap). tied: w is the embedding table; softcap null = no cap."""

    tied: bool = False
    bias: bool = False
    scale: float = 1.0
    softcap: float | None = Field(default=None, gt=0)


class AttentionPins(Frozen):
    """Devices per role of the mixers; null = the planner chooses."""

    dp: Positive | None = None
    tp: Positive | None = None


class ExpertPins(Frozen):
    """Devices per role of the routed experts; null = the planner chooses."""

    ep: Positive | None = None
    tp: Positive | None = None


class MeshPins(Frozen):
    attention: AttentionPins = AttentionPins()
    experts: ExpertPins = ExpertPins()


class DtypePins(Frozen):
    """Dtypes the user fixes; null = the planner chooses."""

    activation: Float | None = None
    weight: FloatOrFp8 | None = None
    expert: ExpertFloat | None = None
    kv: FloatOrFp8 | None = None
    state: Float | None = None
    conv: Float | None = None
    gather: Literal["activation", "float8_e4m3fn"] | None = None
    expert_rows: Literal["activation", "float8_e4m3fn"] | None = None
    scale_block: Annotated[Literal[128, 512], BeforeValidator(_integer)] | None = None


class PlanPins(Frozen):
    """Root `plan`: decisions the user fixes; null = the planner chooses.

    max_batched_tokens, max_seqs: per attention-DP rank. variants: block, or part ("router") -> its variant.
    """

    attention: AttentionPins = AttentionPins()
    experts: ExpertPins = ExpertPins()
    embed: Placement | None = None
    head: Placement | None = None
    shared_expert: Placement | None = None
    mlp: Placement | None = None
    dtypes: DtypePins = DtypePins()
    page_size: Positive | None = None
    max_batched_tokens: Positive | None = None
    max_seqs: Positive | None = None
    variants: dict[str, str] = {}


class TensorRule(Frozen):
    """What one stored tensor holds; a bare weight name means {into: name}, a bare list {either: [...]}.

    either: one of these weights, whichever the layer has.
    split: the out rows of these weights in order; with groups, within each of so many equal
    groups of rows. interleave: their out rows alternate.
    transpose: whether the stored matrix must be transposed to [in, out]; null = as the
    weight declares (linear weights are stored [out, in]).
    flat: the experts' matrices one below the other, [experts * rows, columns].
    packed: 4-bit values with block scales beside them (blocks.core.array_info.PACKED).
    """

    into: str | None = None
    either: Strings | None = None
    split: Strings | None = None
    groups: Annotated[int, Field(gt=1)] | None = None
    interleave: Strings | None = None
    transpose: bool | None = None
    flat: bool = False
    packed: Literal["mxfp4", "int4"] | None = None


class Scales(Frozen):
    """Block scales of quantised tensors: stored as NAME + suffix, value = quantised * scale."""

    suffix: str
    block: Annotated[tuple[Positive, Positive], Field(strict=False)]


class Checkpoint(Frozen):
    """Where checkpoints keep the weights. Several patterns may give the same weight: alternatives.

    prefix: what `{prefix}` in the patterns stands for; several = alternatives.
    ignore: fnmatch patterns of stored tensors nobody needs.
    """

    prefix: Strings = ()
    ignore: Strings = ()
    scales: Scales | None = None
    tensors: dict[str, TensorRule]


class ModelSpec(Frozen):
    """Root `model`: one architecture. max_context: the most positions it was made for."""

    spec_version: Annotated[Literal[1], BeforeValidator(_integer)]
    name: Name
    hidden_size: Positive
    vocab_size: Positive
    max_context: Positive
    num_layers: Positive | None = None  # checked against the sum of `layers`
    defaults: Defaults = Defaults()
    embed: Embed = Embed()
    blocks: Annotated[dict[str, SerializeAsAny[BlockFields]], Field(min_length=1)]
    layers: Annotated[tuple[LayerGroup, ...], Field(strict=False, min_length=1)]
    final_norm: NormOverride = NormOverride()
    head: Head = Head()
    mesh: MeshPins = MeshPins()
    checkpoint: Checkpoint | None = None


class Workload(Frozen):
    """Root `workload`: what is served.

    isl, osl: prompt and output tokens per sequence; concurrency: sequences at once, all
    devices together; max_context: positions a sequence may reach, null = isl + osl.
    """

    name: Name
    isl: Positive
    osl: Positive
    concurrency: Positive
    max_context: Positive = Field(default_factory=lambda fields: fields["isl"] + fields["osl"])

    @model_validator(mode="before")
    @classmethod
    def _null_is_default(cls, data: Any) -> Any:
        if isinstance(data, dict) and data.get("max_context", 0) is None:
            return {key: value for key, value in data.items() if key != "max_context"}
        return data


def _anywhere(problem: Problem) -> Problem:
    return problem


@dataclass(frozen=True)
class Request:
    """Everything the user asked for, checked.

    pins: plan overrides on top of the model file's `mesh`. digests: sha256 of the
    composed roots by name ("spec", "target", "workload", "overrides"). model_source,
    workload_source: name or file as the user gave it, to load the same again. locate: a problem that was
    found later, with the place where the first of its paths was written.
    """

    model: ModelSpec
    graph: "Graph"
    target: Target | None
    workload: Workload | None
    pins: PlanPins
    overrides: tuple[str, ...]
    digests: dict[str, str]
    model_source: str = ""
    workload_source: str | None = None
    locate: Callable[[Problem], Problem] = field(default=_anywhere, compare=False, repr=False)
