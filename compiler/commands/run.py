"""Generate tokens: load a checkpoint into a program and continue prompts.

A MODEL is compiled first (into .moec_cache); a DIR is an emitted program. Text prompts need
the checkpoint's tokenizer.json and print text; --ids prompts print token ids."""

import argparse
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from ..problems import Problem, ProblemsError
from .common import add_json, add_target, add_words, add_workload, fail, log, one_name, print_json, program_folder
from .plan_file import read_plan
from .programs import Emitted, find_program, load_request, prepare_devices, take_devices, visible_target
from .progress import Printer, load_with_progress

if TYPE_CHECKING:
    from tokenizers import Tokenizer

    from moec.runtime.generate import Completion
    from moec.runtime.sampling import SamplingParams

T = TypeVar("T")
USAGE = (
    "moec run MODEL|DIR --weights DIR [--target TARGET] (--prompt TEXT | --ids 1,2,3)... "
    "[--max-tokens N] [--temperature T] [--seed S] [--json] [key=value ...]"
)
EPILOG = """\
examples:
  moec run my_model.yaml --target cpu --weights CHECKPOINT_DIR --prompt "Once upon a time" --prompt "The end"
  moec run generated/my_model/cpu_8/default --weights CHECKPOINT_DIR --ids 5,6,7 --max-tokens 24
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_words(parser, "a model name or file, or the folder of an emitted program; overrides of a model")
    parser.add_argument("--weights", metavar="DIR", type=Path, required=True, help="Hugging Face checkpoint folder")
    add_target(parser)
    add_workload(parser)
    parser.add_argument("--prompt", metavar="TEXT", action="append", default=[], help="a text prompt; repeatable")
    parser.add_argument("--ids", metavar="1,2,3", action="append", default=[], help="a prompt as token ids; repeatable")
    parser.add_argument("--max-tokens", metavar="N", type=int, default=64, help="tokens to generate per prompt (64)")
    parser.add_argument("--temperature", metavar="T", type=float, default=0.0, help="0 = the likeliest token (0)")
    parser.add_argument("--top-k", metavar="K", type=int, default=0, help="draw from the K likeliest, 0 = off (0)")
    parser.add_argument(
        "--top-p", metavar="P", type=float, default=1.0, help="draw from the likeliest mass, 1 = off (1)"
    )
    parser.add_argument("--seed", metavar="S", type=int, default=0, help="prompt i draws with seed S + i (0)")
    add_json(parser)


def run(args: argparse.Namespace) -> int:
    """Compile if needed, load, generate, print."""
    inputs = _inputs(args)
    positions = max(map(len, inputs.prompts)) + args.max_tokens
    emitted = find_program(args.words, args.target, args.workload, positions=positions)
    prepare_devices(emitted.plan)
    completions, notes, seconds = _generate(args, emitted, inputs)
    _tell_cut(completions, emitted.plan.max_context)
    total = sum(len(c.tokens) for c in completions)
    log(f"{total} tokens in {seconds:.2f} s, the compilation of the steps included")
    if args.json:
        print_json({**_document(emitted, inputs, completions, seconds), "load_notes": notes})
    return 0


@dataclass(frozen=True)
class _Inputs:
    """What is known before anything is compiled."""

    tokenizer: "Tokenizer | None"
    prompts: list[list[int]]
    sampling: "SamplingParams"
    stop_ids: tuple[int, ...]


def _inputs(args: argparse.Namespace) -> _Inputs:
    """Read and checked; where something is wrong, the problems of the model come along."""
    from moec.runtime.checkpoint import Checkpoint
    from moec.runtime.sampling import SamplingParams, check_sampling
    from moec.runtime.tokenizer import stop_ids

    problems: list[Problem] = []
    sampling = SamplingParams(args.temperature, args.top_k, args.top_p, args.seed)
    prompts = _attempt(problems, lambda: _prompts(args))
    stops = _attempt(problems, lambda: stop_ids(args.weights))
    _attempt(problems, lambda: Checkpoint(args.weights))
    if wrong := check_sampling(sampling, args.max_tokens):
        problems += [Problem("", text) for text in wrong]
    if problems or prompts is None or stops is None:
        _attempt(problems, lambda: _check_model(args))
        raise ProblemsError(problems)
    return _Inputs(*prompts, sampling, stops)


def _attempt(problems: list[Problem], step: Callable[[], T]) -> T | None:
    """The step's result; None where it only added to the problems."""
    from moec.runtime.errors import InputError, fold

    try:
        return step()
    except ProblemsError as error:
        problems += error.problems
    except InputError as error:
        problems += [Problem("", message) for message in fold(error.messages)]
    return None


def _check_model(args: argparse.Namespace) -> None:
    """The model and its overrides, or the plan of the folder, without compiling anything."""
    name, overrides = one_name(args.words, "MODEL or DIR")
    folder = program_folder(name)
    if folder:
        read_plan(folder)
    else:
        load_request(name, args.target or visible_target(), args.workload, overrides)


def _prompts(args: argparse.Namespace) -> tuple["Tokenizer | None", list[list[int]]]:
    """The tokenizer of text prompts, and the token ids of every prompt."""
    if bool(args.prompt) == bool(args.ids):
        fail("give prompts either as text or as token ids", "--prompt TEXT or --ids 1,2,3, each repeatable")
    if args.ids:
        return None, _parse_ids(args.ids)
    from moec.runtime.tokenizer import encode, load_tokenizer

    tokenizer = load_tokenizer(args.weights)
    return tokenizer, [encode(tokenizer, text) for text in args.prompt]


def _parse_ids(texts: Sequence[str]) -> list[list[int]]:
    found, problems = [], []
    for text in texts:
        try:
            found.append([int(word) for word in text.split(",")])
        except ValueError:
            problems.append(Problem("", f"--ids {text!r} is not a list of token ids", "write --ids 1,2,3"))
    if problems:
        raise ProblemsError(problems)
    return found


def _generate(
    args: argparse.Namespace, emitted: Emitted, inputs: _Inputs
) -> tuple[list["Completion"], tuple[str, ...], float]:
    """Load and generate, streaming to stdout: completions, what loading changed, seconds of generating."""
    from moec.runtime.errors import RequestError
    from moec.runtime.generate import check_prompts, generate
    from moec.runtime.program import load_program

    program = load_program(emitted.folder)
    if problems := check_prompts(program, inputs.prompts):
        raise RequestError(problems)  # before the weights are loaded
    mesh = program.mesh(take_devices(emitted.plan))
    weights, notes = load_with_progress(program, mesh, args.weights)
    start = time.perf_counter()
    with Printer(inputs.prompts, inputs.tokenizer, args.max_tokens, quiet=args.json) as printer:
        completions = generate(
            program,
            mesh,
            weights,
            inputs.prompts,
            max_tokens=args.max_tokens,
            sampling=inputs.sampling,
            stop_ids=inputs.stop_ids,
            on_token=printer.push,
        )
    return completions, notes, time.perf_counter() - start


def _tell_cut(completions: Sequence["Completion"], max_context: int) -> None:
    """Completions that ended for want of room, which their text does not show."""
    for i, completion in enumerate(completions):
        if completion.finish == "context":
            count = len(completion.tokens)
            log(f"prompt {i}: cut after {count} tokens, prompt and completion fill max_context {max_context}")


def _document(emitted: Emitted, inputs: _Inputs, completions: Sequence["Completion"], seconds: float) -> dict[str, Any]:
    def one(ids: list[int], completion: "Completion") -> dict[str, Any]:
        text = {"text": inputs.tokenizer.decode(list(completion.tokens))} if inputs.tokenizer else {}
        return {"prompt_ids": ids, **asdict(completion), **text}

    plan = emitted.plan
    done = [one(ids, completion) for ids, completion in zip(inputs.prompts, completions, strict=True)]
    return {
        "model": plan.model,
        "target": plan.target,
        "program": str(emitted.folder),
        "seconds": round(seconds, 3),
        "completions": done,
    }
