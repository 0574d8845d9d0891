"""Serve an emitted program from standard input: one prompt per line in, one completion per line out.

A line is token ids (`1,2,3`); with a tokenizer.json in the checkpoint a line is text instead.
The whole input is one batch.
"""

import argparse
import math
from collections.abc import Iterable, Sequence
from typing import Any, TextIO

import jax
from tokenizers import Tokenizer

from .generate import Completion, generate
from .program import Program
from .tokenizer import encode, load_tokenizer, stop_ids
from .weights import load_weights


def main(program: Program, argv: Sequence[str], source: TextIO, sink: TextIO) -> int:
    """Read prompts from source, write completions to sink in the same order."""
    args = _parse(program, argv)
    tokenizer = None if args.ids else load_tokenizer(args.weights)
    lines = [line.strip() for line in source if line.strip()]
    prompts = [encode(tokenizer, line) if tokenizer else [int(word) for word in line.split(",")] for line in lines]
    mesh = program.mesh(_devices(math.prod(program.MESH_AXES.values())))
    weights = load_weights(program, mesh, args.weights)
    stops = stop_ids(args.weights)
    done = generate(program, mesh, weights, prompts, max_tokens=args.max_tokens, stop_ids=stops)
    for text in _texts(done, tokenizer):
        print(text, file=sink)
    return 0


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
