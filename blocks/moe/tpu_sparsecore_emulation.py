"""What tpu_sparsecore.py computes, step by step on the host: its runs, its lists, its copies, its order of sums.

Memory of a subcore starts as NaN here, and what an indirect copy ignores stays as it was: a result that used either
would show it. unpermute_sparsecore is what programs call: the kernel on a TPU, this emulation where a program of TPU
kernels runs in Pallas' TPU interpreter on a CPU, which has no rule for a SparseCore. Legend as in tpu_sparsecore.py.
"""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.experimental.pallas import tpu as pltpu

from ..core.chip import ChipLimits
from .tpu_sparsecore import (
    SPARSECORE_TOKENS,
    combine_sparsecore,
    sparsecore_entries,
    sparsecore_share,
    sparsecore_stride,
)


def unpermute_sparsecore(
    out_PJ: Array, place_TK: Array, weight_TK: Array, *, width: int, chip: ChipLimits, copy_rows: int
) -> Array:
    """combine_sparsecore, lowered for a TPU; lowered for a CPU, its emulation. Same arguments, same sums.

    The rows come from a kernel (expert_rows_grouped) that a CPU runs in interpret mode only, so no program gets the
    emulation that did not ask for the interpreter.
    """

    def on_tpu(out_PJ: Array, place_TK: Array, weight_TK: Array) -> Array:
        # Both branches are traced; one that asked for the interpreter would have effects that the other has not.
        no_params: Any = None
        with pltpu.force_tpu_interpret_mode(no_params):
            return combine_sparsecore(out_PJ, place_TK, weight_TK, width=width, chip=chip, copy_rows=copy_rows)

    on_cpu = partial(combine_sparsecore_emulated, width=width, chip=chip, copy_rows=copy_rows)
    return lax.platform_dependent(out_PJ, place_TK, weight_TK, cpu=on_cpu, tpu=on_tpu)


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
    """combine_sparsecore; may be traced."""
    num_tokens, top_k = place_TK.shape
    place, weight = sparsecore_entries(place_TK, -1, chip), sparsecore_entries(weight_TK.astype(jnp.float32), 0, chip)
    groups = -(-num_tokens // SPARSECORE_TOKENS)
    host = partial(
        _emulated_sums,
        groups=groups,
        stride=sparsecore_stride(top_k),
        workers=chip.sparse_cores * chip.sc_subcores,
        width=width,
        copy_rows=copy_rows,
    )
    found = jax.ShapeDtypeStruct((groups * SPARSECORE_TOKENS, width), jnp.float32)
    return jax.pure_callback(host, found, out_PJ, place, weight)[:num_tokens]


def _emulated_sums(
    out_PJ: Array,
    place_entries: Array,
    weight_entries: Array,
    *,
    groups: int,
    stride: int,
    workers: int,
    width: int,
    copy_rows: int,
) -> np.ndarray:
    """All subcores, one after the other, on the host; values by entry as sparsecore_entries lays them out."""
    rows, place, weight = (np.asarray(x) for x in (out_PJ, place_entries, weight_entries))
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
    return y_TD


def _emulated_memory(shape: tuple[int, ...], dtype: np.dtype | type) -> np.ndarray:
    """Memory that nobody wrote: NaN as float32, as bfloat16 pairs too."""
    return np.full(shape, np.nan, np.float32) if dtype == np.float32 else np.full(shape, -1, dtype)


def _emulated_values(words: np.ndarray) -> np.ndarray:
    """float32 values of one row's words."""
    if words.dtype == np.float32:
        return words.reshape(-1)
    bits = words.reshape(-1).view(np.uint32)
    return np.concatenate([bits << np.uint32(16), bits & np.uint32(0xFFFF0000)]).view(np.float32)


__all__ = ["combine_sparsecore_emulated", "gather_rows_sparsecore_emulated", "unpermute_sparsecore"]
