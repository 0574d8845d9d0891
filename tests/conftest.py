"""Shared test set-up: eight virtual CPU devices, recorded references, golden files."""

import gc
import importlib.util
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

# Before anything imports jax: eight virtual devices, and a thread pool that can run their
# collectives at once whatever the machine has.
os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["NPROC"] = "16"
os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=8"

ROOT = Path(__file__).parent.parent
FIXTURES = ROOT / "tests" / "fixtures" / "oracles"


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--update-golden", action="store_true", help="rewrite golden files instead of comparing")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Where libtpu has no wheel, the `aot` and `aot_all` tests are skipped and say why."""
    if importlib.util.find_spec("libtpu") is not None:
        return
    skip = pytest.mark.skip(reason="libtpu is not installed (it has wheels for Linux on x86-64 only)")
    for item in items:
        if {"aot", "aot_all"} & set(item.keywords):
            item.add_marker(skip)


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """A test with the argument `oracle_dir` runs once per recorded reference and is marked `oracle`."""
    if "oracle_dir" not in metafunc.fixturenames:
        return
    params = [pytest.param(path, id=name, marks=pytest.mark.oracle) for name, path in _oracles().items()]
    metafunc.parametrize("oracle_dir", params, scope="session")


def _oracles() -> dict[str, Path]:
    """Folders with a ref.npz by test id: the committed ones, then those of $MOEC_ORACLES.

    A folder of $MOEC_ORACLES that repeats a committed reference byte for byte is left out.
    """
    found = {path.parent.name: path.parent for path in sorted(FIXTURES.glob("*/ref.npz"))}
    extra = os.environ.get("MOEC_ORACLES")
    if extra is None:
        return found
    recorded = {path: (path / "ref.npz").read_bytes() for path in found.values()}
    for ref in sorted(Path(extra).glob("*/ref.npz")):
        if ref.read_bytes() not in recorded.values():
            found[f"extra-{ref.parent.name}"] = ref.parent
    return found


@pytest.fixture(scope="session")
def root() -> Path:
    """The repository root."""
    return ROOT


@pytest.fixture(scope="session")
def oracle_dirs() -> dict[str, Path]:
    """All recorded references by name (see `oracle_dir` to run one test per reference)."""
    return _oracles()


@pytest.fixture
def golden(request: pytest.FixtureRequest) -> Callable[[Path, str], None]:
    """Compare text with a golden file; a missing file fails unless --update-golden writes it."""

    def compare(path: Path, text: str) -> None:
        if request.config.getoption("--update-golden"):
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
            return
        assert path.is_file(), f"no golden file {path}: look at the output, then run with --update-golden"
        assert text == path.read_text(), f"differs from {path} (--update-golden rewrites it)"

    return compare


@pytest.fixture(autouse=True)
def forget_programs(request: pytest.FixtureRequest) -> Iterator[None]:
    """Drop compiled whole programs after the tests that make them.

    One takes 1,500 memory mappings and more on XLA:CPU, a process may have 65,530 (vm.max_map_count), and LLVM
    aborts when there are none left.
    """
    yield
    if {"slow", "oracle"} & request.keywords.keys() and "jax" in sys.modules:
        sys.modules["jax"].clear_caches()
        gc.collect()
