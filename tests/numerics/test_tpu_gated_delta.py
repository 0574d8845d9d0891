"""Gated DeltaNet's Pallas kernels in TPU interpret mode against xla.py, which test_gated_delta.py holds to ref.py.

Tolerances are of the largest value of each result. Every uninitialised byte, every unused pool entry and every slot of
a new sequence is NaN: what a kernel reads of them shows. Pools keep all other slots bit by bit.
"""

from collections.abc import Callable
from dataclasses import replace
from functools import cache, partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax._src.pallas.mosaic.interpret import interpret_pallas_call
from jax.experimental.pallas import tpu as pltpu

from moec.blocks.core.batch import Batch, index_rows
from moec.blocks.core.chip import ChipLimits
from moec.blocks.core.declare import ModelDims, NormFields
from moec.blocks.core.work import Degrees, Dtypes, Load, Stream
from moec.blocks.gated_delta import block, tpu_cost, xla
from moec.blocks.gated_delta.tpu_fused import gated_delta_fused
from moec.compiler.verify.random_checkpoint import random_weight

CHIP = ChipLimits(vmem_bytes=64 << 20, lanes=128, sublanes=8, mxu_dtypes=("bfloat16",))
DIMS = ModelDims(256, 8, NormFields())
LAYERS, SLOTS, ROWS = 2, 10, 5
LEAN = {"xla_backend_optimization_level": 0}  # half the time to compile the same program
TOLERANCE = {"float32": 1e-4, "bfloat16": 1e-2}
HEAD = block.Fields(kind="gated_delta", num_v_heads=4, num_qk_heads=2, head_dim=128, conv_kernel=4)
CHANNEL = HEAD.model_copy(update={"decay": block.Decay(per="channel", lower_bound=-5.0), "negative_eigenvalues": True})
SMALL = block.Fields(kind="gated_delta", num_v_heads=2, num_qk_heads=1, head_dim=128, conv_kernel=3)
LONE = SMALL.model_copy(update={"num_qk_heads": 2, "gate": block.Gate(activation="sigmoid")})
Weights = dict[str, jax.Array]
Pools = tuple[jax.Array, jax.Array]


def options(fields: block.Fields, num_tokens: int, decode_only: bool) -> dict[str, Any]:
    return {
        "num_qk_heads": fields.num_qk_heads, "num_v_heads": fields.num_v_heads, "head_k_dim": 128, "head_v_dim": 128,
        "conv_kernel": fields.conv_kernel, "norm_eps": 1e-6, "norm_zero_centered": False,
        "max_q": 1 if decode_only else num_tokens, "channel_decay": fields.decay.per == "channel",
        "decay_lower_bound": fields.decay.lower_bound, "gate_activation": fields.gate.activation,
        "negative_eigenvalues": fields.negative_eigenvalues,
    }  # fmt: skip


@cache
def runners(fields: block.Fields, num_tokens: int, decode_only: bool, chunk: int) -> tuple[Callable, Callable]:
    """The kernels and their reference, each compiled once for all batches of a shape; the layer is traced."""
    given = options(fields, num_tokens, decode_only)

    def fused(h, w, pools, batch, layer):
        call = partial(gated_delta_fused, chip=CHIP, chunk=chunk, unroll=1, pool_layer=layer)
        return call(h, w, *pools, batch, index_rows(batch), **given)

    def reference(h, w, pools, batch, layer):
        return xla.gated_delta(h, w, *pools, batch, index_rows(batch), chunk=64, pool_layer=layer, **given)

    return tuple(jax.jit(run, compiler_options=LEAN) for run in (fused, reference))


def draw(fields: block.Fields, num_tokens: int, act: str, state: str, seed: int) -> tuple[jax.Array, Weights, Pools]:
    """Inputs, weights, and pools full of some request's values."""
    rng = np.random.default_rng([seed, 31])
    weights = {
        name: jnp.asarray(random_weight(weight, rng), "float32" if weight.role == "decay" else act)
        for name, weight in block.weights(fields, DIMS).items()
    }
    rows = (fields.conv_kernel - 1) * (2 * fields.num_qk_heads + fields.num_v_heads)
    conv, pool = (rng.normal(size=(LAYERS, SLOTS, *shape)) for shape in ((rows, 128), (fields.num_v_heads, 128, 128)))
    return (
        jnp.asarray(rng.normal(size=(num_tokens, 256)), act),
        weights,
        (jnp.asarray(conv, act), jnp.asarray(pool, state)),
    )


@pytest.fixture
def batch_of(make_batch) -> Callable[..., Batch]:
    return partial(make_batch, num_rows=ROWS, pages_per_seq=2, page_size=128, num_pages=32, num_slots=SLOTS, seed=0)


def assert_same(
    fields: block.Fields, batch: Batch, num_tokens: int, *, act: str = "float32", state: str = "float32",
    chunk: int = 64, decode_only: bool = False, change: Callable | None = None, race: bool = False,
) -> None:  # fmt: skip
    """Kernels against the reference: outputs of all tokens, and both pools without the sink's slot."""
    h, w, pools = draw(fields, num_tokens, act, state, 3)
    h, w = change(h, w) if change else (h, w)
    layer, slots = 1, np.asarray(batch.slot)
    used = [slot for slot, length in zip(slots, np.diff(np.asarray(batch.cu_q)), strict=True) if length]
    new = [slot for slot, old in zip(slots, np.asarray(batch.has_state), strict=True) if not old]
    others = [slot for slot in range(SLOTS) if slot not in used]
    pools = tuple(pool.at[1 - layer].set(np.nan).at[layer, jnp.asarray([*others, *new])].set(np.nan) for pool in pools)
    fused, reference = runners(fields, num_tokens, decode_only, chunk)
    with pltpu.force_tpu_interpret_mode(pltpu.InterpretParams(detect_races=race)):
        got = fused(h, w, pools, batch, layer)
    want = reference(h, w, pools, batch, layer)
    num_used = int(batch.cu_q[-1])
    assert_close(got[0][:num_used], want[0][:num_used], act)
    assert np.isfinite(np.asarray(got[0], np.float32)).all()
    for mine, theirs, before, dtype in zip(got[1:], want[1:], pools, (act, state), strict=True):
        assert mine.dtype == before.dtype
        assert_close(mine[layer, jnp.asarray(used, int)], theirs[layer, jnp.asarray(used, int)], dtype)
        untouched = np.asarray(mine, np.float32), np.asarray(before, np.float32)
        np.testing.assert_array_equal(*(x[layer, others] for x in untouched))
        np.testing.assert_array_equal(*(x[1 - layer] for x in untouched))


def assert_close(got: jax.Array, want: jax.Array, dtype: str) -> None:
    mine, theirs = (np.asarray(x, np.float32) for x in (got, want))
    scale = np.abs(theirs).max(initial=0)
    assert mine.shape == theirs.shape and np.isfinite(theirs).all()
    np.testing.assert_allclose(mine, theirs, atol=TOLERANCE[dtype] * scale, rtol=0)


@pytest.mark.slow
def test_decode_rows(batch_of) -> None:
    """New sequences, rows that are padding, no rows at all."""
    for rows in ([(5, 1), (0, 1), (3, 1)], [(0, 1)], []):
        lengths = rows or [(0, 0)]
        batch = batch_of(lengths, num_decode=len(rows), num_tokens=ROWS)
        assert_same(HEAD, batch, ROWS, decode_only=True)


@pytest.mark.slow
@pytest.mark.parametrize(("fields", "act", "state"), [
    (HEAD, "bfloat16", "bfloat16"), (CHANNEL, "float32", "float32"), (CHANNEL, "bfloat16", "bfloat16"),
    (LONE, "bfloat16", "float32"),
])  # fmt: skip
def test_decode_rows_of_each_kind(fields: block.Fields, act: str, state: str, batch_of) -> None:
    batch = batch_of([(5, 1), (0, 1), (3, 1), (9, 1), (2, 1)], num_decode=5, num_tokens=ROWS)
    assert_same(fields, batch, ROWS, act=act, state=state, decode_only=True)


@pytest.mark.slow
def test_copies_of_neighbouring_rows_do_not_race(batch_of) -> None:
    batch = batch_of([(5, 1), (0, 1), (3, 1), (9, 1)], num_decode=4, num_tokens=ROWS)
    runners.cache_clear()
    assert_same(HEAD, batch, ROWS, decode_only=True, race=True)
    runners.cache_clear()
    assert not interpret_pallas_call.races.races_found


def test_mixed_rows_in_short_chunks(batch_of) -> None:
    """Decode rows, then rows of one token, of less than a window, of whole chunks and of a chunk and one."""
    for rows in ([(5, 1), (0, 1), (3, 2), (0, 16), (2, 17)], [(7, 1), (6, 1), (0, 35)]):
        assert_same(SMALL, batch_of(rows, num_decode=2, num_tokens=40), 40, chunk=16)


BATCHES = {
    "across_a_page": [(5, 1), (126, 1), (3, 3), (0, 130)],
    "chunk_borders": [(1, 63), (128, 64), (0, 65)],
    "one_token_each": [(0, 1), (0, 1), (4, 1), (2, 1), (1, 1)],
    "nothing": [(0, 0)],
}


@pytest.mark.slow
@pytest.mark.parametrize("name", BATCHES)
def test_mixed_rows(name: str, batch_of) -> None:
    num_decode = 2 if name == "across_a_page" else 0
    assert_same(HEAD, batch_of(BATCHES[name], num_decode=num_decode, num_tokens=200), 200)


@pytest.mark.slow
@pytest.mark.parametrize(("fields", "act", "state", "chunk"), [
    (HEAD, "bfloat16", "bfloat16", 128), (LONE, "float32", "float32", 32),
])  # fmt: skip
def test_mixed_rows_of_each_kind(fields: block.Fields, act: str, state: str, chunk: int, batch_of) -> None:
    batch = batch_of(BATCHES["across_a_page"], num_decode=2, num_tokens=144)
    assert_same(fields, batch, 144, act=act, state=state, chunk=chunk)


@pytest.mark.slow
def test_extreme_gates_stay_accurate(batch_of) -> None:
    """Decays that underflow beside slow ones; one token repeated with beta near 1 and hardly any decay."""
    batch = batch_of([(0, 1), (0, 130)], num_decode=1, num_tokens=200)

    def wild(h: jax.Array, w: Weights) -> tuple[jax.Array, Weights]:
        return h, w | {"a_log": jnp.linspace(-8.0, 4.0, HEAD.num_v_heads)}

    def repeated(h: jax.Array, w: Weights) -> tuple[jax.Array, Weights]:
        strong = w["w_b"] + 12 * h[0, :, None] / jnp.sum(h[0] ** 2)
        return jnp.tile(h[:1], (200, 1)), w | {"w_b": strong, "a_log": w["a_log"] - 20}

    for change in (wild, repeated):
        assert_same(HEAD, batch, 200, change=change)


QWEN = block.Fields(kind="gated_delta", num_v_heads=64, num_qk_heads=16, head_dim=128, conv_kernel=4)
BF16 = Dtypes("bfloat16", "bfloat16", "bfloat16", "bfloat16", "bfloat16", "bfloat16")
DECODE = Load(
    tokens=64, seqs=64, decode_rows=64, decode_context=8192, decode_longest=8192, prefill_tokens=0, prefill_context=0,
    page_size=256, degrees=Degrees(), dtypes=BF16, row_tile=16, row_full=256, lanes=128, chip=CHIP,
)  # fmt: skip
PREFILL = replace(DECODE, tokens=512, seqs=16, decode_rows=0, prefill_tokens=512, prefill_context=256)


@pytest.mark.parametrize(("fields", "load", "reason"), [
    (QWEN, DECODE, ""),
    (QWEN, PREFILL, ""),
    (QWEN.model_copy(update={"head_dim": 64}), DECODE, "head_k_dim 64: the kernels take 128"),
    (QWEN, replace(DECODE, degrees=Degrees(tp=8)), "36 rows of 128 in a convolution window"),
    (QWEN, replace(DECODE, dtypes=replace(BF16, state="float8_e4m3fn")), "state dtype float8_e4m3fn"),
    (QWEN, replace(DECODE, chip=replace(CHIP, vmem_bytes=8 << 20)), "bytes of vector memory: the chip has 8388608"),
    (CHANNEL, DECODE, ""),
    (CHANNEL, PREFILL, "prefill tokens with a decay per channel"),
    (QWEN, replace(PREFILL, page_size=12), "page size 12"),
])  # fmt: skip
def test_refusals_name_the_rule(fields: block.Fields, load: Load, reason: str) -> None:
    found = tpu_cost.refuse(fields, DIMS, load)
    assert (len(found) >= 1 and reason in found[0]) if reason else not found, found


def test_work_moves_states_and_windows_once_each_way() -> None:
    terms = tpu_cost.work(QWEN, DIMS, DECODE)
    (recur,) = (term for term in terms if isinstance(term, Stream) and term.op == "recur")
    state, window, token = 64 * 128 * 128 * 2, 3 * 96 * 128 * 2, (96 + 64) * 128 * 2
    assert recur.bytes == 64 * (2 * (state + window) + token)
    assert [term.op for term in terms][-1] == "project out"
    assert not [term for term in tpu_cost.work(QWEN, DIMS, PREFILL) if term.op == "recur"]
