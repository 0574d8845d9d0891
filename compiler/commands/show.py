"""Print one stage in its text form: the spec as read, the graph with shapes, the plan, or the program.

spec and graph need only a MODEL; plan and program also need --target."""

import argparse
from collections.abc import Callable

from ..spec.load import load
from ..spec.schema import Request
from .common import add_target, add_words, add_workload, fail, one_name, required, split_words
from .programs import load_request

USAGE = "moec show spec|graph|plan|program MODEL [--target TARGET] [--workload NAME] [key=value ...]"
EPILOG = """\
examples:
  moec show graph my_model.yaml
  moec show program my_model.yaml --target cpu:8
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_words(parser, "the stage, a model name or file, and overrides")
    add_target(parser)
    add_workload(parser)


def run(args: argparse.Namespace) -> int:
    """Load as far as the stage needs, print its text."""
    names, _ = split_words(args.words)
    if not names or names[0] not in STAGES:
        fail(f"expected a stage, got {names[0] if names else 'none'}", f"one of {', '.join(STAGES)}")
    stage = names[0]
    rest = list(args.words)
    rest.remove(stage)
    model, overrides = one_name(rest)
    if stage in ("plan", "program"):
        target = required(args.target, "--target", f"`moec show {stage}` needs it")
        request = load_request(model, target, args.workload, overrides)
    else:
        request = load(model, target=args.target, workload=args.workload, overrides=overrides)
    print(STAGES[stage](request).rstrip("\n"))
    return 0


def _spec(request: Request) -> str:
    from ..spec.show import show_spec

    return show_spec(request)


def _graph(request: Request) -> str:
    from ..graph.show import show_graph

    return show_graph(request.graph)


def _plan(request: Request) -> str:
    from ..plan.choose import make_plan
    from ..plan.report import plan_markdown

    return plan_markdown(make_plan(request))


def _program(request: Request) -> str:
    from ..emit.package import program_files
    from ..plan.choose import make_plan

    return program_files(request.graph, make_plan(request))["model.py"]


STAGES: dict[str, Callable[[Request], str]] = {"spec": _spec, "graph": _graph, "plan": _plan, "program": _program}
