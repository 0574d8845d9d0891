"""Batch layout: decode rows, prefill chunks, padding; bucket choice; page and slot bookkeeping."""

import numpy as np
import pytest

from moec.blocks.core.batch import Bucket
from moec.runtime.cache import PageAllocator, SlotAllocator
from moec.runtime.packing import LAST_SAMPLED, Row, choose_bucket, pack
from moec.runtime.sampling import GREEDY, SamplingParams
from moec.runtime.schedule import Limits, Rank, Running, plan_rank

DECODE = Bucket(tokens_per_rank=4, seqs_per_rank=4, max_q=1, pages_per_seq=3)
SMALL = Bucket(tokens_per_rank=8, seqs_per_rank=4, max_q=8, pages_per_seq=3)
LARGE = Bucket(tokens_per_rank=16, seqs_per_rank=4, max_q=16, pages_per_seq=3)
BUCKETS = {"large": LARGE, "small": SMALL, "decode": DECODE}


def row(*tokens: int, start: int = 0, pages: tuple[int, ...] = (1,), slot: int = 1) -> Row:
    return Row(tokens, start, pages, slot, start > 0)


def test_a_packed_batch_reads_as_the_contract_says() -> None:
    drawn = SamplingParams(temperature=0.5, top_k=7, top_p=0.9, seed=2**32 - 1)
    ranks = [
        [
            Row((LAST_SAMPLED,), 9, (4, 2, 7), 3, True, drawn),
            Row((11, 12, 13), 0, (5,), 1, False),
            Row((21, 22), 4, (6, 1), 2, True),
        ],
        [],
    ]
    batch = pack(SMALL, ranks)
    assert batch.tokens.tolist() == [[-1, 11, 12, 13, 21, 22, 0, 0], [0] * 8]
    assert batch.positions.tolist() == [[9, 0, 1, 2, 4, 5, 0, 0], [0] * 8]
    assert batch.cu_q.tolist() == [[0, 1, 4, 6, 6], [0] * 5]
    assert batch.kv_len.tolist() == [[10, 3, 6, 0], [0] * 4]
    assert batch.page_table.tolist() == [[[4, 2, 7], [5, 0, 0], [6, 1, 0], [0, 0, 0]], [[0] * 3] * 4]
    assert batch.slot.tolist() == [[3, 1, 2, 0], [0] * 4]
    assert batch.has_state.tolist() == [[True, False, True, False], [False] * 4]
    assert batch.distribution.tolist() == [[1, 3, 3], [0, 0, 0]]
    assert batch.sampling.temperature.tolist() == [[0.5, 0, 0, 0], [0] * 4]
    assert batch.sampling.top_k.tolist() == [[7, 0, 0, 0], [0] * 4]
    assert np.allclose(batch.sampling.top_p, [[0.9, 1, 1, 1], [1] * 4])
    assert batch.sampling.seed.tolist() == [[2**32 - 1, 0, 0, 0], [0] * 4]
    dtypes = {name: str(getattr(batch, name).dtype) for name in ("tokens", "cu_q", "has_state", "distribution")}
    assert dtypes == {"tokens": "int32", "cu_q": "int32", "has_state": "bool", "distribution": "int32"}
    assert str(batch.sampling.seed.dtype) == "uint32" and str(batch.sampling.top_p.dtype) == "float32"


def test_buffers_are_never_reused() -> None:
    first = pack(DECODE, [[row(1)]])
    kept = first.tokens.copy()
    second = pack(DECODE, [[row(2)]])
    assert not np.shares_memory(first.tokens, second.tokens)
    assert (first.tokens == kept).all()


def test_prefill_before_decode_is_refused() -> None:
    with pytest.raises(AssertionError, match="decode rows come first"):
        pack(SMALL, [[row(1, 2), row(3)]])


@pytest.mark.parametrize(
    ("ranks", "name"),
    [
        ([[row(1)] * 4, []], "decode"),
        ([[row(1)] * 4, [row(1, 2)]], "small"),
        ([[row(*range(8))], [row(1)]], "small"),
        ([[row(*range(9))], []], "large"),
        ([[row(*range(7)), row(1, 2)]], "large"),
        ([[row(*range(17))]], None),
        ([[row(1)] * 5], None),
        ([[row(1, pages=(1, 2, 3, 4))]], None),
    ],
)
def test_the_smallest_bucket_that_takes_all_ranks(ranks: list[list[Row]], name: str | None) -> None:
    assert choose_bucket(BUCKETS, ranks) == name


def running(pending: int, cached: int = 0) -> Running:
    return Running(0, list(range(cached + pending)), 100, GREEDY, cached=cached)


def plan(*sequences: Running, limits: Limits) -> list[int]:
    """Tokens per sequence, by its place in `sequences`."""
    rank = Rank(PageAllocator(2), SlotAllocator(2), list(sequences))
    chosen = {id(sequence): count for sequence, count in plan_rank(rank, limits)}
    return [chosen.get(id(sequence), 0) for sequence in sequences]


def test_chunks_end_on_page_borders_or_with_the_prompt() -> None:
    limits = Limits(tokens=20, rows=4, max_q=16, page_size=4)
    assert plan(running(30), limits=limits) == [16]  # max_q
    assert plan(running(14, cached=16), limits=limits) == [14]  # the rest
    assert plan(running(30), running(30), limits=limits) == [16, 4]  # the budget
    assert plan(running(1, 7), running(30), running(9), limits=limits) == [1, 16, 0]  # 3 left: no border in reach
    assert plan(running(1, 7), running(30), running(3), limits=limits) == [1, 16, 3]  # 3 left: the rest fits
    assert plan(running(30), running(1, 7), limits=limits) == [16, 1]  # decode rows are never left out


def test_decode_rows_come_first_whatever_the_order() -> None:
    limits = Limits(tokens=20, rows=4, max_q=16, page_size=4)
    rank = Rank(PageAllocator(2), SlotAllocator(2), [running(5), running(1, 4), running(3), running(1)])
    assert [count for _, count in plan_rank(rank, limits)] == [1, 1, 5, 3]


def test_pages_and_slots_come_back() -> None:
    pages, slots = PageAllocator(6), SlotAllocator(3)
    first, second = pages.allocate(2), pages.allocate(3)
    assert (first, second, pages.available) == ((1, 2), (3, 4, 5), 0)
    pages.free(first)
    assert pages.allocate(1) == (1,)
    with pytest.raises(AssertionError):
        pages.allocate(2)
    with pytest.raises(KeyError):
        pages.free((2,))  # it is free already
    with pytest.raises(KeyError):
        pages.free((0,))  # the sink is nobody's
    assert [slots.allocate(), slots.allocate(), slots.available] == [1, 2, 0]
    slots.free(1)
    assert slots.allocate() == 1
