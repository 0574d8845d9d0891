"""The TPU variants of the collectives against xla.py and their meaning on the stack of all shards.

The reduce-scatter kernel runs in TPU interpret mode on eight virtual devices, whose memory starts as NaN; the other
variants are plain JAX. Small integers add up without rounding in any order, so with them results must be exact:
a row that went astray shows whatever its size.
"""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from itertools import product
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax._src.pallas.mosaic.interpret import interpret_pallas_call
from jax.experimental.pallas import tpu as pltpu
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from moec.blocks.collectives import cost, ref, tpu_chunked, tpu_cost, tpu_hierarchical, xla
from moec.blocks.core.chip import ChipLimits
from moec.blocks.core.work import Collective, Degrees, Dtypes, Load

CHIP = ChipLimits(vmem_bytes=64 << 20, lanes=128, sublanes=8, mxu_dtypes=("bfloat16",), cores_per_chip=2)
DATA8 = {"data": 8}
DATA4 = {"data": 4, "tensor": 2}
# mesh, axes, shards that share a chip
GROUPS = {
    "pairs_then_chips": (DATA8, ("data",), 2),
    "pairs_over_two_axes": (DATA4, ("data", "tensor"), 2),
    "chips_alone": (DATA4, ("data",), 1),
    "one_pair": (DATA4, ("tensor",), 2),
    "eight_chips": (DATA8, ("data",), 1),
}
LANES = 128


def on_shards(group: str, call: Callable, *stacks: jax.Array) -> Any:
    """call(local arrays...) on every device of the mesh; arguments and results stacked [8, ...] in mesh order."""
    sizes, _, _ = GROUPS[group]
    mesh = Mesh(np.asarray(jax.devices()[:8]).reshape(tuple(sizes.values())), tuple(sizes))
    spec = P(tuple(sizes))

    def local(*arrays: jax.Array) -> Any:
        return jax.tree.map(lambda a: a[None], call(*(a[0] for a in arrays)))

    mapped = jax.shard_map(local, mesh=mesh, in_specs=spec, out_specs=spec, check_vma=False)
    return jax.tree.map(np.asarray, jax.jit(mapped)(*stacks))


def shards(group: str) -> int:
    sizes, axes, _ = GROUPS[group]
    return int(np.prod([sizes[a] for a in axes]))


def summed(group: str, y: jax.Array) -> np.ndarray:
    """The reduce-scatter in float32, by XLA."""
    return on_shards(group, lambda a: xla.reduce_scatter_tokens(a.astype(jnp.float32), GROUPS[group][1]), y)


def kernel(group: str, micro_batches: int) -> Callable:
    _, axes, pair = GROUPS[group]
    options = {"chip": CHIP, "shards_per_chip": pair, "micro_batches": micro_batches}
    return partial(tpu_hierarchical.reduce_scatter_hierarchical, axes=axes, **options)


def interpreted(group: str, micro_batches: int, y: jax.Array, copies: Any = "on_wait") -> tuple[np.ndarray, bool]:
    """The kernel's result as float32, and whether the race detector found something.

    copies: when the interpreter copies: as late as it may, or at once.
    """
    params = pltpu.InterpretParams(detect_races=True, dma_execution_mode=copies)
    with pltpu.force_tpu_interpret_mode(params):
        found = on_shards(group, lambda a: kernel(group, micro_batches)(a).astype(jnp.float32), y)
    assert interpret_pallas_call.races is not None
    return found, interpret_pallas_call.races.races_found


def draw(*shape: int, seed: int = 0) -> jax.Array:
    return jnp.asarray(np.random.default_rng(seed).standard_normal(shape), jnp.float32)


def integers(*shape: int) -> jax.Array:
    """Small enough that sums over eight shards are exact in bfloat16."""
    return jnp.asarray(np.random.default_rng(1).integers(-9, 10, shape), jnp.bfloat16)


def rounding_bound(group: str, y: jax.Array) -> np.ndarray:
    """Largest error of each sum in bfloat16.

    A summand is rounded when it travels between chips, at most log2(chips) times, and the result once; rounding
    moves a value by 2^-9 of it, and no partial sum exceeds the sum of magnitudes.
    """
    _, _, pair = GROUPS[group]
    roundings = (shards(group) // pair).bit_length()
    return 1.01 * roundings * 2.0**-9 * summed(group, jnp.abs(y))


@pytest.mark.parametrize("chips", [1, 2, 4, 8, 16])
def test_halvings_reach_every_chip_once(chips: int) -> None:
    group = tpu_hierarchical._HrsGroup((("data", 2 * chips),), chips, 2, 8, 1)
    for chip, core in product(range(chips), range(2)):
        reached = [int(tpu_hierarchical._hrs_chip(group, chip, core, path)) for path in range(chips)]
        assert sorted(reached) == list(range(chips))
        for step in range(1, group.halvings + 1):
            partner = int(tpu_hierarchical._hrs_chip(group, chip, core, 1 << (step - 1)))
            assert int(tpu_hierarchical._hrs_chip(group, partner, core, 1 << (step - 1))) == chip


def test_four_chips_exchange_with_neighbours_on_both_links() -> None:
    """make_mesh puts a 2x2 of chips in a circle; in each round the two cores use the chip's two different links."""
    circle = [(0, 0), (1, 0), (1, 1), (0, 1)]
    group = tpu_hierarchical._HrsGroup((("data", 8),), 4, 2, 8, 1)
    for chip, step in product(range(4), (1, 2)):
        hops = []
        for core in range(2):
            partner = circle[int(tpu_hierarchical._hrs_chip(group, chip, core, 1 << (step - 1)))]
            hops.append(tuple(a != b for a, b in zip(circle[chip], partner, strict=True)))
        assert sorted(hops) == [(False, True), (True, False)]


@pytest.mark.parametrize(
    ("group", "tokens", "micro_batches"),
    [
        ("pairs_then_chips", 24, 3),
        pytest.param("pairs_then_chips", 8, 1, marks=pytest.mark.slow),
        pytest.param("pairs_then_chips", 64, 4, marks=pytest.mark.slow),
        pytest.param("pairs_over_two_axes", 24, 3, marks=pytest.mark.slow),
        pytest.param("chips_alone", 32, 4, marks=pytest.mark.slow),
        pytest.param("one_pair", 40, 5, marks=pytest.mark.slow),
        pytest.param("eight_chips", 24, 3, marks=pytest.mark.slow),
    ],
)
def test_hierarchical_sums_integers_exactly(group: str, tokens: int, micro_batches: int) -> None:
    y = integers(8, shards(group) * tokens, LANES)
    found, raced = interpreted(group, micro_batches, y)
    np.testing.assert_array_equal(found, summed(group, y))
    assert not raced


@pytest.mark.parametrize(
    ("dtype", "group"),
    [
        (jnp.bfloat16, "pairs_then_chips"),
        pytest.param(jnp.float32, "pairs_then_chips", marks=pytest.mark.slow),
        pytest.param(jnp.bfloat16, "eight_chips", marks=pytest.mark.slow),
        pytest.param(jnp.float32, "pairs_over_two_axes", marks=pytest.mark.slow),
    ],
)
def test_hierarchical_is_close(dtype: Any, group: str) -> None:
    """float32: 1e-4 of the largest sum; bfloat16: 1e-2 of it, and each sum within its own bound."""
    y = draw(8, shards(group) * 8, LANES).astype(dtype)
    found, _ = interpreted(group, 1, y)
    want = summed(group, y)
    bar = 1e-4 if dtype == jnp.float32 else 1e-2
    assert np.abs(found - want).max() <= bar * np.abs(want).max()
    if dtype == jnp.bfloat16:
        assert (np.abs(found - want) <= rounding_bound(group, y)).all()


def test_race_detector_sees_a_buffer_written_too_early(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the word that a buffer is free, a partner two batches ahead overwrites rows that are still to be read."""
    monkeypatch.setattr(tpu_hierarchical, "_hrs_await_buffer", lambda *_: None)
    monkeypatch.setattr(tpu_hierarchical, "_hrs_free_buffer", lambda *_: None)
    _, raced = interpreted("one_pair", 3, integers(8, 2 * 24, LANES))
    assert raced


@pytest.mark.slow
def test_race_detector_sees_a_missing_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows are added before they have arrived: the wait for the last round's copy only waits for what was sent."""
    arrived = tpu_hierarchical._hrs_half

    class SentOnly:
        def __init__(self, copy: Any) -> None:
            self.start, self.wait = copy.start, copy.wait_send

    def half(group: Any, me: Any, step: int, *rest: Any) -> Any:
        copy = arrived(group, me, step, *rest)
        return SentOnly(copy) if step == group.halvings else copy

    monkeypatch.setattr(tpu_hierarchical, "_hrs_half", half)
    try:
        _, raced = interpreted("chips_alone", 2, integers(8, 4 * 16, LANES), copies="eager")
    finally:
        pltpu.reset_tpu_interpret_mode_state()
    assert raced


@pytest.mark.parametrize(
    ("tokens", "group", "micro_batches", "reason"),
    [
        (12, "one_pair", 1, "12 tokens in 1 batches of whole tiles"),
        (16, "one_pair", 3, "16 tokens in 3 batches"),
        (1 << 16, "one_pair", 1, "more micro_batches need less"),
    ],
)
def test_hierarchical_refuses(tokens: int, group: str, micro_batches: int, reason: str) -> None:
    y = jax.ShapeDtypeStruct((8 * shards(group) * tokens, LANES), jnp.bfloat16)
    sizes, _, _ = GROUPS[group]
    mesh = jax.sharding.AbstractMesh(tuple(sizes.values()), tuple(sizes))
    mapped = jax.shard_map(
        kernel(group, micro_batches), mesh=mesh, in_specs=P(tuple(sizes)), out_specs=P(tuple(sizes)), check_vma=False
    )
    with pytest.raises(AssertionError, match=reason):
        jax.eval_shape(mapped, y)


# --- gathers ---


def packed_routing(num: int, tokens: int, top_k: int) -> tuple[jax.Array, jax.Array, jax.Array]:
    """(index, weight, both packed as the router packs them), stacked over shards."""
    index = jnp.asarray(np.random.default_rng(1).integers(-1, 512, (num, tokens, top_k)), jnp.int32)
    weight = draw(num, tokens, top_k).at[:, 0, 0].set(-0.0).at[:, 1, 1].set(1e-30)
    return index, weight, jnp.concatenate([index, jax.lax.bitcast_convert_type(weight, jnp.int32)], axis=2)


@pytest.mark.parametrize("group", ["pairs_then_chips", "pairs_over_two_axes"])
def test_gather_routing_packed_keeps_all_bits(group: str) -> None:
    index, weight, packed = packed_routing(8, 3, 4)
    axes = GROUPS[group][1]
    found_index, found_weight = on_shards(group, lambda p: xla.gather_routing_packed(p, axes), packed)
    want_index, want_weight = ref.gather_routing(index, weight)
    np.testing.assert_array_equal(found_index, want_index)
    np.testing.assert_array_equal(found_weight.view(np.uint32), np.asarray(want_weight).view(np.uint32))


def hidden_rows() -> np.ndarray:
    """[8, 9, 256]: ordinary rows, and rows of zeros, with an outlier, tiny, huge, subnormal, and with one value."""
    x = np.array(draw(8, 9, 256, seed=3))
    x[:, 1] = 0
    x[:, 2, 7] = 3e4
    x[:, 3] *= 1e-30
    x[:, 4] *= 1e30
    x[:, 5] *= 1e-42
    x[:, 6, 1:] = 0
    x[:, 7] = np.exp2(np.random.default_rng(4).uniform(-20, 0, (8, 256)))
    return x


def test_fp8_rows_are_within_the_bound_of_the_format() -> None:
    """e4m3fn keeps three bits of mantissa, so a value moves by 2^-4 of itself at most; below 2^-6 its steps are
    2^-9, so it moves by 2^-10 at most. Both in units of the row's scale, which float32 rounds (2^-24)."""
    x = hidden_rows()[0]
    q, scale = xla.quantize_tokens(jnp.asarray(x))
    back = np.asarray(xla.dequantize_tokens(q, scale, jnp.float32))
    bound = np.maximum(np.abs(x) * 2.0**-4, np.asarray(scale) * 2.0**-10) * (1 + 2.0**-20)
    assert (np.abs(back - x) <= bound).all()
    assert np.isfinite(np.asarray(q, np.float32)).all()
    # The largest value of a row is kept, and a row of zeros stays one.
    np.testing.assert_allclose(np.abs(back[:5]).max(1), np.abs(x[:5]).max(1), rtol=1e-6)
    assert (back[1] == 0).all()


def test_fp8_rows_with_nan_are_nan() -> None:
    x = draw(2, 256).at[0, 3].set(jnp.nan)
    q, scale = xla.quantize_tokens(x)
    back = np.asarray(xla.dequantize_tokens(q, scale, jnp.float32))
    assert np.isnan(back[0]).all() and np.isfinite(back[1]).all()


@pytest.mark.parametrize("group", ["pairs_then_chips", "pairs_over_two_axes"])
def test_gather_tokens_float8(group: str) -> None:
    """Every device gets what each shard quantised, bit for bit, and the routing beside it."""
    axes = GROUPS[group][1]
    x = jnp.asarray(hidden_rows()).astype(jnp.bfloat16)
    index, weight, packed = packed_routing(8, 9, 4)

    def call(x_TD: jax.Array, packed_TW: jax.Array) -> Any:
        q, scale, *routing = xla.gather_tokens_float8(x_TD, packed_TW, axes)
        return q.astype(jnp.float32), scale, *routing

    q, scale, *routing = on_shards(group, call, x, packed)
    want_q, want_scale = xla.quantize_tokens(x.reshape(-1, 256))
    for device in range(8):
        np.testing.assert_array_equal(q[device], np.asarray(want_q, np.float32))
        np.testing.assert_array_equal(scale[device], want_scale)
    for found, want in zip(routing, ref.gather_routing(index, weight), strict=True):
        np.testing.assert_array_equal(found, want)


# --- unpermute and reduce-scatter in chunks ---


def combine_ref(out_PD: jax.Array, place_TK: jax.Array, weight_TK: jax.Array) -> jax.Array:
    rows_TKD = jnp.where(place_TK[..., None] < 0, 0, out_PD[jnp.maximum(place_TK, 0)])
    return jnp.sum(rows_TKD * weight_TK[..., None], axis=1)


@pytest.mark.parametrize("num_chunks", [1, 2, 4])
@pytest.mark.parametrize("group", ["pairs_then_chips", "chips_alone"])
def test_chunks_give_the_whole(group: str, num_chunks: int) -> None:
    """Chunks change no sum: integers come out the same, in the order of the tokens."""
    axes, num = GROUPS[group][1], shards(group)
    rng = np.random.default_rng(5)
    out = jnp.asarray(rng.integers(-9, 10, (8, 40, 16)), jnp.float32)
    place = jnp.asarray(rng.integers(-1, 40, (8, num * 8, 3)), jnp.int32)
    weight = jnp.asarray(rng.integers(-3, 4, (8, num * 8, 3)), jnp.float32)

    def whole(*arrays: jax.Array) -> jax.Array:
        return xla.reduce_scatter_tokens(combine_ref(*arrays), axes)

    def chunked(out_PD: jax.Array, place_AK: jax.Array, weight_AK: jax.Array) -> jax.Array:
        options = {"scatter": xla.reduce_scatter_tokens, "num_chunks": num_chunks, "dtype": jnp.float32}
        return tpu_chunked.combine_reduce_scatter(partial(combine_ref, out_PD), place_AK, weight_AK, axes, **options)

    found = on_shards(group, chunked, out, place, weight)
    np.testing.assert_array_equal(found, on_shards(group, whole, out, place, weight))


@pytest.mark.slow
def test_chunks_through_the_kernel() -> None:
    """Several kernel calls in a row, which share a barrier and must not meet each other's signals."""
    group = "pairs_then_chips"
    rng = np.random.default_rng(6)
    y = jnp.asarray(rng.integers(-9, 10, (8, 40, LANES)), jnp.float32)
    place = jnp.asarray(rng.integers(-1, 40, (8, 8 * 32, 1)), jnp.int32)
    weight = jnp.ones((8, 8 * 32, 1), jnp.float32)

    def chunked(out_PD: jax.Array, place_AK: jax.Array, weight_AK: jax.Array, scatter: Callable) -> jax.Array:
        options = {"scatter": scatter, "num_chunks": 2, "dtype": jnp.bfloat16}
        combine = partial(combine_ref, out_PD)
        return tpu_chunked.combine_reduce_scatter(combine, place_AK, weight_AK, ("data",), **options)

    def in_kernel(y_AD: jax.Array, axes: tuple[str, ...]) -> jax.Array:
        return kernel(group, 2)(y_AD, axes=axes)

    with pltpu.force_tpu_interpret_mode(pltpu.InterpretParams(detect_races=True)):
        found = on_shards(group, partial(chunked, scatter=in_kernel), y, place, weight)
    assert interpret_pallas_call.races is not None and not interpret_pallas_call.races.races_found
    want = on_shards(group, partial(chunked, scatter=xla.reduce_scatter_tokens), y, place, weight)
    np.testing.assert_array_equal(found.astype(np.float32), want.astype(np.float32))


# --- cost ---


def load(tokens: int, dp: int = 8, dtype: str = "bfloat16", chip: ChipLimits = CHIP) -> Load:
    dtypes = Dtypes(dtype, dtype, dtype, dtype, dtype, dtype)
    return Load(tokens, tokens, tokens, 1, 1, 0, 0, 256, Degrees(dp=dp, tp=8 // dp, ep=8), dtypes, 16, 256, chip=chip)


@pytest.mark.parametrize(("tokens", "dp", "batches"), [(64, 8, 2), (1024, 8, 16), (8, 8, 1), (24, 8, 3), (128, 4, 2)])
def test_vector_memory_is_what_the_kernel_allocates(tokens: int, dp: int, batches: int) -> None:
    one = load(tokens, dp)
    assert tpu_cost.refuse_reduce_scatter(4096, one) == []
    assert tpu_cost.micro_batches(4096, one) == batches
    pair = tpu_cost.shards_per_chip(one)
    group = tpu_hierarchical._HrsGroup((("data", dp),), dp // pair, pair, tokens // batches, batches)
    scratch = tpu_hierarchical._hrs_scratch(group, 4096, jnp.bfloat16)
    assert tpu_cost.buffer_bytes(4096, one, batches) == tpu_hierarchical._hrs_vmem_bytes(scratch) <= 32 << 20


def test_rounds_carry_each_row_once_per_chip() -> None:
    """Within a chip half of the sums of both cores cross; between chips 3/4 of what a core then owns."""
    payload = 512 * 4096 * 2
    found = tpu_cost.rounds(4096, load(64))
    assert [r.link for r in found] == ["D2D", "ICI", "ICI"]
    assert found[0].bytes == payload // 2
    assert sum(r.bytes for r in found[1:]) == payload // 2 * 3 // 4
    alone = tpu_cost.rounds(4096, load(128, dp=4))
    assert [r.link for r in alone] == ["ICI", "ICI"] and sum(r.bytes for r in alone) == payload * 3 // 4


def test_messages_of_the_variants() -> None:
    one = load(64)
    bf16, packed = cost.gather_for_experts(10, 4096, one)
    narrow = replace(one, dtypes=replace(one.dtypes, gather="float8_e4m3fn"))
    fp8, scaled = (term for term in cost.gather_for_experts(10, 4096, narrow) if isinstance(term, Collective))
    assert (packed.shape, scaled.shape) == ((512, 20), (512, 21))
    assert fp8.payload_bytes * 2 == bf16.payload_bytes
    (whole,) = cost.return_tokens("return", "combine", "experts", 4096, one)
    chunks = cost.return_tokens("return", "combine", "experts", 4096, one, chunks=4)
    assert len(chunks) == 4 and sum(c.payload_bytes for c in chunks) == whole.payload_bytes


@pytest.mark.parametrize(
    ("width", "case", "reason"),
    [
        (4096, load(64, dp=1), "one attention rank"),
        (4096, load(12), "12 tokens per rank: the kernel takes multiples of 8"),
        (4100, load(64), "width 4100: the kernel takes multiples of 128"),
        (4096, load(64, dtype="float8_e4m3fn"), "the kernel takes bfloat16 or float32"),
        (4096, load(64, chip=ChipLimits(1 << 20, 128, 8, (), cores_per_chip=2)), "bytes of vector memory"),
        (4096, load(64, chip=ChipLimits(1 << 26, 128, 8, (), cores_per_chip=4)), "4 devices per chip"),
    ],
)
def test_refusals_say_what_would_be_accepted(width: int, case: Load, reason: str) -> None:
    (found,) = tpu_cost.refuse_reduce_scatter(width, case)
    assert reason in found
    assert tpu_cost.refuse_chunks(load(64), 3) == ["64 tokens per rank in 3 chunks: the number must divide them"]
