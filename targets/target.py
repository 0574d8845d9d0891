"""Machines as data: one chip.yaml and one topologies.yaml per chip; every number says where it comes from.

A `target` document is the keys of chip.yaml plus `topology`, the chosen entry of
topologies.yaml. "Device" is what JAX calls a device: one core of a tpu7x chip (a chip has
two), a whole v6e or v5p chip, one virtual CPU device. Numbers are per device unless their
key says chip.
"""

import json
from collections.abc import Mapping
from itertools import pairwise
from math import prod
from pathlib import Path
from typing import Annotated, Any, Literal

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationInfo, field_validator, model_validator
from pydantic_core import PydanticCustomError

HERE = Path(__file__).parent

# published: vendor documentation. benchmark: a third party's published measurement.
# compiler: asked of the compiler. fitted: from benchmark points in the same file.
# inferred: follows from other numbers. assumption: nobody's number. override: from the command line.
Kind = Literal["published", "benchmark", "compiler", "fitted", "inferred", "assumption", "override"]

# What the blocks compute and store in, as plan.dtypes has it.
Float = Literal["float32", "bfloat16"]
TargetName = Annotated[str, Field(pattern=r"^[a-z0-9_]+(:[a-z0-9_]+)?$")]  # it reaches emitted text
FloatOrFp8 = Literal["float32", "bfloat16", "float8_e4m3fn"]
ExpertFloat = Literal["float32", "bfloat16", "float8_e4m3fn", "float4_e2m1fn", "int4"]

# Coordinates of curves: what is divided by, or enters a logarithm.
Above = Annotated[float, Field(ge=1e-6, le=1e15, allow_inf_nan=False)]
Size = Annotated[int, Field(gt=0, le=2**20)]


class Frozen(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class Value(Frozen):
    """One number with its origin; a bare number (an override) becomes one."""

    value: float = Field(ge=0, le=1e12, allow_inf_nan=False)
    kind: Kind
    source: str

    @model_validator(mode="before")
    @classmethod
    def _bare_number(cls, data: Any) -> Any:
        if isinstance(data, int | float) and not isinstance(data, bool):
            return {"value": data, "kind": "override", "source": "given by the user"}
        return data


class Rate(Value):
    """A speed: time is something over it."""

    value: float = Field(ge=1e-6, le=1e12, allow_inf_nan=False)


class Capacity(Value):
    """GiB of memory."""

    value: float = Field(gt=0, le=2**20, allow_inf_nan=False)


class Count(Value):
    """A whole number of things."""

    value: float = Field(ge=1, le=2**20, multiple_of=1, allow_inf_nan=False)


class LeastRows(Count):
    """Rows.least of one dtype."""

    @model_validator(mode="before")
    @classmethod
    def _needed(cls, data: Any) -> Any:
        if data is None:
            raise PydanticCustomError("rows_needed", "needed, because target.peak_tflops has this dtype")
        return data


class Curve(Frozen):
    """Measured points (x, y) with x rising; a single point is a constant."""

    points: tuple[tuple[Above, Above], ...] = Field(min_length=1)
    kind: Kind
    source: str

    @field_validator("points")
    @classmethod
    def _rising(cls, points: tuple[tuple[float, float], ...]) -> tuple[tuple[float, float], ...]:
        if any(a[0] >= b[0] for a, b in pairwise(points)):
            raise PydanticCustomError("not_rising", "x must rise from point to point")
        return points


class ChipLink(Frozen):
    """Links between chips: time = alpha + bytes a chip takes in / bandwidth.

    gbps_per_link: one link, one way, as achieved. all_to_all_gbps_per_link: the same for
    all-to-all. fit_points: (GB, GB/s per chip) of an all-gather over fit_links links per chip.
    """

    alpha_us: Value
    gbps_per_link: Rate
    all_to_all_gbps_per_link: Rate
    fit_links: int = Field(default=0, ge=0)
    fit_points: Curve | None = None


class CoreLink(Frozen):
    """The link between the devices of one chip: time = alpha + bytes exchanged / bandwidth (one way)."""

    alpha_us: Value
    gbps: Rate


class SparseCores(Frozen):
    """Offload cores per device.

    device_kind, device_cores: what jax calls such a device and how many TensorCores it has, which kernels for these
    cores are traced for. clock_ghz: of a subcore, one bundle per cycle. launch_us: until a kernel's first bundle.
    """

    num: Value
    subcores: Value
    lanes: Value
    vmem_kib: Value
    device_kind: str
    device_cores: Count
    clock_ghz: Rate
    launch_us: Value


class Rows(Frozen):
    """Rows of a matrix product. least: fewer take as long, by operand dtype; full: so many keep the unit busy."""

    least: dict[str, LeastRows]
    full: Count


class Tiling(Frozen):
    """How arrays are padded in device memory: two dims in tiles of sublanes x lanes (1 x 1 = not at all)."""

    sublanes: Size
    lanes: Size
    source: str


class Dtypes(Frozen):
    """Default dtypes and why. scaled_expert: experts whose checkpoint carries block scales; packed_expert:
    those whose checkpoint packs 4-bit values ("stored": in these). gather, expert_rows: plan.dtypes has them."""

    activation: Float
    weight: FloatOrFp8
    expert: ExpertFloat
    scaled_expert: ExpertFloat
    packed_expert: ExpertFloat | Literal["stored"]
    kv: FloatOrFp8
    state: Float
    conv: Float
    gather: Literal["activation", "float8_e4m3fn"] = "activation"
    expert_rows: Literal["activation", "float8_e4m3fn"] = "activation"
    source: str


class Bands(Frozen):
    """How far predictions for this chip may be off, in percent, and what says so."""

    step_time_pct: Value
    memory_pct: Value


class Serving(Frozen):
    """Default step sizes. batched_tokens_per_device: tokens of a mixed step."""

    page_size: int = Field(gt=0)
    batched_tokens_per_device: int = Field(gt=0)
    source: str


class Topology(Frozen):
    """One accepted arrangement of chips.

    name: what users write. dims: chips per torus dim. ici_links: links of the least
    connected chip; wraparound links count only where every dim is at least 4.
    """

    name: TargetName
    dims: tuple[Size, ...] = Field(min_length=1)
    num_chips: Size
    num_devices: int = Field(gt=0, le=2**16)
    num_hosts: Size
    ici_links: int = Field(ge=0)
    aliases: tuple[str, ...] = ()

    @field_validator("num_chips")
    @classmethod
    def _fill_dims(cls, chips: int, info: ValidationInfo) -> int:
        dims = info.data.get("dims", (chips,))
        if chips != prod(dims):
            facts = {"dims": " x ".join(map(str, dims)), "chips": prod(dims), "given": chips}
            raise PydanticCustomError("chips", "dims {dims} are {chips} chips, not num_chips={given}", facts)
        return chips


class Target(Frozen):
    """A chip and how many of them, in which shape.

    peak_tflops: dense matrix units by operand dtype; a dtype that is absent is not computed
    natively. hbm_gib: what the compiler lets a program use; hbm_reserve_gib: what the
    runtime keeps of that for itself. hbm_copy: (bytes, GB/s). gemm: (m = n = k, TFLOP/s).
    rows: how many rows a matrix product should have. layer_overhead_us: fixed cost of one
    layer that work terms do not show.
    conflicts: where sources disagree, and which one these files follow.
    """

    chip: TargetName
    platform: Literal["cpu", "tpu"]
    topology: Topology  # ahead of what is checked against it
    devices_per_chip: Count
    hbm_gib: Capacity
    hbm_reserve_gib: Value
    hbm_nameplate_gib: Value
    hbm_gbps: Rate
    hbm_copy: Curve
    peak_tflops: dict[str, Value]
    vector_tflops: Rate
    gemm: Curve
    gemm_dtype: str
    rows: Rows
    clock_ghz: Rate | None = None
    vmem_mib: Value | None = None
    smem_kib: Value | None = None
    sparse_cores: SparseCores | None = None
    tiling: Tiling
    ici: ChipLink
    d2d: CoreLink | None = Field(default=None, validate_default=True)
    layer_overhead_us: Value
    bands: Bands
    dtypes: Dtypes
    serving: Serving
    compile_options: dict[str, str | bool]
    conflicts: tuple[str, ...] = ()

    @model_validator(mode="before")
    @classmethod
    def _rows_of_every_dtype(cls, data: Any) -> Any:
        """A missing entry of rows.least becomes null, so that the message has its path."""
        peaks, rows = (data.get("peak_tflops"), data.get("rows")) if isinstance(data, Mapping) else (None, None)
        least = rows.get("least") if isinstance(rows, Mapping) else None
        if not isinstance(peaks, Mapping) or not isinstance(rows, Mapping) or not isinstance(least, Mapping):
            return data
        return {**data, "rows": {**rows, "least": {**dict.fromkeys(peaks), **least}}}

    @field_validator("devices_per_chip")
    @classmethod
    def _fill_chips(cls, cores: Count, info: ValidationInfo) -> Count:
        shape = info.data.get("topology")
        if shape and cores.value * shape.num_chips != shape.num_devices:
            facts = {"name": shape.name, "devices": shape.num_devices, "chips": shape.num_chips}
            facts["cores"] = f"{cores.value:g}"
            text = "{name} has {devices} devices on {chips} chips, which {cores} per chip do not fill"
            raise PydanticCustomError("devices", text, facts)
        return cores

    @field_validator("gemm_dtype")
    @classmethod
    def _has_a_peak(cls, dtype: str, info: ValidationInfo) -> str:
        peaks = info.data.get("peak_tflops")
        if peaks is not None and (dtype not in peaks or not peaks[dtype].value):
            valid = ", ".join(name for name, peak in peaks.items() if peak.value) or "none"
            raise PydanticCustomError("gemm_dtype", "must be a dtype with a peak_tflops ({valid})", {"valid": valid})
        return dtype

    @field_validator("d2d")
    @classmethod
    def _devices_are_linked(cls, link: CoreLink | None, info: ValidationInfo) -> CoreLink | None:
        cores = info.data.get("devices_per_chip")
        if link is None and cores and cores.value > 1:
            raise PydanticCustomError("d2d", "needed, because a chip has several devices")
        return link

    @property
    def name(self) -> str:
        """What users write, e.g. "tpu7x:2x2x1"."""
        return self.topology.name

    @property
    def num_devices(self) -> int:
        return self.topology.num_devices

    @property
    def cores(self) -> int:
        """Devices per chip."""
        return int(self.devices_per_chip.value)

    @property
    def usable_bytes(self) -> int:
        """HBM per device a program may use, before the runtime's reserve."""
        return int(self.hbm_gib.value * 2**30)

    @property
    def reserve_bytes(self) -> int:
        return int(self.hbm_reserve_gib.value * 2**30)

    def row_tile(self, dtype: str) -> int:
        """Rows a product of `dtype` operands takes at least."""
        return int(self.rows.least[dtype].value)

    def matrix_dtypes(self) -> tuple[str, ...]:
        """Operand dtypes the matrix units compute natively."""
        return tuple(sorted(name for name, peak in self.peak_tflops.items() if peak.value > 0))


def origins(node: object) -> list[Value | Curve]:
    """Every number with an origin below a part of a target."""
    found = [node] if isinstance(node, Value | Curve) else []
    fields = type(node).model_fields if isinstance(node, BaseModel) else {}
    children = [getattr(node, name) for name in fields] + (list(node.values()) if isinstance(node, dict) else [])
    return found + [one for child in children for one in origins(child)]


def parse_name(name: str) -> tuple[str, str]:
    """(chip, topology) of "tpu7x:2x2x1", of an alias ("tpu7x-8") or of a chip alone that has one ("cpu").

    Raises ValueError that says which part is unknown and what would be accepted.
    """
    word = name.strip().lower()
    chips = chip_names()
    chip = next((c for c in chips if word == c or word.startswith((f"{c}:", f"{c}-"))), None)
    if chip is None:
        raise ValueError(f"unknown target '{name}': no such chip; chips: {', '.join(chips)}")
    topologies = read_topologies(chip)
    for key, entry in topologies.items():
        if word in (f"{chip}:{key}", entry["name"], *entry.get("aliases", ())):
            return chip, key
    accepted = ", ".join(topologies)
    raise ValueError(f"unknown target '{name}': {chip} has no such topology; write {chip}: and one of {accepted}")


def target_names() -> tuple[str, ...]:
    """Every target users may name, without aliases."""
    return tuple(entry["name"] for chip in chip_names() for entry in read_topologies(chip).values())


def chip_names() -> tuple[str, ...]:
    """Chips with a data folder."""
    return tuple(sorted(path.parent.name for path in HERE.glob("*/chip.yaml")))


def read_topologies(chip: str) -> dict[str, Any]:
    """topologies.yaml of a chip: topology -> its entry."""
    return _read(HERE / chip / "topologies.yaml")


def read_tuned(chip: str) -> dict[str, Any]:
    """Tuned tiles of a chip by kernel (`<block>.<variant>`); {} where none are (format: tuned/README.md)."""
    paths = sorted((HERE / chip / "tuned").glob("*.json"))
    return {path.stem: json.loads(path.read_text(encoding="utf-8")) for path in paths}


def load_target(name: str) -> Target:
    """The shipped target, without overrides (compiler/spec/load.py composes it with them)."""
    chip, topology = parse_name(name)
    return Target.model_validate({**_read(HERE / chip / "chip.yaml"), "topology": read_topologies(chip)[topology]})


def _read(path: Path) -> dict[str, Any]:
    return yaml.safe_load(path.read_text(encoding="utf-8"))
