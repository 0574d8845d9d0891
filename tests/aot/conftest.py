"""The plan of the miniature program in toy/model.py."""

import pytest

from moec.compiler.plan.plan import BucketPlan, CollectivePlan, DtypePlan, MemoryPlan, MeshPlan, Plan

HIDDEN, RANKS, VOCAB = 256, 8, 1024
BYTES_PER_RANK_STATE = 3 * 64 * 16 * HIDDEN * 2 + 17 * 4


def _collectives(bucket: str, tokens: int) -> tuple[CollectivePlan, ...]:
    """Two gathers and a scatter per layer, one gather of the logits per step; full shapes."""
    every = tokens * RANKS

    def one(scope: str, op: str, dtype: str, shape: tuple[int, ...], what: str) -> CollectivePlan:
        return CollectivePlan(bucket=bucket, scope=scope, op=op, axes=("data",), dtype=dtype, shape=shape, what=what)

    return (
        one("moe", "all-gather", "int32", (every, 2), "routing"),
        one("moe", "all-gather", "bfloat16", (every, HIDDEN), "hidden"),
        one("moe", "reduce-scatter", "bfloat16", (every, HIDDEN), "expert outputs"),
        one("step", "all-gather", "bfloat16", (tokens, VOCAB), "logits"),
    )


@pytest.fixture
def toy_plan() -> Plan:
    """What a planner would say of the miniature program with 64 pages and 17 slots per rank."""
    data = ("data",)
    return Plan(
        model="toy",
        model_source="toy.yaml",
        target="tpu7x:2x2x1",
        workload="none",
        workload_source="none",
        digests={},
        overrides=(),
        mesh=MeshPlan(axes=(("data", RANKS),), attention_dp=data, attention_tp=(), expert_ep=data, expert_tp=()),
        dtypes=DtypePlan(
            activation="bfloat16", weight="bfloat16", expert="bfloat16", kv="bfloat16", state="float32", conv="bfloat16"
        ),
        matmul_precision="default",
        embed="replicated",
        head="sharded",
        shared_expert="replicated",
        mlp="replicated",
        variants={},
        tuning={},
        page_size=16,
        pages_per_rank=64,
        slots_per_rank=17,
        max_context=64,
        buckets=(
            BucketPlan(name="decode", tokens_per_rank=16, seqs_per_rank=16, max_q=1, pages_per_seq=4),
            BucketPlan(name="tiny", tokens_per_rank=2, seqs_per_rank=2, max_q=1, pages_per_seq=4),
        ),
        collectives=(*_collectives("decode", 16), *_collectives("tiny", 2)),
        memory=MemoryPlan(
            components={"weights": 3 * 2 * 2 * 256 * 512 * 2, "kv": BYTES_PER_RANK_STATE},
            arguments_bytes=5_300_000,
            temp_bytes={"decode": 700_000, "tiny": 700_000},
            reserve_bytes=1 << 30,
            usable_bytes=94 << 30,
        ),
        estimates={},
        candidates=(),
        compile_options={},
    )
