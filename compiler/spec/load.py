"""MODEL, TARGET, WORKLOAD and overrides to a checked Request, or every problem at once.

The only file that knows Hydra and OmegaConf. The composed document has four roots:
model, target, workload, plan.
"""

import copy
import json
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

from hydra import compose, initialize_config_dir
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import GrammarParseError, OmegaConfBaseException

from ..problems import Problem, ProblemsError
from .assemble import assemble
from .files import COMMAND_LINE, read_inputs
from .files import list_models as list_models
from .files import list_targets as list_targets
from .files import list_workloads as list_workloads
from .limits import MAX_DEPTH, MAX_INT, nesting, printable, uses_resolver, value_problem
from .locate import Locator, interpolated_path
from .marks import KeyPath, dotted, texts, under, walk
from .overrides import ROOTS, Change, check_changes
from .schema import Request
from .suggest import closest_path
from .validate import Finding, spread_sugar

_UNREADABLE = "(moec: unreadable)"


def load(
    model: str, *, target: str | None = None, workload: str | None = None, overrides: Sequence[str] = ()
) -> Request:
    """Everything the names and overrides stand for; raises ProblemsError with all problems."""
    inputs = read_inputs(model, target, workload)
    documents = inputs.documents
    ambiguous = {path for document in documents.values() for path in document.poisoned}
    poisoned = ambiguous | inputs.unusable()
    data = {root: copy.deepcopy(documents[root].data) if root in documents else {} for root in ROOTS}
    data["model"] = spread_sugar(data["model"])  # so that overrides can reach what the shorthand stands for
    findings = _unparsable(data, poisoned)

    changes, problems = _parse_overrides(overrides)
    good, more = check_changes(changes, data, {*inputs.named, "plan"}, poisoned)
    config, failed = _compose(data, good)
    lost = {problem.col for problem in failed}
    locator = Locator(documents, [(path, change.number) for path, change in good if change.number not in lost])
    locator.unresolved = OmegaConf.to_container(config, resolve=False)
    findings += _unresolvable(config, poisoned)

    resolved: Any = OmegaConf.to_container(config, resolve=True)
    poisoned |= {path for path, text in texts(resolved) if _UNREADABLE in text}
    request, wrong = assemble(resolved, {*documents, "plan"} - {str(path[0]) for path in inputs.unusable()}, overrides)
    findings += [one for one in wrong if not under(one.path, poisoned) or (one.about_form and one.path in ambiguous)]
    problems = [*inputs.problems, *problems, *more, *failed, *map(locator.problem, findings)]
    if problems or request is None:
        raise ProblemsError(_in_order(problems, [document.file for document in documents.values()]))
    return replace(request, model_source=model, workload_source=workload, locate=locator.located)


def _in_order(problems: Iterable[Problem], files: list[str]) -> list[Problem]:
    """By file in the order read, then position; the command line last."""
    problems = [_clean(one) for one in problems]
    rank = {file: index for index, file in enumerate(["", *map(printable, files)])}
    return sorted(dict.fromkeys(problems), key=lambda one: (rank.get(one.file, len(rank)), one.line, one.col, one.path))


def _clean(problem: Problem) -> Problem:
    """Nothing a file or argument holds may break the line or reach the terminal as a control character."""
    path, text, hint, file = map(printable, (problem.path, problem.text, problem.hint, problem.file))
    return replace(problem, path=path, text=text, hint=hint, file=file)


def _parse_overrides(overrides: Sequence[str]) -> tuple[list[Change], list[Problem]]:
    """Hydra's grammar, one override at a time so that every bad one is named."""
    parser = OverridesParser.create()
    changes: list[Change] = []
    problems: list[Problem] = []
    for number, text in enumerate(overrides, 1):
        key = text.partition("=")[0].lstrip("+~")
        parsed, reason = _parse_override(parser, text)
        if parsed is None or reason:
            assert reason
            problems.append(Problem(key, *reason, file=COMMAND_LINE, col=number))
            continue
        changes.append(Change(number, text, _operation(parsed), parsed.key_or_group, parsed.value()))
    return changes, problems


def _parse_override(parser: OverridesParser, text: str) -> tuple[Override | None, tuple[str, str] | None]:
    """The override, or (text, hint) of why it is none."""
    wrong = _text_problem(text)
    if wrong:
        return None, wrong
    if text.partition("=")[0].count(".") >= MAX_DEPTH:
        return None, (f"the key has more than {MAX_DEPTH} parts", "")
    try:
        parsed = parser.parse_override(text)
        return parsed, _not_accepted(parsed)
    except (HydraException, ValueError, RecursionError) as error:
        if "integer string conversion" in str(error):
            return None, ("its value holds a number that is too large", f"at most {MAX_INT}")
        return None, (f"'{text}' does not parse: {first_line(error)}", "KEY=VALUE, e.g. model.hidden_size=4096")


def _text_problem(text: str) -> tuple[str, str] | None:
    """Text that may not even be parsed: brackets without end, and calls of functions."""
    if nesting(text) > MAX_DEPTH:
        return f"brackets nest too deeply: more than {MAX_DEPTH} levels", ""
    if uses_resolver(text):
        reason = "a spec must not depend on environment, clock or code"
        return f"'{text}' calls a resolver: {reason}", "only a key can be named, e.g. ${model.hidden_size}"
    return None


def _operation(parsed: Override) -> Literal["set", "add", "delete"]:
    if parsed.is_delete():
        return "delete"
    return "add" if parsed.is_add() or parsed.is_force_add() else "set"


def _not_accepted(parsed: Override) -> tuple[str, str] | None:
    """Parts of Hydra's grammar that mean nothing here."""
    if parsed.package is not None or "/" in parsed.key_or_group or not parsed.key_or_group:
        return f"'{parsed.input_line}' is not KEY=VALUE with a dotted key", "e.g. model.hidden_size=4096"
    if parsed.is_sweep_override():
        return f"'{parsed.input_line}' is a sweep; one value is expected", "a list is written [a,b]"
    if parsed.is_delete() and "=" in (parsed.input_line or ""):
        return f"'{parsed.input_line}' deletes, so it has no value", f"~{parsed.key_or_group}"
    return value_problem(parsed.value())


def first_line(error: Exception) -> str:
    """The first line of an exception's words."""
    return (str(error).splitlines() or [type(error).__name__])[0]


def _put(data: Any, path: KeyPath, value: Any) -> None:
    for key in path[:-1]:
        data = data[key]
    data[path[-1]] = value


def _unparsable(data: dict[str, Any], poisoned: set[KeyPath]) -> list[Finding]:
    """Interpolations with broken syntax; their values are taken out of the document."""
    findings = []
    for path, text in [one for one in texts(data) if "${" in one[1]]:
        wrong = _text_problem(text)
        try:
            if not wrong:
                OmegaConf.create({"value": text})
        except GrammarParseError as error:
            wrong = f"bad interpolation '{text}': {first_line(error)}", "e.g. ${model.hidden_size}"
        if wrong:
            findings.append(Finding(path, *wrong))
            _put(data, path, _UNREADABLE)
            poisoned.add(path)
    return findings


def _unresolvable(config: DictConfig, poisoned: set[KeyPath]) -> list[Finding]:
    """Interpolations that lead nowhere; their values are taken out of the document."""
    findings = []
    document: Any = OmegaConf.to_container(config, resolve=False)
    for path, text in [one for one in texts(document) if "${" in one[1]]:
        try:
            _resolve(config, path)
        except (OmegaConfBaseException, RecursionError) as error:
            if "RecursionError" in f"{type(error).__name__} {error}":
                findings.append(Finding(path, "references lead to references too many times", "name the first one"))
                _give_up(config, document, poisoned)
                return findings
            near = _near_source(text, path, document)
            findings.append(Finding(path, f"cannot resolve '{text}': {first_line(error)}", near))
            _put(config, path, _UNREADABLE)
            poisoned.add(path)
    return findings


def _give_up(config: DictConfig, document: Any, poisoned: set[KeyPath]) -> None:
    """Take all references out: how many of a long chain resolve depends on how full the stack is."""
    for path, _ in [one for one in texts(document) if "${" in one[1]]:
        _put(config, path, _UNREADABLE)
        poisoned.add(path)


def _resolve(config: Any, path: KeyPath) -> None:
    """Raises where the value at the path, or one inside it, does not resolve."""
    for key in path:
        config = config[key]
    if OmegaConf.is_config(config):
        OmegaConf.to_container(config, resolve=True)


def _near_source(text: str, path: KeyPath, document: Any) -> str:
    """The nearest path an interpolation could have meant."""
    source = interpolated_path(text, path)
    known = [dotted(one) for one, _ in walk(document)]
    if source and dotted(source) in known:
        return ""
    near = closest_path(dotted(source), known) if source else None
    return f"did you mean '${{{near}}}'?" if near else "a key is named from its root, e.g. ${model.hidden_size}"


def _compose(data: Mapping[str, Any], good: list[tuple[KeyPath, Change]]) -> tuple[DictConfig, list[Problem]]:
    """Hydra's composition of the roots and overrides; overrides that cannot be merged are dropped and named."""
    changes = [change for _, change in good]
    with tempfile.TemporaryDirectory(prefix="moec-compose-") as directory:
        _stage(Path(directory), data)
        with initialize_config_dir(config_dir=directory, version_base=None):
            try:
                return compose("root", overrides=[_hydra_text(change) for change in changes]), []
            except (HydraException, OmegaConfBaseException):
                merging, problems = _split_unmergeable(compose("root"), changes)
                return compose("root", overrides=[_hydra_text(change) for change in merging]), problems


def _split_unmergeable(config: DictConfig, changes: list[Change]) -> tuple[list[Change], list[Problem]]:
    """The changes that merge one after the other, and what is wrong with the rest."""
    merging: list[Change] = []
    problems: list[Problem] = []
    for change in changes:
        try:
            if change.operation != "delete":
                OmegaConf.update(config, change.key, change.value, merge=True, force_add=True)
            merging.append(change)
        except (OmegaConfBaseException, ValueError, TypeError) as error:
            text = f"'{change.text}' cannot be merged: {first_line(error)}"
            problems.append(Problem(change.key, text, file=COMMAND_LINE, col=change.number))
    return merging, problems


def _stage(directory: Path, data: Mapping[str, Any]) -> None:
    """Each root as a config group of one file.

    The package is global because a model's own key `defaults` would be Hydra's defaults list.
    """
    for root, body in data.items():
        group = directory / root
        group.mkdir()
        text = json.dumps({root: body}, allow_nan=False)
        (group / "main.yaml").write_text(f"# @package _global_\n{text}\n", encoding="utf-8")
    defaults = ["_self_", *({root: "main"} for root in data)]
    (directory / "root.yaml").write_text(json.dumps({"defaults": defaults}), encoding="utf-8")


def _hydra_text(change: Change) -> str:
    """The override as Hydra must see it: keys the schema knows may be set whether or not the file has them."""
    return change.text if change.operation == "delete" else f"++{change.text.lstrip('+')}"
