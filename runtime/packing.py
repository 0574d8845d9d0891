"""Host rows to the step's Batch: decode rows, then prefill chunks, then padding.

Legend: R attention-DP ranks, T tokens and S rows per rank of the bucket, P pages per sequence.
Every call makes fresh arrays: on CPU a jitted step may alias its numpy arguments, so a buffer
that was handed over is never written again.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from moec.blocks.core.batch import Batch, Bucket, Sampling

from .program import Program
from .sampling import GREEDY, SamplingParams

LAST_SAMPLED = -1  # token id that stands for what the row's slot sampled last


@dataclass(frozen=True)
class Row:
    """What one sequence does in one step.

    tokens: the ids to run (LAST_SAMPLED allowed for a single one). start: tokens cached before.
    pages: the sequence's pages in order, enough for start + len(tokens). slot: its state slot.
    has_state: False = the recurrent state starts from zeros.
    """

    tokens: tuple[int, ...]
    start: int
    pages: tuple[int, ...]
    slot: int
    has_state: bool
    sampling: SamplingParams = GREEDY

    @property
    def is_decode(self) -> bool:
        return len(self.tokens) == 1


def fits(bucket: Bucket, rows: Sequence[Row]) -> bool:
    """Whether one rank's rows fit the bucket."""
    counts = [len(row.tokens) for row in rows]
    return (
        len(rows) <= bucket.seqs_per_rank
        and sum(counts) <= bucket.tokens_per_rank
        and max(counts, default=0) <= bucket.max_q
        and max((len(row.pages) for row in rows), default=0) <= bucket.pages_per_seq
    )


def choose_bucket(buckets: dict[str, Bucket], ranks: Sequence[Sequence[Row]]) -> str | None:
    """The smallest bucket that fits every rank (decode only first); None when none does."""
    fitting = [name for name, bucket in buckets.items() if all(fits(bucket, rows) for rows in ranks)]
    return min(fitting, key=lambda name: _size(buckets[name]), default=None)


def _size(bucket: Bucket) -> tuple[bool, int, int]:
    return bucket.max_q > 1, bucket.tokens_per_rank, bucket.seqs_per_rank


def pack(bucket: Bucket, ranks: Sequence[Sequence[Row]]) -> Batch:
    """The Batch of numpy arrays [R, ...]; each rank's rows are ordered and fit."""
    return jax.tree.map(lambda *arrays: np.stack(arrays), *(_pack_rank(bucket, rows) for rows in ranks))


def _pack_rank(bucket: Bucket, rows: Sequence[Row]) -> Batch:
    assert fits(bucket, rows), (bucket, rows)
    assert all(not b.is_decode or a.is_decode for a, b in pairwise(rows)), "decode rows come first"
    counts = [len(row.tokens) for row in rows]
    size = bucket.seqs_per_rank
    return Batch(
        tokens=_padded([token for row in rows for token in row.tokens], bucket.tokens_per_rank),
        positions=_padded([row.start + i for row in rows for i in range(len(row.tokens))], bucket.tokens_per_rank),
        cu_q=_padded(np.cumsum([0, *counts]), size + 1, fill=sum(counts)),
        kv_len=_padded([row.start + len(row.tokens) for row in rows], size),
        page_table=_page_table(bucket, rows),
        slot=_padded([row.slot for row in rows], size),
        has_state=_padded([row.has_state for row in rows], size, np.bool_),
        distribution=_padded([sum(row.is_decode for row in rows), len(rows), len(rows)], 3),
        sampling=_pack_sampling([row.sampling for row in rows], size),
    )


def _pack_sampling(params: Sequence[SamplingParams], size: int) -> Any:
    return Sampling(
        temperature=_padded([p.temperature for p in params], size, np.float32),
        top_k=_padded([p.top_k for p in params], size),
        top_p=_padded([p.top_p for p in params], size, np.float32, fill=1.0),
        seed=_padded([p.seed for p in params], size, np.uint32),
    )


def _padded(values: Any, size: int, dtype: Any = np.int32, fill: float = 0) -> Any:
    padded = np.full(size, fill, dtype)
    padded[: len(values)] = values
    return padded


def _page_table(bucket: Bucket, rows: Sequence[Row]) -> Any:
    table = np.zeros((bucket.seqs_per_rank, bucket.pages_per_seq), np.int32)
    for row, entry in zip(rows, table, strict=False):
        entry[: len(row.pages)] = row.pages
    return table


def place(program: Program, mesh: Mesh, batch: Batch) -> Batch:
    """The batch on the devices, each rank's part where its rows live."""
    return jax.device_put(batch, NamedSharding(mesh, PartitionSpec(program.RULES["rank"] or None)))
