"""The search: verdicts, ties, pins, and the decisions published facts demand."""

import itertools
import random
import re
import subprocess
import sys
from collections import Counter
from dataclasses import replace

import pytest

from moec.blocks.core.batch import Bucket
from moec.compiler.plan.choose import TIE_PCT, Judged, ask, eliminate, judge, make_plan
from moec.compiler.plan.dtypes import check_dtypes
from moec.compiler.plan.evaluate import Priced, Question, evaluate
from moec.compiler.plan.memory import BAND_PCT as MEMORY_BAND_PCT
from moec.compiler.plan.memory import available_bytes
from moec.compiler.plan.plan import Plan
from moec.compiler.plan.space import enumerate_options
from moec.compiler.problems import ProblemsError
from moec.compiler.spec.load import load
from moec.compiler.spec.schema import Request
from moec.runtime.schedule import limits_of
from moec.targets.target import Value, load_target, target_names

BIG = "qwen3.5-397b-a17b"


def request(*overrides: str, model: str = BIG, target: str = "tpu7x-8", workload: str = "decode_512x9216") -> Request:
    return load(model, target=target, workload=workload, overrides=overrides)


@pytest.fixture(scope="module")
def plan() -> Plan:
    return make_plan(request())


def chosen(plan: Plan) -> tuple[str, str]:
    (one,) = [c for c in plan.candidates if c.verdict == "CHOSEN"]
    return one.attention, one.experts


@pytest.mark.parametrize("workload", ["decode_512x9216", "chat_1k8k_c512", "chat_8k1k_c512"])
@pytest.mark.parametrize("kv", ["bfloat16", "float8_e4m3fn"])
def test_data_parallel_attention_with_expert_parallelism_at_512_sequences(workload: str, kv: str) -> None:
    plan = make_plan(request(f"plan.dtypes.kv={kv}", workload=workload))
    assert chosen(plan) == ("DP8", "EP8")
    assert plan.mesh.axes == (("data", 8),)
    rivals = [c for c in plan.candidates if c.attention == "DP4xTP2" and c.experts == "EP8"]
    assert len(rivals) == 8 and {c.verdict for c in rivals} <= {"TIE", "DOMINATED"}
    for c in rivals:
        tie = "collectives per layer: 7 against 3" in c.why
        slower = c.numbers["behind_pct"] > TIE_PCT and "ms per output token" in c.why
        assert tie if c.verdict == "TIE" else slower


# One sequence of 9216 tokens on one of 8 tensor-parallel devices: in 15 layers a whole key and value head of 256,
# in 45 an eighth of 64 states of 128 x 128 and of 3 x 12288 convolution inputs; two bytes each.
SEQUENCE_BYTES = 2 * (15 * 9216 * 2 * 256 + 45 * (64 * 128 * 128 + 3 * 12288) // 8)


def test_tensor_parallelism_is_capped_by_hbm_with_a_bfloat16_cache(plan: Plan) -> None:
    full = [c for c in plan.candidates if c.attention == "TP8"]
    assert len(full) == 32 and {c.verdict for c in full} == {"HBM"}
    for c in full:
        room = (c.numbers["available_gib"] - c.numbers["weights_gib"]) * 2**30
        assert c.numbers["max_concurrency"] == pytest.approx(room / SEQUENCE_BYTES, rel=0.03)
        assert c.numbers["max_concurrency"] < 512
        assert c.numbers["needed_gib"] > c.numbers["available_gib"]
        assert f"at most {c.numbers['max_concurrency']:.0f} sequences" in c.why


def test_tensor_parallelism_with_a_float8_cache_is_refused_as_computed() -> None:
    plan = make_plan(request("plan.dtypes.kv=float8_e4m3fn"))
    full = [c for c in plan.candidates if c.attention == "TP8"]
    assert len(full) == 32 and {c.verdict for c in full} <= {"HBM", "DOMINATED"}
    for c in full:
        behind, needed = c.numbers.get("behind_pct", 0), c.numbers.get("needed_gib", 0)
        assert needed > c.numbers["available_gib"] if c.verdict == "HBM" else behind > TIE_PCT


@pytest.mark.parametrize("workload", ["chat_1k1k_c4", "chat_1k1k_c8", "chat_8k1k_c4", "chat_8k1k_c8"])
def test_tensor_parallelism_is_fastest_at_few_sequences(workload: str) -> None:
    plan = make_plan(request(workload=workload))
    for key in ("decode_ms", "tpot_ms"):
        best = min((c for c in plan.candidates if key in c.numbers), key=lambda c: c.numbers[key])
        assert (best.attention, best.experts) == ("TP8", "EP8")
    # As sweep.sh of tests/e2e/benchmarking/inferencex/qwen3.5 has it for both prompt lengths
    # (https://github.com/vllm-project/tpu-inference).
    assert chosen(plan)[0] == "TP8"


@pytest.mark.parametrize(
    ("model", "target", "workload"),
    [
        (BIG, "tpu7x-8", "decode_512x9216"),
        (BIG, "tpu7x:2x4x1", "chat_8k1k_c256"),
        (BIG, "tpu7x:2x2x4", "chat_8k1k_c512"),
        ("qwen3-30b-a3b", "v6e-8", "chat_1k1k_c64"),
        ("mixtral-8x7b", "v5p-4", "chat_1k1k_c64"),
        ("tiny/qwen3_5_moe", "cpu", "tiny"),
        ("tiny/qwen3_5_moe", "cpu:8", "tiny"),
        ("tiny/mixtral", "cpu:4", "tiny"),
        ("tiny/qwen3_moe", "cpu:2", "tiny"),
    ],
)
def test_every_candidate_has_one_verdict_with_numbers(model: str, target: str, workload: str) -> None:
    asked = request(model=model, target=target, workload=workload)
    plan = make_plan(asked)
    assert asked.target is not None
    enumerated = len(list(enumerate_options(asked.graph, asked.target.num_devices)))
    verdicts = Counter(c.verdict for c in plan.candidates)
    assert verdicts["CHOSEN"] == 1
    assert sum(verdicts.values()) - verdicts["CHOSEN"] + 1 == enumerated
    assert all(c.why and c.numbers for c in plan.candidates)


def brute_force(allowed: list[Priced]) -> Priced:
    """The stated order, written down a second time: no rule objects, no elimination."""
    fastest = min(p.token_seconds for p in allowed)
    tied = [p for p in allowed if p.token_seconds <= fastest * (1 + TIE_PCT / 100)]
    fewest = min(p.collectives_per_layer for p in tied)
    tied = [p for p in tied if abs(p.collectives_per_layer - fewest) < 1e-6]
    least = min(p.hbm_bytes for p in tied)
    tied = [p for p in tied if p.hbm_bytes - least <= MEMORY_BAND_PCT / 100 * available_bytes(p.memory)]
    return min(tied, key=lambda p: (p.complexity, p.token_seconds))


def random_questions(number: int) -> list[Question]:
    """Small instances: random workloads and machines, from a fixed seed."""
    rng = random.Random(7)
    base = [ask(request(model="tiny/qwen3_5_moe", target=f"cpu:{n}", workload="tiny")) for n in (2, 4)]
    return [_random_question(rng, rng.choice(base)) for _ in range(number)]


def _random_question(rng: random.Random, base: Question) -> Question:
    target = base.target

    def scaled(value: Value, low: float, high: float) -> Value:
        return value.model_copy(update={"value": value.value * 10 ** rng.uniform(low, high)})

    changes = {
        "hbm_gbps": scaled(target.hbm_gbps, -2, 2),
        "layer_overhead_us": scaled(target.layer_overhead_us, -3, 1),
        "hbm_gib": target.hbm_gib.model_copy(update={"value": 0.5 + 10 ** rng.uniform(-2.3, -0.5)}),
        "ici": target.ici.model_copy(
            update={
                "alpha_us": scaled(target.ici.alpha_us, -3, 1),
                "gbps_per_link": scaled(target.ici.gbps_per_link, -1, 3),
            }
        ),
        "hbm_copy": target.hbm_copy.model_copy(update={"points": ((2.0**20, 10 ** rng.uniform(-1, 2)),)}),
    }
    workload = {"concurrency": rng.choice((1, 8, 64)), "isl": rng.choice((8, 64, 256)), "osl": rng.choice((8, 64))}
    return replace(
        base,
        target=target.model_copy(update=changes),
        workload=base.workload.model_copy(update={**workload, "max_context": 320}),
        _weights={},
    )


@pytest.mark.parametrize("number", [40, pytest.param(200, marks=pytest.mark.slow)])
def test_choice_is_optimal_on_random_instances(number: int) -> None:
    outcomes: Counter[str] = Counter()
    for question in random_questions(number):
        judged = judge(question)
        priced = [one.result for one in judged if isinstance(one.result, Priced)]
        winners = [one.result for one in judged if one.verdict == "CHOSEN"]
        if not priced:
            assert not winners
            outcomes["none"] += 1
            continue
        (winner,) = winners
        assert isinstance(winner, Priced)
        best = brute_force(priced)
        assert (winner.token_seconds, winner.hbm_bytes) == (best.token_seconds, best.hbm_bytes)
        outcomes[f"{winner.option.attention} {winner.option.experts} {winner.option.sharded}"] += 1
    assert outcomes["none"] and len(outcomes) > 4  # the instances do differ


def test_verdicts_do_not_depend_on_other_candidates_prices() -> None:
    """A candidate is priced alone: evaluating it again gives the same numbers."""
    question = ask(request())
    judged = judge(question)
    for one in random.Random(1).sample(judged, 12):
        again = evaluate(question, one.option)
        numbers = again.numbers() if isinstance(again, Priced) else again.numbers
        assert numbers.items() <= one.numbers.items()


def test_ties_need_a_difference_inside_the_threshold() -> None:
    question = ask(request())
    allowed = [one.result for one in judge(question) if isinstance(one.result, Priced)]
    verdicts = eliminate(allowed)
    fastest = min(one.token_seconds for one in allowed)
    for one in allowed:
        verdict, _ = verdicts[one.option]
        inside = one.token_seconds <= fastest * (1 + TIE_PCT / 100)
        assert inside == (verdict in ("CHOSEN", "TIE"))


def test_pins_exclude_and_say_so() -> None:
    plan = make_plan(request("plan.attention.dp=4", "plan.head=replicated"))
    assert chosen(plan)[0] == "DP4xTP2"
    assert plan.head == "replicated"
    excluded = [c for c in plan.candidates if c.verdict == "PINNED"]
    assert excluded and all(c.why.startswith("excluded by plan.") for c in excluded)
    assert any(c.attention == "DP8" and "plan.attention.dp=4" in c.why for c in excluded)


def test_an_infeasible_pin_names_the_constraint_and_its_numbers(plan: Plan) -> None:
    with pytest.raises(ProblemsError) as caught:
        make_plan(request("plan.attention.tp=8"))
    problem = caught.value.problems[0]
    assert problem.path == "plan.attention.tp"
    assert problem.text.startswith("HBM: TP8 with EP")
    cap = re.search(
        r"needs (1\d\d\.\d) of 94\.24 GiB per device, (\d+\.\d) too much; at most (\d+) sequences", problem.text
    )
    assert cap
    assert float(cap.group(1)) - 94.24 == pytest.approx(float(cap.group(2)), abs=0.11)
    assert int(cap.group(3)) == max(c.numbers["max_concurrency"] for c in plan.candidates if c.attention == "TP8")
    assert problem.hint == "without the pins DP8 with EP8 would run"


def test_a_machine_that_is_too_small_says_what_would_fit() -> None:
    with pytest.raises(ProblemsError) as caught:
        make_plan(request(model=BIG, target="v6e-8", workload="chat_1k1k_c4"))
    assert "needs" in caught.value.problems[0].text
    assert "the weights alone do not fit" in caught.value.problems[0].hint
    with pytest.raises(ProblemsError) as caught:
        make_plan(request("workload.concurrency=4096"))
    assert "workload.concurrency=" in caught.value.problems[0].hint
    most = caught.value.problems[0].hint.split("=")[1].split()[0]  # "workload.concurrency=932 fits, with ..."
    assert make_plan(request(f"workload.concurrency={most}")).traffic is not None


@pytest.mark.parametrize(
    ("model", "target", "workload", "changes", "enough"),
    [
        (BIG, "tpu7x-2", "chat_1k1k_c4", (), "tpu7x:2x2x1"),
        (BIG, "tpu7x-8", "decode_512x9216", ("workload.concurrency=4096",), "tpu7x:2x2x4"),
        (BIG, "v6e-8", "chat_1k1k_c4", (), "v6e:4x4"),
        (BIG, "tpu7x-2", "chat_1k1k_c4", ("plan.experts.ep=2", "plan.experts.tp=1"), None),
    ],
)
def test_a_machine_that_is_too_small_names_the_smallest_that_is_not(
    model: str, target: str, workload: str, changes: tuple[str, ...], enough: str | None
) -> None:
    with pytest.raises(ProblemsError) as caught:
        make_plan(request(*changes, model=model, target=target, workload=workload))
    said = re.search(r"(\S+) would hold it", caught.value.problems[0].hint)
    assert (said.group(1) if said else None) == enough
    if enough is None:
        return
    make_plan(request(*changes, model=model, target=enough, workload=workload))
    chip, devices = enough.partition(":")[0], load_target(enough).num_devices
    for name in target_names():
        if name.startswith(f"{chip}:") and load_target(name).num_devices < devices:
            with pytest.raises(ProblemsError):
                make_plan(request(*changes, model=model, target=name, workload=workload))


@pytest.mark.parametrize(
    ("target", "changes", "path", "said"),
    [
        ("cpu:8", "plan.page_size=1000000000", "plan.page_size", "workload.max_context=128 (at most 128)"),
        ("cpu:8", "plan.max_batched_tokens=1025", "plan.max_batched_tokens", "have at most 1024 (at most 1024)"),
        ("cpu:8", "target.hbm_gib=0.4", "target.hbm_gib", "nothing beside the runtime's 0.5 GiB"),
        ("cpu:8", "plan.max_seqs=1000000000", "plan.max_seqs", "(plan.max_seqs=54736 fits, with DP8 and EP8)"),
        ("cpu:8", "plan.shared_expert=sharded", "plan.shared_expert", "the model has no shared expert"),
        ("cpu", "plan.embed=sharded", "plan.embed", "cpu is one device, nothing can be sharded"),
        ("cpu:8", "target.hbm_gib=0.5078125 plan.max_batched_tokens=1024 plan.attention.dp=8",
         "plan.attention.dp, plan.max_batched_tokens",
         "smaller than plan.max_batched_tokens=1024; see <command line>:arg2)"),
    ],
)  # fmt: skip
def test_advice_names_the_culprit(target: str, changes: str, path: str, said: str) -> None:
    with pytest.raises(ProblemsError) as caught:
        make_plan(request(*changes.split(), model="tiny/mixtral", target=target, workload="default"))
    problem = caught.value.problems[0]
    assert problem.path == path
    assert said in str(problem)


def test_advice_keeps_to_the_pins() -> None:
    pinned = request("plan.attention.dp=1", "workload.concurrency=100000")
    with pytest.raises(ProblemsError) as caught:
        make_plan(pinned)
    hint = caught.value.problems[0].hint
    most = re.fullmatch(r"workload\.concurrency=(\d+) fits, with TP8 and EP\S+", hint)
    assert most
    make_plan(request("plan.attention.dp=1", f"workload.concurrency={most.group(1)}"))


def test_a_pinned_step_without_room_for_prefill_is_unsupported() -> None:
    with pytest.raises(ProblemsError) as caught:
        make_plan(request("plan.max_batched_tokens=32"))
    assert any("UNSUPPORTED" in one.text and "32 batched tokens" in one.text for one in caught.value.problems)


def test_a_pinned_step_that_holds_no_page_is_unsupported() -> None:
    """The runtime cuts prefill at page borders, and every other row of a rank may decode."""
    with pytest.raises(ProblemsError) as caught:
        make_plan(request("plan.max_batched_tokens=256", "plan.page_size=256"))
    problem = caught.value.problems[0]
    assert problem.path == "plan.page_size, plan.max_batched_tokens"
    assert "UNSUPPORTED: DP8 with EP8" in problem.text
    assert "256 batched tokens hold no page of 256 tokens beside 63 decode rows, 319 would" in problem.text
    plan = make_plan(request("plan.max_batched_tokens=319", "plan.page_size=256"))
    assert plan.buckets[1].tokens_per_rank == 319


@pytest.mark.parametrize(
    ("model", "target", "workload", "pins", "page", "tokens"),
    [
        (BIG, "tpu7x-8", "default", ("plan.attention.dp=8",), 128, 128),  # one row per rank, contexts of 128 tokens
        (BIG, "tpu7x-8", "default", ("plan.attention.dp=8", "workload.osl=36"), 128, 128),
        (BIG, "tpu7x-8", "decode_512x9216", ("plan.max_batched_tokens=256",), 128, 256),
        ("tiny/qwen3_5_moe", "cpu", "default", (), 16, 128),
        ("tiny/qwen3_5_moe", "cpu", "default", ("plan.page_size=512", "workload.max_context=512"), 512, 519),
        ("tiny/qwen3_5_moe", "cpu", "default", ("plan.max_seqs=1", "plan.max_batched_tokens=2"), 2, 2),
    ],
)
def test_a_mixed_step_holds_a_page_beside_the_decode_rows(
    model: str, target: str, workload: str, pins: tuple[str, ...], page: int, tokens: int
) -> None:
    plan = make_plan(request(*pins, model=model, target=target, workload=workload))
    mixed = plan.buckets[1]
    assert (plan.page_size, mixed.tokens_per_rank) == (page, tokens)
    limits = limits_of({b.name: Bucket(**b.model_dump(exclude={"name"})) for b in plan.buckets}, plan.page_size)
    assert limits.tokens - (limits.rows - 1) >= limits.page_size
    said = any(f"Pages hold {page} tokens" in note for note in plan.notes)
    usual = load_target(target).serving.page_size
    assert said == (page != usual and "plan.page_size=512" not in pins)


@pytest.mark.parametrize(("page", "chunk"), [(256, 64), (64, 64), (48, 16), (24, 8), (16, 16), (7, 1)])
def test_chunks_divide_pages(page: int, chunk: int) -> None:
    """Else a cached prefix, which ends at a page border, would be cut into other chunks than the whole prompt."""
    plan = make_plan(request(f"plan.page_size={page}", model="tiny/qwen3_5_moe", target="cpu", workload="tiny"))
    assert plan.page_size == page
    assert plan.tuning["gdn.chunk"] == chunk


def test_pinned_sizes_reach_the_buckets() -> None:
    plan = make_plan(request("plan.max_seqs=32", "plan.max_batched_tokens=512", "plan.page_size=128"))
    decode, mixed = plan.buckets
    assert (decode.tokens_per_rank, decode.seqs_per_rank, decode.max_q) == (32, 32, 1)
    assert (mixed.tokens_per_rank, mixed.seqs_per_rank, mixed.max_q) == (512, 32, 512)
    assert (plan.page_size, decode.pages_per_seq) == (128, 72)
    assert (plan.pages_per_rank, plan.slots_per_rank) == (32 * 72 + 1, 33)


def test_buckets_and_pools_by_default(plan: Plan) -> None:
    decode, mixed = plan.buckets
    assert (decode.name, decode.tokens_per_rank, decode.seqs_per_rank, decode.max_q) == ("decode", 64, 64, 1)
    assert (mixed.name, mixed.tokens_per_rank, mixed.seqs_per_rank, mixed.max_q) == ("mixed", 1024, 64, 1024)
    assert (plan.page_size, decode.pages_per_seq, plan.pages_per_rank, plan.slots_per_rank) == (256, 36, 2305, 65)


def test_collectives_of_data_parallel_attention(plan: Plan) -> None:
    """What prefill returns, it returns in chunks."""
    for bucket, rows, chunks in (("decode", 512, 1), ("mixed", 8192, 4)):
        layer = [(c.op, c.dtype, c.shape) for c in plan.collectives if c.bucket == bucket and c.scope == "moe"]
        assert layer == [
            ("all-gather", "bfloat16", (rows, 4096)),
            ("all-gather", "int32", (rows, 20)),
            *[("reduce-scatter", "bfloat16", (rows // chunks, 4096))] * chunks,
        ]
    assert {c.scope for c in plan.collectives} == {"moe", "step"}
    assert all(c.axes == ("data",) and c.bytes > 0 and c.predicted_us > 0 for c in plan.collectives)


def test_collectives_when_heads_are_cut() -> None:
    plan = make_plan(request("plan.attention.dp=4", "plan.experts.ep=8"))
    decode = [(c.scope, c.op, c.axes) for c in plan.collectives if c.bucket == "decode" and c.scope != "step"]
    assert decode == [
        ("gdn", "all-reduce", ("tensor",)),
        ("moe", "all-gather", ("data",)),
        ("moe", "all-gather", ("data",)),
        ("moe", "reduce-scatter", ("data",)),
        ("moe", "all-reduce", ("tensor",)),
        ("gqa", "all-reduce", ("tensor",)),
    ]


def test_one_device_exchanges_nothing() -> None:
    plan = make_plan(request(model="tiny/qwen3_5_moe", target="cpu", workload="tiny"))
    assert plan.collectives == ()
    assert plan.mesh.axes == (("data", 1),)
    assert (plan.embed, plan.head, plan.shared_expert) == ("replicated",) * 3
    assert plan.matmul_precision == "highest"


def test_tuning_follows_the_expected_tokens_per_expert(plan: Plan) -> None:
    # 512 and 8192 tokens, top 10 of 512: 10 and 160 tokens per expert; the kernel takes blocks of at most 128.
    tiles = {"gdn.chunk": 64, "moe.block_rows.decode": 16, "moe.block_rows.mixed": 128}
    assert tiles.items() <= plan.tuning.items()
    # Plain XLA streams an expert's weights again for a second block: two deviations more.
    plain = make_plan(request("plan.variants.moe=xla", "plan.variants.gqa=xla")).tuning
    tiles = {"gqa.q_block": 128, "gqa.kv_block": 512, "moe.block_rows.decode": 32, "moe.block_rows.mixed": 256}
    assert tiles.items() <= plain.items()


def test_default_dtypes() -> None:
    big, small = make_plan(request()), make_plan(request(model="tiny/mixtral", target="cpu", workload="tiny"))
    assert big.dtypes.expert == "float8_e4m3fn"  # its checkpoint table has block scales
    assert (big.dtypes.activation, big.dtypes.kv, big.dtypes.state) == ("bfloat16",) * 3
    assert set(small.dtypes.model_dump(exclude={"scale_block"}).values()) == {"float32", "activation"}
    unscaled = make_plan(request(model="mixtral-8x7b", workload="chat_1k1k_c64"))
    assert unscaled.dtypes.expert == "bfloat16"


@pytest.mark.parametrize("role", ["activation", "weight", "expert"])
def test_integers_are_refused_where_the_matrix_units_do_not_take_them(role: str) -> None:
    asked = ask(request())
    (problem,) = check_dtypes(asked.graph, asked.target, replace(asked.dtypes, **{role: "int8"}))
    assert problem.path == f"plan.dtypes.{role}"
    assert "UNSUPPORTED: the matrix units of tpu7x do not take int8" in problem.text
    assert "bfloat16" in problem.hint and "int8" not in problem.hint


def test_float8_needs_scales() -> None:
    with pytest.raises(ProblemsError, match="block scales"):
        make_plan(request("plan.dtypes.expert=float8_e4m3fn", model="mixtral-8x7b", workload="chat_1k1k_c64"))
    with pytest.raises(ProblemsError, match="only expert stacks"):
        make_plan(request("plan.dtypes.weight=float8_e4m3fn"))


def test_scales_of_another_block_size_are_refused_where_they_are_kept() -> None:
    odd = "model.checkpoint.scales.block=[64,64]"
    with pytest.raises(ProblemsError) as caught:
        make_plan(request(odd))
    (problem,) = caught.value.problems
    assert problem.path == "model.checkpoint.scales.block"
    assert "128 x 128 values, the checkpoint table says 64 x 64" in problem.text
    assert problem.hint == "plan.dtypes.expert=bfloat16 dequantises them when they are loaded"
    small = make_plan(request(odd, model="tiny/qwen3_5_moe_fp8_cut", target="cpu", workload="tiny"))
    assert small.dtypes.expert == "float32"


def test_a_narrow_recurrent_state_is_named_and_priced(plan: Plan) -> None:
    def said(plan: Plan) -> list[str]:
        return [note for note in plan.notes if note.startswith("Recurrent state")]

    (note,) = said(plan)
    assert "stored in bfloat16 (state as https://" in note and "name float32 (mamba_ssm_dtype)" in note
    # 65 slots, 45 layers, 64 matrices of 128 x 128: two bytes more per value.
    assert f"takes {65 * 45 * 64 * 128 * 128 * 2 / 2**30:.2f} GiB more per device" in note
    (pinned,) = said(make_plan(request("plan.dtypes.state=bfloat16")))
    assert "stored in bfloat16 (pinned)" in pinned
    assert not said(make_plan(request("plan.dtypes.state=float32")))
    assert not said(make_plan(request(model="qwen3-30b-a3b", workload="chat_1k1k_c64")))


def test_a_plan_needs_a_target_and_a_workload() -> None:
    with pytest.raises(ProblemsError, match="needs a target"):
        make_plan(load(BIG))
    with pytest.raises(ProblemsError, match="needs a workload"):
        make_plan(load(BIG, target="tpu7x-8"))


def test_plans_are_deterministic_and_round_trip(plan: Plan) -> None:
    text = plan.model_dump_json(indent=1)
    assert make_plan(request()).model_dump_json(indent=1) == text
    assert Plan.model_validate_json(text) == plan
    assert plan.digests.keys() == {"spec", "target", "workload", "overrides"}


def test_more_memory_changes_the_verdict() -> None:
    plan = make_plan(request("target.hbm_gib=192"))
    assert "HBM" not in {c.verdict for c in plan.candidates}


def test_planning_loads_no_jax() -> None:
    code = (
        "import sys; from moec.compiler.spec.load import load; from moec.compiler.plan.choose import make_plan;"
        f"make_plan(load({BIG!r}, target='tpu7x-8', workload='decode_512x9216')); sys.exit('jax' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_verdict_order_is_total() -> None:
    """Every pair of candidates that may run is ordered by the published order, without cycles."""
    question = ask(request())
    judged: tuple[Judged, ...] = judge(question)
    allowed = [one.result for one in judged if isinstance(one.result, Priced)]
    for size in (2, 5, 17):
        for subset in itertools.islice(itertools.combinations(allowed[:20], size), 40):
            verdicts = [verdict for verdict, _ in eliminate(subset).values()]
            assert verdicts.count("CHOSEN") == 1 and len(verdicts) == size
