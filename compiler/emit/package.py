"""The files of an emitted program: model.py, weights.py, serve.py, plan.json, README.md."""

import hashlib
import re
import shlex
from pathlib import Path

from ..graph.ir import Graph
from ..plan.plan import Plan
from ..plan.report import plan_markdown
from .constants import item_lines
from .constants import text as python_text
from .render import render, render_python
from .view import identifier, view
from .weights_view import weights_view

# What the dims in the suffixes of array names are, in the order of a program's legend.
_DIMS = {
    "T": "tokens of this rank", "A": "tokens of all ranks", "S": "rows (sequences)", "D": "hidden",
    "Z": "width of the routed experts", "E": "experts", "K": "experts per token", "C": "cached values per token",
    "V": "vocabulary", "L": "layers", "G": "heads of all devices",
}  # fmt: skip
_SUFFIX = re.compile(r"\b[a-z][a-z0-9_]*_([A-Z0-9]+)\b")


def program_dir(root: Path, plan: Plan) -> Path:
    """generated/<model>/<target>/<workload>, in importable slugs."""
    return root / identifier(plan.model) / identifier(plan.target) / identifier(plan.workload)


def plan_digest(plan: Plan) -> str:
    """sha256 of plan.json, shortened."""
    return hashlib.sha256(plan_json(plan).encode()).hexdigest()[:16]


def plan_json(plan: Plan) -> str:
    """plan.json as written."""
    return plan.model_dump_json(indent=1) + "\n"


def regenerate_command(plan: Plan, standalone: bool = False) -> str:
    """The command line that writes this program again."""
    words = ["moec", "compile", plan.model_source, "--target", plan.target, "--workload", plan.workload_source]
    words += [*plan.overrides, *(["--standalone", "-o", "DIR"] if standalone else [])]
    return shlex.join(words)


def header(plan: Plan, standalone: bool = False) -> tuple[str, ...]:
    """First lines of every emitted file: where it came from and how to make it again."""
    digests = ", ".join(f"{name} {value[:16]}" for name, value in plan.digests.items())
    return (
        f"Emitted by moec; do not edit. Regenerate: {regenerate_command(plan, standalone)}",
        f"Digests: {digests}, plan {plan_digest(plan)}",
    )


def legend(text: str) -> tuple[str, ...]:
    """Lines that say what the dims in a program's suffixes are."""
    used = {dim for suffix in _SUFFIX.findall(text) for dim in suffix if dim.isalpha()}
    assert used <= _DIMS.keys(), f"dims without a legend: {sorted(used - _DIMS.keys())}"
    first, *others = (f"{dim} {what}" for dim, what in _DIMS.items() if dim in used)
    return tuple(item_lines([f"Suffixes: {first}", *others], "."))


def program_files(graph: Graph, plan: Plan) -> dict[str, str]:
    """File name -> text of the emitted package."""
    v = view(graph, plan, header(plan))
    calls = {b.name: render(f"{b.kind}/call.j2", **b.fields).rstrip("\n") for b in v.blocks}
    fields = {
        "v": v,
        "name": graph.name,
        "calls": calls,
        "plan_digest": plan_digest(plan),
        "compile_options": python_text(plan.compile_options),
    }
    model = render_python("model.py.j2", **fields, legend=legend(render("model.py.j2", **fields, legend=())))
    return {
        "__init__.py": f'"""{graph.name} on {plan.target}, emitted by moec."""\n',
        "model.py": model,
        "weights.py": render_python("weights.py.j2", v=weights_view(graph, plan, header(plan))),
        "serve.py": render_python("serve.py.j2", header=header(plan), name=graph.name),
        "plan.json": plan_json(plan),
        "README.md": plan_markdown(plan),
    }
