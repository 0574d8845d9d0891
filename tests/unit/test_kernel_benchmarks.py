"""benchmarks/kernels without a compiler: counting, recording and tuning over the dumps of tests/fixtures/bundles."""

import json
import shutil
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest

from benchmarks.kernels import record as recording
from benchmarks.kernels import tune as tuning
from benchmarks.kernels.__main__ import main
from benchmarks.kernels.case import Arg, Case, Refused
from benchmarks.kernels.measure import ANSWER, Result, document, find_cases, reread, stale
from moec.blocks.core.program import abstract_mesh
from moec.blocks.registry import BLOCKS, COLLECTIVES, PARTS
from moec.compiler.plan.chip import chip_limits
from moec.compiler.plan.choose import ask
from moec.compiler.plan.space import Option
from moec.compiler.plan.tuned import kernels
from moec.compiler.plan.variants import places
from moec.compiler.spec.load import load
from moec.targets.target import load_target

TARGET = "tpu7x:2x2x1"
DUMP = Path(__file__).parents[1] / "fixtures" / "bundles"
VERSIONS = {"jax": "1", "jaxlib": "1", "libtpu": "1"}

CASE = Case(
    name="two-kernels",
    block="moe",
    variant="tpu_grouped",
    build=lambda chip, mesh, tiles: lambda x: x,
    args=(Arg((8, 128), "float32"),),
    unit="row",
    units=8,
    floor_bytes=3690,
    kernels=("loops",),
    trips={"loops": {"L0.I0.I1.L0": 3}},
    grid={"rows": (8, 16), "tile": (128,)},
    shape="rows=8",
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


OURS = {name: case for name, (_, case) in find_cases("cases").items()}
GRIDS = {name: case for name, case in OURS.items() if case.grid}


@pytest.mark.parametrize("name", OURS)
def test_cases_are_of_registered_kernels(name: str) -> None:
    case = OURS[name]
    folders = {**BLOCKS, **PARTS, "collectives": COLLECTIVES}
    assert case.variant in [variant.name for variant in folders[case.block]().VARIANTS if variant.kernel]


@pytest.mark.parametrize("name", GRIDS)
def test_what_a_grid_tries_the_planner_reads(name: str) -> None:
    case = GRIDS[name]
    module, variant = kernels()[f"{case.block}.{case.variant}"]
    assert case.grid.keys() <= dict(variant.tiles).keys() == tuned_tiles(f"{case.block}.{case.variant}")
    assert tuple(part.partition("=")[0] for part in case.shape.split(",")) == module.TUNED_BY
    assert all(case.tiles[tile] in values for tile, values in case.grid.items()), "the tiles it has without tuning"


@cache
def tuned_tiles(kernel: str) -> set[str]:
    """Names in tuning() of the kernel for the model of its cases, without buckets, that its function takes."""
    module, variant = kernels()[kernel]
    model = "deepseek-v3" if kernel.startswith("mla.") else "qwen3.5-397b-a17b"
    question = ask(load(model, target=TARGET, workload="decode_512x9216"))
    option = Option(question.target.num_devices, 1, question.target.num_devices, 1, *["replicated"] * 4)
    (place,) = (one for one in places(question.graph) if variant in one.variants)
    loads = question.loads(option, question.steps(option, 64))
    found = {name.partition(".")[0] for name in module.tuning(place.fields, question.graph.dims, loads)}
    return found & dict(variant.tiles).keys()


def test_no_two_cases_tune_the_same_tile() -> None:
    tiles = [(case.block, case.variant, case.shape, tile) for case in GRIDS.values() for tile in case.grid]
    assert len(set(tiles)) == len(tiles)


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
    tuning.store(replace(CASE, shape="rows=16"), best, machine)
    path = tuning.store(CASE, best, machine)
    found = json.loads(path.read_text())
    assert path == tmp_path / "targets" / "tpu7x" / "tuned" / "moe.tpu_grouped.json"
    assert list(found["entries"]) == ["rows=16", "rows=8"]
    entry = found["entries"]["rows=8"]
    assert {tile: one["value"] for tile, one in entry.items()} == {"rows": 16, "tile": 128}
    assert (
        entry["rows"]["provenance"]
        == entry["tile"]["provenance"]
        == {
            "kind": "compiler",
            "topology": TARGET,
            **VERSIONS,
            "case": "two-kernels",
            "candidates": 2,
            "bundles": round(result.executed.bundles),
            "vmem_bytes": 1000,
            "seconds_at_least": 1e-6,
        }
    )


def test_tuning_keeps_other_tiles_and_what_was_measured(
    result: Result, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tuning, "ROOT", tmp_path)
    (tmp_path / "targets" / "tpu7x").mkdir(parents=True)
    machine = load_target(TARGET)
    found = [tuning.Candidate(tiles, result, 1e-6, 5.0) for tiles in ({"rows": 8}, {"tile": 128}, {"rows": 16})]
    for one in found[:2]:
        path = tuning.store(CASE, one, machine)
    document = json.loads(path.read_text())
    document["entries"]["rows=8"]["rows"]["provenance"]["kind"] = "measured"
    path.write_text(json.dumps(document))
    tuning.store(CASE, found[2], machine)
    entry = json.loads(path.read_text())["entries"]["rows=8"]
    assert {tile: one["value"] for tile, one in entry.items()} == {"rows": 8, "tile": 128}


def test_only_what_gains_is_tuned(result: Result) -> None:
    own, level, better = (tuning.Candidate({"rows": n}, result, 1e-6, b) for n, b in ((8, 100.0), (16, 99.5), (32, 98)))
    case = replace(CASE, tiles={"rows": 8}, grid={"rows": (8, 16, 32)})
    assert tuning.winner(case, [own, level]) is None
    assert tuning.winner(case, [own, level, better]) is better
    assert tuning.winner(case, [level, better]) is better, "the own tiles do not compile"


def test_trips_follow_the_tiles_that_are_tried(dumps: Path) -> None:
    case = replace(CASE, trips=lambda tiles: {"loops": {"L0.I0.I1.L0": tiles["rows"]}}, tiles={"rows": 8})
    few, many = (reread(replace(case, tiles={"rows": rows}), TARGET, dumps) for rows in (8, 16))
    assert few is not None and many is not None
    assert many.executed.bundles > few.executed.bundles and stale(case, few) == ()


def test_shipped_tuned_entries_are_of_tunable_cases(root: Path) -> None:
    for path in sorted((root / "targets").glob("*/tuned/*.json")):
        found = json.loads(path.read_text())
        assert path.name == f"{found['block']}.{found['variant']}.json"
        for shape, entry in found["entries"].items():
            for tile, one in entry.items():
                case = GRIDS[one["provenance"]["case"]]
                assert (case.block, case.variant, case.shape) == (found["block"], found["variant"], shape)
                assert one["value"] in case.grid[tile] and one["provenance"]["libtpu"]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--timeout", "0"], "--timeout: expected seconds, got 0 "),
        (["--timeout", "-3"], "--timeout: expected seconds, got -3 "),
        (["--timeout", "soon"], "--timeout: expected seconds, got 'soon'"),
        (["--target", "cpu"], "--target: 'cpu' is no TPU"),
        (["--case", "tokamax-gmm-v2-w2-fp8"], "--case: 'tokamax-gmm-v2-w2-fp8' is a peer's"),
        (["--case", "tokamax-gmm-v2-w2-fp8", "--peers", "."], "--peers: no checkout of tokamax below '.'"),
        (["--peers", "."], "--peers: no checkout below '.'"),
        (["--reread", "none"], "--reread: there is no folder 'none'"),
    ],
)
def test_bad_words_are_messages(
    words: list[str], said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(words) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"<command line>: error: {said}")


@pytest.mark.parametrize(
    ("target", "why"),
    [
        ("v6e:1x1", "one attention rank: nothing is scattered"),
        ("v6e:8x8", "1 tokens per rank: the kernel takes multiples of 8"),
    ],
)
def test_a_case_that_does_not_run_on_so_many_devices_is_refused(target: str, why: str) -> None:
    _, case = find_cases("cases")["rs-hierarchical-decode"]
    machine = load_target(target)
    with pytest.raises(Refused, match=why):
        case.build(chip_limits(machine), abstract_mesh({"data": machine.num_devices}), case.tiles)
