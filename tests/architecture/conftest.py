"""What the architecture tests look at: the files of the repository, without needing git."""

from collections.abc import Iterator
from pathlib import Path

import pytest

FOLDERS = (
    ".ci",
    "benchmarks",
    "blocks",
    "compiler",
    "docs",
    "generated",
    "moec",
    "runtime",
    "specs",
    "targets",
    "tests",
)
BINARY = {".npz", ".safetensors", ".png", ".pyc"}


def _walk(folder: Path) -> Iterator[Path]:
    for path in sorted(folder.iterdir()):
        if path.is_symlink() or path.name == "__pycache__":
            continue
        if path.is_dir():
            yield from _walk(path)
        else:
            yield path


@pytest.fixture(scope="session")
def text_files(root: Path) -> dict[str, str]:
    """Every text file of the project by its path relative to the root."""
    top = [path for path in sorted(root.iterdir()) if path.is_file() and path.name != ".git"]
    inside = [path for name in FOLDERS if (root / name).is_dir() for path in _walk(root / name)]
    return {str(p.relative_to(root)): p.read_text() for p in top + inside if p.suffix not in BINARY}


@pytest.fixture(scope="session")
def python_files(text_files: dict[str, str]) -> dict[str, str]:
    """The Python files among them, emitted programs left out."""
    return {p: t for p, t in text_files.items() if p.endswith(".py") and not p.startswith("generated/")}
