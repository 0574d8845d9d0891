"""Recipes: one YAML file per model_type under specs/families, found by name or by what they list.

A recipe may be based on another (`like: NAME`): mappings are merged key by key, null takes an entry
away, all else is replaced. Files whose name begins with `_` are bases only. docs/port.md is the reference.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import moec

from ..problems import Problem
from ..spec.marks import read_document

FAMILIES = Path(moec.__file__).parent / "specs" / "families"
DRAFT = "_draft"
KEYS = {
    "model_types": list,
    "like": str,
    "title": str,
    "source": str,
    "roots": list,
    "defaults": dict,
    "types": dict,
    "let": dict,
    "templates": dict,
    "spec": dict,
    "blocks": dict,
    "layers": dict,
    "checkpoint": dict,
    "notes": dict,
    "ignored": dict,
    "inexpressible": dict,
    "questions": dict,
}


@dataclass(frozen=True)
class Recipe:
    """A recipe with its bases merged in. name: the file's stem."""

    name: str
    data: Mapping[str, Any]

    def part(self, key: str) -> Any:
        """One of KEYS; empty when the recipe has none."""
        return self.data.get(key, KEYS[key]())


def recipe_names(folder: Path = FAMILIES) -> list[str]:
    """Stems of the recipes that stand for a model_type."""
    return sorted(path.stem for path in folder.glob("*.yaml") if not path.stem.startswith("_"))


def model_types(folder: Path = FAMILIES) -> dict[str, str]:
    """model_type -> recipe, over all recipes."""
    found = {}
    for name in recipe_names(folder):
        listed = _read(name, folder).get("model_types") or [name]
        found.update(dict.fromkeys(listed, name))
    return found


def recipe_of(kind: str, folder: Path = FAMILIES) -> str | None:
    """The recipe of a model_type, reading only files that name it: there are many."""
    for name in sorted(recipe_names(folder), key=lambda name: name != kind):
        said = name == kind or kind in (folder / f"{name}.yaml").read_text(encoding="utf-8")
        if said and kind in (_read(name, folder).get("model_types") or [name]):
            return name
    return None


def load_recipe(name: str, folder: Path = FAMILIES) -> Recipe:
    """A recipe with its bases; a broken recipe is a bug of the repository and raises ValueError."""
    return Recipe(name, _merged(name, folder, ()))


def _merged(name: str, folder: Path, above: tuple[str, ...]) -> dict[str, Any]:
    if name in above:
        raise ValueError(f"recipes are based on each other in a circle: {' -> '.join((*above, name))}")
    data = _read(name, folder)
    base = data.pop("like", None)
    if base is None:
        return data
    whole = _merged(base, folder, (*above, name))
    whole.pop("model_types", None)
    return merge_recipe(whole, data)


def merge_recipe(base: Any, changes: Any) -> Any:
    """Mappings key by key, null takes away, all else is replaced. `{replace: X}` is X without merging."""
    if isinstance(changes, Mapping) and changes.keys() == {"replace"}:
        return changes["replace"]
    if not isinstance(base, Mapping) or not isinstance(changes, Mapping):
        return changes
    whole = {**base, **{key: merge_recipe(base.get(key), value) for key, value in changes.items()}}
    return {key: value for key, value in whole.items() if value is not None or key not in base}


def changes_of(whole: Any, base: Any) -> Any:
    """The other way round: what makes `base` the whole. Templates and cases are taken as they are."""
    for one in (whole, base):
        if not isinstance(one, Mapping) or one.keys() & {"use", "case", "when"}:
            return whole
    keys = [key for key in {**base, **whole} if whole.get(key) != base.get(key)]
    return {key: changes_of(whole.get(key), base.get(key)) for key in keys}


def _read(name: str, folder: Path) -> dict[str, Any]:
    path = folder / f"{name}.yaml"
    document = read_document(path, "recipe", path.name)
    wrong = [*document.problems, *_unknown(document.data, path.name)]
    if wrong:
        raise ValueError("\n".join(map(str, wrong)))
    return dict(document.data)


def _unknown(data: Mapping[str, Any], file: str) -> list[Problem]:
    """Keys a recipe cannot have, and parts of the wrong form."""
    found = [Problem(key, "is no part of a recipe", f"parts: {', '.join(KEYS)}", file) for key in data.keys() - KEYS]
    for key in KEYS.keys() & data.keys():
        if data[key] is not None and not isinstance(data[key], KEYS[key]):
            found.append(Problem(key, f"must be a {KEYS[key].__name__}", "", file))
    return found
