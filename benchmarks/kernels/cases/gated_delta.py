"""Fused convolution and gated delta rule at Qwen3.5-397B's shape (one device of DP8) and at a per-channel one."""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import jax
from jax.sharding import Mesh

from benchmarks.kernels.case import Arg, Case
from moec.blocks.core.batch import Batch
from moec.blocks.core.chip import ChipLimits
from moec.blocks.core.work import tuned_key
from moec.blocks.gated_delta.project import GdnHeads
from moec.blocks.gated_delta.tpu_cost import TUNED_BY
from moec.blocks.gated_delta.tpu_fused_decode import gdn_decode_rows
from moec.blocks.gated_delta.tpu_fused_prefill import gdn_prefill_rows
from moec.blocks.gated_delta.tpu_fused_prefill_channel import gdn_prefill_channel_rows

TAPS, SEQS, LAYERS, SLOTS = 4, 64, 4, 65
PREFILL_TOKENS, PREFILL_ROWS, CHUNK = 2048, 8, 64
QWEN = GdnHeads(16, 64, 128, 128)
KIMI = GdnHeads(32, 32, 128, 128)
# The kernel's rows. A decode row has a state (a request of one token is rare): the branch that clears one never runs.
# A row's branch prefetches the next row: all rows but the last.
ROWS = {"I0.I0": 0.0, "I1.L0": SEQS, "I1.L0.I0": 1.0, "I1.L0.I0.I0": 0.0}


def _conv_heads(heads: GdnHeads) -> int:
    return 2 * heads.qk + heads.v


def _batch(cu_q: Any, slot: Any, has_state: Any, distribution: Any) -> Batch:
    """What the kernels read of a batch."""
    return Batch(None, None, cu_q, None, None, slot, has_state, distribution, None)  # type: ignore[arg-type]


def _build_decode(
    chip: ChipLimits, mesh: Mesh, tiles: Mapping[str, int], *, heads: GdnHeads
) -> Callable[..., tuple[jax.Array, ...]]:
    def run(x_TF, beta, decay, taps, slot, has_state, distribution, layer, conv, state):  # type: ignore[no-untyped-def]
        batch = _batch(None, slot, has_state, distribution)
        x_TH = x_TF.reshape(x_TF.shape[0], -1, chip.lanes)
        return gdn_decode_rows(x_TH, beta, decay, taps, batch, layer, conv, state, heads=heads, chip=chip, **tiles)

    return run


def _build_prefill(
    chip: ChipLimits, mesh: Mesh, tiles: Mapping[str, int], *, heads: GdnHeads, by_channel: bool
) -> Callable[..., tuple[jax.Array, ...]]:
    prefill = gdn_prefill_channel_rows if by_channel else gdn_prefill_rows

    def run(x_TF, beta, g, taps, cu_q, slot, has_state, distribution, layer, out, conv, state):  # type: ignore[no-untyped-def]
        batch = _batch(cu_q, slot, has_state, distribution)
        x_TH = x_TF.reshape(x_TF.shape[0], -1, chip.lanes)
        return prefill(x_TH, beta, g, taps, batch, layer, out, conv, state, heads=heads, chip=chip, **tiles)

    return run


def _pools(heads: GdnHeads, dtype: str) -> tuple[Arg, Arg]:
    conv = Arg((LAYERS, SLOTS, (TAPS - 1) * _conv_heads(heads), 128), "bfloat16")
    return conv, Arg((LAYERS, SLOTS, heads.v, 128, 128), dtype)


def _row_bytes(heads: GdnHeads, dtype: str) -> int:
    """Window and state, in and out."""
    itemsize = {"bfloat16": 2, "float32": 4}[dtype]
    return 2 * (heads.v * 128 * 128 * itemsize + (TAPS - 1) * _conv_heads(heads) * 128 * 2)


def _decode(name: str, heads: GdnHeads, dtype: str, by_channel: bool, **bar: Any) -> Case:
    conv_heads = _conv_heads(heads)
    rates = (SEQS, heads.v, 128) if by_channel else (SEQS, heads.v)
    tokens = SEQS * (conv_heads + heads.v) * 128 * 2
    return Case(
        name=name, block="gated_delta", variant="tpu_fused", build=partial(_build_decode, heads=heads),
        args=(
            Arg((SEQS, conv_heads * 128), "bfloat16"), Arg((SEQS, heads.v), "float32"), Arg(rates, "float32"),
            Arg((TAPS, conv_heads, 128), "float32"), Arg((SEQS,), "int32"), Arg((SEQS,), "bool"), Arg((3,), "int32"),
            Arg((), "int32"), *_pools(heads, dtype),
        ),
        donate=(8, 9), unit="sequence", units=SEQS, floor_bytes=SEQS * _row_bytes(heads, dtype) + tokens,
        kernels=(r"gdn_decode.*",), trips={"gdn_decode": ROWS}, tiles={"unroll": 4}, grid={"unroll": (1, 2, 4, 8)},
        shape=tuned_key(
            TUNED_BY, rows=SEQS, v_heads=heads.v, qk_heads=heads.qk, state=dtype,
            decay="channel" if by_channel else "head", page=256,
        ), **bar,
    )  # fmt: skip


def _prefill(name: str, heads: GdnHeads, by_channel: bool) -> Case:
    conv_heads, tokens = _conv_heads(heads), PREFILL_TOKENS + CHUNK
    chunks, per_row = PREFILL_TOKENS // CHUNK, PREFILL_TOKENS // PREFILL_ROWS // CHUNK
    row, item = "I0.L0", "I0.L0.I0.I2.L0"
    # Rows of whole chunks, half of them with a state: one path of loading it each. Convolution: eight steps a chunk.
    trips = {
        row: PREFILL_ROWS, f"{row}.I0.I0": 0.5, f"{row}.I0.I1": 0.5, item: per_row,
        f"{item}.I0.L0": CHUNK // 8, f"{item}.I1": 0.0, f"{item}.I1.L0": 0,
    }  # fmt: skip
    rates = (PREFILL_TOKENS, heads.v, 128) if by_channel else (PREFILL_TOKENS, heads.v)
    moved = PREFILL_TOKENS * ((conv_heads + heads.v) * 128 * 2 + (heads.v * 128 * 4 if by_channel else 0))
    return Case(
        name=name, block="gated_delta", variant="tpu_fused",
        build=partial(_build_prefill, heads=heads, by_channel=by_channel),
        args=(
            Arg((tokens, conv_heads * 128), "bfloat16"), Arg((PREFILL_TOKENS, heads.v), "float32"),
            Arg(rates, "float32"), Arg((TAPS, conv_heads, 128), "float32"),
            Arg((SEQS + 1,), "int32"), Arg((SEQS,), "int32"), Arg((SEQS,), "bool"), Arg((3,), "int32"),
            Arg((), "int32"), Arg((tokens, heads.v, 128), "bfloat16"), *_pools(heads, "bfloat16"),
        ),
        donate=(9, 10, 11), unit=f"chunk of {CHUNK}", units=chunks,
        floor_bytes=PREFILL_ROWS * _row_bytes(heads, "bfloat16") + moved,
        kernels=(r"gdn_prefill.*",), trips={"gdn_prefill": trips}, tiles={"chunk": CHUNK},
    )  # fmt: skip


CASES = (
    _decode("gdn-decode-bf16", QWEN, "bfloat16", False, peer="gdn-v2-decode-bfloat16", bar=0.72),
    _decode("gdn-decode-f32", QWEN, "float32", False, peer="gdn-v2-decode-float32", bar=0.72),
    _decode("gdn-decode-channel-bf16", KIMI, "bfloat16", True),
    _prefill("gdn-prefill-bf16", QWEN, False),
    _prefill("kda-prefill", KIMI, True),
)
