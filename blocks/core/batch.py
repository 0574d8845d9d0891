"""The step's input: decode rows and prefill chunks in one ragged batch.

Legend: R attention-DP ranks, T tokens per rank, S sequences (rows) per rank, P pages per
sequence. Ids are local to the rank. Rows are decode rows first, then prefill chunks, then
padding. Outside the step every array has the leading axis R; inside shard_map it is gone.
"""

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array


@dataclass(frozen=True)
class Bucket:
    """A static step shape; max_q == 1 means decode only (then tokens_per_rank == seqs_per_rank)."""

    tokens_per_rank: int
    seqs_per_rank: int
    max_q: int
    pages_per_seq: int


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Sampling:
    """Per-row sampling parameters.

    temperature[S] float32 (0 = greedy), top_k[S] int32 (0 = off), top_p[S] float32 (1 = off),
    seed[S] uint32 (the draw depends on seed and position only).
    """

    temperature: Array
    top_k: Array
    top_p: Array
    seed: Array


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Batch:
    """One step's rows.

    tokens[T] int32: token ids; -1 = the token this row's slot sampled last.
    positions[T] int32: absolute positions.
    cu_q[S+1] int32: row s owns tokens cu_q[s]:cu_q[s+1]; padding rows are empty.
    kv_len[S] int32: length of the sequence after this step (old tokens + this step's).
    page_table[S, P] int32: pages of the sequence in order; page 0 is the sink.
    slot[S] int32: recurrent-state slot; slot 0 is the sink.
    has_state[S] bool: False = the recurrent state starts from zeros.
    distribution[3] int32: (decode rows end, prefill rows end, rows in total).
    """

    tokens: Array
    positions: Array
    cu_q: Array
    kv_len: Array
    page_table: Array
    slot: Array
    has_state: Array
    distribution: Array
    sampling: Sampling


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Rows:
    """Where each token of the batch sits; computed once per step from a Batch.

    row[T]: its row (clipped for padding), offset[T]: its index inside the row,
    valid[T]: False for padding tokens, q_len[S]: tokens of the row in this step,
    start[S]: tokens of the row that were cached before this step.
    """

    row: Array
    offset: Array
    valid: Array
    q_len: Array
    start: Array


def index_rows(batch: Batch) -> Rows:
    """Invert cu_q: the row, offset and validity of each token (local, no leading R)."""
    num_tokens, num_rows = batch.tokens.shape[0], batch.kv_len.shape[0]
    token = jnp.arange(num_tokens, dtype=jnp.int32)
    # A comparison sum instead of searchsorted, which lowers to a loop.
    row = jnp.sum(token[:, None] >= batch.cu_q[None, 1:], axis=1, dtype=jnp.int32)
    row = jnp.minimum(row, num_rows - 1)
    q_len = batch.cu_q[1:] - batch.cu_q[:-1]
    return Rows(
        row=row,
        offset=token - batch.cu_q[row],
        valid=token < batch.cu_q[num_rows],
        q_len=q_len,
        start=batch.kv_len - q_len,
    )


def local(tree: Any) -> Any:
    """Drop the leading rank axis that shard_map leaves with size 1."""
    return jax.tree.map(lambda a: a[0], tree)


def ranked(tree: Any) -> Any:
    """Put the leading rank axis back."""
    return jax.tree.map(lambda a: a[None], tree)


def stack_layers(*scanned: Array) -> Array:
    """New cache rows of several scans, [repeats, layers per repeat, T, C] each, as [layers, T, C] in layer order."""
    return jnp.concatenate([a.reshape(-1, *a.shape[2:]) for a in scanned])


__all__ = ["Batch", "Bucket", "Rows", "Sampling", "index_rows", "local", "ranked", "stack_layers"]
