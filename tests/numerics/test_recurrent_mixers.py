"""What all mixers with a state per sequence owe, against their token-by-token meaning; each kind's own options are
tested in test_<kind>.py.

Weights and pools are drawn from the blocks' own declarations and called as the emitted program calls them, so
that declarations and call.j2 are held to the code too.

Tolerance in float32: chunks reorder sums over at most 130 steps of values of order 1 (states of order
10); errors up to 1e-5 are measured. 1e-4 leaves room for unlucky seeds; a wrong decay, tap, mask or slot
shows as an error of order 0.1. States of lightning attention that hardly decay are sums of up to 190 products and
reach 60; they are held to 1e-5 of the largest, of which 3e-6 is measured.
"""

import ast
import importlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from moec.blocks.core.batch import Batch, index_rows
from moec.blocks.core.declare import ModelDims, NormFields, Weight
from moec.blocks.core.emission import Site
from moec.blocks.gated_delta.shapes import TEST_SHAPES as GATED_DELTA
from moec.blocks.lightning.shapes import TEST_SHAPES as LIGHTNING
from moec.blocks.mamba1.shapes import TEST_SHAPES as MAMBA1
from moec.blocks.mamba2.shapes import TEST_SHAPES as MAMBA2
from moec.blocks.registry import BLOCKS
from moec.blocks.short_conv.shapes import TEST_SHAPES as SHORT_CONV
from moec.compiler.emit.render import render
from moec.compiler.verify.random_checkpoint import random_weight

TOLERANCE, LARGE_STATE_TOLERANCE = 1e-4, 1e-5
LAYERS, SLOTS, TOKENS, ROWS, CHUNK, EPS = 3, 16, 176, 8, 32, 1e-5
UNCHUNKED = "short_conv"
LEAN = {"xla_backend_optimization_level": 0}  # half the time to compile the same program
Arrays = dict[str, np.ndarray]

# (cached, new) per row; the first num_decode rows are decode rows.
MIXES = {
    "decode_only": (4, [(1, 1), (7, 1), (0, 1), (60, 1)]),
    "short_prefills": (0, [(0, 1), (0, 2), (0, 3), (9, 2), (4, 1)]),
    "mixed_chunk_edges": (3, [(16, 1), (15, 1), (0, 1), (0, 31), (0, 32), (0, 33)]),
    "continued": (1, [(33, 1), (13, 130), (32, 32), (5, 3)]),
}


@dataclass(frozen=True)
class Case:
    """One block at one shape. layers: absolute indices of the LAYERS layers with it."""

    kind: str
    hidden: int
    declared: dict[str, Any]
    zero_centered: bool = False
    layers: tuple[int, ...] = tuple(range(LAYERS))

    def part(self, name: str) -> Any:
        """A module of the block."""
        return importlib.import_module(f"moec.blocks.{self.kind}.{name}")

    @property
    def fields(self) -> Any:
        return self.part("block").Fields(kind=self.kind, **self.declared)

    @property
    def weights(self) -> dict[str, Weight]:
        return self.part("block").weights(self.fields, self.dims)

    @property
    def state(self) -> Any:
        return self.part("block").state(self.fields, self.dims)

    @property
    def dims(self) -> ModelDims:
        return ModelDims(self.hidden, 8, NormFields(eps=EPS, zero_centered=self.zero_centered))

    def run(self, variant: str, *args: Any, tp: int = 1, max_q: int = TOKENS, chunk: int = CHUNK, layer: Any) -> Any:
        """The block's function of ref.py or xla.py on one of tp devices, which meet on the axis "tensor"."""
        options = call_options(self.kind, self.fields, self.dims, self.layers, tp)
        options |= {"max_q": max_q, "pool_layer": layer} | ({} if self.kind == UNCHUNKED else {"chunk": chunk})
        return getattr(self.part(variant), self.kind)(*args, **options)


def call_options(kind: str, fields: Any, dims: ModelDims, layers: tuple[int, ...], tp: int) -> dict[str, Any]:
    """The keywords of the emitted call by value, but those of the step."""
    site = Site(
        name="mix", variant=replace(BLOCKS[kind]().VARIANTS[0], module="m"),
        collectives="c", dims=dims, dp=1, tp=tp, ep=1, etp=1, shared_sharded=False,
        mlp_sharded=False, scaled=False, tuning={"chunk": CHUNK}, layers=layers,
    )  # fmt: skip
    emitted = importlib.import_module(f"moec.blocks.{kind}.emit").emit(fields, site)
    xla = importlib.import_module(f"moec.blocks.{kind}.xla")
    names = {name: getattr(xla, name) for module, name in emitted.imports if module == "m"} | {"TENSOR": ("tensor",)}
    for constant in emitted.constants:
        names[constant.name] = eval(constant.text, {}, names)
    statement = ast.parse(render(f"{kind}/call.j2", **emitted.fields)).body[0]
    assert isinstance(statement, ast.Assign) and isinstance(statement.value, ast.Call)
    given = {word.arg: word.value for word in statement.value.keywords if word.arg is not None}
    step = {"max_q", "pool_layer", "chunk"} - ({"chunk"} if kind == UNCHUNKED else set())
    assert step <= given.keys()
    return {name: eval(ast.unparse(value), {}, names) for name, value in given.items() if name not in step}


def _cases() -> Iterator[tuple[str, Case]]:
    for name, g in GATED_DELTA.items():
        declared: dict[str, Any] = {
            "num_v_heads": g.num_v_heads, "num_qk_heads": g.num_qk_heads, "head_dim": g.head_k_dim,
            "head_v_dim": g.head_v_dim, "conv_kernel": g.conv_kernel, "decay": g.decay, "gate": g.gate,
            "negative_eigenvalues": g.negative_eigenvalues,
        }  # fmt: skip
        yield f"gated_delta-{name}", Case("gated_delta", g.hidden, declared)
    for name, n in LIGHTNING.items():
        declared = {"num_heads": n.num_heads, "head_dim": n.head_dim, "decay_layers": n.num_layers}
        yield f"lightning-{name}", Case("lightning", n.hidden, declared, name == "spread_layers", n.layers)
    for name, s in MAMBA2.items():
        declared = {
            "num_heads": s.num_heads, "num_groups": s.num_groups, "head_dim": s.head_dim, "state_size": s.state_size,
            "conv_kernel": s.conv_kernel, "conv_bias": s.conv_bias, "proj_bias": s.proj_bias,
            "time_step": {"min": s.time_step_min, "max": s.time_step_max},
        }  # fmt: skip
        yield f"mamba2-{name}", Case("mamba2", s.hidden, declared, s.zero_centered)
    for name, m in MAMBA1.items():
        declared = {
            "inner_size": m.inner, "state_size": m.state_size, "dt_rank": m.dt_rank, "conv_kernel": m.conv_kernel,
            "conv_bias": m.conv_bias, "proj_bias": m.proj_bias, "input_norms": {} if m.input_norms else None,
        }  # fmt: skip
        yield f"mamba1-{name}", Case("mamba1", m.hidden, declared, m.zero_centered)
    for name, c in SHORT_CONV.items():
        declared = {"channels": c.channels, "conv_kernel": c.conv_kernel, "bias": c.bias}
        yield f"short_conv-{name}", Case("short_conv", c.hidden, declared)


CASES = dict(_cases())
FIRST = [next(name for name in CASES if name.startswith(f"{kind}-")) for kind in
         ("gated_delta", "lightning", "mamba2", "mamba1", "short_conv")]  # fmt: skip
GDN, LIGHT, SSD, SSM, _ = FIRST


def normal(rng: np.random.Generator, *size: int) -> np.ndarray:
    return rng.normal(size=size).astype(np.float32)


def draw(
    case: Case, rng: np.random.Generator, tokens: int = TOKENS
) -> tuple[np.ndarray, Arrays, tuple[np.ndarray, ...]]:
    """Inputs, weights and pools, every slot full of some request's values."""
    weights = {name: random_weight(weight, rng) for name, weight in case.weights.items()}
    pools = tuple(normal(rng, LAYERS, SLOTS, *state.shape) for state in case.state)
    return normal(rng, tokens, case.hidden), weights, pools


@pytest.fixture
def batch_of(make_batch) -> Callable[..., Batch]:
    return partial(make_batch, pages_per_seq=1, page_size=256, num_pages=16, num_slots=SLOTS)


def mix_batch(batch_of: Callable[..., Batch], mix: str, seed: int = 0) -> tuple[Batch, int]:
    """A batch and the number of its tokens that are no padding."""
    num_decode, lengths = MIXES[mix]
    batch = batch_of(lengths, num_decode=num_decode, num_tokens=TOKENS, num_rows=ROWS, seed=seed)
    return batch, sum(new for _, new in lengths)


rows_of = jax.jit(index_rows)


@partial(jax.jit, static_argnames=("name", "max_q", "chunk"), compiler_options=LEAN)
def compiled(h, w, pools, batch: Batch, layer, *, name: str, max_q: int, chunk: int):
    return CASES[name].run("xla", h, w, *pools, batch, index_rows(batch), layer=layer, max_q=max_q, chunk=chunk)


def mix_tokens(h, w, pools, batch: Batch, layer: int, *, name: str, max_q: int = TOKENS, chunk: int = CHUNK):
    """One layer; the layer index is traced, as in a scan over layers. All tests of a case share one program."""
    return compiled(h, w, tuple(pools), batch, layer, name=name, max_q=max_q, chunk=chunk)


def arrays(found: tuple[jax.Array, ...]) -> list[np.ndarray]:
    return [np.asarray(x) for x in found]


def assert_matches_reference(name: str, h, w, pools, batch: Batch, layer: int, max_q=TOKENS, chunk=CHUNK) -> None:
    """Outputs of valid tokens and all pools without the sink slot: untouched slots and layers stay."""
    case, rows = CASES[name], rows_of(batch)
    want = arrays(case.run("ref", h, w, *pools, batch, rows, layer=layer, max_q=max_q, chunk=chunk))
    got = arrays(mix_tokens(h, w, pools, batch, layer, name=name, max_q=max_q, chunk=chunk))
    assert [x.dtype for x in got] == [h.dtype, *(pool.dtype for pool in pools)]
    valid = np.asarray(rows.valid)
    np.testing.assert_allclose(got[0][valid], want[0][valid], atol=TOLERANCE, rtol=0)
    for a, b in zip(got[1:], want[1:], strict=True):
        tolerance = LARGE_STATE_TOLERANCE * np.abs(b).max() if case.kind == "lightning" else TOLERANCE
        np.testing.assert_allclose(a[:, 1:], b[:, 1:], atol=tolerance, rtol=0)


@pytest.mark.parametrize("mix", MIXES)
@pytest.mark.parametrize("name", CASES)
def test_ragged_batch_matches_reference(name: str, mix: str, batch_of) -> None:
    """Rows without history reuse slots full of other requests' values."""
    seed = list(MIXES).index(mix)
    h, w, pools = draw(CASES[name], np.random.default_rng([seed, 12]))
    batch, _ = mix_batch(batch_of, mix, seed)
    assert_matches_reference(name, h, w, pools, batch, seed % LAYERS)


@pytest.mark.parametrize(
    ("name", "chunk"), [(GDN, 48), (GDN, 128), (LIGHT, 1), (LIGHT, 128), (SSD, 16), (SSD, 128), (SSM, 48)]
)
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
        h = normal(self.rng, TOKENS, self.h.shape[1])
        h[first : first + count] = self.h[start : start + count]
        out, *self.pools = mix_tokens(h, self.w, tuple(self.pools), batch, 1, name=self.name)
        return np.asarray(out)[first : first + count]

    def state(self) -> np.ndarray:
        return np.concatenate([np.ravel(np.asarray(pool)[1, self.slot]) for pool in self.pools])


@pytest.mark.parametrize("pieces", [(32, 98), (1, 2, 3, 63, 61)])
@pytest.mark.parametrize("name", CASES)
def test_prefill_in_pieces_equals_prefill_at_once(name: str, pieces: tuple[int, ...], batch_of) -> None:
    """Cut at chunk edges a float32 state carries over bit for bit: a cached prefix cannot be told from one prefill."""
    whole, cut = (Sequence(name, 130, batch_of) for _ in range(2))
    want = whole.feed(0, 130)
    starts = np.cumsum([0, *pieces[:-1]]).tolist()
    got = np.concatenate([cut.feed(start, count) for start, count in zip(starts, pieces, strict=True)])
    tolerance = 0 if pieces[0] == CHUNK else TOLERANCE
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
    dirty = tuple(np.where(mine.reshape(LAYERS, SLOTS, *[1] * (x.ndim - 2)), x, np.float32(np.nan)) for x in pools)
    clean = arrays(mix_tokens(h, w, pools, batch, 1, name=name))
    h[used:] = np.nan
    got = arrays(mix_tokens(h, w, dirty, batch, 1, name=name))
    np.testing.assert_array_equal(got[0][:used], clean[0][:used])
    for a, b in zip(got[1:], clean[1:], strict=True):
        np.testing.assert_array_equal(a[1, slots], b[1, slots])


@pytest.mark.parametrize("name", FIRST)
def test_a_row_does_not_read_the_next_row(name: str, batch_of) -> None:
    """The last chunk of a row covers tokens of the row behind it: their NaN must stay there."""
    batch = batch_of([(0, 40), (0, 9)], num_decode=0, num_tokens=TOKENS, num_rows=ROWS, seed=0)
    h, w, pools = draw(CASES[name], np.random.default_rng(22))
    clean = arrays(mix_tokens(h, w, pools, batch, 0, name=name))
    h[40:49] = np.nan
    got = arrays(mix_tokens(h, w, pools, batch, 0, name=name))
    np.testing.assert_array_equal(got[0][:40], clean[0][:40])
    assert np.isnan(got[0][40:49]).all()
    for a, b in zip(got[1:], clean[1:], strict=True):
        np.testing.assert_array_equal(a[0, int(batch.slot[0])], b[0, int(batch.slot[0])])


def _cut(case: Case, value: np.ndarray, weight: Weight, tp: int) -> np.ndarray:
    """A weight's shares in front: heads that several devices hold are repeated, as the emitted program stores them."""
    sizes = {cut.axis: cut.size for cut in case.part("block").cuts(case.fields)}
    for dim, axis in enumerate(weight.axes):
        if axis is not None:
            before, after = value.shape[:dim], value.shape[dim + 1 :]
            heads = value.reshape(*before, -1, value.shape[dim] // sizes[axis], *after)
            heads = np.repeat(heads, max(tp // sizes[axis], 1), axis=dim)
            return np.stack(np.split(heads.reshape(*before, -1, *after), tp, axis=dim))
    return np.stack([value] * tp)


@pytest.mark.parametrize(
    ("name", "tp"),
    [
        ("gated_delta-shared_keys", 2),
        ("gated_delta-channel_decay_low_rank", 2),
        ("lightning-first_layers", 4),
        ("lightning-spread_layers", 3),
        ("mamba2-two_groups_conv_bias", 4),
        ("mamba2-own_groups_two_taps", 2),
        ("mamba2-one_group_all_biases", 3),
        ("mamba1-all_options", 4),
        ("short_conv-biases", 4),
    ],
)
def test_shares_of_a_cut_block_add_up(name: str, tp: int, batch_of) -> None:
    """Partial outputs of tp devices sum to the whole, and each holds its part of the state: two steps from nothing."""
    case, rng = CASES[name], np.random.default_rng([tp, 18])
    h, w, pools = draw(case, rng)
    shares = {key: _cut(case, value, case.weights[key], tp) for key, value in w.items()}
    local_pools = [np.zeros((tp, LAYERS, SLOTS, *_local_shape(case, state, tp)), np.float32) for state in case.state]
    pools = tuple(np.zeros_like(pool) for pool in pools)

    @partial(jax.jit, compiler_options=LEAN)
    def on_devices(h, shares, local_pools, batch):
        def one(w, *pools):
            return case.run("xla", h, w, *pools, batch, index_rows(batch), layer=1, tp=tp)

        return jax.vmap(one, axis_name="tensor")(shares, *local_pools)

    slots = np.asarray([5, 3])
    for lengths, num_decode in (([(0, 70), (0, 5)], 0), ([(70, 1), (5, 67)], 1)):
        batch = batch_of(lengths, num_decode=num_decode, num_tokens=TOKENS, num_rows=ROWS, seed=0, slots=slots)
        want, *pools = arrays(mix_tokens(h, w, tuple(pools), batch, 1, name=name))
        parts, *local_pools = arrays(on_devices(h, shares, local_pools, batch))
        used = sum(new for _, new in lengths)
        np.testing.assert_allclose(np.sum(parts, axis=0)[:used], want[:used], atol=TOLERANCE, rtol=0)
    if case.state[-1].role == "state":  # a window's channels are not stored part by part
        (dim,) = (dim for dim, axis in enumerate(case.state[-1].axes) if axis)
        got = np.concatenate(list(local_pools[-1]), axis=2 + dim)
        np.testing.assert_allclose(got[:, slots], pools[-1][:, slots], atol=TOLERANCE, rtol=0)


def _local_shape(case: Case, state: Any, tp: int) -> tuple[int, ...]:
    """What one device stores of a sequence: a head at least."""
    sizes = {cut.axis: cut.size for cut in case.part("block").cuts(case.fields)}
    return tuple(n // min(tp, sizes[axis]) if axis else n for n, axis in zip(state.shape, state.axes, strict=True))


@pytest.mark.parametrize("name", CASES)
def test_the_interpreter_gives_the_whole_output(name: str, batch_of) -> None:
    """reference.apply: one sequence from nothing, with the bias that an emitted program adds after the sum."""
    case = CASES[name]
    h, w, pools = draw(case, np.random.default_rng(25))
    alone = batch_of([(0, 9)], num_decode=0, num_tokens=9, num_rows=1, seed=0, slots=np.zeros(1, int))
    apply = case.part("reference").apply
    got = apply(case.fields, case.dims, h[:9], w, alone, rows_of(alone), h[:9], case.layers[0])
    batch = batch_of([(0, 9)], num_decode=0, num_tokens=TOKENS, num_rows=ROWS, seed=0)
    want = np.asarray(mix_tokens(h, w, pools, batch, 0, name=name)[0])[:9] + w.get("b_o", 0)
    np.testing.assert_allclose(got, want, atol=TOLERANCE, rtol=0)


@pytest.mark.parametrize(
    ("name", "activation", "state"),
    [
        *((name, jnp.bfloat16, jnp.float32) for name in FIRST),
        *((name, jnp.bfloat16, jnp.bfloat16) for name in (GDN, LIGHT, SSD)),
        *((name, jnp.float32, jnp.bfloat16) for name in (GDN, LIGHT)),
    ],
)
def test_narrow_dtypes_stay_close(name: str, activation, state, batch_of) -> None:
    """bfloat16 weights and activations round inputs, products and outputs to 2^-9 relative.

    Root mean square, relative to the outputs: 5e-3 is measured. Not the largest error: a norm blows up
    the rounding of a token whose output was nearly zero. A bfloat16 state rounds once per step: 2^-8 relative.
    """
    case, (num_decode, lengths) = CASES[name], MIXES["continued"]
    h, w, pools = draw(case, np.random.default_rng(19))
    batch = batch_of(lengths, num_decode=num_decode, num_tokens=TOKENS, num_rows=ROWS, seed=0)
    narrow = {key: x if case.weights[key].role == "decay" else x.astype(activation) for key, x in w.items()}
    cast = [
        x.astype(activation if one.role == "conv" else state) for one, x in zip(case.state, pools, strict=True)
    ]  # fmt: skip
    got = arrays(mix_tokens(h.astype(activation), narrow, tuple(cast), batch, 1, name=name))
    assert [x.dtype for x in got] == [activation, *(x.dtype for x in cast)]
    # The same rounded numbers in float32: what remains is what the variant rounds on its way.
    rounded, *pools = (x.astype(np.float32) for x in (h.astype(activation), *cast))
    wide = {key: x.astype(np.float32) for key, x in narrow.items()}
    want = arrays(mix_tokens(rounded, wide, tuple(pools), batch, 1, name=name))
    used, slots = sum(new for _, new in lengths), np.asarray(batch.slot)[: len(lengths)]
    for i, (a, b) in enumerate(zip(got, want, strict=True)):
        a32, b32 = (x.astype(np.float32)[(1, slots) if i else slice(used)] for x in (a, b))
        limit = 1e-4 if activation == jnp.float32 and not i else 1.5e-2
        assert np.sqrt(np.mean((a32 - b32) ** 2)) < limit * np.sqrt(np.mean(b32**2))
