"""`--standalone` splices block sources into one file, so their top-level names must not collide."""

import ast
from collections import defaultdict
from collections.abc import Iterator
from fnmatch import fnmatch

SPLICED = ("blocks/core/*.py", "blocks/*/xla.py", "blocks/*/tpu_*.py")


def _spliced(files: dict[str, str]) -> dict[str, str]:
    # What a kernel costs is read by the planner only.
    chosen = {p: t for p, t in files.items() if any(fnmatch(p, pattern) for pattern in SPLICED)}
    found = {p: t for p, t in chosen.items() if not p.endswith("_cost.py")}
    assert len(found) > 3
    return found


def _defined(text: str) -> Iterator[str]:
    """Functions, classes and constants at the top level."""
    for node in ast.parse(text).body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield node.name
        targets = (
            node.targets if isinstance(node, ast.Assign) else [node.target] if isinstance(node, ast.AnnAssign) else []
        )
        yield from (t.id for t in targets if isinstance(t, ast.Name) and t.id != "__all__")


def _aliases(text: str) -> Iterator[tuple[str, str]]:
    """Names bound by imports from outside the project, with what they stand for."""
    for node in ast.parse(text).body:
        if isinstance(node, ast.Import):
            yield from ((a.asname or a.name.split(".")[0], a.name) for a in node.names)
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            yield from ((a.asname or a.name, f"{node.module}.{a.name}") for a in node.names)


def test_top_level_names_are_unique(python_files: dict[str, str]) -> None:
    owners = defaultdict(list)
    for path, text in _spliced(python_files).items():
        for name in _defined(text):
            owners[name].append(path)
    assert not {name: paths for name, paths in owners.items() if len(paths) > 1}


def test_imported_names_mean_the_same_everywhere(python_files: dict[str, str]) -> None:
    meanings = defaultdict(set)
    defined = set()
    for text in _spliced(python_files).values():
        defined |= set(_defined(text))
        for name, target in _aliases(text):
            meanings[name].add(target)
    assert not {name: found for name, found in meanings.items() if len(found) > 1 or name in defined}
