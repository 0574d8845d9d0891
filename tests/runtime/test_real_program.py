"""The engine on an emitted program: batches, chunks and waiting rows must not change what a prompt gives."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from jax.sharding import Mesh

from moec.compiler.emit.emit import emit
from moec.compiler.plan.choose import make_plan
from moec.compiler.spec.load import load
from moec.runtime.cache import allocate_state
from moec.runtime.generate import generate
from moec.runtime.packing import LAST_SAMPLED, Row, pack, place
from moec.runtime.program import Program, load_program
from moec.runtime.sampling import GREEDY, SamplingParams
from moec.runtime.weights import load_weights

ORACLE = Path(__file__).parent.parent / "fixtures" / "oracles" / "qwen3_5_moe"
# Two rows and 48 tokens per rank and step: seven prompts on two ranks wait, and long ones take several chunks.
PINS = ("plan.attention={dp: 2, tp: 2}", "plan.max_seqs=2", "plan.max_batched_tokens=48", "workload.max_context=160")
Loaded = tuple[Program, Mesh, Any]


@pytest.fixture(scope="module")
def loaded(tmp_path_factory: pytest.TempPathFactory) -> Loaded:
    request = load("tiny/qwen3_5_moe", target="cpu:4", workload="tiny", overrides=PINS)
    folder = tmp_path_factory.mktemp("emitted")
    emit(request.graph, make_plan(request), folder)
    program = load_program(folder)
    assert program.NUM_RANKS == 2 and {b.seqs_per_rank for b in program.BUCKETS.values()} == {2}
    mesh = program.mesh(jax.devices()[:4])
    return program, mesh, load_weights(program, mesh, ORACLE)


@pytest.fixture(scope="module")
def prompts() -> list[list[int]]:
    ids = np.load(ORACLE / "ref.npz")["ids_b"][0].tolist()
    return [ids[:9], ids[:1], ids[:120], ids[7:56], ids[3:51], ids[20:37], ids[40:130]]


def test_a_batch_gives_each_prompt_what_it_gets_alone(loaded: Loaded, prompts: list[list[int]]) -> None:
    """Alone a prompt is cut into other chunks, sits in other rows and waits for nobody."""
    program, mesh, weights = loaded
    done = generate(program, mesh, weights, prompts, max_tokens=24)
    assert list(done[0].tokens) == np.load(ORACLE / "ref.npz")["gen"][0].tolist()
    for prompt, together in zip(prompts, done, strict=True):
        (alone,) = generate(program, mesh, weights, [prompt], max_tokens=24)
        assert alone.tokens == together.tokens
        np.testing.assert_allclose(alone.logprobs, together.logprobs, atol=1e-4)


def test_draws_do_not_depend_on_the_batch(loaded: Loaded, prompts: list[list[int]]) -> None:
    program, mesh, weights = loaded
    warm = SamplingParams(temperature=0.9, top_k=40, top_p=0.95, seed=3)
    together = generate(program, mesh, weights, prompts, max_tokens=8, sampling=warm)
    for i in (0, 3):
        (alone,) = generate(program, mesh, weights, [prompts[i]], max_tokens=8, sampling=replace(warm, seed=3 + i))
        assert alone.tokens == together[i].tokens
    assert together[0].tokens != generate(program, mesh, weights, prompts[:1], max_tokens=8)[0].tokens


def test_minus_one_feeds_the_last_sampled_token(loaded: Loaded) -> None:
    program, mesh, weights = loaded
    state = allocate_state(program, mesh, program.NUM_PAGES, program.NUM_SLOTS)
    reference = np.load(ORACLE / "ref.npz")
    prompt, tokens = reference["gen_prompt"][0].tolist(), list[int]()
    row = Row(tuple(prompt), 0, tuple(range(1, 5)), 1, False, GREEDY)
    for i in range(6):
        bucket = "mixed" if i == 0 else "decode"
        batch = place(program, mesh, pack(program.BUCKETS[bucket], [[], [row]]))
        state, out = program.STEPS[bucket](weights, state, batch)
        tokens.append(int(out["tokens"][1, 0]))
        row = replace(row, tokens=(LAST_SAMPLED,), start=len(prompt) + i, has_state=True)
    assert tokens == reference["gen"][0, :6].tolist()
