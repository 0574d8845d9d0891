"""plan.json of an emitted program: what is wrong with the file, or with the request that it records."""

import json
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from ..plan.plan import Plan
from ..problems import Problem, ProblemsError
from ..spec.files import COMMAND_LINE
from ..spec.validate import Finding, error_findings

NAME = "plan.json"
HINT = "compile the program again"
# What a plan records of the command line, by root.
SOURCES = {"model": "model_source", "target": "target", "workload": "workload_source"}


def read_plan(folder: Path) -> Plan:
    """The plan of an emitted program; raises ProblemsError with everything that makes the file no plan."""
    file = folder / NAME
    try:
        text = file.read_bytes().decode()
        data = json.loads(text)
    except json.JSONDecodeError as error:
        raise ProblemsError([_problem(file, f"no JSON: {error.msg}", error.lineno, error.colno)]) from None
    except (UnicodeDecodeError, OSError, RecursionError) as error:
        reason = getattr(error, "strerror", None) or getattr(error, "reason", None) or error
        raise ProblemsError([_problem(file, f"cannot be read: {reason}")]) from None
    try:
        return Plan.model_validate_json(text)
    except ValidationError as error:
        raise ProblemsError(_not_a_plan(error, data, file)) from None


def _problem(file: Path, text: str, line: int = 0, col: int = 0) -> Problem:
    return Problem("", text, HINT, str(file), line, col)


def _not_a_plan(error: ValidationError, data: Any, file: Path) -> list[Problem]:
    """Each error with its key; the same in many entries of a list once."""
    found: dict[tuple[Any, ...], Finding] = {}
    times = Counter[tuple[Any, ...]]()
    for one in error_findings(error, Plan, data, ()):
        like = (tuple("*" if isinstance(key, int) else key for key in one.path), one.text)
        found.setdefault(like, one)
        times[like] += 1
    problems = []
    for like, one in found.items():
        more = f", and {times[like] - 1} more like it" if times[like] > 1 else ""
        hint = f"{one.hint}; {HINT}" if one.hint else HINT
        problems.append(Problem(".".join(map(str, one.path)), f"{one.text}{more}", hint, str(file)))
    return problems


@contextmanager
def recorded_in(folder: Path) -> Iterator[None]:
    """Problems of the request that a plan records are said of its plan.json, not of a command line nobody wrote."""
    try:
        yield
    except ProblemsError as error:
        raise ProblemsError([_recorded(problem, folder / NAME) for problem in error.problems]) from None


def _recorded(problem: Problem, file: Path) -> Problem:
    if problem.file not in ("", COMMAND_LINE):
        hint = "; ".join([problem.hint] * bool(problem.hint) + [f"asked for by {file}"])
        return replace(problem, hint=hint)
    if problem.col:
        text = f"{problem.path}: {problem.text}"
        return Problem(f"overrides.{problem.col - 1}", text, problem.hint, str(file))
    return replace(problem, path=SOURCES.get(problem.path, problem.path), file=str(file))
