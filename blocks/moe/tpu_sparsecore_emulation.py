"""What tpu_sparsecore.py computes, step by step on the host: its runs, its lists, its copies, its order of sums.

Memory of a subcore starts as NaN here, and what an indirect copy ignores stays as it was: a result that used either
would show it. Legend as in tpu_sparsecore.py.
"""

import jax.numpy as jnp
import numpy as np
from jax import Array

from ..core.chip import ChipLimits
from .tpu_sparsecore import SPARSECORE_TOKENS, sparsecore_entries, sparsecore_share, sparsecore_stride


def gather_rows_sparsecore_emulated(
    h_TJ: Array, token_P: Array, num_rows: Array, *, chip: ChipLimits, copy_rows: int
) -> Array:
    """gather_rows_sparsecore; rows that no subcore writes are NaN, or -1 in integer words."""
    workers, h = chip.sparse_cores * chip.sc_subcores, np.asarray(h_TJ)
    rows = -(-token_P.shape[0] // (workers * copy_rows)) * workers * copy_rows
    token = np.pad(np.asarray(token_P), (0, rows - token_P.shape[0]))
    out = _emulated_memory((rows, *h.shape[1:]), h.dtype)
    for worker in range(workers):
        first, count = sparsecore_share(worker, -(-int(num_rows) // copy_rows), workers)
        for step in range(first, first + count):
            where = slice(step * copy_rows, (step + 1) * copy_rows)
            out[where] = h[token[where]]
    return jnp.asarray(out)


def combine_sparsecore_emulated(
    out_PJ: Array, place_TK: Array, weight_TK: Array, *, width: int, chip: ChipLimits, copy_rows: int
) -> Array:
    """combine_sparsecore."""
    workers, rows = chip.sparse_cores * chip.sc_subcores, np.asarray(out_PJ)
    place = np.asarray(sparsecore_entries(place_TK, -1, chip))
    weight = np.asarray(sparsecore_entries(weight_TK.astype(jnp.float32), 0, chip))
    groups, stride = -(-place_TK.shape[0] // SPARSECORE_TOKENS), sparsecore_stride(place_TK.shape[1])
    group = SPARSECORE_TOKENS * stride
    y_TD = _emulated_memory((groups * SPARSECORE_TOKENS, width), np.float32)
    for worker in range(workers):
        first, count = sparsecore_share(worker, groups, workers)
        mine = slice(first * group, (first + count) * group)
        entries = np.flatnonzero(place[mine] >= 0)
        listed = np.pad(place[mine][entries], (0, copy_rows), constant_values=-1)
        copied = _emulated_memory((2, copy_rows, *rows.shape[1:]), rows.dtype)
        sums = _emulated_memory((count * SPARSECORE_TOKENS, width), np.float32)
        before = -1
        for row, entry in enumerate(entries.tolist()):
            slot, at = row // copy_rows % 2, row % copy_rows
            if at == 0:
                numbers = listed[row : row + copy_rows]
                copied[slot][numbers >= 0] = rows[numbers[numbers >= 0]]
            token = entry // stride
            sums[before + 1 : token] = 0
            value = weight[mine][entry] * _emulated_values(copied[slot, at])
            sums[token] = value if token > before else sums[token] + value
            before = token
        sums[before + 1 :] = 0
        y_TD[first * SPARSECORE_TOKENS : (first + count) * SPARSECORE_TOKENS] = sums
    return jnp.asarray(y_TD[: place_TK.shape[0]])


def _emulated_memory(shape: tuple[int, ...], dtype: np.dtype | type) -> np.ndarray:
    """Memory that nobody wrote: NaN as float32, as bfloat16 pairs too."""
    return np.full(shape, np.nan, np.float32) if dtype == np.float32 else np.full(shape, -1, dtype)


def _emulated_values(words: np.ndarray) -> np.ndarray:
    """float32 values of one row's words."""
    if words.dtype == np.float32:
        return words.reshape(-1)
    bits = words.reshape(-1).view(np.uint32)
    return np.concatenate([bits << np.uint32(16), bits & np.uint32(0xFFFF0000)]).view(np.float32)


__all__ = ["combine_sparsecore_emulated", "gather_rows_sparsecore_emulated"]
