"""Generate tokens: load a checkpoint into a program and continue prompts.

A MODEL is compiled first (into .moec_cache); a DIR is an emitted program. Text prompts need
the checkpoint's tokenizer.json and print text; --ids prompts print token ids."""

import argparse
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .common import add_json, add_target, add_words, add_workload, fail, log, print_json
from .programs import Emitted, find_program, prepare_devices, take_devices
from .progress import Printer, load_with_progress

if TYPE_CHECKING:
    from tokenizers import Tokenizer

    from moec.runtime.generate import Completion

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
    tokenizer = _tokenizer(args)
    prompts = _prompts(args, tokenizer)
    positions = max(map(len, prompts)) + args.max_tokens
    emitted = find_program(args.words, args.target, args.workload, positions=positions)
    prepare_devices(emitted.plan)
    completions, notes, seconds = _generate(args, emitted, prompts, tokenizer)
    total = sum(len(c.tokens) for c in completions)
    log(f"{total} tokens in {seconds:.2f} s, the compilation of the steps included")
    if args.json:
        print_json({**_document(emitted, prompts, completions, tokenizer, seconds), "load_notes": notes})
    return 0


def _tokenizer(args: argparse.Namespace) -> "Tokenizer | None":
    if not args.prompt:
        return None
    from moec.runtime.tokenizer import load_tokenizer

    return load_tokenizer(args.weights)


def _prompts(args: argparse.Namespace, tokenizer: "Tokenizer | None") -> list[list[int]]:
    """Token ids of every prompt."""
    if bool(args.prompt) == bool(args.ids):
        fail("give prompts either as text or as token ids", "--prompt TEXT or --ids 1,2,3, each repeatable")
    if tokenizer is None:
        return [_parse_ids(text) for text in args.ids]
    from moec.runtime.tokenizer import encode

    return [encode(tokenizer, text) for text in args.prompt]


def _parse_ids(text: str) -> list[int]:
    try:
        return [int(word) for word in text.split(",")]
    except ValueError:
        fail(f"--ids {text!r} is not a list of token ids", "write --ids 1,2,3")


def _generate(
    args: argparse.Namespace, emitted: Emitted, prompts: list[list[int]], tokenizer: "Tokenizer | None"
) -> tuple[list["Completion"], tuple[str, ...], float]:
    """Load and generate, streaming to stdout: completions, what loading changed, seconds of generating."""
    from moec.runtime.generate import generate
    from moec.runtime.packing import SamplingParams
    from moec.runtime.program import load_program
    from moec.runtime.tokenizer import stop_ids

    program = load_program(emitted.folder)
    mesh = program.mesh(take_devices(emitted.plan))
    weights, notes = load_with_progress(program, mesh, args.weights)
    sampling = SamplingParams(args.temperature, args.top_k, args.top_p, args.seed)
    start = time.perf_counter()
    with Printer(prompts, tokenizer, args.max_tokens, quiet=args.json) as printer:
        completions = generate(
            program,
            mesh,
            weights,
            prompts,
            max_tokens=args.max_tokens,
            sampling=sampling,
            stop_ids=stop_ids(args.weights),
            on_token=printer.push,
        )
    return completions, notes, time.perf_counter() - start


def _document(
    emitted: Emitted,
    prompts: list[list[int]],
    completions: Sequence["Completion"],
    tokenizer: "Tokenizer | None",
    seconds: float,
) -> dict[str, Any]:
    def one(ids: list[int], completion: "Completion") -> dict[str, Any]:
        text = {"text": tokenizer.decode(list(completion.tokens))} if tokenizer else {}
        return {"prompt_ids": ids, **asdict(completion), **text}

    plan = emitted.plan
    done = [one(ids, completion) for ids, completion in zip(prompts, completions, strict=True)]
    return {
        "model": plan.model,
        "target": plan.target,
        "program": str(emitted.folder),
        "seconds": round(seconds, 3),
        "completions": done,
    }
