"""The import laws (docs/architecture.md). import-linter checks the package graph, this file the rest."""

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

PACKAGES = ("blocks", "compiler", "runtime", "specs", "targets")


def _imported(path: str, text: str) -> Iterator[str]:
    """Absolute dotted names that a file imports anywhere, relative imports resolved under moec."""
    package = ("moec." + path.removesuffix(".py").replace("/", ".")).split(".")
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level] if node.level else []
            module = ".".join([*base, *([node.module] if node.module else [])])
            yield from (f"{module}.{alias.name}" for alias in node.names)


def _under(names: Iterator[str], *prefixes: str) -> list[str]:
    return [n for n in names if any(n == p or n.startswith(p + ".") for p in prefixes)]


def test_import_linter_contracts_hold(root: Path) -> None:
    done = subprocess.run([sys.executable, "-m", "importlinter.cli", "lint"], cwd=root, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


def test_bare_package_names_are_never_imported(python_files: dict[str, str]) -> None:
    wrong = {p: _under(_imported(p, t), *PACKAGES) for p, t in python_files.items()}
    assert not {p: names for p, names in wrong.items() if names}


def test_nothing_imports_generated_or_tests(python_files: dict[str, str]) -> None:
    code = {p: t for p, t in python_files.items() if not p.startswith("tests/")}
    wrong = {p: _under(_imported(p, t), "generated", "tests", "moec.generated", "moec.tests") for p, t in code.items()}
    assert not {p: names for p, names in wrong.items() if names}


def test_runtime_uses_only_the_core_of_blocks(python_files: dict[str, str]) -> None:
    runtime = {p: t for p, t in python_files.items() if p.startswith("runtime/")}
    assert runtime
    for path, text in runtime.items():
        outside = [n for n in _under(_imported(path, text), "moec.blocks") if not n.startswith("moec.blocks.core")]
        assert not outside, (path, outside)


def test_only_the_loader_knows_hydra(python_files: dict[str, str]) -> None:
    assert _users(python_files, "hydra", "omegaconf") == {"compiler/spec/load.py"}


def test_only_the_spec_stage_and_the_target_files_know_yaml(python_files: dict[str, str]) -> None:
    users = _users(python_files, "yaml")
    assert users
    assert {p for p in users if not p.startswith("compiler/spec/")} <= {"targets/target.py"}


def _users(files: dict[str, str], *modules: str) -> set[str]:
    code = {p: t for p, t in files.items() if p.split("/")[0] in PACKAGES}
    return {p for p, t in code.items() if _under(_imported(p, t), *modules)}


@pytest.mark.parametrize("name", ["block.py", "cost.py", "emit.py"])
def test_block_declarations_load_without_jax(name: str, root: Path) -> None:
    modules = [f"moec.blocks.{p.parent.name}.{p.stem}" for p in sorted(root.glob(f"blocks/*/{name}"))]
    assert modules
    _run_without_jax(root, f"import {', '.join(modules)}")


def test_the_command_line_starts_without_jax(root: Path) -> None:
    _run_without_jax(root, "from moec.compiler.cli import main\ntry: main(['--help'])\nexcept SystemExit: pass")


def test_checking_and_planning_run_without_jax(root: Path) -> None:
    call = "from moec.compiler.cli import main\nassert main({!r}) == 0"
    _run_without_jax(root, call.format(["check", "tiny/mixtral"]))
    _run_without_jax(root, call.format(["plan", "tiny/mixtral", "--target", "cpu:8", "--workload", "tiny", "--json"]))


def _run_without_jax(root: Path, code: str) -> None:
    """Run code in a fresh interpreter that must not have loaded jax at its end."""
    script = f"import sys\n{code}\nassert 'jax' not in sys.modules, 'jax was imported'"
    done = subprocess.run([sys.executable, "-c", script], cwd=root, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
