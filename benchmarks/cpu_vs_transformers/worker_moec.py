"""Times prefill and decode steps of an emitted program; one JSON command per input line, seconds out.

Every command uses the program's own steps: what `moec run` calls, without its bookkeeping.
"""

import json
import sys
import time
from pathlib import Path

import jax
import numpy as np

from moec.runtime.cache import allocate_state
from moec.runtime.packing import Row
from moec.runtime.program import load_program
from moec.runtime.step import Stepper
from moec.runtime.weights import load_weights


class Engine:
    """A program with weights, and the prompts of a fixed seed."""

    def __init__(self, folder: Path, checkpoint: Path, prompt_tokens: int):
        self.program = load_program(folder)
        self.mesh = self.program.mesh(jax.devices()[:1])
        self.weights = load_weights(self.program, self.mesh, checkpoint)
        program, state = self.program, self.state()
        self.stepper = Stepper(program, self.mesh, program.STEPS, program.BUCKETS, self.weights, state)
        self.prompt_tokens = prompt_tokens
        self.pages = -(-self.program.MAX_CONTEXT // self.program.PAGE_SIZE)

    def state(self) -> dict:
        return allocate_state(self.program, self.mesh, self.program.NUM_PAGES, self.program.NUM_SLOTS)

    def row(self, index: int, tokens: tuple[int, ...], start: int) -> Row:
        first = 1 + index * self.pages
        return Row(tokens, start, tuple(range(first, first + self.pages)), index + 1, start > 0)

    def run(self, batch: int, decode_steps: int) -> tuple[float, float, list[int]]:
        """(prefill seconds, seconds of all decode steps, ids of the first prompt)."""
        prompts = np.random.default_rng(0).integers(3, self.program.VOCAB, (batch, self.prompt_tokens))
        state = self.state()
        rows = [self.row(i, tuple(int(t) for t in prompt), 0) for i, prompt in enumerate(prompts)]
        start = time.perf_counter()
        state, out = self.stepper(self.weights, state, [rows])
        tokens = np.asarray(out["tokens"])[0]
        prefilled = time.perf_counter()
        ids = [int(tokens[0])]
        for step in range(decode_steps):
            length = self.prompt_tokens + step
            rows = [self.row(i, (int(tokens[i]),), length) for i in range(batch)]
            state, out = self.stepper(self.weights, state, [rows])
            tokens = np.asarray(out["tokens"])[0]
            ids.append(int(tokens[0]))
        return prefilled - start, time.perf_counter() - prefilled, ids


def main() -> None:
    engine = Engine(Path(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3]))
    for line in sys.stdin:
        command = json.loads(line)
        prefill, decode, ids = engine.run(command["batch"], command["decode_steps"])
        print(json.dumps({"prefill_s": prefill, "decode_s": decode, "ids": ids}), flush=True)


if __name__ == "__main__":
    main()
