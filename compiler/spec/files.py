"""Names on the command line to YAML files, read with their positions."""

from dataclasses import dataclass, field
from pathlib import Path

import moec
from moec.targets.target import parse_name, target_names

from ..problems import Problem, ProblemsError
from .limits import printable
from .marks import Document, KeyPath, read_document
from .suggest import closest, listing

_PACKAGE = Path(moec.__file__).parent
MODELS = _PACKAGE / "specs" / "models"
WORKLOADS = _PACKAGE / "specs" / "workloads"
TARGETS = _PACKAGE / "targets"
COMMAND_LINE = "<command line>"
_SUFFIXES = (".yaml", ".yml")


@dataclass
class Inputs:
    """The documents by root, and what was wrong with finding or reading them. named: the roots asked for."""

    named: set[str]
    documents: dict[str, Document] = field(default_factory=dict)
    problems: list[Problem] = field(default_factory=list)

    def add(self, root: str, document: Document) -> None:
        self.documents[root] = document
        self.problems += document.problems

    def unusable(self) -> set[KeyPath]:
        """Roots that were asked for but cannot be looked at."""
        readable = {root for root, document in self.documents.items() if not document.fatal}
        return {(root,) for root in self.named - readable}


def list_models() -> list[str]:
    """Names of the shipped models, with their folder, e.g. "tiny/NAME"."""
    return _names(MODELS)


def list_workloads() -> list[str]:
    """Names of the shipped workloads."""
    return _names(WORKLOADS)


def list_targets() -> list[str]:
    """Every CHIP:TOPOLOGY of the shipped targets."""
    return list(target_names())


def read_inputs(model: str, target: str | None, workload: str | None) -> Inputs:
    """Find and read everything that was named."""
    given = {"model": model, "target": target, "workload": workload}
    inputs = Inputs({root for root, name in given.items() if name is not None})
    _check_working_directory()
    _read_named(inputs, "model", model, MODELS)
    if workload is not None:
        _read_named(inputs, "workload", workload, WORKLOADS)
    if target is not None:
        _read_target(inputs, target)
    return inputs


def _check_working_directory() -> None:
    """Without one no relative path means anything, and Hydra cannot compose."""
    try:
        Path.cwd()
    except OSError as error:
        text = f"the working directory cannot be used: {error.strerror}"
        raise ProblemsError([Problem("", text, "change into one that exists", COMMAND_LINE)]) from error


def _names(directory: Path) -> list[str]:
    files = directory.rglob("*.yaml")
    return sorted(path.relative_to(directory).with_suffix("").as_posix() for path in files)


def _read_named(inputs: Inputs, root: str, name: str, directory: Path) -> None:
    """A path to a YAML file, or a name under the directory."""
    if not name.isprintable():
        text = f"'{printable(name)}' has line breaks or control characters, which no name or path here may have"
        inputs.problems.append(Problem(root, text, "rename the file", COMMAND_LINE))
        return
    try:
        path, is_folder = _file_of(name, directory), Path(name).is_dir()
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        text = f"'{name if len(name) <= 60 else name[:57] + '...'}' cannot be looked at: {reason}"
        inputs.problems.append(Problem(root, text, "", COMMAND_LINE))
        return
    if path is not None and path.suffix == ".json":
        text = f"'{name}' is no YAML file; a config.json of Hugging Face has to be ported first"
        problem = Problem(root, text, f"moec port {name} -o SPEC.yaml", COMMAND_LINE)
        inputs.problems.append(problem)
        return
    if path is not None:
        inputs.add(root, read_document(path, root, show_path(path)))
        return
    if name and is_folder:
        inputs.problems.append(Problem(root, *_folder_problem(name, root), COMMAND_LINE))
        return
    if name.endswith(_SUFFIXES) or not name:
        near = closest(name.removesuffix(".yaml"), _names(directory))
        hint = near if near.startswith("did you mean") else ""
        problem = Problem(root, f"there is no file '{name}'", hint, COMMAND_LINE)
    else:
        hint = f"{closest(name, _names(directory))}; or the path of a YAML file"
        problem = Problem(root, f"unknown {root} '{name}'", hint, COMMAND_LINE)
    inputs.problems.append(problem)


def _folder_problem(name: str, root: str) -> tuple[str, str]:
    """(text, hint) of a folder where a file is expected."""
    if (Path(name) / "plan.json").is_file():
        return f"'{name}' is an emitted program, a {root} is a YAML file", "`moec verify` and `moec run` take programs"
    files = sorted(path.as_posix() for ending in _SUFFIXES for path in Path(name).glob(f"*{ending}"))
    return f"'{name}' is a folder, a {root} is a YAML file", listing(files)


def _file_of(name: str, directory: Path) -> Path | None:
    """The file a name or path stands for; names never lead out of the directory."""
    if Path(name).is_file():
        return Path(name)
    named = directory / f"{name}.yaml"
    inside = not Path(name).is_absolute() and ".." not in Path(name).parts
    return named if inside and named.is_file() else None


def show_path(path: Path) -> str:
    """The path as messages show it: inside the working directory or the package, relative to that."""
    full, here = path.resolve(), Path.cwd()
    if full.is_relative_to(here):
        return full.relative_to(here).as_posix()
    inside = path.is_relative_to(_PACKAGE)
    return path.relative_to(_PACKAGE.parent).as_posix() if inside else path.as_posix()


def _read_target(inputs: Inputs, name: str) -> None:
    """Root `target`: the chip's data with the chosen topology under `topology`."""
    try:
        chip, topology = parse_name(name)
    except ValueError as error:
        near = closest(name, list_targets())
        hint = near if near.startswith("did you mean") else ""
        inputs.problems.append(Problem("target", str(error), hint, COMMAND_LINE))
        return
    document = _data_document(chip, "chip.yaml", "target")
    table = _data_document(chip, "topologies.yaml", "topologies")
    document.problems += table.problems
    document.data["topology"] = table.data[topology]
    for marks, found in ((document.keys, table.keys), (document.values, table.values)):
        start = ("topologies", topology)
        for path, mark in found.items():
            if path[:2] == start:
                marks["target", "topology", *path[2:]] = mark
    inputs.add("target", document)


def _data_document(chip: str, file: str, root: str) -> Document:
    return read_document(TARGETS / chip / file, root, show_path(TARGETS / chip / file))
