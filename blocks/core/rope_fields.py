"""Rotary embeddings as a spec declares them; rope_spec.py is what programs write, rope.py computes. No jax."""

import math
from dataclasses import fields as fields_of
from dataclasses import is_dataclass
from typing import Annotated, Any, Literal

from pydantic import Field

from .declare import Declared, FieldProblem
from .rope_spec import (
    LinearScaling,
    LongRopeScaling,
    ProportionalScaling,
    Rope,
    Scaling,
    WavelengthScaling,
    YarnScaling,
)

_MODULE = "moec.blocks.core.rope_spec"
_TEXT_WIDTH = 80  # beyond it a constructor is written one argument a line
_SCALINGS: dict[str, type[Scaling]] = {
    "linear": LinearScaling,
    "yarn": YarnScaling,
    "wavelength": WavelengthScaling,
    "proportional": ProportionalScaling,
    "longrope": LongRopeScaling,
}
# What a kind needs, and what it may have.
_NEEDS: dict[str, tuple[str, ...]] = {
    "linear": ("factor",),
    "yarn": ("factor", "original_max_position"),
    "wavelength": ("factor", "original_max_position", "low_freq_factor", "high_freq_factor"),
    "proportional": ("rotated",),
    "longrope": ("factors",),
}
_MAY: dict[str, tuple[str, ...]] = {
    "yarn": ("attention_factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim", "truncate"),
    "proportional": ("factor",),
    "longrope": ("attention_factor",),
}


class ScalingFields(Declared):
    """How frequencies differ from theta^(-2i/dim); which fields belong to which kind: _NEEDS and _MAY.

    attention_factor multiplies the rotated dims of queries and keys; null with yarn: m(mscale) / m(mscale_all_dim)
    when both are given, else m(1), with m(s) = 0.1 s ln(factor) + 1; null with longrope: 1. mscale_all_dim alone only
    scales scores (score_mscale), where the block has them scaled.
    """

    kind: Literal["linear", "yarn", "wavelength", "proportional", "longrope"]
    factor: float | None = Field(default=None, gt=0)
    original_max_position: int | None = Field(default=None, gt=0)
    attention_factor: float | None = Field(default=None, gt=0)
    beta_fast: float | None = Field(default=None, gt=0)
    beta_slow: float | None = Field(default=None, gt=0)
    mscale: float | None = Field(default=None, gt=0)
    mscale_all_dim: float | None = Field(default=None, gt=0)
    truncate: bool | None = None
    low_freq_factor: float | None = Field(default=None, gt=0)
    high_freq_factor: float | None = Field(default=None, gt=0)
    rotated: int | None = Field(default=None, gt=0)
    factors: Annotated[tuple[float, ...], Field(strict=False)] | None = None


class RopeFields(Declared):
    """Rotary embedding on the first `dim` dims of each head. pairing: half = (i, i+dim/2), interleaved = (2i, 2i+1)."""

    dim: int = Field(gt=0)
    theta: float = Field(gt=0)
    pairing: Literal["half", "interleaved"] = "half"
    scaling: ScalingFields | None = None


def yarn_mscale(factor: float, mscale: float = 1.0) -> float:
    """m(mscale) = 0.1 * mscale * ln(factor) + 1, and 1 for factors up to 1 (arXiv:2309.00071, as in transformers)."""
    return 0.1 * mscale * math.log(factor) + 1.0 if factor > 1 else 1.0


def score_mscale(fields: RopeFields | None) -> float:
    """m(mscale_all_dim), whose square latent attention multiplies its score scale with; 1 where it is not given."""
    scaling = fields.scaling if fields else None
    if scaling is None or scaling.kind != "yarn" or not scaling.factor or not scaling.mscale_all_dim:
        return 1.0
    return yarn_mscale(scaling.factor, scaling.mscale_all_dim)


def check_rope(fields: RopeFields | None, head_dim: int, *, scores: bool) -> list[FieldProblem]:
    """Problems, with paths below ("rope",): dim is even and fits in the head, a scaling has just its own fields.

    scores: whether the block multiplies its scores with score_mscale(fields)^2.
    """
    if fields is None:
        return []
    problems = []
    if fields.dim > head_dim or fields.dim % 2:
        text = f"rope dim {fields.dim} must be even and at most head_dim {head_dim}"
        problems.append(FieldProblem(("rope", "dim"), text))
    if fields.theta <= 1:
        problems.append(FieldProblem(("rope", "theta"), f"rope theta {fields.theta} must be above 1"))
    return problems + (_check_scaling(fields.scaling, fields.dim, scores) if fields.scaling else [])


def _check_scaling(scaling: ScalingFields, dim: int, scores: bool) -> list[FieldProblem]:
    path, kind = ("rope", "scaling"), scaling.kind
    given = {name for name, value in scaling if value is not None} - {"kind"}
    needs, may = _NEEDS[kind], _MAY.get(kind, ())
    problems = [FieldProblem(path, f"{kind} scaling needs {name}") for name in needs if name not in given]
    legal = f"{kind} has: {', '.join((*needs, *may))}"
    problems += [
        FieldProblem((*path, name), f"{name} has no effect on {kind} scaling", legal)
        for name in sorted(given - {*needs, *may})
    ]
    return problems or [*_check_values(scaling, dim), *_check_mscale(scaling, scores)]


def _check_values(scaling: ScalingFields, dim: int) -> list[FieldProblem]:
    """Relations between the fields of a scaling that has all it needs."""
    problems = []
    if scaling.factors is not None and (len(scaling.factors) != dim // 2 or min(scaling.factors) <= 0):
        text = f"{len(scaling.factors)} factors: {dim // 2} positive ones are needed, one per pair of dim {dim}"
        problems.append(FieldProblem(("rope", "scaling", "factors"), text))
    if scaling.rotated is not None and (scaling.rotated % 2 or scaling.rotated > dim):
        text = f"rotated {scaling.rotated} must be even and at most dim {dim}"
        problems.append(FieldProblem(("rope", "scaling", "rotated"), text))
    fast, slow = scaling.beta_fast, scaling.beta_slow
    if fast is not None and slow is not None and slow > fast:
        text = f"beta_slow {slow} must not be above beta_fast {fast}: they count turns"
        problems.append(FieldProblem(("rope", "scaling", "beta_slow"), text))
    low, high = scaling.low_freq_factor, scaling.high_freq_factor
    if low is not None and high is not None and low >= high:
        text = f"low_freq_factor {low} must be below high_freq_factor {high}"
        problems.append(FieldProblem(("rope", "scaling", "low_freq_factor"), text))
    return problems


def _check_mscale(scaling: ScalingFields, scores: bool) -> list[FieldProblem]:
    """mscale and mscale_all_dim together make the attention factor; mscale_all_dim alone can only scale scores."""
    path, given = ("rope", "scaling"), scaling.attention_factor is not None
    problems = []
    if scaling.mscale and given:
        text = "mscale has no effect beside attention_factor"
        problems.append(FieldProblem((*path, "mscale"), text, "remove one"))
    elif scaling.mscale and not scaling.mscale_all_dim:
        text = "mscale has no effect without mscale_all_dim"
        problems.append(FieldProblem((*path, "mscale"), text, "remove it, or add mscale_all_dim"))
    if scaling.mscale_all_dim and not scores and (given or not scaling.mscale):
        text = "mscale_all_dim has no effect " + ("beside attention_factor" if given else "without mscale")
        problems.append(FieldProblem((*path, "mscale_all_dim"), f"{text} where it does not scale scores", "remove it"))
    return problems


def rope_of(fields: RopeFields | None) -> Rope | None:
    """The rotary embedding that programs and references compute with; fields must have passed check_rope."""
    if fields is None:
        return None
    return Rope(
        fields.dim, fields.theta, fields.pairing, _scaling_of(fields.scaling), _attention_factor(fields.scaling)
    )


def rope_text(fields: RopeFields) -> str:
    """Constructor text of rope_of(fields), defaults left out: `Rope(dim=64, theta=10000000.0)`; long ones on lines."""
    arguments = _arguments(rope_of(fields))
    text = f"Rope({', '.join(arguments)})"
    if len(text) <= _TEXT_WIDTH:
        return text
    return "Rope(\n" + "".join(f"    {argument},\n" for argument in arguments) + ")"


def rope_imports(fields: RopeFields | None) -> tuple[tuple[str, str], ...]:
    """(module, name) of every class rope_text names."""
    if fields is None:
        return ()
    scaling = ((_MODULE, _SCALINGS[fields.scaling.kind].__name__),) if fields.scaling else ()
    return ((_MODULE, "Rope"), *scaling)


def _scaling_of(scaling: ScalingFields | None) -> Scaling | None:
    if scaling is None:
        return None
    cls = _SCALINGS[scaling.kind]
    names = {field.name for field in fields_of(cls)}
    return cls(**{name: value for name, value in scaling if name in names and value is not None})


def _attention_factor(scaling: ScalingFields | None) -> float:
    if scaling is None:
        return 1.0
    if scaling.attention_factor is not None or scaling.kind != "yarn":
        return scaling.attention_factor or 1.0
    factor = scaling.factor or 1.0
    if scaling.mscale and scaling.mscale_all_dim:
        return yarn_mscale(factor, scaling.mscale) / yarn_mscale(factor, scaling.mscale_all_dim)
    return yarn_mscale(factor)


def _arguments(value: Any) -> list[str]:
    """`name=value` of a dataclass's fields, without those that have their default."""
    found = [(field.name, getattr(value, field.name), field.default) for field in fields_of(value)]
    return [f"{name}={_text(one)}" for name, one, default in found if one != default]


def _text(value: Any) -> str:
    if is_dataclass(value):
        return f"{type(value).__name__}({', '.join(_arguments(value))})"
    return f'"{value}"' if isinstance(value, str) else repr(value)
