"""CPU sanity: prefill and decode rates of an emitted program beside Hugging Face transformers.

    python benchmarks/cpu_vs_transformers/run.py --transformers-python PATH [--rounds 7]

Both run the same random float32 checkpoint of about 110 M parameters on two threads. One process
each stays alive; rounds are interleaved (A, B, A, B, ...) after one warm-up round that is not
counted, and the table shows medians with the spread. Greedy ids of the first prompt must agree.
PATH is a Python with the extra `oracle` (torch, transformers); it may be the same one.
"""

import argparse
import json
import os
import platform
import shutil
import statistics
import subprocess
import sys
import tempfile
from importlib.metadata import version
from pathlib import Path

from moec.compiler.emit.emit import emit
from moec.compiler.graph.count import active_params, total_params
from moec.compiler.plan.choose import make_plan
from moec.compiler.spec.load import load
from moec.compiler.verify.random_checkpoint import write_random_checkpoint

HERE = Path(__file__).resolve().parent
PROMPT_TOKENS = 128
DECODE_STEPS = 32
BATCHES = (1, 8)
SIDES = ("moec", "transformers")


def prepare(folder: Path) -> dict[str, int]:
    """Emit the program and write the checkpoint; returns facts for the record."""
    overrides = [f"plan.max_batched_tokens={max(BATCHES) * PROMPT_TOKENS}", "workload.isl=128", "workload.osl=64"]
    overrides += [f"workload.concurrency={max(BATCHES)}", "workload.max_context=256"]
    request = load(str(HERE / "moe_100m.yaml"), target="cpu", workload="default", overrides=overrides)
    emit(request.graph, make_plan(request), folder / "program")
    write_random_checkpoint(request.graph, folder / "checkpoint")
    shutil.copy(HERE / "config.json", folder / "checkpoint" / "config.json")
    return {"total_params": total_params(request.graph), "active_params": active_params(request.graph)}


def start(side: str, folder: Path, python: str) -> subprocess.Popen:
    """One worker process."""
    own = {**os.environ, "JAX_PLATFORMS": "cpu", "OMP_NUM_THREADS": "2"}
    if side == "moec":
        command = [sys.executable, HERE / "worker_moec.py", folder / "program", folder / "checkpoint"]
    else:
        command = [python, HERE / "worker_transformers.py", folder / "checkpoint"]
    command.append(PROMPT_TOKENS)
    return subprocess.Popen(map(str, command), stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=own)


def ask(worker: subprocess.Popen, batch: int) -> dict:
    """One timed run."""
    assert worker.stdin and worker.stdout
    worker.stdin.write(json.dumps({"batch": batch, "decode_steps": DECODE_STEPS}) + "\n")
    worker.stdin.flush()
    line = worker.stdout.readline()
    assert line, "the worker died; see its messages above"
    return json.loads(line)


def measure(workers: dict[str, subprocess.Popen], rounds: int) -> list[dict]:
    """Medians per batch and side."""
    found = []
    for batch in BATCHES:
        samples: dict[str, list[dict]] = {side: [] for side in SIDES}
        for number in range(rounds + 1):
            for side in SIDES if number % 2 else reversed(SIDES):
                answer = ask(workers[side], batch)
                if number:
                    samples[side].append(answer)
        first = {side: samples[side][0]["ids"] for side in SIDES}
        assert first["moec"] == first["transformers"], f"greedy ids differ: {first}"
        for side in SIDES:
            found.append({"side": side, "batch": batch, **rates(samples[side], batch)})
    return found


def rates(samples: list[dict], batch: int) -> dict[str, float]:
    """Tokens per second: median, slowest, fastest."""
    result = {}
    for phase, tokens in (("prefill", batch * PROMPT_TOKENS), ("decode", batch * DECODE_STEPS)):
        values = [tokens / sample[f"{phase}_s"] for sample in samples]
        result[f"{phase}_tokens_per_s"] = round(statistics.median(values), 1)
        result[f"{phase}_min"], result[f"{phase}_max"] = round(min(values), 1), round(max(values), 1)
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--transformers-python", default=sys.executable)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--out", type=Path, default=HERE / "result.json")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        facts = prepare(Path(name))
        workers = {side: start(side, Path(name), args.transformers_python) for side in SIDES}
        try:
            rows = measure(workers, args.rounds)
        finally:
            for worker in workers.values():
                worker.kill()
    peers = subprocess.run(
        [args.transformers_python, "-c", "import torch, transformers as t; print(torch.__version__, t.__version__)"],
        capture_output=True,
        text=True,
        check=True,
    ).stdout.split()
    method = f"{args.rounds} interleaved rounds, medians; {PROMPT_TOKENS} prompt tokens, {DECODE_STEPS} steps, float32"
    record = {
        "model": facts,
        "machine": {"cores": os.cpu_count(), "arch": platform.machine()},
        "versions": {"jax": version("jax"), "torch": peers[0], "transformers": peers[1]},
        "method": method,
        "rows": rows,
    }
    args.out.write_text(json.dumps(record, indent=1) + "\n")
    print(json.dumps(record, indent=1))


if __name__ == "__main__":
    main()
