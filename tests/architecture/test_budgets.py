"""Size budgets of docs/style.md, measured on the syntax tree. Docstrings are free, everything else counts."""

import ast
from statistics import median, quantiles

MAX_FUNCTION, MAX_KERNEL_FUNCTION = 80, 120
MAX_FILE, MAX_KERNEL_FILE, MAX_PROGRAM = 500, 700, 400
MEDIAN_FUNCTION, P95_FUNCTION, P95_FILE = 10, 45, 350

# What may exceed a hard limit, each with its reason. Empty is the normal state.
ALLOWED_FUNCTIONS: dict[str, str] = {}
ALLOWED_FILES: dict[str, str] = {}

PACKAGES = ("blocks/", "compiler/", "runtime/", "targets/")
Function = ast.FunctionDef | ast.AsyncFunctionDef


def _is_kernel(path: str) -> bool:
    return path.startswith("blocks/") and path.rsplit("/", 1)[-1].startswith("tpu_")


def _functions(files: dict[str, str]) -> dict[str, int]:
    """Lines of every function, "path:name" -> lines without its docstring."""
    return {
        f"{path}:{node.name}": _lines(node)
        for path, text in files.items()
        for node in ast.walk(ast.parse(text))
        if isinstance(node, Function)
    }


def _lines(node: Function) -> int:
    assert node.end_lineno is not None
    first = node.body[0]
    has_doc = (
        isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant) and isinstance(first.value.value, str)
    )
    doc = (first.end_lineno or first.lineno) - first.lineno + 1 if has_doc else 0
    return node.end_lineno - node.lineno + 1 - doc


def _packages(files: dict[str, str]) -> dict[str, str]:
    return {p: t for p, t in files.items() if p.startswith(PACKAGES)}


def test_no_function_is_too_long(python_files: dict[str, str]) -> None:
    def limit(name: str) -> int:
        return MAX_KERNEL_FUNCTION if _is_kernel(name.split(":")[0]) else MAX_FUNCTION

    over = {name: n for name, n in _functions(python_files).items() if n > limit(name)}
    assert over.keys() == ALLOWED_FUNCTIONS.keys(), over


def test_functions_are_short_on_the_whole(python_files: dict[str, str]) -> None:
    lengths = list(_functions(_packages(python_files)).values())
    assert median(lengths) <= MEDIAN_FUNCTION
    assert quantiles(lengths, n=20)[-1] <= P95_FUNCTION


def test_no_file_is_too_long(python_files: dict[str, str]) -> None:
    over = {
        path: text.count("\n")
        for path, text in python_files.items()
        if text.count("\n") > (MAX_KERNEL_FILE if _is_kernel(path) else MAX_FILE)
    }
    assert over.keys() == ALLOWED_FILES.keys(), over


def test_files_are_short_on_the_whole(python_files: dict[str, str]) -> None:
    lengths = [text.count("\n") for text in _packages(python_files).values() if text]
    assert quantiles(lengths, n=20)[-1] <= P95_FILE


def test_emitted_programs_fit_on_a_few_screens(text_files: dict[str, str]) -> None:
    programs = {p: t for p, t in text_files.items() if p.startswith("generated/") and p.endswith("/model.py")}
    assert programs
    over = {p: t.count("\n") for p, t in programs.items() if t.count("\n") > MAX_PROGRAM}
    assert not over
