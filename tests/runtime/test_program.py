"""Importing emitted programs from any folder, and the contract they keep."""

import re
from collections.abc import Callable
from pathlib import Path

import pytest

from moec.runtime.errors import ProgramError
from moec.runtime.program import NAMES, load_program


def test_an_unchanged_folder_is_imported_once(fake_folder: Callable[[int], Path]) -> None:
    folder = fake_folder(1)
    program = load_program(folder)
    assert program.NAME == "fake"
    assert load_program(str(folder)) is program
    assert load_program(fake_folder(1)) is not program


def test_a_rewritten_folder_is_imported_anew_and_left_clean(fake_folder: Callable[[int], Path]) -> None:
    """Even within the same second and with the same size, where stale bytecode would pass for fresh."""
    folder = fake_folder(1)
    assert load_program(folder).VOCAB == 97
    path = folder / "model.py"
    path.write_text(path.read_text().replace("VOCAB = 97", "VOCAB = 89"))
    assert load_program(folder).VOCAB == 89
    path = folder / "weights.py"
    path.write_text(path.read_text().replace("mtp.*", "ptm.*"))
    assert load_program(folder).IGNORE == ("ptm.*",)
    assert not list(folder.rglob("*.pyc"))


def fails(folder: Path) -> str:
    with pytest.raises(ProgramError) as caught:
        load_program(folder)
    return str(caught.value)


def test_folders_that_are_no_program_say_why(fake_folder: Callable[[int], Path], tmp_path: Path) -> None:
    missing = tmp_path / "none"
    assert fails(missing) == f"{missing}: not an emitted program, it holds no model.py and no weights.py"
    folder = fake_folder(1)
    (folder / "weights.py").unlink()
    assert fails(folder) == f"{folder}: not an emitted program, it holds no weights.py"
    (folder / "weights.py").write_text("")
    assert "model.py cannot be imported: cannot import name 'IGNORE'" in fails(folder)
    (folder / "model.py").write_text("NAME = 'x'\n")
    assert "not an emitted program, model.py defines no PLAN_DIGEST, MESH_AXES, RULES" in fails(folder)
    (folder / "model.py").write_text("NAME = = 'x'\n")
    assert "model.py cannot be imported: invalid syntax" in fails(folder)


@pytest.mark.parametrize("source", ["NAME = nowhere", "raise SystemExit(0)", "NAME = '\\udcff'", "1 / 0"])
def test_whatever_importing_raises_is_told(fake_folder: Callable[[int], Path], source: str) -> None:
    folder = fake_folder(1)
    (folder / "model.py").write_bytes(source.replace("\\udcff", "\udcff").encode("utf-8", "surrogateescape"))
    assert f"{folder}: model.py cannot be imported: " in fails(folder)


def test_the_documented_contract_is_the_one_that_is_checked(root: Path) -> None:
    text = (root / "docs" / "architecture.md").read_text()
    section = text.partition("## The contract of an emitted program")[2].partition("### The batch")[0]
    cells = [line.split("|")[1] for line in section.splitlines() if line.startswith("| `")]
    assert sorted(re.findall(r"`(\w+)", "".join(cells))) == sorted(NAMES)


def test_committed_recordings_are_as_small_as_the_playbook_says(root: Path) -> None:
    playbook = (root / "docs" / "playbooks" / "port-an-architecture.md").read_text()
    (megabytes,) = re.findall(r"`\*\.safetensors` \((\d+) MB at most\)", playbook)
    folders = list((root / "tests" / "fixtures" / "oracles").iterdir())
    sizes = {folder.name: sum(path.stat().st_size for path in folder.glob("*.safetensors")) for folder in folders}
    assert sizes
    assert {name: size for name, size in sizes.items() if size > int(megabytes) * 10**6} == {}
