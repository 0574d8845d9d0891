"""Find every problem of model files and overrides, in one pass.

A config.json of Hugging Face is checked as the spec that `moec port` would write of it.
Exit code 0 when all is well, 2 with one line per problem otherwise:
FILE:LINE:COL: error: DOTTED.PATH: what is wrong (valid values or "did you mean")."""

import argparse
from pathlib import Path

from ..graph.count import active_params, total_params
from ..graph.ir import Graph
from ..problems import Problem, ProblemsError
from ..spec.load import load
from .common import add_json, add_words, fail, print_json, split_words

USAGE = "moec check MODEL... [--json] [key=value ...]"
EPILOG = """\
examples:
  moec check my_model.yaml
  moec check my_model.yaml other.yaml model.blocks.moe.router.top_k=8
  moec check Some-Model/config.json
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_words(parser, "model names or files, and overrides that apply to all of them")
    add_json(parser)


def run(args: argparse.Namespace) -> int:
    """Check all models; the problems of all of them are raised together."""
    names, overrides = split_words(args.words)
    if not names:
        fail("no MODEL given", f"usage: {USAGE}")
    graphs: dict[str, Graph] = {}
    problems: list[Problem] = []
    for name in names:
        try:
            graphs[name] = _graph(name, overrides)
        except ProblemsError as error:
            problems += error.problems
    if not args.json:
        _print_good(graphs)
    if problems:
        raise ProblemsError(dict.fromkeys(problems))  # an override's problem once, not once per model
    if args.json:
        print_json({"models": {name: _facts(graph) for name, graph in graphs.items()}, "problems": []})
    return 0


def _graph(name: str, overrides: tuple[str, ...]) -> Graph:
    """The graph of a model, or of what a config.json ports to."""
    if not name.endswith(".json"):
        return load(name, overrides=overrides).graph
    from .port import ported_graph

    if overrides:
        fail(f"{name} is no spec, so key=value has nothing to change", f"moec port {name} -o SPEC.yaml")
    return ported_graph(Path(name))


def _print_good(graphs: dict[str, Graph]) -> None:
    for name, graph in graphs.items():
        facts = _facts(graph)
        counts = f"{_count(facts['total_params'])} parameters ({_count(facts['active_params'])} active)"
        print(f"{name}: good, {facts['num_layers']} layers, {counts}")


def _facts(graph: Graph) -> dict[str, int]:
    return {
        "num_layers": graph.num_layers,
        "total_params": total_params(graph),
        "active_params": active_params(graph),
    }


def _count(value: int) -> str:
    """396345294848 -> 396.35 B."""
    for unit, size in (("B", 10**9), ("M", 10**6), ("K", 10**3)):
        if value >= size:
            return f"{value / size:.2f} {unit}"
    return str(value)
