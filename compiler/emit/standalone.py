"""The same program without the library: block sources spliced into model.py, the small runtime beside it.

model.py holds the used block modules, the weights and the program in one file that needs only
jax and numpy: internal imports go, external ones are merged at the top, every spliced module
keeps its text. Top-level names must be unique over the blocks (a test holds the library to
that), so nothing is renamed. engine/ is the runtime's loader and batch engine, its imports of
blocks pointed at model.py; it also needs safetensors' file format, which it reads itself.
"""

import ast
from pathlib import Path

import moec

from ..graph.ir import Graph
from ..plan.plan import Plan
from .package import header, program_files
from .render import render_python

PACKAGE = "moec"
ROOT = Path(moec.__file__).parent
ENGINE = ("moec.runtime.weights", "moec.runtime.generate", "moec.runtime.score")


def standalone_files(graph: Graph, plan: Plan) -> dict[str, str]:
    """File name -> text of the standalone package."""
    files = program_files(graph, plan)
    engine = [module for module in closure(list(ENGINE)) if module.startswith(f"{PACKAGE}.runtime.")]
    roots = _imported(files["model.py"]) | _imported(files["weights.py"])
    roots |= {target for module in engine for target in _imported(_read(module), module) if _is_block(target)}
    parts = [(module, _read(module)) for module in closure(sorted(roots))]
    parts += [("weights of this model", files["weights.py"]), ("the program", files["model.py"])]
    top = [f"# {line}" for line in header(plan, standalone=True)]
    return {
        "__init__.py": files["__init__.py"],
        "model.py": splice(top, parts),
        "run.py": render_python("standalone_run.py.j2", header=header(plan, standalone=True), name=graph.name),
        **{f"engine/{module.rpartition('.')[2]}.py": _engine_source(module) for module in engine},
        "engine/__init__.py": '"""Checkpoint loader and batch engine of the program beside this folder."""\n',
        "plan.json": files["plan.json"],
        "README.md": files["README.md"],
    }


def _read(module: str) -> str:
    return module_file(module).read_text(encoding="utf-8")


def _is_block(module: str) -> bool:
    return module.startswith(f"{PACKAGE}.blocks.")


def _imported(source: str, module: str = "program.model") -> set[str]:
    return {target for _, target in internal_imports(ast.parse(source), module)}


def _engine_source(module: str) -> str:
    """A runtime module with its imports of blocks pointed at the spliced model.py."""
    lines = _read(module).splitlines()
    for node, target in internal_imports(ast.parse("\n".join(lines)), module):
        if _is_block(target):
            if module_file(target).name == "__init__.py":
                raise ValueError(f"{module}: `{ast.unparse(node)}`: model.py has names, not modules")
            names = ", ".join(ast.unparse(alias) for alias in node.names)
            lines[node.lineno - 1] = f"from ..model import {names}"
            for number in range(node.lineno, node.end_lineno or node.lineno):
                lines[number] = ""
    return "\n".join(lines) + "\n"


def module_file(module: str) -> Path:
    """Source file of a moec module."""
    base = ROOT.joinpath(*module.split(".")[1:])
    return base / "__init__.py" if base.is_dir() else base.with_suffix(".py")


def internal_imports(tree: ast.Module, module: str) -> list[tuple[ast.ImportFrom, str]]:
    """Every `from X import names` that stays inside moec, with X absolute."""
    found = []
    for node in tree.body:
        if isinstance(node, ast.ImportFrom):
            target = _absolute(node, module)
            if target.split(".")[0] == PACKAGE:
                found.append((node, target))
    return found


def _absolute(node: ast.ImportFrom, module: str) -> str:
    if not node.level:
        return node.module or ""
    parts = module.split(".")[: -node.level]
    return ".".join([*parts, node.module] if node.module else parts)


def closure(roots: list[str]) -> list[str]:
    """The modules `roots` need, dependencies first."""
    order: list[str] = []

    def visit(module: str) -> None:
        if module in order:
            return
        tree = ast.parse(module_file(module).read_text(encoding="utf-8"))
        for _, target in internal_imports(tree, module):
            visit(target)
        order.append(module)

    for root in roots:
        visit(root)
    return order


def splice(header: list[str], parts: list[tuple[str, str]]) -> str:
    """One module from (title, source) parts, in order; raises ValueError on a name defined twice."""
    external: set[str] = set()
    seen: dict[str, str] = {}
    bodies = []
    for title, source in parts:
        tree = ast.parse(source)
        _claim_names(tree, title, seen)
        bodies.append(_body(title, source, tree, external))
    return "\n".join([*header, "", *_sorted_imports(external), "", *bodies])


def _claim_names(tree: ast.Module, title: str, seen: dict[str, str]) -> None:
    for node in tree.body:
        for name in _defined(node):
            if name in seen:
                raise ValueError(f"{name} is defined by {seen[name]} and by {title}; spliced modules need unique names")
            seen[name] = title


def _defined(node: ast.stmt) -> list[str]:
    if isinstance(node, ast.FunctionDef | ast.ClassDef):
        return [node.name]
    targets = node.targets if isinstance(node, ast.Assign) else [node.target] if isinstance(node, ast.AnnAssign) else []
    return [t.id for t in targets if isinstance(t, ast.Name) and t.id != "__all__"]


def _body(title: str, source: str, tree: ast.Module, external: set[str]) -> str:
    """The module's text without imports, docstring and __all__; external imports are collected."""
    lines = source.splitlines()
    drop: set[int] = set()
    for index, node in enumerate(tree.body):
        is_import = isinstance(node, ast.Import | ast.ImportFrom)
        if isinstance(node, ast.ImportFrom) and _is_internal(node) and any(alias.asname for alias in node.names):
            raise ValueError(f"{title}: `{ast.unparse(node)}`: spliced modules cannot rename what they import")
        if is_import and not _is_internal(node):
            external.add(ast.unparse(node))
        is_doc = index == 0 and isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
        if is_import or is_doc or _is_all(node):
            drop.update(range(node.lineno - 1, node.end_lineno or node.lineno))
    doc = ast.get_docstring(tree) or ""
    rule = "# " + "-" * 100
    about = [rule, f"# {title}", *(f"# {line}".rstrip() for line in doc.splitlines()), rule]
    kept = [line for number, line in enumerate(lines) if number not in drop and not line.startswith("# Emitted by")]
    return "\n".join([*about, *_squeeze(kept), ""])


def _is_internal(node: ast.stmt) -> bool:
    return isinstance(node, ast.ImportFrom) and (node.level > 0 or (node.module or "").split(".")[0] == PACKAGE)


def _is_all(node: ast.stmt) -> bool:
    return isinstance(node, ast.Assign) and any(isinstance(t, ast.Name) and t.id == "__all__" for t in node.targets)


def _squeeze(lines: list[str]) -> list[str]:
    """At most two blank lines in a row, none at the ends."""
    kept: list[str] = []
    for line in lines:
        if line or (kept and any(kept[-2:])):
            kept.append(line)
    while kept and not kept[-1]:
        kept.pop()
    return ["", "", *kept, ""] if kept else []


def _sorted_imports(external: set[str]) -> list[str]:
    plain = sorted(line for line in external if line.startswith("import "))
    return plain + sorted(line for line in external if line.startswith("from "))
