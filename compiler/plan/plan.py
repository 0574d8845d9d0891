"""The plan: everything the emitter needs and everything a person wants to know why. Frozen data, plan.json."""

from typing import Literal

from pydantic import BaseModel, ConfigDict

Placement = Literal["replicated", "sharded"]
Reason = Literal["CHOSEN", "INDIVISIBLE", "HBM", "UNSUPPORTED", "DOMINATED", "PINNED", "TIE"]


class Frozen(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class MeshPlan(Frozen):
    """Mesh axes major to minor, and which axes each role uses.

    axes: ((name, size), ...); at most three: "data", "inner", "tensor". Axes of size 1 are left
    out, except that one device keeps ("data", 1), because a mesh needs an axis.
    attention_dp + attention_tp, and expert_ep + expert_tp, each cover all axes in order.
    """

    axes: tuple[tuple[str, int], ...]
    attention_dp: tuple[str, ...]
    attention_tp: tuple[str, ...]
    expert_ep: tuple[str, ...]
    expert_tp: tuple[str, ...]

    def size(self, names: tuple[str, ...]) -> int:
        """Number of devices along the named axes."""
        sizes = dict(self.axes)
        total = 1
        for name in names:
            total *= sizes[name]
        return total

    @property
    def num_devices(self) -> int:
        return self.size(tuple(name for name, _ in self.axes))

    @property
    def dp(self) -> int:
        return self.size(self.attention_dp)

    @property
    def tp(self) -> int:
        return self.size(self.attention_tp)

    @property
    def ep(self) -> int:
        return self.size(self.expert_ep)

    @property
    def etp(self) -> int:
        return self.size(self.expert_tp)


class DtypePlan(Frozen):
    """numpy/ml_dtypes names. weight: linear, router, embed and head matrices and gains.

    gather: hidden states on their way to experts of other ranks; expert_rows: token rows in products with float8
    experts; "activation" = as they are. scale_block: edge of the squares of float8 experts under one scale.
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


class BucketPlan(Frozen):
    """A static step shape (blocks.core.batch.Bucket) and its name in the emitted program."""

    name: str
    tokens_per_rank: int
    seqs_per_rank: int
    max_q: int
    pages_per_seq: int


class CollectivePlan(Frozen):
    """One collective of one bucket's step.

    scope: a block instance name (once per layer that uses the block, inside the scan body) or
    "step" (once per step). shape: the full array: what an all-gather yields, what a
    reduce-scatter takes, what an all-reduce sums, what one device holds before an all-to-all.
    predicted_us: alpha-beta time of one call (an estimate, see Plan.estimates for the band).
    """

    bucket: str
    scope: str
    op: Literal["all-gather", "reduce-scatter", "all-reduce", "all-to-all"]
    axes: tuple[str, ...]
    dtype: str
    shape: tuple[int, ...]
    what: str
    bytes: int = 0
    predicted_us: float = 0.0


class MemoryPlan(Frozen):
    """Bytes per device. components: what they are (weights by block, kv, state, conv, ...)."""

    components: dict[str, int]
    arguments_bytes: int
    temp_bytes: dict[str, int]  # per bucket
    reserve_bytes: int
    usable_bytes: int


class CachePool(Frozen):
    """One pool of the state on one device: pages of tokens or slots of sequences, all layers of its block.

    entries: pages or slots, the sink among them. bytes: of one entry's values; padded_bytes: what it takes in device
    memory, tiles filled up. per_sequence: entries of a sequence of full length.
    """

    key: str
    kind: Literal["pages", "slots"]
    entries: int
    bytes: int
    padded_bytes: float
    per_sequence: int


class Estimate(Frozen):
    """A predicted number: never a measurement.

    band_pct: how far it may be off; 0 when it is a bound or a definition. band_from: what says so.
    """

    value: float
    unit: str
    band_pct: float
    band_from: str
    provenance: str
    terms: dict[str, float] = {}


class StepTerm(Frozen):
    """Predicted time of one operator in one bucket's step.

    scope: block instance name, "embed", "head", "residual" or "overhead". layers: how often
    per step; us: one execution; binding: what limits it (HBM, MXU, VPU, SparseCore, ICI, D2D, fixed).
    """

    bucket: str
    scope: str
    op: str
    layers: int
    us: float
    binding: str


class VariantChoice(Frozen):
    """One implementation of a block, or of a part that a block calls, and what became of it.

    scope: block instance name, `<block>.<part>` or `unpermute.<bucket>`. us: predicted time of one layer by bucket,
    collectives included. vmem_bytes: on-chip memory its largest kernel takes; 0 = plain XLA. tiles_from: where each
    tile is from, e.g. {"chunk": ..., "block_rows.decode": ...}.
    """

    scope: str
    variant: str
    verdict: Literal["CHOSEN", "SLOWER", "REFUSED", "PINNED"]
    why: str
    us: dict[str, float] = {}
    vmem_bytes: int = 0
    tiles_from: dict[str, str] = {}


class ScaleChoice(Frozen):
    """One granularity of float8 experts' scales, a scale per square of edge x edge values, and what became of it.

    delta_us: predicted time of a step over that of the chosen one, by bucket. scale_bytes: all scales on one device,
    tiles filled up. A stored value moves by at most the larger of relative_error times itself and absolute_error times
    its block's largest when the weights are loaded (0 = not at all); LOSSY: so only a pin takes it.
    """

    edge: int
    verdict: Literal["CHOSEN", "LOSSY", "REFUSED", "PINNED"]
    why: str
    delta_us: dict[str, float] = {}
    scale_bytes: int = 0
    relative_error: float = 0.0
    absolute_error: float = 0.0


class Traffic(Frozen):
    """The workload's numbers: prompt and output tokens per sequence, sequences at once on all devices."""

    isl: int
    osl: int
    concurrency: int


class Candidate(Frozen):
    """One enumerated plan and what became of it. numbers: what the verdict rests on (units in names)."""

    attention: str
    experts: str
    embed: Placement
    head: Placement
    shared_expert: Placement
    mlp: Placement
    verdict: Reason
    why: str
    numbers: dict[str, float]


class Plan(Frozen):
    """The decision record of one (model, target, workload).

    model, workload: names; *_source: name or file as the user gave it, to plan the same again.
    """

    model: str
    model_source: str
    target: str
    workload: str
    workload_source: str
    digests: dict[str, str]  # spec, target, workload, overrides
    overrides: tuple[str, ...]
    mesh: MeshPlan
    dtypes: DtypePlan
    matmul_precision: Literal["default", "highest"]
    embed: Placement
    head: Placement
    shared_expert: Placement
    mlp: Placement
    variants: dict[str, str]  # block instance name, <block>.router, "collectives", "sampling", ... -> variant
    variant_choices: tuple[VariantChoice, ...] = ()
    scale_choices: tuple[ScaleChoice, ...] = ()  # () where experts are not float8
    tuning: dict[str, int]  # e.g. moe.block_rows.<bucket>, gdn.chunk
    page_size: int
    pages_per_rank: int
    slots_per_rank: int
    max_context: int
    buckets: tuple[BucketPlan, ...]
    collectives: tuple[CollectivePlan, ...]
    memory: MemoryPlan
    cache: tuple[CachePool, ...] = ()
    estimates: dict[str, Estimate]
    candidates: tuple[Candidate, ...]
    compile_options: dict[str, str | bool]
    chip: dict[str, int | tuple[str, ...]] = {}  # what kernels must respect: blocks.core.chip.ChipLimits
    device: tuple[str, int] | None = None  # kind and TensorCores, where a kernel is traced for one kind of device
    traffic: Traffic | None = None
    breakdown: tuple[StepTerm, ...] = ()
    notes: tuple[str, ...] = ()  # assumptions behind the estimates
