"""Every case of benchmarks/kernels compiles for tpu7x in time, fits and keeps its bar; v6e takes or refuses it.

A bar is a ratio to a peer's kernel compiled with the same jax and libtpu, whose numbers are committed
(benchmarks/kernels/results): no peer is needed here. With other versions only the ratio is skipped.
"""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from benchmarks.kernels.case import Case
from benchmarks.kernels.measure import Result, find_cases, measure, stale
from moec.compiler.verify.cache import exclusive
from moec.targets.target import load_target

pytestmark = pytest.mark.timeout(1200)

TARGET, OTHER = "tpu7x:2x2x1", "v6e:2x2"
CASES = find_cases("cases")
TIMEOUT_S = 600.0
FIRST = {(module, case.variant): name for name, (module, case) in reversed(CASES.items())}.values()
EVERY = [pytest.param(name, marks=pytest.mark.aot) for name in CASES]
# On the other chip one case of each kernel; `make test-aot` compiles the others.
OTHERS = [pytest.param(name, marks=pytest.mark.aot if name in FIRST else pytest.mark.aot_all) for name in CASES]


@pytest.fixture
def alone(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """One compile at a time, whatever the number of test workers."""
    with exclusive(tmp_path_factory.getbasetemp().parent / "kernels.lock"):
        yield


@pytest.fixture(scope="module")
def peers(root: Path) -> dict[str, Any]:
    return json.loads((root / "benchmarks" / "kernels" / "results" / "peers_tpu7x.json").read_text())


def vmem(target: str) -> float:
    limit = load_target(target).vmem_mib
    assert limit is not None
    return limit.value * 2**20


@pytest.mark.parametrize("name", EVERY)
def test_compiles_in_time_fits_and_keeps_its_bar(name: str, peers: dict[str, Any], alone: None) -> None:
    module, case = CASES[name]
    result = measure(module, case, TARGET, timeout_s=TIMEOUT_S)
    assert result.outcome == "compiled", result.message
    # On a busy machine the wall clock says nothing, and the processor's seconds are what an idle one takes at most.
    assert min(result.compile_s, result.compile_cpu_s) <= case.limit_s
    assert result.vmem_bytes is None or result.vmem_bytes <= vmem(TARGET)
    assert not result.unknown, f"the case gives no trips for {result.unknown}"
    assert not (lost := stale(case, result)), f"the case gives trips for nodes that are not there: {lost}"
    assert result.executed.bundles > 0 or case.block == "collectives"
    if case.bar is not None:
        assert_bar(case, result, peers)


def assert_bar(case: Case, result: Result, peers: dict[str, Any]) -> None:
    peer = peers["peers"][case.peer]
    assert case.bar is not None and peer["unit"] == case.unit
    if result.versions != peers["versions"]:
        pytest.skip(f"bundles depend on the compiler: {case.peer} was compiled with {peers['versions']}")
    ratio = result.executed.bundles / case.units / peer["bundles"]
    assert ratio <= case.bar, f"{ratio:.3f} of {case.peer}'s bundles per {case.unit}, the bar is {case.bar}"


@pytest.mark.parametrize("name", OTHERS)
def test_other_chip_compiles_or_is_refused(name: str, alone: None) -> None:
    module, case = CASES[name]
    result = measure(module, case, OTHER, timeout_s=TIMEOUT_S)
    assert result.outcome in ("compiled", "refused"), result.message
    assert result.outcome == "compiled" or result.message
    assert result.vmem_bytes is None or result.vmem_bytes <= vmem(OTHER)


@pytest.mark.aot
def test_peers_have_versions_and_units(peers: dict[str, Any]) -> None:
    assert set(peers["versions"]) == {"jax", "jaxlib", "libtpu"}
    assert all(peer["bundles"] > 0 or peer["message"] for peer in peers["peers"].values())
    assert not any(peer.get("unknown_loops") for peer in peers["peers"].values())
    assert {case.peer for _, case in CASES.values() if case.peer} <= peers["peers"].keys()
