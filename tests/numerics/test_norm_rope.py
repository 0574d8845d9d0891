"""RMS norm and rope against float64 formulas.

Tolerance 1e-5 in float32: one reduction over <= 64 values. Rope turns by whole turns in integers and
by float32 angles within [-pi, pi]: 4e-7 rad of rounding and as much in sine and cosine, 2e-6 on values
up to 4, at any position. A wrong pairing or frequency is of order 1, and an angle in float32 would be
off by 0.04 rad at position 1e6.
"""

import math
from functools import partial
from typing import Literal

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from moec.blocks.core import rope_spec
from moec.blocks.core.declare import FieldProblem
from moec.blocks.core.norm import rms_norm
from moec.blocks.core.ref import rms_of, rotated
from moec.blocks.core.rope import rope
from moec.blocks.core.rope_fields import (
    RopeFields,
    ScalingFields,
    check_rope,
    rope_imports,
    rope_of,
    rope_text,
    score_mscale,
    yarn_mscale,
)
from moec.blocks.core.rope_spec import (
    LinearScaling,
    LongRopeScaling,
    ProportionalScaling,
    Rope,
    WavelengthScaling,
    YarnScaling,
    rope_frequencies,
)

turn = jax.jit(rope, static_argnums=2)
norm = jax.jit(rms_norm, static_argnames=("eps", "zero_centered"))


@pytest.mark.parametrize("zero_centered", [False, True])
def test_rms_norm_is_the_formula(zero_centered: bool) -> None:
    """Of rows of very different sizes; ref.rms_of is the same in numpy."""
    rng = np.random.default_rng(1)
    x, w = rng.normal(size=(3, 5, 64)) * 10.0 ** rng.integers(-3, 4, (3, 5, 1)), rng.normal(size=64)
    want = x / np.sqrt(np.mean(x * x, axis=-1, keepdims=True) + 1e-5) * (1 + w if zero_centered else w)
    got = norm(jnp.asarray(x, jnp.float32), jnp.asarray(w, jnp.float32), eps=1e-5, zero_centered=zero_centered)
    np.testing.assert_allclose(got, want, atol=1e-5, rtol=0)
    np.testing.assert_allclose(rms_of(x, w, eps=1e-5, zero_centered=zero_centered), want, atol=1e-9, rtol=0)


def test_rms_norm_without_gain() -> None:
    x = np.random.default_rng(2).normal(size=(4, 16))
    want = x / np.sqrt(np.mean(x * x, axis=-1, keepdims=True) + 1e-5)
    np.testing.assert_allclose(norm(jnp.asarray(x, jnp.float32), None, eps=1e-5, zero_centered=False), want, atol=1e-5)
    np.testing.assert_allclose(rms_of(x, eps=1e-5), want, atol=1e-9)


def test_rms_norm_of_a_dim_cut_over_devices_is_that_of_the_whole() -> None:
    rng = np.random.default_rng(3)
    x, w = (jnp.asarray(rng.normal(size=size), jnp.float32) for size in ((5, 24), (24,)))
    cut = partial(rms_norm, eps=1e-5, zero_centered=True, sum_axes=("parts",))
    parts = jax.vmap(cut, axis_name="parts")(jnp.stack(jnp.split(x, 3, axis=1)), w.reshape(3, 8))
    want = rms_norm(x, w, eps=1e-5, zero_centered=True)
    np.testing.assert_allclose(np.concatenate(parts, axis=1), want, atol=1e-5, rtol=0)


def test_epsilon_is_inside_the_root() -> None:
    got = norm(jnp.full((1, 4), 1e-3), jnp.ones(4), eps=1e-6, zero_centered=False)
    np.testing.assert_allclose(got, 1 / np.sqrt(2), rtol=1e-5)


@pytest.mark.parametrize("zero_centered", [False, True])
def test_rms_norm_rounds_where_checkpoints_expect(zero_centered: bool) -> None:
    """bfloat16: plain gain multiplies the rounded value, zero-centred gain multiplies before the one rounding."""
    rng, bf16 = np.random.default_rng(1), ml_dtypes.bfloat16
    x, w = rng.normal(size=(21, 32)).astype(bf16), rng.normal(size=32).astype(bf16)
    x64, w64 = x.astype(np.float64), w.astype(np.float64)
    normed = x64 / np.sqrt(np.mean(x64 * x64, axis=-1, keepdims=True) + 1e-6)
    want = (
        (normed * (1 + w64)).astype(bf16)
        if zero_centered
        else (normed.astype(bf16).astype(np.float64) * w64).astype(bf16)
    )
    got = norm(jnp.asarray(x), jnp.asarray(w), eps=1e-6, zero_centered=zero_centered)
    assert got.dtype == jnp.bfloat16
    # Equal bit for bit but where the float32 mean falls on the other side of a rounding edge.
    assert np.mean(np.asarray(got) == want) > 0.98


Pairing = Literal["half", "interleaved"]
ROPE_TOLERANCE = 2e-6


def rotate(x_TNH: np.ndarray, positions: np.ndarray, spec: Rope, frequencies: np.ndarray) -> np.ndarray:
    """Every pair by position * frequency, in float64."""
    out, half = x_TNH.copy(), spec.dim // 2
    for i, frequency in enumerate(frequencies):
        a, b = (i, i + half) if spec.pairing == "half" else (2 * i, 2 * i + 1)
        angle = positions[:, None] * frequency
        cos, sin = np.cos(angle) * spec.attention_factor, np.sin(angle) * spec.attention_factor
        out[..., a] = x_TNH[..., a] * cos - x_TNH[..., b] * sin
        out[..., b] = x_TNH[..., b] * cos + x_TNH[..., a] * sin
    return out


@pytest.mark.parametrize("pairing", ["half", "interleaved"])
@pytest.mark.parametrize("dim", [2, 8, 16])
def test_rope_rotates_its_pairs_and_passes_the_rest(dim: int, pairing: Pairing) -> None:
    rng, spec = np.random.default_rng(dim), Rope(dim, 1e4, pairing)
    x, positions = rng.normal(size=(27, 3, 16)).clip(-2.8, 2.8), rng.integers(0, 500, 27)
    want = rotate(x, positions, spec, 1e4 ** (-np.arange(0, dim, 2) / dim))
    got = np.asarray(turn(jnp.asarray(x, jnp.float32), jnp.asarray(positions, jnp.int32), spec))
    np.testing.assert_allclose(got, want, atol=ROPE_TOLERANCE, rtol=0)
    np.testing.assert_array_equal(got[..., dim:], x[..., dim:].astype(np.float32))
    one_head = turn(jnp.asarray(x[:, 1], jnp.float32), jnp.asarray(positions, jnp.int32), spec)
    np.testing.assert_array_equal(one_head, got[:, 1])


@pytest.mark.parametrize(("pairing", "theta"), [("half", 1e4), ("interleaved", 1e7)])
def test_rope_is_exact_at_any_position(pairing: Pairing, theta: float) -> None:
    """Tolerance as at small positions; the frequencies themselves are float64. ref.rotated is as exact."""
    rng, spec = np.random.default_rng(5), Rope(64, theta, pairing, attention_factor=1.25)
    ends = (4096, 131_072, 1_010_000, 2**31 - 1)
    positions = np.concatenate([rng.integers(last // 2, last, 200) for last in ends])
    x = rng.normal(size=(800, 1, 64)).clip(-2, 2)
    want = rotate(x, positions, spec, theta ** (-np.arange(0, 64, 2) / 64))
    np.testing.assert_allclose(rotated(x, positions, spec), want, atol=1e-6, rtol=0)
    got = turn(jnp.asarray(x, jnp.float32), jnp.asarray(positions, jnp.int32), spec)
    np.testing.assert_allclose(got, want, atol=ROPE_TOLERANCE, rtol=0)


def test_no_rope_changes_nothing() -> None:
    x = jnp.asarray(np.random.default_rng(0).normal(size=(4, 2, 8)), jnp.float32)
    np.testing.assert_array_equal(rope(x, jnp.arange(4), None), x)


@pytest.mark.parametrize("pairing", ["half", "interleaved"])
def test_scores_depend_on_the_distance_alone(pairing: Pairing) -> None:
    rng = np.random.default_rng(1)
    q, k = (jnp.asarray(rng.normal(size=(1, 1, 32)), jnp.float32) for _ in range(2))

    def score(q_position: int, k_position: int) -> float:
        turned = [turn(x, jnp.asarray([p]), Rope(32, 1e4, pairing)) for x, p in ((q, q_position), (k, k_position))]
        return float(jnp.sum(turned[0] * turned[1]))

    assert score(7, 3) == pytest.approx(score(1_000_007, 1_000_003), abs=1e-4)
    assert abs(score(7, 3) - score(7, 4)) > 1e-2


def test_bfloat16_is_rotated_in_float32() -> None:
    """At position 300 a bfloat16 angle would be off by up to 1 rad."""
    x, spec = np.random.default_rng(2).normal(size=(1, 2, 8)).astype(ml_dtypes.bfloat16), Rope(8, 1e4)
    got = turn(jnp.asarray(x), jnp.asarray([301]), spec)
    want = rotate(x.astype(np.float64), np.asarray([301]), spec, 1e4 ** (-np.arange(0, 8, 2) / 8))
    assert got.dtype == jnp.bfloat16
    np.testing.assert_allclose(np.asarray(got, np.float32), want, atol=2**-7 * 4, rtol=0)


# Pairs 0, 5, 10, ... of what transformers 5.24 computes (ROPE_INIT_FUNCTIONS, float32) for these parameters.
RECORDED: dict[str, tuple[Rope, list[float]]] = {
    "linear": (
        Rope(64, 1e4, scaling=LinearScaling(8.0)),
        [0.125, 0.02964217, 0.0070292661, 0.0016669019, 0.00039528473, 9.3736773e-05, 2.2228493e-05],
    ),
    "yarn_untruncated": (
        Rope(64, 1.5e5, scaling=YarnScaling(32.0, 4096, truncate=False)),
        [1, 0.15532298, 0.019335, 0.0010526022, 1.8188337e-05, 2.8250668e-06, 4.3879785e-07],
    ),
    "yarn": (
        Rope(64, 1e4, scaling=YarnScaling(40.0, 4096, beta_fast=16.0, beta_slow=2.0)),
        [1, 0.23713736, 0.056234129, 0.0090012699, 0.00042163703, 1.8747354e-05, 4.4456983e-06],
    ),
    "wavelength": (
        Rope(128, 5e5, scaling=WavelengthScaling(8.0, 1.0, 4.0, 8192)),
        [
            1,
            0.35873023,
            0.12868738,
            0.046164051,
            0.016560441,
            0.0059407307,
            0.0013718937,
            9.5562122e-05,
            3.4281024e-05,
            1.2297639e-05,
            4.4115345e-06,
            1.5825508e-06,
            5.6770881e-07,
        ],
    ),
    "proportional": (
        Rope(64, 1e6, scaling=ProportionalScaling(32, factor=2.0)),
        [0.5, 0.057739101, 0.0066676075, 0.00076996326, 0, 0, 0],
    ),
    "longrope": (Rope(16, 1e4, scaling=LongRopeScaling((1.0, 1.1, 1.3, 1.7, 2.5, 4.0, 8.0, 16.0))), [1, 0.00079056947]),
}


@pytest.mark.parametrize("name", RECORDED)
def test_scaled_frequencies_are_those_of_transformers(name: str) -> None:
    """Tolerance: theirs are float32 throughout, 2e-7 for a few roundings; 2e-6 where a ramp cancels."""
    spec, want = RECORDED[name]
    np.testing.assert_allclose(rope_frequencies(spec)[::5], want, rtol=2e-6, atol=0)


def test_proportional_rope_turns_the_first_pairs_of_the_whole_head() -> None:
    """Half pairs are (i, i + dim/2) over the whole head; the pairs from rotated/2 on stay as they are, bit for bit."""
    x, positions = np.random.default_rng(3).normal(size=(5, 2, 16)).astype(np.float32), np.arange(100, 105)
    got = np.asarray(turn(jnp.asarray(x), jnp.asarray(positions), Rope(16, 1e4, scaling=ProportionalScaling(6))))
    still = [3, 4, 5, 6, 7, 11, 12, 13, 14, 15]
    np.testing.assert_array_equal(got[..., still], x[..., still])
    angle = positions[:, None] * 1e4 ** (-4 / 16)
    want = x[..., 2] * np.cos(angle) - x[..., 10] * np.sin(angle)
    np.testing.assert_allclose(got[..., 2], want, atol=ROPE_TOLERANCE, rtol=0)


def fields_of(kind: str, **values: object) -> RopeFields:
    return RopeFields(dim=8, theta=1e4, scaling=ScalingFields.model_validate({"kind": kind, **values}))


def test_attention_factor_of_yarn() -> None:
    """Given, or m(mscale) / m(mscale_all_dim), or m(1) with m(s) = 0.1 s ln(factor) + 1."""
    yarn = {"factor": 32.0, "original_max_position": 4096}
    plain = rope_of(fields_of("yarn", **yarn))
    both = rope_of(fields_of("yarn", **yarn, mscale=1.0, mscale_all_dim=0.5))
    given = rope_of(fields_of("yarn", **yarn, attention_factor=1.5))
    assert plain and both and given
    assert plain.attention_factor == pytest.approx(0.1 * math.log(32) + 1) == pytest.approx(1.3465735902799727)
    assert both.attention_factor == pytest.approx((0.1 * math.log(32) + 1) / (0.05 * math.log(32) + 1))
    assert given.attention_factor == 1.5
    assert yarn_mscale(0.5) == yarn_mscale(1.0) == 1.0


def test_only_mscale_all_dim_scales_scores() -> None:
    yarn = {"factor": 40.0, "original_max_position": 4096}
    assert score_mscale(fields_of("yarn", **yarn, mscale=1.0, mscale_all_dim=1.0)) == yarn_mscale(40.0)
    assert score_mscale(fields_of("yarn", **yarn)) == score_mscale(None) == 1.0


def test_text_of_a_rope_builds_it() -> None:
    """What a program writes, with its imports, is the rope itself; defaults are not written."""
    names = vars(rope_spec)
    for fields in (
        RopeFields(dim=8, theta=1e7, pairing="interleaved"),
        fields_of("yarn", factor=32.0, original_max_position=4096, truncate=False),
        fields_of("longrope", factors=[1.0, 1.5, 2.0, 4.0], attention_factor=1.25),
        fields_of("proportional", rotated=4),
    ):
        text = rope_text(fields)
        assert eval(text, {name: names[name] for _, name in rope_imports(fields)}) == rope_of(fields)
    assert rope_text(RopeFields(dim=64, theta=1e7)) == "Rope(dim=64, theta=10000000.0)"
    assert rope_imports(None) == ()


@pytest.mark.parametrize(
    ("fields", "path", "text"),
    [
        (RopeFields(dim=7, theta=1e4), ("dim",), "rope dim 7 must be even and at most head_dim 8"),
        (RopeFields(dim=10, theta=1e4), ("dim",), "rope dim 10 must be even and at most head_dim 8"),
        (RopeFields(dim=8, theta=1.0), ("theta",), "rope theta 1.0 must be above 1"),
        (fields_of("linear"), ("scaling",), "linear scaling needs factor"),
        (fields_of("linear", factor=2.0, mscale=1.0), ("scaling", "mscale"), "mscale has no effect on linear scaling"),
        (fields_of("yarn", factor=2.0), ("scaling",), "yarn scaling needs original_max_position"),
        (fields_of("proportional", rotated=10), ("scaling", "rotated"), "rotated 10 must be even and at most dim 8"),
        (
            fields_of("longrope", factors=[1.0, 2.0]),
            ("scaling", "factors"),
            "2 factors: 4 positive ones are needed, one per pair of dim 8",
        ),
        (
            fields_of("wavelength", factor=8.0, original_max_position=64, low_freq_factor=4.0, high_freq_factor=4.0),
            ("scaling", "low_freq_factor"),
            "low_freq_factor 4.0 must be below high_freq_factor 4.0",
        ),
        (
            fields_of("yarn", factor=2.0, original_max_position=64, attention_factor=1.0, mscale=1.0),
            ("scaling", "mscale"),
            "mscale has no effect beside attention_factor",
        ),
        (
            fields_of("yarn", factor=2.0, original_max_position=64, mscale=1.0),
            ("scaling", "mscale"),
            "mscale has no effect without mscale_all_dim",
        ),
    ],
)
def test_a_rope_that_cannot_be_is_refused(fields: RopeFields, path: tuple[str, ...], text: str) -> None:
    (problem,) = check_rope(fields, 8, scores=True)
    assert isinstance(problem, FieldProblem) and (problem.path, problem.text) == (("rope", *path), text)


@pytest.mark.parametrize(
    ("more", "why"),
    [({}, "without mscale"), ({"attention_factor": 1.0}, "beside attention_factor"), ({"mscale": 1.0}, None)],
)
def test_mscale_all_dim_needs_something_to_scale(more: dict[str, float], why: str | None) -> None:
    """Alone, or beside an attention factor, it only scales scores, where the block has them scaled."""
    fields = fields_of("yarn", factor=2.0, original_max_position=64, mscale_all_dim=1.0, **more)
    assert check_rope(fields, 8, scores=True) == []
    found = [(one.path, one.text) for one in check_rope(fields, 8, scores=False)]
    text = f"mscale_all_dim has no effect {why} where it does not scale scores"
    assert found == ([(("rope", "scaling", "mscale_all_dim"), text)] if why else [])
