"""What all mixers with a state per sequence owe: mamba2, mamba1, short_conv against their token-by-token meaning.

Weights and pools are drawn from the blocks' own declarations, so that those are held to the code too.

Tolerance in float32: chunks reorder sums over at most 130 steps of values of order 1 (states of order
10); errors up to 1e-5 are measured. 1e-4 leaves room for unlucky seeds; a wrong decay, tap, mask or slot
shows as an error of order 0.1. Each kind's own options are tested in test_<kind>.py.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from types import ModuleType
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from moec.blocks.core.batch import Batch, index_rows
from moec.blocks.core.declare import ModelDims, NormFields, Weight
from moec.blocks.mamba1 import block as mamba1_block
from moec.blocks.mamba1 import ref as mamba1_ref
from moec.blocks.mamba1 import reference as mamba1_reference
from moec.blocks.mamba1 import xla as mamba1_xla
from moec.blocks.mamba1.shapes import TEST_SHAPES as MAMBA1
from moec.blocks.mamba2 import block as mamba2_block
from moec.blocks.mamba2 import ref as mamba2_ref
from moec.blocks.mamba2 import reference as mamba2_reference
from moec.blocks.mamba2 import xla as mamba2_xla
from moec.blocks.mamba2.shapes import TEST_SHAPES as MAMBA2
from moec.blocks.short_conv import block as short_conv_block
from moec.blocks.short_conv import ref as short_conv_ref
from moec.blocks.short_conv import reference as short_conv_reference
from moec.blocks.short_conv import xla as short_conv_xla
from moec.blocks.short_conv.shapes import TEST_SHAPES as SHORT_CONV
from moec.compiler.verify.random_checkpoint import random_weight

TOLERANCE = 1e-4
LAYERS, SLOTS, TOKENS, ROWS, EPS = 2, 16, 272, 8, 1e-5
Arrays = dict[str, jax.Array]

# (cached, new) per row; the first num_decode rows are decode rows.
MIXES = {
    "decode_only": (4, [(1, 1), (7, 1), (3, 1), (60, 1)]),
    "short_prefills": (0, [(0, 1), (0, 2), (0, 3), (9, 2), (4, 1)]),
    "mixed_chunk_edges": (3, [(16, 1), (15, 1), (0, 1), (0, 63), (0, 64), (0, 65)]),
    "continued": (1, [(33, 1), (13, 130), (64, 64), (5, 3)]),
}


@dataclass(frozen=True)
class Case:
    """One block at one shape. chunked: it takes a chunk length."""

    hidden: int
    block: ModuleType
    ref: Callable[..., Any]
    xla: Callable[..., Any]
    reference: ModuleType
    fields: Any
    zero_centered: bool = False
    chunked: bool = True

    @property
    def dims(self) -> ModelDims:
        return ModelDims(self.hidden, 8, NormFields(eps=EPS, zero_centered=self.zero_centered))

    def options(self, tp: int = 1) -> dict[str, Any]:
        """Keywords of the block's function on one of tp devices, which meet on the axis "tensor"."""
        fields, axes = self.fields, ("tensor",)
        if self.block is short_conv_block:
            return {"conv_kernel": fields.conv_kernel, "bias": fields.bias}
        found = {"conv_kernel": fields.conv_kernel, "conv_bias": fields.conv_bias, "proj_bias": fields.proj_bias}
        if self.block is mamba1_block:
            found |= {"norm_eps": EPS if fields.input_norms else None, "norm_zero_centered": self.zero_centered}
            return found | ({"sum_axes": axes} if tp > 1 else {})
        found |= {"num_heads": fields.num_heads // tp, "num_groups": max(fields.num_groups // tp, 1)}
        found |= {"head_dim": fields.head_dim, "state_size": fields.state_size, "norm_eps": EPS}
        found |= {"time_step_min": fields.time_step.min, "time_step_max": fields.time_step.max}
        found |= {"norm_zero_centered": self.zero_centered}
        return found | ({"sum_axes": axes, "norm_groups": fields.num_groups} if tp > fields.num_groups else {})


def _cases() -> dict[str, Case]:
    found = {}
    for name, s in MAMBA2.items():
        fields = mamba2_block.Fields(
            kind="mamba2", num_heads=s.num_heads, num_groups=s.num_groups, head_dim=s.head_dim, state_size=s.state_size,
            conv_kernel=s.conv_kernel, conv_bias=s.conv_bias, proj_bias=s.proj_bias,
            time_step=mamba2_block.TimeStep(min=s.time_step_min, max=s.time_step_max),
        )  # fmt: skip
        parts = (mamba2_block, mamba2_ref.mamba2, mamba2_xla.mamba2, mamba2_reference)
        found[f"mamba2-{name}"] = Case(s.hidden, *parts, fields, s.zero_centered)
    for name, one in MAMBA1.items():
        fields1 = mamba1_block.Fields(
            kind="mamba1", inner_size=one.inner, state_size=one.state_size, dt_rank=one.dt_rank,
            conv_kernel=one.conv_kernel, conv_bias=one.conv_bias, proj_bias=one.proj_bias, input_norms=one.input_norms,
        )  # fmt: skip
        parts = (mamba1_block, mamba1_ref.mamba1, mamba1_xla.mamba1, mamba1_reference)
        found[f"mamba1-{name}"] = Case(one.hidden, *parts, fields1, one.zero_centered)
    for name, conv in SHORT_CONV.items():
        fields2 = short_conv_block.Fields(
            kind="short_conv", channels=conv.channels, conv_kernel=conv.conv_kernel, bias=conv.bias
        )  # fmt: skip
        parts = (short_conv_block, short_conv_ref.short_conv, short_conv_xla.short_conv, short_conv_reference)
        found[f"short_conv-{name}"] = Case(conv.hidden, *parts, fields2, chunked=False)
    return found


CASES = _cases()
FIRST = ["mamba2-two_groups_conv_bias", "mamba1-norms_conv_bias", "short_conv-biases"]


def normal(rng: np.random.Generator, *size: int) -> jax.Array:
    return jnp.asarray(rng.normal(size=size), jnp.float32)


def draw(case: Case, rng: np.random.Generator, tokens: int = TOKENS) -> tuple[jax.Array, Arrays, tuple[jax.Array, ...]]:
    """Inputs, weights and pools, every slot full of some request's values."""
    declared = case.block.weights(case.fields, case.dims)
    weights = {name: jnp.asarray(random_weight(weight, rng)) for name, weight in declared.items()}
    pools = tuple(normal(rng, LAYERS, SLOTS, *state.shape) for state in case.block.state(case.fields, case.dims))
    return normal(rng, tokens, case.hidden), weights, pools


@pytest.fixture
def batch_of(make_batch) -> Callable[..., Batch]:
    return partial(make_batch, pages_per_seq=1, page_size=256, num_pages=16, num_slots=SLOTS)


def mix_batch(batch_of: Callable[..., Batch], mix: str, seed: int = 0) -> tuple[Batch, int]:
    """A batch and the number of its tokens that are no padding."""
    num_decode, lengths = MIXES[mix]
    batch = batch_of(lengths, num_decode=num_decode, num_tokens=TOKENS, num_rows=ROWS, seed=seed)
    return batch, sum(new for _, new in lengths)


@partial(jax.jit, static_argnames=("name", "max_q", "chunk"))
def mix_tokens(h, w, pools, batch: Batch, layer, *, name: str, max_q: int = TOKENS, chunk: int = 64):
    """One layer; the layer index is traced, as in a scan over layers."""
    case = CASES[name]
    options = case.options() | {"max_q": max_q} | ({"chunk": chunk} if case.chunked else {})
    return case.xla(h, w, *pools, batch, index_rows(batch), pool_layer=layer, **options)


def assert_matches_reference(name: str, h, w, pools, batch: Batch, layer: int, max_q=TOKENS, chunk=64) -> None:
    """Outputs of valid tokens and all pools without the sink slot: untouched slots and layers stay."""
    case, rows = CASES[name], index_rows(batch)
    options = case.options() | {"max_q": max_q} | ({"chunk": chunk} if case.chunked else {})
    want = case.ref(h, w, *pools, batch, rows, pool_layer=layer, **options)
    got = mix_tokens(h, w, pools, batch, layer, name=name, max_q=max_q, chunk=chunk)
    assert [x.dtype for x in got] == [h.dtype, *(pool.dtype for pool in pools)]
    valid = np.asarray(rows.valid)
    np.testing.assert_allclose(got[0][valid], want[0][valid], atol=TOLERANCE, rtol=0)
    for a, b in zip(got[1:], want[1:], strict=True):
        np.testing.assert_allclose(a[:, 1:], b[:, 1:], atol=TOLERANCE, rtol=0)


@pytest.mark.parametrize("mix", MIXES)
@pytest.mark.parametrize("name", CASES)
def test_ragged_batch_matches_reference(name: str, mix: str, batch_of) -> None:
    """Rows without history reuse slots full of other requests' values."""
    seed = list(MIXES).index(mix)
    h, w, pools = draw(CASES[name], np.random.default_rng([seed, 12]))
    batch, _ = mix_batch(batch_of, mix, seed)
    assert_matches_reference(name, h, w, pools, batch, seed % LAYERS)


@pytest.mark.parametrize(("name", "chunk"), [(FIRST[0], 16), (FIRST[0], 128), (FIRST[1], 48)])
def test_any_chunk_size_matches_reference(name: str, chunk: int, batch_of) -> None:
    h, w, pools = draw(CASES[name], np.random.default_rng(21))
    batch, _ = mix_batch(batch_of, "continued")
    assert_matches_reference(name, h, w, pools, batch, 1, chunk=chunk)


@pytest.mark.parametrize(("name", "rows"), [*((name, 6) for name in CASES), *((name, 1) for name in FIRST)])
def test_decode_bucket_matches_reference(name: str, rows: int, batch_of) -> None:
    """max_q = 1: only the decode path exists; the last rows are padding when there is more than one."""
    rng = np.random.default_rng([rows, 13])
    lengths = [(2, 1), (0, 1), (1, 1), (7, 1)][: max(1, rows - 2)]
    batch = batch_of(lengths, num_decode=len(lengths), num_tokens=rows, num_rows=rows, seed=rows)
    h, w, pools = draw(CASES[name], rng, rows)
    assert_matches_reference(name, h, w, pools, batch, 1, max_q=1)


class Sequence:
    """One sequence fed piece by piece beside another row."""

    def __init__(self, name: str, length: int, batch_of: Callable[..., Batch]) -> None:
        self.name, self.batch_of, self.rng = name, batch_of, np.random.default_rng(15)
        self.h, self.w, self.pools = draw(CASES[name], self.rng, length)
        self.slot, self.other = self.rng.permutation(np.arange(1, SLOTS))[:2]

    def feed(self, start: int, count: int, *, as_decode: bool = False) -> np.ndarray:
        """The outputs of tokens start .. start+count; the state stays in the pools."""
        mine, other = (start, count), (3, 1) if as_decode else (3, 2)
        order = slice(None, None, 1 if as_decode else -1)
        slots = np.asarray([self.slot, self.other][order])
        lengths = [mine, other][order]
        batch = self.batch_of(
            lengths, num_decode=2 * as_decode, num_tokens=TOKENS, num_rows=ROWS, seed=start, slots=slots
        )  # fmt: skip
        first = 0 if as_decode else 2
        h = normal(self.rng, TOKENS, self.h.shape[1]).at[first : first + count].set(self.h[start : start + count])
        out, *self.pools = mix_tokens(h, self.w, tuple(self.pools), batch, 1, name=self.name)
        return np.asarray(out[first : first + count])

    def state(self) -> np.ndarray:
        return np.concatenate([np.ravel(pool[1, self.slot]) for pool in self.pools])


@pytest.mark.parametrize("pieces", [(64, 66), (1, 2, 3, 63, 61)])
@pytest.mark.parametrize("name", CASES)
def test_prefill_in_pieces_equals_prefill_at_once(name: str, pieces: tuple[int, ...], batch_of) -> None:
    """Cut at chunk edges a float32 state carries over bit for bit: a cached prefix cannot be told from one prefill."""
    whole, cut = (Sequence(name, 130, batch_of) for _ in range(2))
    want = whole.feed(0, 130)
    starts = np.cumsum([0, *pieces[:-1]]).tolist()
    got = np.concatenate([cut.feed(start, count) for start, count in zip(starts, pieces, strict=True)])
    tolerance = 0 if pieces[0] == 64 else TOLERANCE
    np.testing.assert_allclose(got, want, atol=tolerance, rtol=0)
    np.testing.assert_allclose(cut.state(), whole.state(), atol=tolerance, rtol=0)


@pytest.mark.parametrize("name", CASES)
def test_decode_steps_equal_prefill(name: str, batch_of) -> None:
    whole, stepped = (Sequence(name, 24, batch_of) for _ in range(2))
    want = whole.feed(0, 24)
    got = np.concatenate([stepped.feed(0, 15), *(stepped.feed(t, 1, as_decode=True) for t in range(15, 24))])
    np.testing.assert_allclose(got, want, atol=TOLERANCE, rtol=0)
    np.testing.assert_allclose(stepped.state(), whole.state(), atol=TOLERANCE, rtol=0)


@pytest.mark.parametrize("mix", ["mixed_chunk_edges", "short_prefills"])
@pytest.mark.parametrize("name", FIRST)
def test_nothing_of_other_requests_is_read(name: str, mix: str, batch_of) -> None:
    """NaN in every slot that is not a row's own history, and in the padding tokens, changes no bit."""
    h, w, pools = draw(CASES[name], np.random.default_rng(17))
    batch, used = mix_batch(batch_of, mix, 1)
    slots = np.asarray(batch.slot)[: len(MIXES[mix][1])]
    mine = np.zeros((LAYERS, SLOTS), bool)
    mine[1, slots] = [old > 0 for old, _ in MIXES[mix][1]]
    dirty = tuple(jnp.where(mine.reshape(LAYERS, SLOTS, *[1] * (x.ndim - 2)), x, jnp.nan) for x in pools)
    clean = mix_tokens(h, w, pools, batch, 1, name=name)
    got = mix_tokens(h.at[used:].set(jnp.nan), w, dirty, batch, 1, name=name)
    np.testing.assert_array_equal(got[0][:used], clean[0][:used])
    for a, b in zip(got[1:], clean[1:], strict=True):
        np.testing.assert_array_equal(a[1, slots], b[1, slots])


@pytest.mark.parametrize("name", FIRST)
def test_a_row_does_not_read_the_next_row(name: str, batch_of) -> None:
    """The last chunk of a row covers tokens of the row behind it: their NaN must stay there."""
    batch = batch_of([(0, 70), (0, 9)], num_decode=0, num_tokens=TOKENS, num_rows=ROWS, seed=0)
    h, w, pools = draw(CASES[name], np.random.default_rng(22))
    clean = mix_tokens(h, w, pools, batch, 0, name=name)
    got = mix_tokens(h.at[70:79].set(jnp.nan), w, pools, batch, 0, name=name)
    np.testing.assert_array_equal(got[0][:70], clean[0][:70])
    assert np.isnan(got[0][70:79]).all()
    for a, b in zip(got[1:], clean[1:], strict=True):
        np.testing.assert_array_equal(a[0, batch.slot[0]], b[0, batch.slot[0]])


def _cut(case: Case, value: jax.Array, weight: Weight, tp: int) -> jax.Array:
    """A weight's shares in front: heads that several devices hold are repeated, as the emitted program stores them."""
    sizes = {cut.axis: cut.size for cut in case.block.cuts(case.fields)}
    for dim, axis in enumerate(weight.axes):
        if axis is not None:
            copies = max(tp // sizes[axis], 1)
            heads = value.reshape(*value.shape[:dim], -1, value.shape[dim] // sizes[axis], *value.shape[dim + 1 :])
            return jnp.stack(jnp.split(jnp.repeat(heads, copies, axis=dim).reshape(
                *value.shape[:dim], -1, *value.shape[dim + 1 :]
            ), tp, axis=dim))  # fmt: skip
    return jnp.stack([value] * tp)


@pytest.mark.parametrize(
    ("name", "tp"),
    [
        ("mamba2-two_groups_conv_bias", 2),
        ("mamba2-two_groups_conv_bias", 4),
        ("mamba2-one_group_all_biases", 3),
        ("mamba1-all_options", 4),
        ("short_conv-biases", 4),
    ],
)
def test_shares_of_a_cut_block_add_up(name: str, tp: int, batch_of) -> None:
    """Partial outputs of tp devices sum to the whole, and each holds its part of the state: two steps from nothing."""
    case, rng = CASES[name], np.random.default_rng([tp, 18])
    h, w, pools = draw(case, rng)
    declared = case.block.weights(case.fields, case.dims)
    shares = {key: _cut(case, value, declared[key], tp) for key, value in w.items()}
    options = case.options(tp) | {"max_q": TOKENS, "pool_layer": 1} | ({"chunk": 64} if case.chunked else {})
    local_pools = [
        jnp.zeros((tp, LAYERS, SLOTS, *_local_shape(case, state, tp)))
        for state in case.block.state(case.fields, case.dims)
    ]  # fmt: skip
    pools = tuple(jnp.zeros_like(pool) for pool in pools)

    @jax.jit
    def on_devices(h, shares, local_pools, batch):
        def one(w, *pools):
            return case.xla(h, w, *pools, batch, index_rows(batch), **options)

        return jax.vmap(one, axis_name="tensor")(shares, *local_pools)

    slots = np.asarray([5, 3])
    for lengths, num_decode in (([(0, 70), (0, 5)], 0), ([(70, 1), (5, 67)], 1)):
        batch = batch_of(lengths, num_decode=num_decode, num_tokens=TOKENS, num_rows=ROWS, seed=0, slots=slots)
        want, *pools = mix_tokens(h, w, tuple(pools), batch, 1, name=name)
        parts, *local_pools = on_devices(h, shares, local_pools, batch)
        used = sum(new for _, new in lengths)
        np.testing.assert_allclose(jnp.sum(parts, axis=0)[:used], want[:used], atol=TOLERANCE, rtol=0)
    if name.startswith("mamba"):  # channels are the last dim of mamba1's state, heads the first of mamba2's
        got = jnp.concatenate(list(local_pools[-1]), axis=-1 if name.startswith("mamba1") else 2)
        np.testing.assert_allclose(got[:, slots], pools[-1][:, slots], atol=TOLERANCE, rtol=0)


def _local_shape(case: Case, state: Any, tp: int) -> tuple[int, ...]:
    """What one device stores of a sequence: a head at least."""
    sizes = {cut.axis: cut.size for cut in case.block.cuts(case.fields)}
    return tuple(n // min(tp, sizes[axis]) if axis else n for n, axis in zip(state.shape, state.axes, strict=True))


@pytest.mark.parametrize("name", CASES)
def test_the_interpreter_gives_the_whole_output(name: str, batch_of) -> None:
    """reference.apply: one sequence from nothing, with the bias that an emitted program adds after the sum."""
    case = CASES[name]
    h, w, pools = draw(case, np.random.default_rng(25))
    alone = batch_of([(0, 9)], num_decode=0, num_tokens=9, num_rows=1, seed=0, slots=np.zeros(1, int))
    got = case.reference.apply(case.fields, case.dims, h[:9], w, alone, index_rows(alone), h[:9], 0)
    batch = batch_of([(0, 9)], num_decode=0, num_tokens=TOKENS, num_rows=ROWS, seed=0)
    want = mix_tokens(h, w, pools, batch, 0, name=name)[0][:9] + w.get("b_o", 0)
    np.testing.assert_allclose(got, want, atol=TOLERANCE, rtol=0)


@pytest.mark.parametrize(("name", "state"), [*((name, jnp.float32) for name in FIRST), (FIRST[0], jnp.bfloat16)])
def test_narrow_dtypes_stay_close(name: str, state, batch_of) -> None:
    """bfloat16 weights and activations round inputs, products and outputs to 2^-9 relative.

    Root mean square, relative to the outputs: 5e-3 is measured. Not the largest error: a norm blows up
    the rounding of a token whose output was nearly zero. A bfloat16 state rounds once per step: 2^-8 relative.
    """
    case, (num_decode, lengths) = CASES[name], MIXES["continued"]
    h, w, pools = draw(case, np.random.default_rng(19))
    batch = batch_of(lengths, num_decode=num_decode, num_tokens=TOKENS, num_rows=ROWS, seed=0)
    declared = case.block.weights(case.fields, case.dims)
    narrow = {key: x if declared[key].role == "decay" else x.astype(jnp.bfloat16) for key, x in w.items()}
    roles = [one.role for one in case.block.state(case.fields, case.dims)]
    cast = [x.astype(jnp.bfloat16 if role == "conv" else state) for role, x in zip(roles, pools, strict=True)]
    got = mix_tokens(h.astype(jnp.bfloat16), narrow, tuple(cast), batch, 1, name=name)
    assert [x.dtype for x in got] == [jnp.bfloat16, *(x.dtype for x in cast)]
    # The same rounded numbers in float32: what remains is what the variant rounds on its way.
    rounded, *pools = (x.astype(jnp.float32) for x in (h.astype(jnp.bfloat16), *cast))
    wide = {key: x.astype(jnp.float32) for key, x in narrow.items()}
    want = mix_tokens(rounded, wide, tuple(pools), batch, 1, name=name)
    used, slots = sum(new for _, new in lengths), np.asarray(batch.slot)[: len(lengths)]
    for i, (a, b) in enumerate(zip(got, want, strict=True)):
        a32, b32 = (np.asarray(x[1, slots] if i else x[:used], np.float32) for x in (a, b))
        assert np.sqrt(np.mean((a32 - b32) ** 2)) < 1.5e-2 * np.sqrt(np.mean(b32**2))
