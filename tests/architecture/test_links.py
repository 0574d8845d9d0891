"""The import package mirrors the top-level packages, and the documents' links resolve."""

import re
import tomllib
from pathlib import Path
from urllib.parse import unquote

LINK = re.compile(r"\]\(([^)\s]+)\)")
HEADING = re.compile(r"^#+ (.*)$", re.MULTILINE)
DATA_PACKAGES = {"specs"}  # data only, no __init__.py


def test_every_package_has_its_link_and_the_reverse(root: Path) -> None:
    links = {path.name: path for path in (root / "moec").iterdir() if path.is_symlink()}
    packages = {path.parent.name for path in root.glob("*/__init__.py")} - {"moec"}
    assert links.keys() == packages | DATA_PACKAGES
    for name, link in links.items():
        assert link.readlink() == Path("..") / name, f"moec/{name} must be the relative link ../{name}"
        assert link.is_dir()


def test_the_type_checker_is_pointed_at_every_link(root: Path) -> None:
    include = tomllib.loads((root / "pyproject.toml").read_text())["tool"]["pyright"]["include"]
    links = {f"moec/{path.name}" for path in (root / "moec").iterdir() if path.is_symlink()}
    assert links - {f"moec/{name}" for name in DATA_PACKAGES} <= set(include)


def test_every_folder_with_code_is_a_package(python_files: dict[str, str]) -> None:
    folders = {
        p.rsplit("/", 1)[0] for p in python_files if p.split("/")[0] in {"blocks", "compiler", "runtime", "targets"}
    }
    assert {f for f in folders if f"{f}/__init__.py" not in python_files} == set()


def test_document_links_resolve(root: Path, text_files: dict[str, str]) -> None:
    broken = []
    for path, text in text_files.items():
        if not path.endswith(".md") or path.startswith("generated/"):
            continue
        for target in LINK.findall(text):
            if "://" not in target and not _resolves(root / path, target):
                broken.append(f"{path} -> {target}")
    assert not broken


def _resolves(document: Path, target: str) -> bool:
    name, _, anchor = unquote(target).partition("#")
    file = document.parent / name if name else document
    return file.exists() and (not anchor or anchor in _anchors(file.read_text()))


def _anchors(text: str) -> set[str]:
    """Anchors as GitHub makes them from headings."""
    headings = (re.sub(r"[^\w\- ]", "", heading.lower()) for heading in HEADING.findall(text))
    return {heading.strip().replace(" ", "-") for heading in headings}
