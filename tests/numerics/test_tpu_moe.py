"""Grouped experts (Pallas, TPU interpret mode) against float64 and against xla.py.

Errors are compared with bounds that follow each value: a product of rows rounded by a relative `eps` is off by at most
eps * |x| |w|, silu is 1.1-Lipschitz, so the bound of gate and up goes through act and, with act's own rounding,
through |down|. eps is 2**-4 where x * scale is one float8 e4m3 (3 stored bits), 2**-8 where it is the sum of two,
2**-9 for bfloat16 (of act) and 2**-20 for float32 sums. Random rounding adds up far below such bounds, so the largest
error is also held against the largest output: 1e-4 in float32, 1e-2 in bfloat16, and for one float8 the mean square:
three roundings of relative error at most 2**-4, uniform: sqrt(3) * 2**-4 / sqrt(3), at most 2**-4.
"""

import math
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import tpu as pltpu

from moec.blocks.core.chip import ChipLimits
from moec.blocks.core.declare import ModelDims, NormFields
from moec.blocks.core.quant import dequantize_on_host, quantize_on_host
from moec.blocks.core.work import Degrees, Dtypes, Load
from moec.blocks.moe import tpu_cost, xla
from moec.blocks.moe.block import Fields
from moec.blocks.moe.tpu_grouped import _gmm_plan, _gmm_scratch, expert_rows_grouped, experts_grouped
from moec.blocks.moe.tpu_grouped_rows import pack_rows, unpack_rows

CHIP = ChipLimits(
    vmem_bytes=64 << 20, lanes=128, sublanes=8, mxu_dtypes=("bfloat16", "float8_e4m3fn"), smem_bytes=1 << 20
)
MATRICES = ("w_gate", "w_up", "w_down")


@dataclass(frozen=True)
class Rows:
    """A kernel call: rows of each expert, sizes, dtypes; block: side of a scale block; tiles: its static arguments."""

    rows: tuple[int, ...]
    hidden: int
    inner: int
    act: str
    weight: str
    block_rows: int
    block: int = 128
    inner_tile: int | None = None
    row_parts: int = 0


F8 = "float8_e4m3fn"
CASES = {
    "float32": Rows((3, 0, 8, 17), 1024, 128, "float32", "float32", 8),  # rows of whole tiles
    "float8": Rows((0, 10, 0, 17), 256, 384, "bfloat16", F8, 16, row_parts=2),  # a tile of 128 columns is left over
}
SLOW_CASES = {
    "no_rows": Rows((0, 0, 0), 128, 128, "float32", "float32", 8),
    "bfloat16_units": Rows((0, 9, 16, 1, 33), 256, 256, "bfloat16", "bfloat16", 16, inner_tile=128),
    "bfloat16_loops": Rows((70, 1), 1024, 640, "bfloat16", "bfloat16", 64),
    "float8_quantised": Rows((7, 0, 9), 512, 128, "bfloat16", F8, 8, row_parts=1),
    "float8_units": Rows((9, 0, 40), 256, 256, "bfloat16", F8, 16, inner_tile=128, row_parts=2),
    "float8_blocks_of_512": Rows((12, 3), 1024, 512, "bfloat16", F8, 16, block=512, row_parts=1),
    "float8_loops_quantised": Rows((70, 5), 256, 256, "bfloat16", F8, 64, row_parts=1),
    "float8_loops": Rows((70, 0, 1, 130), 512, 640, "bfloat16", F8, 64),
}
ALL = [*CASES, *(pytest.param(name, marks=pytest.mark.slow) for name in SLOW_CASES)]


def interpret(call: Any, *args: Any, **options: Any) -> Any:
    with pltpu.force_tpu_interpret_mode(pltpu.InterpretParams()):
        return jax.jit(partial(call, **options))(*args)


def draw_weights(case: Rows, rng: np.random.Generator, layers: int = 2) -> tuple[dict, dict | None, dict]:
    """Stored stacks, their scales, and the float64 values they mean; scales of neighbouring blocks differ."""
    stored, scales, meant = {}, {}, {}
    for key in MATRICES:
        size = (case.inner, case.hidden) if key == "w_down" else (case.hidden, case.inner)
        w = rng.standard_normal((layers, len(case.rows), *size)) * 2 / np.sqrt(size[0])
        if case.weight != F8:
            stored[key] = jnp.asarray(w, case.weight)
            meant[key] = np.asarray(stored[key]).astype(np.float64)
            continue
        spread = np.exp(rng.standard_normal((*w.shape[:2], size[0] // 128, 1, size[1] // 128, 1)))
        w = (w.reshape(*w.shape[:2], size[0] // 128, 128, size[1] // 128, 128) * spread).reshape(w.shape)
        q, scale = quantize_on_host(w.astype(np.float32), F8)
        step = case.block // 128
        scale = scale[..., ::step, ::step]
        meant[key] = dequantize_on_host(q, scale.repeat(step, -2).repeat(step, -1)).astype(np.float64)
        stored[key], scales[key] = jnp.asarray(q), jnp.asarray(scale)
    return stored, scales or None, meant


def exact(x: np.ndarray, w: list[np.ndarray], eps: float, rounding: float) -> tuple[np.ndarray, np.ndarray]:
    """(rows, bound of their error) in float64."""
    gate, up = x @ w[0], x @ w[1]
    silu = gate / (1 + np.exp(-gate))
    off_gate, off_up = eps * (np.abs(x) @ np.abs(w[0])), eps * (np.abs(x) @ np.abs(w[1]))
    act = silu * up
    off = 1.1 * off_gate * (np.abs(up) + off_up) + np.abs(silu) * off_up
    off = off + max(eps, rounding) * (np.abs(act) + off)
    y = act @ w[2]
    return y, off @ np.abs(w[2]) + rounding * np.abs(y)


@pytest.mark.parametrize("name", ALL)
def test_rows_are_within_the_bound_of_their_rounding(name: str) -> None:
    case = (CASES | SLOW_CASES)[name]
    rng = np.random.default_rng(len(name))
    stored, scales, meant = draw_weights(case, rng)
    start = np.concatenate([[0], np.cumsum(case.rows)]).astype(np.int32)
    num_tokens = 29
    # Rows of no local expert name token 0, as dispatch has them.
    token = np.zeros(start[-1] + 3, np.int32)
    token[: start[-1]] = rng.integers(0, num_tokens, start[-1])
    h = jnp.asarray(
        rng.standard_normal((num_tokens, case.hidden)) * np.exp(rng.standard_normal((num_tokens, 1))), case.act
    )
    tiles = {"block_rows": case.block_rows, "inner_tile": case.inner_tile, "row_parts": case.row_parts}
    weights = [stored[key] for key in MATRICES]
    args = (h, jnp.asarray(token), jnp.asarray(start), *weights, scales)
    words = interpret(expert_rows_grouped, *args, layer=1, chip=CHIP, **tiles)
    assert words.shape[0] >= token.size
    found = np.asarray(unpack_rows(words)).astype(np.float64)[: start[-1]]
    if not start[-1]:
        return
    scaled, rounding = case.weight == F8, 2.0**-9 if case.act == "bfloat16" else 2.0**-20
    eps = (2.0**-4 if case.row_parts == 1 else 2.0**-8) if scaled else 2.0**-20
    x = np.asarray(h).astype(np.float64)[token[: start[-1]]]
    pairs = [
        exact(x[a:b], [meant[k][1, e] for k in MATRICES], eps, rounding) for e, (a, b) in enumerate(pairwise(start))
    ]
    want, bound = (np.concatenate(parts) for parts in zip(*pairs, strict=True))
    error = np.abs(found - want)
    assert (error <= bound + 1e-6).all()
    if case.row_parts == 1:
        assert np.sqrt((error**2).mean() / (want**2).mean()) < 2.0**-4
    else:
        assert error.max() <= (1e-4 if case.act == "float32" else 1e-2) * np.abs(want).max()


@pytest.mark.slow
@pytest.mark.parametrize("stream_rows", [0, 16])
def test_experts_match_xla(stream_rows: int) -> None:
    """Routing with other ranks' experts and padding; layer and first expert traced."""
    case = Rows((0,) * 4, 256, 128, "bfloat16", "bfloat16", 16)
    rng = np.random.default_rng(stream_rows)
    stored, _, _ = draw_weights(case, rng)
    tokens, top_k, experts = 27, 3, 12
    h = jnp.asarray(rng.standard_normal((tokens, case.hidden)), case.act)
    index = np.stack([rng.permutation(experts)[:top_k] for _ in range(tokens)]).astype(np.int32)
    index[index == 5] = 0  # an expert nobody chose
    index[-4:] = -1
    weight = jnp.asarray(rng.uniform(0.1, 1, index.shape), jnp.float32)

    def call(function: Any, layer: jax.Array, first: jax.Array, **options: Any) -> jax.Array:
        weights = [stored[key] for key in MATRICES]
        return function(
            h, jnp.asarray(index), weight, *weights, None, layer=layer, first_expert=first, block_rows=16, **options
        )

    where = (jnp.int32(1), jnp.int32(4))
    want = jax.jit(partial(call, xla.experts))(*where)
    tiles = {"combine_tokens": 8, "stream_rows": stream_rows}
    found = interpret(partial(call, experts_grouped), *where, chip=CHIP, **tiles)
    assert found.shape == want.shape and found.dtype == jnp.float32
    assert float(jnp.abs(found - want).max()) <= 1e-2 * float(jnp.abs(want).max())
    assert (np.asarray(found)[-4:] == 0).all()


@pytest.mark.parametrize(("dtype", "width"), [("bfloat16", 512), ("float32", 384)])
def test_row_words_keep_every_bit(dtype: str, width: int) -> None:
    x = jnp.asarray(np.random.default_rng(0).standard_normal((5, width)), dtype)
    words = pack_rows(x)
    assert words.shape[2] == 128 and words.dtype.itemsize == 4
    assert (unpack_rows(words) == x).all()


DIMS = ModelDims(4096, 128, NormFields())


def load(tokens: int, rows: int, expert: str = F8, chip: ChipLimits = CHIP, act: str = "bfloat16") -> Load:
    """A step of one of eight ranks: decode rows, and the other tokens of one chunk each."""
    dtypes = Dtypes(act, act, expert, act, "float32", act)
    prefill = tokens - rows
    return Load(tokens, tokens, rows, 4096, 8192, prefill, 0, 256, Degrees(dp=8, ep=8), dtypes, 16, 256, 128, chip)


def moe(**experts: Any) -> Fields:
    options = {"intermediate_size": 1024} | experts
    return Fields(kind="moe", router={"num_experts": 512, "top_k": 10}, experts=options)


def test_cost_serves_the_shapes_and_says_what_it_does_not() -> None:
    fields = moe()
    for tokens, rows, block in ((64, 64, 16), (2048, 0, 128)):
        one = load(tokens, rows)
        assert tpu_cost.refuse(fields, DIMS, one) == []
        assert tpu_cost.tuning(fields, DIMS, {"b": one})["block_rows.b"] == block
        assert tpu_cost.tuning(fields, DIMS, {"b": one})["inner_tile"] == 1024
        assert tpu_cost.vmem_bytes(fields, DIMS, one) <= CHIP.vmem_bytes
    small, no_fp8 = replace(CHIP, vmem_bytes=4 << 20), replace(CHIP, mxu_dtypes=("bfloat16",))
    refused = {
        "activation gelu": (moe(activation="gelu"), load(64, 64)),
        "experts without a gate": (moe(gated=False), load(64, 64)),
        "experts with biases": (moe(bias=True), load(64, 64)),
        "intermediate 1000": (moe(intermediate_size=1000), load(64, 64)),
        "vector memory": (fields, load(64, 64, chip=small)),
        "no float8 product": (fields, load(64, 64, chip=no_fp8)),
        "expert dtype float32 with activation bfloat16": (fields, load(64, 64, "float32")),
        "scalar memory": (fields, load(4096, 0)),
    }
    for text, (odd, at) in refused.items():
        assert any(text in reason for reason in tpu_cost.refuse(odd, DIMS, at)), text


@pytest.mark.parametrize(
    ("tokens", "rows", "expert"), [(64, 64, F8), (2048, 0, F8), (64, 64, "bfloat16"), (2048, 0, "bfloat16")]
)
def test_vector_memory_is_what_the_kernel_allocates(tokens: int, rows: int, expert: str) -> None:
    fields, at = moe(), load(tokens, rows, expert)
    tiles = tpu_cost.tuning(fields, DIMS, {"b": at})
    words = jax.ShapeDtypeStruct((8 * tokens, 16, 128), jnp.int32)
    w_up = jax.ShapeDtypeStruct((1, 64, 4096, 1024), jnp.dtype(expert))
    scales = (
        {key: jnp.ones((1, 64, *((8, 32) if key == "w_down" else (32, 8)))) for key in MATRICES}
        if expert == F8
        else None
    )
    plan, scale = _gmm_plan(
        words, w_up, scales, 0, tiles["block_rows.b"], tiles["inner_tile"], tiles.get("row_parts.b", 0)
    )
    scratch = _gmm_scratch(plan, w_up.dtype, words.dtype, scale.shape[2:])
    vmem = [ref for ref in jax.tree.leaves(scratch) if getattr(ref, "memory_space", None) == pltpu.VMEM]
    allocated = sum(math.prod(ref.shape) * jnp.dtype(ref.dtype).itemsize for ref in vmem)
    assert allocated <= tpu_cost.vmem_bytes(fields, DIMS, at) <= allocated + (3 << 20)
