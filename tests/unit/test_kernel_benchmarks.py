"""benchmarks/kernels without a compiler: counting, recording and tuning over the dumps of tests/fixtures/bundles."""

import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks.kernels import record as recording
from benchmarks.kernels import tune as tuning
from benchmarks.kernels.case import Arg, Case
from benchmarks.kernels.measure import ANSWER, Result, document, find_cases, reread, stale
from moec.targets.target import load_target

TARGET = "tpu7x:2x2x1"
DUMP = Path(__file__).parents[1] / "fixtures" / "bundles"
VERSIONS = {"jax": "1", "jaxlib": "1", "libtpu": "1"}

CASE = Case(
    name="two-kernels",
    block="moe",
    variant="grouped",
    build=lambda chip, mesh, tiles: lambda x: x,
    args=(Arg((8, 128), "float32"),),
    unit="row",
    units=8,
    floor_bytes=3690,
    kernels=("loops",),
    trips={"loops": {"L0.I0.I1.L0": 3}},
    grid={"rows": (8, 16), "tile": (128,)},
    shape="8x128",
)


@pytest.fixture
def dumps(tmp_path: Path) -> Path:
    folder = tmp_path / CASE.name
    shutil.copytree(DUMP, folder)
    (folder / ANSWER).write_text(json.dumps({"outcome": "compiled", "versions": VERSIONS, "vmem_bytes": 1000}))
    return tmp_path


@pytest.fixture
def result(dumps: Path) -> Result:
    found = reread(CASE, TARGET, dumps)
    assert found is not None
    return found


def test_only_the_named_modules_count(result: Result) -> None:
    assert [(m.name, m.counted) for m in result.modules] == [("loops.1", True), ("branches.1", False)]
    assert result.static.bundles == 117 and result.around.bundles > 113  # its loop of 10 is executed
    assert result.unknown == ()


def test_every_module_counts_where_none_is_named(dumps: Path) -> None:
    every = reread(replace(CASE, kernels=(), trips={}), TARGET, dumps)
    assert every is not None and every.static.bundles == 117 + 113
    assert every.unknown == ("loops.1/L0.I0.I1.L0",)


def test_trips_of_nodes_that_are_not_there_are_found(result: Result) -> None:
    assert stale(CASE, result) == ()
    wrong = replace(CASE, trips={"loops": {"L0.I0.I1.L0": 3, "L7": 1}, "gone": {"L0": 1}})
    assert stale(wrong, result) == ("loops/L7", "gone/L0")


def test_counts_are_printed_per_unit_of_work(result: Result) -> None:
    found = document(CASE, result)
    assert found["per_unit"]["bundles"] == result.executed.bundles / 8
    assert found["kernels"] == {"loops.1": 117}
    assert json.loads(json.dumps(found)) == found


def test_a_case_that_was_not_kept_is_not_reread(tmp_path: Path) -> None:
    assert reread(CASE, TARGET, tmp_path) is None


def test_cases_have_names_of_their_own_and_complete_bars() -> None:
    cases = {**find_cases("cases"), **find_cases("peers")}
    assert len(cases) == len(find_cases("cases")) + len(find_cases("peers"))
    for _, case in cases.values():
        assert case.peer or case.bar is None, f"{case.name}: a bar of what?"
        assert case.units > 0 and case.floor_bytes > 0 and case.unit
        assert not case.grid or case.shape, f"{case.name} can be tuned: it needs a key"


def test_recording_keeps_other_entries_of_the_same_compiler(
    result: Result, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(recording, "HERE", tmp_path)
    monkeypatch.setattr(recording, "SUMS", {"both": ("a", "b")})
    (tmp_path / "results").mkdir()
    a, b = (replace(CASE, name=name, variant="xla") for name in "ab")
    recording.record({"a": a}, [replace(result, case="a")], None)
    (path,) = recording.record({"b": b}, [replace(result, case="b")], None)
    peers = json.loads(path.read_text())["peers"]
    assert list(peers) == ["a", "b", "both"]
    assert peers["both"]["bundles"] == pytest.approx(2 * result.executed.bundles / 8, rel=1e-4)

    mine = replace(CASE, peer="both", bar=0.6)
    (kernels,) = recording.record({CASE.name: mine}, [result], None)
    entry = json.loads(kernels.read_text())["kernels"][CASE.name]
    assert (entry["peer"], entry["ratio"], entry["bar"]) == ("both", 0.5, 0.6)
    assert "0.500 of both's bundles per row (recorded), within the bar 0.6" in recording.bar_text(mine, result, {})

    newer = replace(result, case="b", versions={**VERSIONS, "libtpu": "2"})
    recording.record({"b": b}, [newer], None)
    assert list(json.loads(path.read_text())["peers"]) == ["b"]


def test_the_floor_bounds_the_rank_and_bundles_break_ties(result: Result) -> None:
    machine = load_target(TARGET)
    slow, floor = tuning.seconds(1e6, CASE, machine), tuning.seconds(1, CASE, machine)
    assert slow == pytest.approx(1e6 / 2.2e9) and floor == pytest.approx(3690 / 3.69e12)
    few, many = (tuning.Candidate({"tile": 1}, result, floor, bundles) for bundles in (5, 9))
    assert min(many, few, key=lambda c: c.rank) is few


def test_a_tuned_entry_says_where_it_comes_from(
    result: Result, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tuning, "ROOT", tmp_path)
    (tmp_path / "targets" / "tpu7x").mkdir(parents=True)
    machine = load_target(TARGET)
    best = tuning.Candidate({"rows": 16, "tile": 128}, result, 1e-6, result.executed.bundles)
    tuning.store(replace(CASE, shape="16x128"), best, machine)
    path = tuning.store(CASE, best, machine)
    found = json.loads(path.read_text())
    assert path == tmp_path / "targets" / "tpu7x" / "tuned" / "moe.grouped.json"
    assert list(found["entries"]) == ["16x128", "8x128"]
    entry = found["entries"]["8x128"]
    assert entry["tiles"] == {"rows": 16, "tile": 128}
    assert entry["provenance"] == {
        "kind": "compiler",
        "topology": TARGET,
        **VERSIONS,
        "case": "two-kernels",
        "candidates": 2,
        "bundles": round(result.executed.bundles),
        "vmem_bytes": 1000,
        "seconds_at_least": 1e-6,
    }


def test_shipped_tuned_entries_are_of_tunable_cases(root: Path) -> None:
    grids = {(c.block, c.variant, c.shape): c for _, c in find_cases("cases").values() if c.grid}
    for path in sorted((root / "targets").glob("*/tuned/*.json")):
        found = json.loads(path.read_text())
        assert path.name == f"{found['block']}.{found['variant']}.json"
        for shape, entry in found["entries"].items():
            case = grids[found["block"], found["variant"], shape]
            assert entry["tiles"].keys() == case.grid.keys()
            assert entry["provenance"]["kind"] == "compiler" and entry["provenance"]["libtpu"]
