"""Target data: every number has an origin, names resolve, and fits and curves follow the published points."""

import json
from itertools import pairwise
from pathlib import Path
from statistics import mean
from typing import Any

import pytest

from moec.compiler.plan.choose import make_plan
from moec.compiler.plan.cost import Machine, interpolate
from moec.compiler.plan.plan import Plan
from moec.compiler.problems import ProblemsError
from moec.compiler.spec.load import load
from moec.targets.target import (
    Curve,
    Target,
    load_target,
    origins,
    parse_name,
    read_topologies,
    target_names,
)

GIB = 2**30


@pytest.fixture(scope="module")
def ironwood() -> Target:
    return load_target("tpu7x:2x2x1")


@pytest.mark.parametrize("name", target_names())
def test_every_number_says_where_it_comes_from(name: str) -> None:
    target = load_target(name)
    found = origins(target)
    assert len(found) > 12
    assert all(len(one.source) >= 3 for one in found)
    assert all(one.kind in ("assumption", "inferred") for one in found) or target.platform == "tpu"
    assert target.usable_bytes > target.reserve_bytes > 0
    assert target.name == name


@pytest.mark.parametrize("name", [name for name in target_names() if not name.startswith("cpu")])
def test_topologies_are_consistent(name: str) -> None:
    target = load_target(name)
    topology = target.topology
    chips = 1
    for dim in topology.dims:
        chips *= dim
    assert (topology.num_chips, topology.num_devices) == (chips, chips * target.cores)
    spanned = sum(dim > 1 for dim in topology.dims)
    torus = min(topology.dims) >= (16 if target.chip == "v6e" else 4)
    assert topology.ici_links == spanned * (2 if torus else 1)


@pytest.mark.parametrize(
    ("word", "expected"),
    [
        ("tpu7x:2x2x1", ("tpu7x", "2x2x1")),
        ("tpu7x-8", ("tpu7x", "2x2x1")),
        ("TPU7x:2x2", ("tpu7x", "2x2x1")),
        ("tpu7x:2x4x1", ("tpu7x", "2x4x1")),
        ("tpu7x-16", ("tpu7x", "2x2x2")),
        ("v6e-8", ("v6e", "2x4")),
        ("v5p:2x2x2", ("v5p", "2x2x2")),
        ("cpu", ("cpu", "1")),
        ("cpu:1", ("cpu", "1")),
        ("cpu:8", ("cpu", "8")),
    ],
)
def test_names_and_aliases(word: str, expected: tuple[str, str]) -> None:
    assert parse_name(word) == expected


def test_aliases_are_unique() -> None:
    for chip in ("cpu", "tpu7x", "v5p", "v6e"):
        words = [w for e in read_topologies(chip).values() for w in (e["name"], *e.get("aliases", ()))]
        assert len(words) == len(set(words))


@pytest.mark.parametrize(
    ("word", "part"),
    [
        ("v7x:2x2x1", "chips: cpu, tpu7x, v5p, v6e"),
        ("tpu7x:3x3", "2x2x1"),
        ("tpu7x-9", "2x2x1"),
        ("cpu:3", "1, 2, 4, 8"),
    ],
)
def test_unknown_names_say_what_is_accepted(word: str, part: str) -> None:
    with pytest.raises(ValueError, match="unknown target") as caught:
        parse_name(word)
    assert word in str(caught.value)
    assert part in str(caught.value)


def test_ironwood_facts(ironwood: Target) -> None:
    assert (ironwood.num_devices, ironwood.topology.num_chips, ironwood.cores) == (8, 4, 2)
    assert ironwood.usable_bytes == int(94.74 * GIB)
    assert ironwood.hbm_reserve_gib.kind == "assumption"
    assert "int8" not in ironwood.matrix_dtypes()
    assert {"bfloat16", "float8_e4m3fn"} <= set(ironwood.matrix_dtypes())
    assert 2 * ironwood.peak_tflops["bfloat16"].value == 2307
    assert any("int8" in text for text in ironwood.conflicts)
    assert any("geometry" in text for text in ironwood.conflicts)


def fit_alpha_beta(points: Curve) -> tuple[float, float, tuple[float, ...]]:
    """(alpha seconds, GB/s, relative residuals) of t = alpha + bytes / beta through (GB, GB/s) points.

    Least squares weighted by 1 / t^2, so that every point counts by its relative error.
    """
    rows = [(gb, gb / gbps) for gb, gbps in points.points]  # GB, seconds
    weights = [1 / t**2 for _, t in rows]
    sw = sum(weights)
    mx = sum(w * gb for w, (gb, _) in zip(weights, rows, strict=True)) / sw
    mt = sum(w * t for w, (_, t) in zip(weights, rows, strict=True)) / sw
    sxx = sum(w * (gb - mx) ** 2 for w, (gb, _) in zip(weights, rows, strict=True))
    slope = sum(w * (gb - mx) * (t - mt) for w, (gb, t) in zip(weights, rows, strict=True)) / sxx
    alpha = mt - slope * mx
    return alpha, 1 / slope, tuple((alpha + slope * gb) / t - 1 for gb, t in rows)


def test_collective_fit_reproduces_the_published_points(ironwood: Target) -> None:
    ici = ironwood.ici
    assert ici.fit_points is not None and len(ici.fit_points.points) == 5
    alpha, beta, residuals = fit_alpha_beta(ici.fit_points)
    assert max(map(abs, residuals)) < 0.01
    assert alpha * 1e6 == pytest.approx(ici.alpha_us.value, rel=0.005)
    assert beta == pytest.approx(ici.gbps_per_link.value * ici.fit_links, rel=0.001)


def test_hbm_curve_is_monotone_and_close_to_its_points(ironwood: Target) -> None:
    machine = Machine.of(ironwood)
    assert len(ironwood.hbm_copy.points) == 13
    speeds = [speed for _, speed in machine.bandwidth]
    assert speeds == sorted(speeds)
    for num_bytes, gbps in ironwood.hbm_copy.points:
        assert interpolate(machine.bandwidth, num_bytes) == pytest.approx(gbps * 1e9, rel=0.005)
    assert speeds[-1] / (ironwood.hbm_gbps.value * 1e9) == pytest.approx(0.870, abs=0.0005)


def test_small_pieces_stream_slower_and_never_faster_than_the_curve(ironwood: Target) -> None:
    machine = Machine.of(ironwood)
    sizes = [2**k for k in range(12, 34)]
    speeds = [size / machine.memory_seconds(size, size) for size in sizes]
    assert all(a < b or a == pytest.approx(b, rel=1e-3) for a, b in pairwise(speeds))
    assert speeds[0] < 0.01 * speeds[-1]


def test_gemm_curve_meets_its_points(ironwood: Target) -> None:
    machine = Machine.of(ironwood)
    assert len(ironwood.gemm.points) == 8
    peak = ironwood.peak_tflops["bfloat16"].value
    for size, tflops in ironwood.gemm.points:
        assert interpolate(machine.efficiency, size) * peak == pytest.approx(tflops, rel=1e-9)
    assert machine.efficiency[-1][1] == pytest.approx(0.829, abs=0.0005)


def with_overrides(target: Target, **changes: Any) -> Target:
    """The target with top-level keys replaced."""
    return Target.model_validate({**target.model_dump(), **changes})


def test_a_bare_number_is_an_override() -> None:
    changed = with_overrides(load_target("tpu7x-8"), hbm_gib=192)
    assert (changed.hbm_gib.value, changed.hbm_gib.kind) == (192, "override")


def test_curves_must_rise() -> None:
    with pytest.raises(ValueError, match="x must rise"):
        Curve(points=((2, 1), (1, 2)), kind="assumption", source="test")


@pytest.mark.parametrize("name", ["tpu7x:2x2x1", "v6e:2x2", "v5p:2x2x1"])
def test_least_rows_are_those_jax_tiles_by(name: str) -> None:
    from jax import numpy as jnp
    from jax._src.pallas.mosaic.tpu_info import ChipVersion, get_tpu_info_for_chip

    target = load_target(name)
    version = {"tpu7x": ChipVersion.TPU_7X, "v6e": ChipVersion.TPU_V6E, "v5p": ChipVersion.TPU_V5P}[target.chip]
    info = get_tpu_info_for_chip(version, 1)
    assert target.rows.least
    for dtype in target.rows.least:
        assert target.row_tile(dtype) == info.get_sublane_tiling(jnp.dtype(dtype)), dtype
    assert target.rows.full.value == info.mxu_column_size


def test_rows_are_known_for_every_matrix_dtype(ironwood: Target) -> None:
    rows = {**ironwood.rows.model_dump(), "least": {}}
    with pytest.raises(ValueError, match=r"rows\.least\.bfloat16\n  needed, because target\.peak_tflops has"):
        with_overrides(ironwood, rows=rows)


@pytest.mark.parametrize(
    ("change", "part"),
    [
        ("target.hbm_gbps=0", "hbm_gbps.value: must be greater than or equal to 0.000001, got 0"),
        ("target.vector_tflops=0", "vector_tflops.value: must be greater"),
        ("target.ici.gbps_per_link=0", "ici.gbps_per_link.value: must be greater"),
        ("target.ici.all_to_all_gbps_per_link=0", "ici.all_to_all_gbps_per_link.value: must be greater"),
        ("target.hbm_copy.points=[[1,0]]", "hbm_copy.points.0.1: must be greater"),
        ("target.gemm.points=[[1,0]]", "gemm.points.0.1: must be greater"),
        ("target.rows.full=0", "rows.full.value: must be greater than or equal to 1, got 0"),
        ("target.rows.least.float32=0", "rows.least.float32.value: must be greater than or equal to 1, got 0"),
        ("~target.rows.least.float32", "rows.least.float32: needed, because target.peak_tflops has this dtype"),
        ("target.devices_per_chip=0", "devices_per_chip.value: must be greater"),
        ("target.devices_per_chip=3", "devices_per_chip.value: cpu:8 has 8 devices on 8 chips, which 3 per chip"),
        ("target.devices_per_chip.value=3", "devices_per_chip.value: cpu:8 has 8 devices on 8 chips, which 3 per chip"),
        ("target.topology.num_devices=6", "topology.num_devices: cpu:8 has 6 devices on 8 chips, which 1 per chip"),
        ("target.topology.dims=[3,1]", "topology.dims: dims 3 x 1 are 3 chips, not num_chips=8"),
        ("target.topology.num_chips=4", "topology.num_chips: dims 8 are 8 chips, not num_chips=4"),
        ("target.clock_ghz=0", "clock_ghz.value: must be greater than or equal to 0.000001, got 0"),
        ("target.hbm_gib=[64]", "hbm_gib: expected a number, got a list of 1"),
        ("target.rows=[1]", "rows: expected a mapping, got a list of 1"),
        ("target.peak_tflops={}", "peak_tflops: an empty mapping changes nothing"),
        ("target.hbm_gib=0", "hbm_gib.value: must be greater than 0, got 0"),
        ("target.hbm_gib=inf", "hbm_gib.value: must be a finite number, got inf"),
        ("target.hbm_gib=1e300", "hbm_gib.value: must be less than or equal to 1048576"),
        ("target.layer_overhead_us=inf", "layer_overhead_us.value: must be a finite number"),
        ("target.gemm_dtype=foo", "gemm_dtype: must be a dtype with a peak_tflops (float32, bfloat16), got 'foo'"),
        ("target.dtypes.kv=foo", "dtypes.kv: got 'foo' (valid: float32, bfloat16, float8_e4m3fn)"),
        ("target.dtypes.kv=int8", "dtypes.kv: got 'int8'"),
        ("""target.topology.name='a\"\"\"b'""", "topology.name: must match pattern"),
    ],
)
def test_overrides_no_machine_could_have_are_refused_where_they_were_written(change: str, part: str) -> None:
    with pytest.raises(ProblemsError) as caught:
        load("tiny/mixtral", target="cpu:8", workload="default", overrides=[change])
    (problem,) = caught.value.problems
    assert str(problem).startswith(f"<command line>:arg1: error: target.{part}")


def test_several_devices_of_a_chip_need_a_link() -> None:
    with pytest.raises(ProblemsError, match=r"target\.d2d: needed, because a chip has several devices"):
        load("tiny/mixtral", target="tpu7x-8", workload="default", overrides=["~target.d2d"])


@pytest.fixture(scope="module")
def published(root: Path) -> list[tuple[int, float, Plan]]:
    """(concurrency, milliseconds per output token, our plan of it) of every published point."""
    evidence = json.loads((root / "targets/tpu7x/evidence/published_step_times.json").read_text())

    def plan(workload: str, dp: int) -> Plan:
        pins = (*evidence["overrides"], f"plan.attention.dp={dp}")
        return make_plan(load(evidence["model"], target=evidence["target"], workload=workload, overrides=pins))

    return [(concurrency, ms, plan(workload, dp)) for workload, concurrency, dp, ms in evidence["rows"]]


def test_the_band_of_step_times_holds_the_published_ones(
    ironwood: Target, published: list[tuple[int, float, Plan]]
) -> None:
    more = [plan.estimates["tpot"].value / ms - 1 for _, ms, plan in published]
    assert len(more) == 10
    band = ironwood.bands.step_time_pct
    assert max(map(abs, more)) * 100 < band.value
    assert f"by {min(more) * 100:.0f} to {max(more) * 100:.0f} %, {mean(more) * 100:.0f} % on average" in band.source


def test_the_fixed_cost_per_layer_is_the_residue_of_published_step_times(
    ironwood: Target, published: list[tuple[int, float, Plan]]
) -> None:
    def residue(ms: float, plan: Plan) -> float:
        """Microseconds per layer that neither bytes nor collectives explain."""
        exchanged = sum(t.layers * t.us for t in plan.breakdown if t.bucket == "decode" and t.binding in ("ICI", "D2D"))
        return (ms * 1e3 - plan.estimates["decode_floor"].value * 1e3 - exchanged) / 60

    found = [residue(ms, plan) for concurrency, ms, plan in published if concurrency <= 16]
    assert len(found) == 6
    assert f"is {min(found):.0f}-{max(found):.0f} us, mean {mean(found):.0f}" in ironwood.layer_overhead_us.source
    assert ironwood.layer_overhead_us.value == round(mean(found), -1)
