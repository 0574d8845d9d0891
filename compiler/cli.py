"""The command line: picks one command, runs it, turns problems into messages and exit code 2.

Exit codes: 0 good, 1 a check failed, 2 bad input. With --json one document goes to stdout;
everything meant for people then goes to stderr. Only the chosen command is imported, so
that `moec check` starts without jax.
"""

import argparse
import importlib
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from moec import __version__
from moec.runtime.errors import InputError, fold

from .commands.common import Parser, print_json
from .problems import ProblemsError

EXIT_BAD_INPUT = 2
EXIT_INTERRUPTED = 130

EXPLANATION = """\
MODEL is a name under specs/models or a path to a YAML file; TARGET is a machine (tpu7x:2x2x1,
its alias tpu7x-8, cpu, cpu:8); key=value changes one entry of the composed document, whose roots
are model, target, workload and plan, e.g. plan.dtypes.kv=bfloat16.

examples:
  moec check my_model.yaml model.blocks.moe.router.top_k=8
  moec plan my_model.yaml --target tpu7x-8 --workload NAME
  moec compile my_model.yaml --target tpu7x-8 --workload NAME
  moec verify my_model.yaml --target tpu7x-8 --workload NAME --aot
  moec run my_model.yaml --weights CHECKPOINT_DIR --prompt "Once upon a time" --max-tokens 32

`moec COMMAND --help` explains one command.
"""


@dataclass(frozen=True)
class Command:
    """One command: its module under commands/ is imported only when it is called."""

    module: str
    summary: str


COMMANDS: dict[str, Command] = {
    "check": Command("check", "find every problem of model files and overrides"),
    "show": Command("show", "print one stage: spec, graph, plan or program"),
    "plan": Command("plan", "choose mesh, placement, dtypes and kernels, and say why"),
    "compile": Command("compile", "write the program of a model, a target and a workload"),
    "verify": Command("verify", "check a program against its plan, its references and the TPU compiler"),
    "port": Command("port", "write a model's spec from its Hugging Face config.json"),
    "bench": Command("bench", "compile kernels for a TPU that is not there and count what they execute"),
    "run": Command("run", "generate tokens from a checkpoint"),
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command line; returns the exit code."""
    words = list(sys.argv[1:] if argv is None else argv)
    top = _top_parser()
    if not words:
        top.print_help()
        return EXIT_BAD_INPUT
    chosen = top.parse_args(words[:1]).command
    module = importlib.import_module(f".commands.{COMMANDS[chosen].module}", __package__)
    parser = Parser(f"moec {chosen}", module.USAGE, module.__doc__, module.EPILOG)
    module.add_arguments(parser)
    # Options and positionals may alternate: `moec plan MODEL --target T key=value`.
    return _run(module, parser.parse_intermixed_args(words[1:]))


def _run(module: Any, args: argparse.Namespace) -> int:
    """Run a parsed command; bad input becomes messages, anything unexpected is a bug and raises."""
    try:
        return module.run(args)
    except ProblemsError as error:
        for problem in error.problems:
            print(problem, file=sys.stderr)
        if getattr(args, "json", False):
            print_json({"problems": [vars(problem) for problem in error.problems]})
        return EXIT_BAD_INPUT
    except InputError as error:  # checkpoints, prompts, tokenizers
        print("\n".join(f"error: {message}" for message in fold(error.messages)), file=sys.stderr)
        if getattr(args, "json", False):
            print_json({"problems": [{"text": message} for message in error.messages]})
        return EXIT_BAD_INPUT
    except BrokenPipeError:  # `moec show graph | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # the last flush has somewhere to go
        return 0
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return EXIT_INTERRUPTED


def _top_parser() -> argparse.ArgumentParser:
    width = max(map(len, COMMANDS)) + 2
    listing = "\n".join(f"  {name:<{width}}{command.summary}" for name, command in COMMANDS.items())
    parser = Parser(
        "moec",
        "moec COMMAND [arguments] [key=value ...]",
        "A model compiler for Mixture-of-Experts language models.",
        f"commands:\n{listing}\n\n{EXPLANATION}",
    )
    parser.add_argument("command", choices=COMMANDS, metavar="COMMAND", help="what to do, see below")
    parser.add_argument("--version", action="version", version=f"moec {__version__}")
    return parser
