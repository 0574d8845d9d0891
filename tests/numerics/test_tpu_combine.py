"""Weighted sums of expert rows: the TensorCore kernels in TPU interpret mode, the SparseCore ones by their emulation.

The meaning is a sum in float64 of the values as stored. Rows of bfloat16 are exact in float32, so what is left is the
order of at most K float32 sums: 1e-6 of the output's scale, far below the bars of 1e-4 and 1e-2. Rows that no token
names are NaN.
"""

from dataclasses import dataclass
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax._src.pallas.mosaic.interpret import interpret_pallas_call
from jax.experimental.pallas import tpu as pltpu
from jax.sharding import AbstractDevice, AbstractMesh

from moec.blocks.core.chip import ChipLimits
from moec.blocks.core.work import Stream, Subcore, Vector
from moec.blocks.moe.tpu_combine import combine_rows, combine_stream
from moec.blocks.moe.tpu_combine_cost import (
    combine_plan,
    combine_refuse,
    combine_work,
    sparsecore_copy_rows,
    sparsecore_refuse,
    sparsecore_work,
)
from moec.blocks.moe.tpu_grouped_rows import pack_rows
from moec.blocks.moe.tpu_sparsecore import combine_sparsecore, gather_rows_sparsecore, sparsecore_share
from moec.blocks.moe.tpu_sparsecore_emulation import (
    combine_sparsecore_emulated,
    gather_rows_sparsecore_emulated,
    unpermute_sparsecore,
)

CHIP = ChipLimits(64 << 20, 128, 8, ("bfloat16",), 2, 16, 16, 512 << 10, 2, 1 << 20)
V6E = ChipLimits(128 << 20, 128, 8, ("bfloat16",), 2, 16, 8, 256 << 10, 1, 1 << 20)
# So little VMEM that sums of 8 tokens at a time are held.
SMALL = ChipLimits(262144, 128, 8, ("bfloat16",), smem_bytes=1 << 20)
BAR = 1e-6
EXPERTS = 5


@dataclass(frozen=True)
class Shape:
    """tokens, choices, rows in the array, width; `local` of the choices have a row, the first `bare` tokens none."""

    tokens: int
    top_k: int
    rows: int
    width: int
    local: float
    bare: int = 0
    dtype: str = "bfloat16"
    weight: str = "float32"


# Small ones: a few grid steps of the interpreter take seconds.
SHAPES = {
    "odd": Shape(13, 3, 50, 256, 0.4, bare=2),
    "every_choice_here": Shape(8, 10, 80, 512, 1.0),
    "nothing_here": Shape(9, 2, 16, 256, 0.0),
    "one_choice": Shape(19, 1, 24, 384, 0.6, dtype="float32", weight="bfloat16"),
}
# As a decode step and a prefill chunk of one rank of eight.
LARGE = {
    "ep8": Shape(512, 10, 5120, 2048, 1 / 8, bare=3),
    "more_tokens_than_a_round": Shape(700, 10, 7000, 2048, 1 / 8),
    "one_group": Shape(5, 10, 50, 2048, 0.5),
    "two_of_two": Shape(40, 2, 80, 2048, 1.0, dtype="float32"),
    "nothing": Shape(40, 1, 80, 2048, 0.0),
}


@dataclass(frozen=True)
class Data:
    """Row words, where each choice's row is, weights, and the same by row for the rows that are there."""

    out: jax.Array
    place: jax.Array
    weight: jax.Array
    token: jax.Array
    choice: jax.Array
    start: jax.Array
    want: np.ndarray


def data(shape: Shape, seed: int = 0) -> Data:
    """Random choices, their rows by expert and then by token at the front; all rows behind them are NaN."""
    rng = np.random.default_rng(seed)
    there = rng.random((shape.tokens, shape.top_k)) < shape.local
    there[: shape.bare] = False
    used = int(there.sum())
    expert = rng.integers(0, EXPERTS, used)
    order = np.argsort(expert, kind="stable")
    choices, start = np.flatnonzero(there)[order], np.searchsorted(expert[order], np.arange(EXPERTS + 1))
    place = np.full(shape.tokens * shape.top_k, -1, np.int32)
    place[choices] = np.arange(used)
    values = rng.standard_normal((shape.rows, shape.width)).astype(np.float32)
    values[used:] = np.nan
    rows = jnp.asarray(values, shape.dtype)
    weight = jnp.asarray(rng.random((shape.tokens, shape.top_k)), shape.weight)
    want = np.zeros((shape.tokens, shape.width))
    exact, factor = np.asarray(rows).astype(np.float64), np.asarray(weight).astype(np.float64).reshape(-1)
    np.add.at(want, choices // shape.top_k, factor[choices, None] * exact[:used])
    choice = np.full(shape.tokens * shape.top_k, 10**6, np.int32)  # past the end they must not be looked at
    choice[:used] = choices
    return Data(
        pack_rows(rows),
        jnp.asarray(place.reshape(shape.tokens, shape.top_k)),
        weight,
        jnp.asarray(choice // shape.top_k),
        jnp.asarray(choice),
        jnp.asarray(start, jnp.int32),
        want,
    )


def assert_close(got: jax.Array, want: np.ndarray) -> None:
    assert got.dtype == jnp.float32 and got.shape == want.shape
    assert np.abs(np.asarray(got) - want).max() <= BAR * max(np.abs(want).max(), 1)


@pytest.mark.parametrize("name", [pytest.param(n, marks=[] if n == "odd" else pytest.mark.slow) for n in SHAPES])
def test_sums_by_token(name: str) -> None:
    case = data(SHAPES[name])
    with pltpu.force_tpu_interpret_mode(pltpu.InterpretParams()):
        got = combine_rows(case.out, case.place, case.weight, width=SHAPES[name].width, chip=CHIP, tile_tokens=8)
    assert_close(got, case.want)


BY_ROW = [("odd", SMALL), ("odd", CHIP), ("every_choice_here", CHIP), ("one_choice", SMALL)]


@pytest.mark.parametrize(
    ("name", "chip"), [pytest.param(n, c, marks=pytest.mark.slow if i else []) for i, (n, c) in enumerate(BY_ROW)]
)
def test_sums_by_row(name: str, chip: ChipLimits) -> None:
    """All sums at once, and 8 tokens' at a time; pieces of 4 rows cut runs, the last one reaches past the array."""
    case = data(SHAPES[name])
    with pltpu.force_tpu_interpret_mode(pltpu.InterpretParams()):
        got = combine_stream(
            case.out,
            case.token,
            case.choice,
            case.start,
            case.weight,
            width=SHAPES[name].width,
            chip=chip,
            tile_tokens=8,
            tile_rows=4,
        )
    assert_close(got, case.want)


@pytest.mark.slow
def test_no_copy_races_another() -> None:
    """Uninitialised memory is NaN, and every read of a copy's target must come after the wait for it."""
    case = data(SHAPES["odd"], seed=1)
    params = pltpu.InterpretParams(detect_races=True, uninitialized_memory="nan")
    with pltpu.force_tpu_interpret_mode(params):
        by_token = combine_rows(case.out, case.place, case.weight, width=256, chip=CHIP, tile_tokens=8)
        by_row = combine_stream(
            case.out,
            case.token,
            case.choice,
            case.start,
            case.weight,
            width=256,
            chip=SMALL,
            tile_tokens=8,
            tile_rows=4,
        )
        assert_close(by_token, case.want)
        assert_close(by_row, case.want)
        assert interpret_pallas_call.races is not None
        assert not interpret_pallas_call.races.races_found


@pytest.mark.parametrize("copy_rows", [8, 16])
@pytest.mark.parametrize("name", LARGE)
def test_sparsecore_sums(name: str, copy_rows: int) -> None:
    case = data(LARGE[name])
    got = combine_sparsecore_emulated(
        case.out, case.place, case.weight, width=LARGE[name].width, chip=CHIP, copy_rows=copy_rows
    )
    assert_close(got, case.want)


@pytest.mark.parametrize("num_rows", [0, 1, 16, 130, 333, 400])
def test_sparsecore_gathers_only_the_rows_there_are(num_rows: int) -> None:
    rng = np.random.default_rng(num_rows)
    h_TJ = pack_rows(jnp.asarray(rng.standard_normal((40, 2048)), jnp.bfloat16))
    token_P = jnp.asarray(rng.integers(0, 40, 400), jnp.int32)
    got = np.asarray(gather_rows_sparsecore_emulated(h_TJ, token_P, jnp.int32(num_rows), chip=CHIP, copy_rows=16))
    np.testing.assert_array_equal(got[:num_rows], np.asarray(h_TJ)[np.asarray(token_P)[:num_rows]])
    untouched = -(-num_rows // 16) * 16
    assert (got[untouched:] == -1).all()
    assert len(got) == 512


@pytest.mark.parametrize("workers", [1, 8, 32])
def test_every_item_has_one_worker(workers: int) -> None:
    for items in (0, 1, 31, 32, 33, 64, 1000):
        runs = [sparsecore_share(worker, items, workers) for worker in range(workers)]
        taken = [item for first, count in runs for item in range(first, first + count)]
        assert taken == list(range(items))
        traced = [sparsecore_share(jnp.int32(w), jnp.int32(items), workers) for w in range(workers)]
        assert [(int(f), int(c)) for f, c in traced if int(c)] == [run for run in runs if run[1]]


@pytest.mark.parametrize(("chip", "kind"), [(CHIP, "TPU7x"), (V6E, "TPU v6e")])
def test_sparsecore_kernels_lower(chip: ChipLimits, kind: str) -> None:
    """Traced and lowered for a chip that is not there: no interpreter runs them, the compiler tests compile them."""
    shape, width = LARGE["ep8"], 2048
    copy_rows = sparsecore_copy_rows(shape.tokens, shape.top_k, width, "bfloat16", chip)
    assert copy_rows is not None
    words = jax.ShapeDtypeStruct((shape.rows, width // 256, 128), jnp.int32)
    index, numbers = jax.ShapeDtypeStruct((512, 10), jnp.int32), jax.ShapeDtypeStruct((5120,), jnp.int32)
    weight, one = jax.ShapeDtypeStruct((512, 10), jnp.float32), jax.ShapeDtypeStruct((), jnp.int32)

    def combine(out: jax.Array, place: jax.Array, weight: jax.Array) -> jax.Array:
        return combine_sparsecore(out, place, weight, width=width, chip=chip, copy_rows=copy_rows)

    def gather(h: jax.Array, token: jax.Array, num_rows: jax.Array) -> jax.Array:
        return gather_rows_sparsecore(h, token, num_rows, chip=chip, copy_rows=copy_rows)

    mesh = AbstractMesh((), (), abstract_device=AbstractDevice(kind, 1, "tpu"))
    with jax.sharding.use_abstract_mesh(mesh):
        for call, args in ((combine, (words, index, weight)), (gather, (words, numbers, one))):
            assert "tpu_custom_call" in jax.jit(call).trace(*args).lower(lowering_platforms=("tpu",)).as_text()


def test_programs_sum_on_sparsecores_of_a_tpu_and_by_the_emulation_on_a_cpu() -> None:
    """One traced function, two lowerings: a kernel and no call to the host, or the other way round."""
    shape, case = LARGE["one_group"], data(LARGE["one_group"])

    def sums(out: jax.Array, place: jax.Array, weight: jax.Array) -> jax.Array:
        return unpermute_sparsecore(out, place, weight, width=shape.width, chip=CHIP, copy_rows=8)

    args = (case.out, case.place, case.weight)
    device = AbstractDevice("TPU7x", 1, "tpu")
    with jax.sharding.use_abstract_mesh(AbstractMesh((), (), abstract_device=device)):
        traced = jax.jit(sums).trace(*args)
        tpu, cpu = (traced.lower(lowering_platforms=(name,)).as_text() for name in ("tpu", "cpu"))
        assert "combine_sparsecore" in tpu and "tpu_custom_call" in tpu and "callback" not in tpu
        assert "tpu_custom_call" not in cpu and "callback" in cpu
        with pltpu.force_tpu_interpret_mode(pltpu.InterpretParams()):
            assert_close(jax.jit(sums)(*args), case.want)


def test_kernels_of_sparsecores_need_to_know_the_chip() -> None:
    """Traced over a mesh of names alone, they leave jax asking the default device, here a CPU."""
    case = data(LARGE["one_group"])
    sums = partial(unpermute_sparsecore, width=2048, chip=CHIP, copy_rows=8)
    with pytest.raises(ValueError, match="Unsupported TPU device kind: cpu"):
        jax.make_jaxpr(sums)(case.out, case.place, case.weight)


def test_sparsecore_work_is_of_the_busiest_subcore() -> None:
    """The same rows once, sums once; bundles of whole groups of 8 tokens over 32 subcores, one start."""
    terms = sparsecore_work(512, 640, 10, 4096, "bfloat16", CHIP)
    moved = {term.op: term.bytes for term in terms if isinstance(term, Stream)}
    assert (moved["combine"], moved["write sums"]) == (640 * 4096 * 2, 512 * 4096 * 4)

    def bundles(tokens: int, rows: float, **changed: int) -> float:
        found = sparsecore_work(tokens, rows, 10, changed.get("width", 4096), "bfloat16", CHIP)
        return sum(term.bundles for term in found if isinstance(term, Subcore))

    assert sum(term.starts for term in terms if isinstance(term, Subcore)) == 1
    assert 12_000 < bundles(512, 640) < 13_500  # 16 tokens and 20 rows of 128 vectors of words
    assert bundles(8192, 10240) == pytest.approx(16 * bundles(512, 640))
    assert bundles(8, 10) == bundles(256, 320) == bundles(512, 640) / 2
    # A row of half the width is half of the vectors; looking for rows is not.
    assert bundles(512, 640) / 2 < bundles(512, 640, width=2048) < 0.6 * bundles(512, 640)


def test_sums_are_made_by_row_while_scalar_memory_lists_them() -> None:
    decode = combine_plan(512, 10, 4096, "bfloat16", CHIP)
    prefill = combine_plan(8192, 10, 4096, "bfloat16", CHIP)
    long = combine_plan(32768, 10, 4096, "bfloat16", CHIP)
    assert decode is not None and (decode.kernel, decode.held_tokens) == ("stream", 512)
    assert prefill is not None and (prefill.kernel, prefill.held_tokens) == ("stream", 1024)
    assert long is not None and long.kernel == "rows"
    for plan in (decode, prefill, long):
        assert plan.vmem_bytes <= CHIP.vmem_bytes // 2


def test_work_is_the_rows_that_are_there_once() -> None:
    terms = combine_work(512, 640, 10, 4096, "bfloat16", CHIP)
    assert sum(t.bytes for t in terms if isinstance(t, Stream)) == 640 * 4096 * 2 + 512 * 4096 * 4
    slots = sum(t.flops for t in terms if isinstance(t, Vector)) / (4 * 8 * 128)
    assert 11_000 < slots < 13_000


def test_refusals_name_the_rule() -> None:
    assert combine_refuse(10, 4096, "bfloat16") == []
    assert combine_refuse(33, 4100, "bfloat16") == [
        "width 4100: rows of bfloat16 words take multiples of 256",
        "top_k 33: a token's choices fit one word of 32 bits",
    ]
    assert sparsecore_refuse(512, 10, 4096, "bfloat16", CHIP) == []
    assert sparsecore_refuse(8192, 10, 4096, "bfloat16", CHIP) == []
    assert sparsecore_refuse(512, 10, 5120, "bfloat16", CHIP) == [
        "width 5120: the SparseCores copy rows of whole memory tiles, multiples of 2048"
    ]
    assert "a subcore needs" in sparsecore_refuse(512, 10, 4096, "bfloat16", V6E)[0]
    assert sparsecore_refuse(512, 10, 4096, "bfloat16", V6E, sums=False) == []
    assert sparsecore_refuse(512, 10, 2048, "bfloat16", V6E) == []
    no_cores = ChipLimits(64 << 20, 128, 8, ("bfloat16",))
    assert sparsecore_refuse(512, 10, 4096, "bfloat16", no_cores) == ["the chip has no SparseCores"]
