"""Gated DeltaNet's Pallas kernels in TPU interpret mode against xla.py, which test_gated_delta.py holds to ref.py.

Extreme decays per channel are also compared with ref.py itself: xla.py splits them as the kernel does.

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
from moec.blocks.core.work import Degrees, Dtypes, Gemm, Load, Stream
from moec.blocks.gated_delta import block, ref, tpu_cost, xla
from moec.blocks.gated_delta.project import GdnHeads
from moec.blocks.gated_delta.tpu_fused import gated_delta_fused
from moec.blocks.gated_delta.tpu_fused_prefill import gdn_prefill_rows
from moec.blocks.gated_delta.tpu_fused_prefill_channel import gdn_prefill_channel_rows
from moec.compiler.verify.random_checkpoint import random_weight

CHIP = ChipLimits(vmem_bytes=64 << 20, lanes=128, sublanes=8, mxu_dtypes=("bfloat16",))
DIMS = ModelDims(256, 8, NormFields())
LAYERS, SLOTS, ROWS = 2, 10, 5
LEAN = {"xla_backend_optimization_level": 0}  # half the time to compile the same program
TOLERANCE = {"float32": 1e-4, "bfloat16": 1e-2}
HEAD = block.Fields(kind="gated_delta", num_v_heads=4, num_qk_heads=2, head_dim=128, conv_kernel=4)
CHANNEL = HEAD.model_copy(update={"decay": block.Decay(per="channel", lower_bound=-5.0), "negative_eigenvalues": True})
SMALL = block.Fields(kind="gated_delta", num_v_heads=2, num_qk_heads=1, head_dim=128, conv_kernel=3)
SMALL_KDA = SMALL.model_copy(update={"decay": block.Decay(per="channel", rank=32)})
LONE = SMALL.model_copy(update={"num_qk_heads": 2, "gate": block.Gate(activation="sigmoid")})
# Two query/key heads for four value heads: a unit of two heads, and one of four in short chunks.
KDA = HEAD.model_copy(update={"decay": block.Decay(per="channel", rank=32), "gate": block.Gate(activation="sigmoid")})
SHORT_KDA = KDA.model_copy(update={"num_qk_heads": 4, "conv_kernel": 3})
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


@pytest.mark.parametrize(("fields", "chunk"), [
    pytest.param(SMALL, 16, id="head"), pytest.param(SMALL_KDA, 8, id="channel", marks=pytest.mark.slow),
])  # fmt: skip
def test_mixed_rows_in_short_chunks(fields: block.Fields, chunk: int, batch_of) -> None:
    """Decode rows, then rows of one token, of less than a window, of whole chunks and of a chunk and one."""
    for rows in ([(5, 1), (0, 1), (3, 2), (0, 16), (2, 17)], [(7, 1), (6, 1), (0, 35)]):
        assert_same(fields, batch_of(rows, num_decode=2, num_tokens=40), 40, chunk=chunk)


BATCHES = {
    "across_a_page": [(5, 1), (126, 1), (3, 3), (0, 130)],
    "chunk_borders": [(1, 63), (128, 64), (0, 65)],
    "one_token_each": [(0, 1), (0, 1), (4, 1), (2, 1), (1, 1)],
    "nothing": [(0, 0)],
}


@pytest.mark.slow
@pytest.mark.parametrize("fields", [HEAD, KDA], ids=["head", "channel"])
@pytest.mark.parametrize("name", BATCHES)
def test_mixed_rows(name: str, fields: block.Fields, batch_of) -> None:
    num_decode = 2 if name == "across_a_page" else 0
    assert_same(fields, batch_of(BATCHES[name], num_decode=num_decode, num_tokens=200), 200)


@pytest.mark.slow
@pytest.mark.parametrize(("fields", "act", "state", "chunk"), [
    (HEAD, "bfloat16", "bfloat16", 128), (LONE, "float32", "float32", 32),
    (KDA, "bfloat16", "bfloat16", 64), (KDA, "bfloat16", "float32", 64), (CHANNEL, "float32", "float32", 64),
    (CHANNEL, "float32", "float32", 128), (SHORT_KDA, "float32", "bfloat16", 16),
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


# What softplus makes of these biases is the decay: e^-20 a token, almost e^-200, none to speak of (e^-60), or drawn.
DECAYS = {"strong": [20.0], "none": [-60.0], "side_by_side": [20.0, 200.0, -60.0, -3.0, 0.0]}


@pytest.mark.slow
@pytest.mark.parametrize("name", DECAYS)
def test_extreme_decays_per_channel_stay_accurate(name: str, batch_of) -> None:
    """Also a request of one token and rows that share no chunk; against xla.py and token by token."""
    batch = batch_of([(0, 1), (5, 1), (7, 66), (0, 130)], num_decode=1, num_tokens=200)
    rng = np.random.default_rng(5)
    bias = jnp.asarray(rng.choice(DECAYS[name], size=HEAD.num_v_heads * 128), "float32")

    def given(h: jax.Array, w: Weights) -> tuple[jax.Array, Weights]:
        return h, w | {"dt_bias": bias, "a_log": jnp.zeros(HEAD.num_v_heads)}

    assert_same(KDA, batch, 200, change=given)
    h, w, pools = draw(KDA, 200, "float32", "float32", 3)
    h, w = given(h, w)
    with pltpu.force_tpu_interpret_mode(pltpu.InterpretParams()):
        got = runners(KDA, 200, False, 64)[0](h, w, pools, batch, 1)
    flat = (pools[0].reshape(LAYERS, SLOTS, -1), pools[1])
    at = {"pool_layer": 1, "chunk": 64, **options(KDA, 200, False)}
    want = ref.gated_delta(h, w, *flat, batch, index_rows(batch), **at)
    used = jnp.asarray(np.asarray(batch.slot)[:4])
    assert_close(got[0][:198], want[0][:198], "float32")
    for mine, theirs in zip(got[1:], want[1:], strict=True):
        assert_close(mine[1, used], theirs[1, used].reshape(4, *mine.shape[2:]), "float32")


@pytest.mark.slow
def test_repeated_keys_with_a_decay_per_channel(batch_of) -> None:
    """One token repeated, written with a strength near 1 and hardly any decay: the couplings' powers grow."""
    batch = batch_of([(0, 1), (0, 130)], num_decode=1, num_tokens=200)

    def repeated(h: jax.Array, w: Weights) -> tuple[jax.Array, Weights]:
        strong = w["w_b"] + 12 * h[0, :, None] / jnp.sum(h[0] ** 2)
        return jnp.tile(h[:1], (200, 1)), w | {"w_b": strong, "a_log": w["a_log"] - 20}

    assert_same(KDA, batch, 200, change=repeated)


QWEN = block.Fields(kind="gated_delta", num_v_heads=64, num_qk_heads=16, head_dim=128, conv_kernel=4)
KIMI = QWEN.model_copy(update={"num_v_heads": 32, "num_qk_heads": 32, "decay": KDA.decay, "gate": KDA.gate})
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
    (CHANNEL, PREFILL, ""),
    (KIMI, PREFILL, ""),
    (KIMI, replace(PREFILL, chip=replace(CHIP, vmem_bytes=16 << 20)), "bytes of vector memory: the chip has 16777216"),
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


def test_prefill_reads_log_decays_of_every_channel() -> None:
    by_head = KIMI.model_copy(update={"decay": block.Decay()})
    (channel, head) = (
        next(
            term
            for term in tpu_cost.work(fields, DIMS, PREFILL)
            if isinstance(term, Stream) and term.op == "scan chunks"
        )
        for fields in (KIMI, by_head)
    )
    assert channel.bytes - head.bytes == 512 * 32 * 128 * 4
    # Six borders of a chunk of 64: products of two heads at once, as long and as wide as two heads' channels.
    gemms = [term for term in tpu_cost.work(KIMI, DIMS, PREFILL) if isinstance(term, Gemm)]
    (pairs,) = (term for term in gemms if (term.m, term.n, term.k) == (2 * 128, 2 * 128, 2 * 128))
    assert pairs.count == 512 / 64 * 32 / 2 * 6


@pytest.mark.parametrize("fields", [HEAD, KDA], ids=["head", "channel"])
def test_vector_memory_of_prefill_covers_what_the_kernel_allocates(fields: block.Fields) -> None:
    load = replace(PREFILL, tokens=2048, prefill_tokens=2048)
    heads = GdnHeads(fields.num_qk_heads, fields.num_v_heads, 128, 128)
    conv, f32, bf16 = 2 * heads.qk + heads.v, jnp.float32, jnp.bfloat16
    by_channel = fields.decay.per == "channel"
    prefill = gdn_prefill_channel_rows if by_channel else gdn_prefill_rows
    array = jax.ShapeDtypeStruct

    def run(x, beta, g, taps, cu_q, slot, has, bounds, out, conv_pool, pool):
        batch = Batch(None, None, cu_q, None, None, slot, has, bounds, None)
        return prefill(x, beta, g, taps, batch, 0, out, conv_pool, pool, heads=heads, chip=CHIP, chunk=64)

    traced = jax.make_jaxpr(run)(
        array((2112, conv, 128), bf16), array((2048, heads.v), f32),
        array((2048, heads.v, 128) if by_channel else (2048, heads.v), f32), array((4, conv, 128), f32),
        array((17,), jnp.int32), array((16,), jnp.int32), array((16,), bool), array((3,), jnp.int32),
        array((2112, heads.v, 128), bf16), array((1, 4, 3 * conv, 128), bf16), array((1, 4, heads.v, 128, 128), bf16),
    )  # fmt: skip
    (kernel,) = (eqn.params["jaxpr"] for eqn in traced.eqns if eqn.primitive.name == "pallas_call")
    refs = [var.aval for var in kernel.invars if var.aval.memory_space == pltpu.VMEM]
    assert len(refs) >= 14
    # A MiB is the compiler's own.
    allocated = sum(map(padded_bytes, refs)) + (1 << 20)
    assert allocated <= tpu_cost.vmem_bytes(fields, DIMS, load) <= 1.03 * allocated


def padded_bytes(ref: Any) -> int:
    """Bytes of an array in tiles of 8 rows of 128 values of 32 bits."""
    (*outer, rows, lanes), size = ref.shape, ref.dtype.itemsize
    step = 32 // size
    return int(np.prod(outer, initial=1)) * -(-rows // step) * step * -(-lanes // 128) * 128 * size
