"""Scheduling, packing and generation on the fake program: every token is checked against plain arithmetic."""

from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from jax.sharding import Mesh

from moec.runtime.cache import allocate_state
from moec.runtime.errors import RequestError
from moec.runtime.generate import Completion, generate
from moec.runtime.packing import LAST_SAMPLED, Row, pack, place
from moec.runtime.program import Program
from moec.runtime.sampling import GREEDY, SamplingParams

Fake = tuple[Program, Mesh]
Next = Callable[..., int]
RAGGED = [1, 2, 3, 4, 5, 7, 8, 9, 10, 11, 13, 19, 20, 23]  # around page (4), bucket (10) and row (3) borders


def prompts_of(lengths: list[int]) -> list[list[int]]:
    rng = np.random.default_rng(0)
    return [rng.integers(0, 97, n).tolist() for n in lengths]


def expected(prompt: list[int], count: int, next_token: Next, seed: int | None = None) -> list[int]:
    tokens = list(prompt)
    for _ in range(count):
        tokens.append(next_token(tokens, seed))
    return tokens[len(prompt) :]


def test_ragged_prompts_more_than_rows(fake: Fake, next_token: Next) -> None:
    program, mesh = fake
    prompts = prompts_of(RAGGED * (3 if program.NUM_RANKS > 1 else 1))
    assert len(prompts) > 3 * program.NUM_RANKS
    done = generate(program, mesh, {}, prompts, max_tokens=8)
    assert [list(c.tokens) for c in done] == [expected(p, 8, next_token) for p in prompts]
    assert all(c.finish == "length" for c in done)
    assert [c.logprobs for c in done] == [tuple(-float(len(p) + i) for i in range(8)) for p in prompts]


def test_tokens_stream_in_order_as_they_are_sampled(fake: Fake, next_token: Next) -> None:
    program, mesh = fake
    prompts, seen = prompts_of([3, 21, 6, 1]), list[tuple[int, int]]()
    generate(program, mesh, {}, prompts, max_tokens=3, on_token=lambda i, token: seen.append((i, token)))
    for i, prompt in enumerate(prompts):
        assert [token for index, token in seen if index == i] == expected(prompt, 3, next_token)
    if program.NUM_RANKS == 1:  # prompt 0 streams while the chunks of prompt 1 run beside it
        assert [index for index, _ in seen[:2]] == [0, 0]


def test_stop_ids_end_a_sequence_and_are_kept(fake: Fake, next_token: Next) -> None:
    program, mesh = fake
    prompts = prompts_of([5, 9])
    tokens = [expected(p, 8, next_token) for p in prompts]
    stop = tokens[0][2]
    assert stop not in tokens[0][:2] and stop not in tokens[1]
    done = generate(program, mesh, {}, prompts, max_tokens=8, stop_ids=[stop])
    assert [list(c.tokens) for c in done] == [tokens[0][:3], tokens[1]]
    assert [c.finish for c in done] == ["stop", "length"]


def test_context_end_is_told_apart_from_max_tokens(fake: Fake, next_token: Next) -> None:
    program, mesh = fake
    prompts = prompts_of([31, 30, 26])
    done = generate(program, mesh, {}, prompts, max_tokens=6)
    assert [(len(c.tokens), c.finish) for c in done] == [(1, "context"), (2, "context"), (6, "length")]
    assert [list(c.tokens) for c in done] == [
        expected(p, len(c.tokens), next_token) for p, c in zip(prompts, done, strict=True)
    ]


def test_seeds_belong_to_prompts_not_to_rows(fake: Fake, next_token: Next) -> None:
    program, mesh = fake
    prompts = prompts_of([4, 12, 7, 2, 3])
    done = generate(program, mesh, {}, prompts, max_tokens=4, sampling=SamplingParams(temperature=1.0, seed=5))
    assert [list(c.tokens) for c in done] == [expected(p, 4, next_token, 5 + i) for i, p in enumerate(prompts)]
    (alone,) = generate(program, mesh, {}, prompts[:1], max_tokens=4, sampling=SamplingParams(temperature=0.5, seed=5))
    assert alone.tokens == done[0].tokens


def test_few_pages_make_prompts_wait(fake: Fake, next_token: Next) -> None:
    program, mesh = fake
    prompts = prompts_of([10] * (3 * program.NUM_RANKS))
    done = generate(program, mesh, {}, prompts, max_tokens=5, num_pages=6, num_slots=3)
    assert [list(c.tokens) for c in done] == [expected(p, 5, next_token) for p in prompts]


def watch(program: Program) -> tuple[Any, list[str], list[str]]:
    """The program, the buckets it ran and those it compiled, in order."""
    ran, compiled = list[str](), list[str]()

    def watched(name: str) -> SimpleNamespace:
        def lower(*shapes: Any) -> SimpleNamespace:
            def compile(*, compiler_options: dict[str, Any]) -> Callable[..., Any]:
                executable = program.STEPS[name].lower(*shapes).compile(compiler_options=compiler_options)
                compiled.append(name)
                return lambda *args: ran.append(name) or executable(*args)

            return SimpleNamespace(compile=compile)

        return SimpleNamespace(lower=lower)

    steps = {name: watched(name) for name in program.STEPS}
    return SimpleNamespace(**{**vars(program), "STEPS": steps}), ran, compiled


def test_every_step_is_compiled_before_the_first_token(fake: Fake) -> None:
    program, mesh = fake
    watched, ran, compiled = watch(program)
    compiled_by_then = list[list[str]]()
    prompts = prompts_of([9, 2])
    generate(watched, mesh, {}, prompts, max_tokens=3, on_token=lambda *_: compiled_by_then.append([*compiled]))
    assert set(ran) == {"decode", "mixed"}
    assert compiled_by_then[0] == compiled == ["decode", "mixed"]


def test_a_step_that_cannot_run_is_not_compiled(fake: Fake) -> None:
    program, mesh = fake
    watched, ran, compiled = watch(program)
    generate(watched, mesh, {}, prompts_of([1, 1, 1]), max_tokens=2)
    assert compiled == ["decode"]
    assert set(ran) == {"decode"}


def test_the_decode_bucket_runs_as_soon_as_all_rows_decode(fake: Fake) -> None:
    program, mesh = fake
    watched, calls, _ = watch(program)
    generate(watched, mesh, {}, prompts_of([23, 1]), max_tokens=4)
    if program.NUM_RANKS == 1:  # 23 = 8 + 12 + 3: beside a decode row (budget 9) to a page border, then alone
        assert calls == ["mixed", "mixed", "mixed", "decode", "decode", "decode"]
    else:  # 23 = 8 + 8 + 7
        assert calls == ["mixed", "mixed", "mixed", "decode", "decode", "decode"]


def test_generating_twice_is_clean(fake: Fake) -> None:
    """Pools are not shared between calls; slots are reused within one without being cleared."""
    program, mesh = fake
    prompts = prompts_of(RAGGED)
    first = generate(program, mesh, {}, prompts, max_tokens=2)
    assert generate(program, mesh, {}, prompts, max_tokens=2) == first
    assert isinstance(first[0], Completion)


def test_minus_one_stands_for_the_last_sampled_token(fake: Fake, next_token: Next) -> None:
    program, mesh = fake
    state = allocate_state(program, mesh, program.NUM_PAGES, program.NUM_SLOTS)
    prompt, tokens = [3, 5, 7], list[int]()
    row = Row(tuple(prompt), 0, (1, 2), 2, False, GREEDY)
    for i in range(3):
        bucket = "mixed" if i == 0 else "decode"
        packed = pack(program.BUCKETS[bucket], [[row]] * program.NUM_RANKS)
        state, out = program.STEPS[bucket]({}, state, place(program, mesh, packed))
        tokens.append(int(out["tokens"][-1, 0]))
        row = replace(row, tokens=(LAST_SAMPLED,), start=3 + i, has_state=True)
    assert tokens == expected(prompt, 3, next_token)


def test_slots_are_copied_and_cleared_on_every_rank(fake: Fake, next_token: Next) -> None:
    """A sequence goes on from a copy of its slot; a cleared slot starts from zeros."""
    program, mesh = fake
    state = allocate_state(program, mesh, program.NUM_PAGES, program.NUM_SLOTS)
    row = Row((3, 5, 7), 0, (1, 2), 2, False, GREEDY)
    packed = pack(program.BUCKETS["mixed"], [[row]] * program.NUM_RANKS)
    state, _ = program.STEPS["mixed"]({}, state, place(program, mesh, packed))
    slots = {slot: np.full(program.NUM_RANKS, slot, np.int32) for slot in (2, 3)}
    state = program.copy_slot(state, slots[2], slots[3])
    state = program.zero_slot(state, slots[2])
    assert not np.asarray(state["fake.sum"])[:, 2].any()
    row = replace(row, tokens=(LAST_SAMPLED,), start=3, slot=3, has_state=True)
    packed = pack(program.BUCKETS["decode"], [[row]] * program.NUM_RANKS)
    state, out = program.STEPS["decode"]({}, state, place(program, mesh, packed))
    wanted = expected([3, 5, 7], 2, next_token)[1]
    assert np.asarray(out["tokens"])[:, 0].tolist() == [wanted] * program.NUM_RANKS


BAD_REQUESTS = {
    "empty": ({"prompts": [[1], []]}, ["prompt 1 is empty: at least one token is needed"]),
    "too long": (
        {"prompts": [[1] * 32, [2] * 40]},
        [
            "prompt 0 has 32 tokens: with one to generate it exceeds max_context 32",
            "prompt 1 has 40 tokens: with one to generate it exceeds max_context 32",
        ],
    ),
    "strange ids": (
        {"prompts": [[1, 97], [-1]]},
        ["prompt 0 holds token 97: valid ids are 0 to 96", "prompt 1 holds token -1: valid ids are 0 to 96"],
    ),
    "sampling": (
        {"prompts": [[1]], "max_tokens": 0, "sampling": SamplingParams(-0.5, -1, 0.0, -2)},
        [
            "temperature -0.5: must be from 0 (greedy) to 3e+38",
            "top_k -1: must be from 0 (off) to 2147483647",
            "top_p 0.0: must be above 0 and at most 1 (off)",
            "seed -2: must be from 0 to 4294967295",
            "max_tokens 0: must be at least 1",
        ],
    ),
    "cache too small": (
        {"prompts": [[1] * 9], "num_pages": 3},
        ["prompt 0 may grow to 11 tokens: 3 pages of 4, the cache has 2"],
    ),
}


@pytest.mark.parametrize(("request_", "messages"), BAD_REQUESTS.values(), ids=BAD_REQUESTS.keys())
def test_bad_requests_name_everything_wrong(fake: Fake, request_: dict, messages: list[str]) -> None:
    program, mesh = fake
    arguments = {"max_tokens": 2, **request_}
    with pytest.raises(RequestError) as caught:
        generate(program, mesh, {}, arguments.pop("prompts"), **arguments)
    assert list(caught.value.messages) == messages
