"""Choose mesh, placement, dtypes, kernels and buckets for a model on a target, and say why.

Prints the chosen plan, its memory and its estimates, and every rejected candidate with the
reason. Estimates are computed from published numbers, never measured."""

import argparse

from ..plan.choose import make_plan
from ..plan.report import render_plan
from ..spec.load import list_workloads, load
from .common import add_json, add_target, add_words, add_workload, console, one_name, required

USAGE = "moec plan MODEL --target TARGET --workload NAME [--json] [key=value ...]"
EPILOG = """\
examples:
  moec plan my_model.yaml --target tpu7x-8 --workload NAME
  moec plan my_model.yaml --target tpu7x-8 --workload NAME plan.dtypes.kv=bfloat16 workload.concurrency=256
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_words(parser, "a model name or file, and overrides")
    add_target(parser)
    add_workload(parser)
    add_json(parser)


def run(args: argparse.Namespace) -> int:
    """Plan and print."""
    model, overrides = one_name(args.words)
    target = required(args.target, "--target")
    workload = required(args.workload, "--workload", f"a file, or one of {', '.join(list_workloads())}")
    plan = make_plan(load(model, target=target, workload=workload, overrides=overrides))
    if args.json:
        print(plan.model_dump_json(indent=1))
    else:
        render_plan(plan, console())
    return 0
