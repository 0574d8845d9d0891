"""Serve an emitted program from standard input: one prompt per line in, one completion per line out.

A line is token ids (`1,2,3`); with a tokenizer.json in the checkpoint a line is text instead.
The whole input is one batch. Bad input gives a message on stderr and exit code 2.
"""

import argparse
import math
import sys
from collections.abc import Iterable, Sequence
from typing import Any, TextIO

import jax
from tokenizers import Tokenizer

from .errors import InputError, RequestError, fold
from .generate import Completion, check_prompts, generate
from .program import Program
from .sampling import GREEDY, check_sampling
from .tokenizer import encode, load_tokenizer, stop_ids
from .weights import load_weights

EXIT_BAD_INPUT = 2


def main(program: Program, argv: Sequence[str], source: TextIO, sink: TextIO) -> int:
    """Read prompts from source, write completions to sink in the same order; returns the exit code."""
    args = _parse(program, argv)
    try:
        for text in _complete(program, args, source):
            print(text, file=sink)
    except InputError as error:
        print("\n".join(f"error: {message}" for message in fold(error.messages)), file=sys.stderr)
        return EXIT_BAD_INPUT
    return 0


def _complete(program: Program, args: argparse.Namespace, source: TextIO) -> Iterable[str]:
    """A line of output per line of input."""
    tokenizer = None if args.ids else load_tokenizer(args.weights)
    stops = stop_ids(args.weights)
    prompts = _prompts(source, tokenizer)
    if problems := [*check_sampling(GREEDY, args.max_tokens), *check_prompts(program, prompts)]:
        raise RequestError(problems)  # before the weights are loaded
    mesh = program.mesh(_devices(math.prod(program.MESH_AXES.values())))
    weights = load_weights(program, mesh, args.weights)
    done = generate(program, mesh, weights, prompts, max_tokens=args.max_tokens, stop_ids=stops)
    return _texts(done, tokenizer)


def _prompts(source: TextIO, tokenizer: Tokenizer | None) -> list[list[int]]:
    """Token ids of every line that is not blank."""
    lines = [(number, line.strip()) for number, line in enumerate(source, 1) if line.strip()]
    if tokenizer:
        return [encode(tokenizer, line) for _, line in lines]
    strange = [
        f"line {number}: {line!r} is not a list of token ids (1,2,3)" for number, line in lines if not _ids(line)
    ]
    if strange:
        raise RequestError(strange)
    return [_ids(line) for _, line in lines]


def _ids(line: str) -> list[int]:
    """The ids of a line, none where it is no list of them."""
    try:
        return [int(word) for word in line.split(",")]
    except ValueError:
        return []


def _parse(program: Program, argv: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=f"Complete prompts with {program.NAME}, one per input line.")
    parser.add_argument("--weights", required=True, metavar="DIR", help="Hugging Face checkpoint folder")
    parser.add_argument("--ids", action="store_true", help="lines are token ids (1,2,3) instead of text")
    parser.add_argument("--max-tokens", type=int, default=64, metavar="N")
    return parser.parse_args(argv)


def _devices(count: int) -> list[Any]:
    """The devices of the program's mesh. Where there is only a CPU, as many virtual ones."""
    jax.config.update("jax_num_cpu_devices", count)  # other backends do not read it
    return jax.devices()[:count]


def _texts(done: Iterable[Completion], tokenizer: Tokenizer | None) -> Iterable[str]:
    for completion in done:
        yield tokenizer.decode(list(completion.tokens)) if tokenizer else ",".join(map(str, completion.tokens))
