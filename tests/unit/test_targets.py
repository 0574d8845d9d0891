"""Target data: every number has an origin, names resolve, and fits and curves follow the published points."""

from itertools import pairwise

import pytest

from moec.compiler.plan.cost import Machine, fit_alpha_beta, interpolate
from moec.targets.target import (
    Curve,
    Target,
    Value,
    load_target,
    parse_name,
    read_topologies,
    target_names,
    with_overrides,
)

GIB = 2**30


@pytest.fixture(scope="module")
def ironwood() -> Target:
    return load_target("tpu7x:2x2x1")


def _origins(node: object) -> list[Value | Curve]:
    """Every number with an origin below a pydantic value."""
    found = [node] if isinstance(node, Value | Curve) else []
    fields = type(node).model_fields if hasattr(type(node), "model_fields") else {}
    children = [getattr(node, name) for name in fields] + (list(node.values()) if isinstance(node, dict) else [])
    return found + [one for child in children for one in _origins(child)]


@pytest.mark.parametrize("name", target_names())
def test_every_number_says_where_it_comes_from(name: str) -> None:
    target = load_target(name)
    origins = _origins(target)
    assert len(origins) > 12
    assert all(len(one.source) >= 3 for one in origins)
    assert all(one.kind in ("assumption", "inferred") for one in origins) or target.platform == "tpu"
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


def test_a_bare_number_is_an_override() -> None:
    changed = with_overrides(load_target("tpu7x-8"), [("hbm_gib", 192)])
    assert (changed.hbm_gib.value, changed.hbm_gib.kind) == (192, "override")


def test_curves_must_rise() -> None:
    with pytest.raises(ValueError, match="x must rise"):
        Curve(points=((2, 1), (1, 2)), kind="assumption", source="test")
