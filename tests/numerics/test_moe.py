"""Mixture of experts in XLA against its float32 reference, unsharded and over eight devices.

Tolerance in float32: outputs are sums of at most 256 products of order 1 in another order, so
errors are near sqrt(256) * 6e-8 * |y|; 1e-4 leaves room for unlucky seeds, while a wrong
expert, weight or row shows as an error of order 0.1. In bfloat16 (8 significant bits) every
intermediate is rounded by up to 2**-9; with about ten roundings on the way 3 % of the largest
output bounds the error, on the same routing.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from moec.blocks.collectives import xla as collectives
from moec.blocks.core.quant import quantize_on_host
from moec.blocks.mlp.clamp import Clamp
from moec.blocks.moe import ref, xla
from moec.blocks.moe.shapes import TEST_SHAPES, MoeShape

F32_TOLERANCE = 1e-4
BF16_SHARE = 0.03

Stacks = dict[str, jax.Array]


def draw_stacks(shape: MoeShape, seed: int, num_experts: int | None = None) -> dict[str, np.ndarray]:
    """w_gate, w_up [L, E, D, I] and w_down [L, E, I, D] that keep activations of order 1."""
    rng = np.random.default_rng(seed)
    lead = (shape.layers, num_experts or shape.local_experts)
    up, down = (shape.hidden, shape.intermediate), (shape.intermediate, shape.hidden)
    sizes = {"w_gate": up, "w_up": up, "w_down": down}
    return {k: (rng.standard_normal((*lead, *s)) * 2 / np.sqrt(s[0])).astype(np.float32) for k, s in sizes.items()}


def draw_tokens(shape: MoeShape, seed: int) -> jax.Array:
    return jnp.asarray(np.random.default_rng(seed + 100).standard_normal((shape.tokens, shape.hidden)), jnp.float32)


def draw_routing(shape: MoeShape, seed: int) -> tuple[jax.Array, jax.Array]:
    """Distinct random experts per token and positive weights."""
    rng = np.random.default_rng(seed + 200)
    index = np.stack([rng.permutation(shape.num_experts)[: shape.top_k] for _ in range(shape.tokens)])
    return jnp.asarray(index, jnp.int32), jnp.asarray(rng.uniform(0.1, 1, index.shape), jnp.float32)


def run(
    module, shape: MoeShape, h, routing, stacks: Stacks, scales: Stacks | None = None, first=0, layer=1, options=None
):
    """experts() of either module; the XLA one under jit with a traced layer and first expert."""
    call = compiled_experts if module is xla else partial(experts_of, ref)
    with jax.default_matmul_precision("highest"):
        return call(shape.block_rows, tuple((options or {}).items()), h, *routing, stacks, scales, layer, first)


def experts_of(module, block_rows: int, options: tuple, h, index, weight, stacks: Stacks, scales, layer, first):
    biases = {key: stack for key, stack in stacks.items() if key.startswith("b_")}
    return module.experts(
        h, index, weight, *(stacks.get(k) for k in ("w_gate", "w_up", "w_down")), scales,
        layer=layer, first_expert=first, block_rows=block_rows, biases=biases or None, **dict(options),
    )  # fmt: skip


# One program per shape and options, for all tests.
compiled_experts = jax.jit(partial(experts_of, xla), static_argnums=(0, 1))


def check(shape: MoeShape, h, routing, stacks, scales=None, first=0, layer=1, options=None) -> jax.Array:
    """XLA equals the reference; returns the result."""
    stacks = jax.tree.map(jnp.asarray, stacks)
    found = run(xla, shape, h, routing, stacks, scales, first, layer, options)
    want = run(ref, shape, h, routing, stacks, scales, first, layer, options)
    assert found.dtype == want.dtype == jnp.float32
    np.testing.assert_allclose(found, want, atol=F32_TOLERANCE, rtol=0)
    return found


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("name", TEST_SHAPES)
def test_experts_match_the_reference(name: str, seed: int) -> None:
    shape = TEST_SHAPES[name]
    y = check(shape, draw_tokens(shape, seed), draw_routing(shape, seed), draw_stacks(shape, seed), layer=seed)
    assert np.abs(y).max() > 0.3


def draw_biases(shape: MoeShape, seed: int) -> dict[str, np.ndarray]:
    """b_gate, b_up [L, E, I] and b_down [L, E, D] of order 0.5."""
    rng = np.random.default_rng(seed + 300)
    sizes = {"b_gate": shape.intermediate, "b_up": shape.intermediate, "b_down": shape.hidden}
    lead = (shape.layers, shape.local_experts)
    return {key: (rng.standard_normal((*lead, size)) / 2).astype(np.float32) for key, size in sizes.items()}


MATRICES = ("w_gate", "w_up", "w_down")
BIASES = ("b_gate", "b_up", "b_down")
# What a call changes of the default, and the stacks it has; sums stay of order 1.
OPTIONS: dict[str, tuple[dict[str, Any], tuple[str, ...]]] = {
    "plain": ({"activation": "relu2"}, ("w_up", "w_down")),
    "plain_bias": ({"activation": "gelu"}, ("w_up", "w_down", "b_up", "b_down")),
    "bias": ({}, (*MATRICES, *BIASES)),
    "bias_elsewhere": ({"add_b_down": False}, (*MATRICES, *BIASES)),
    "clamp": ({"clamp": Clamp(limit=0.7, alpha=1.702, up_offset=1.0)}, (*MATRICES, *BIASES)),
    "clamp_after": ({"clamp": Clamp(limit=0.4, place="after")}, MATRICES),
    "weigh_input": ({"weigh": "input", "activation": "gelu_tanh"}, MATRICES),
}


@pytest.mark.parametrize("option", OPTIONS)
def test_options_match_the_reference(option: str) -> None:
    shape, (options, keys) = TEST_SHAPES["one_of_two_ranks"], OPTIONS[option]
    stacks = draw_stacks(shape, 12) | draw_biases(shape, 12)
    routing, h = draw_routing(shape, 12), draw_tokens(shape, 12)
    found = check(shape, h, routing, {k: stacks[k] for k in keys}, options=options)
    plain = run(ref, shape, h, routing, {k: jnp.asarray(stacks[k]) for k in MATRICES})
    assert np.abs(np.asarray(found) - np.asarray(plain)).max() > 0.1, "the option does nothing"


@pytest.mark.parametrize("dtype", ["float8_e4m3fn", "float4_e2m1fn", "int4"])
def test_scaled_experts_match_the_reference(dtype: str) -> None:
    """144 and 176 are no multiples of the 128 x 128 scale blocks of float8, nor of the 32 rows of 4 bits."""
    shape = TEST_SHAPES["ragged_scale_blocks"]
    # Magnitudes differ by scale block, so that a misplaced scale shows.
    stacks = {k: w * (1 + np.arange(w.shape[-1]) // 128 * 3.0) for k, w in draw_stacks(shape, 3).items()}
    pairs = {k: quantize_on_host(w, dtype) for k, w in stacks.items()}
    q, scales = ({k: jnp.asarray(p[n]) for k, p in pairs.items()} for n in (0, 1))
    h = 0.3 * draw_tokens(shape, 3)
    check(shape, h, draw_routing(shape, 3), q, scales)


def test_bfloat16_stays_within_its_precision() -> None:
    shape = TEST_SHAPES["ragged_scale_blocks"]
    stacks = {k: jnp.asarray(w, jnp.bfloat16) for k, w in draw_stacks(shape, 4).items()}
    h = draw_tokens(shape, 4).astype(jnp.bfloat16)
    index, weight = draw_routing(shape, 4)
    routing = index, weight.astype(jnp.bfloat16)
    found, want = (np.asarray(run(module, shape, h, routing, stacks)) for module in (xla, ref))
    assert np.abs(found - want).max() <= BF16_SHARE * np.abs(want).max()


def test_the_block_size_does_not_matter() -> None:
    """Beside those of the shapes: blocks of one row."""
    shape = MoeShape(**{**vars(TEST_SHAPES["many_blocks"]), "block_rows": 1})
    check(shape, draw_tokens(shape, 5), draw_routing(shape, 5), draw_stacks(shape, 5))


@pytest.mark.parametrize("expert", [0, 2, 7])
def test_all_tokens_to_one_expert(expert: int) -> None:
    """Every other expert is empty; the first and the last one too."""
    shape = TEST_SHAPES["odd"]
    index, weight = draw_routing(shape, 6)
    index = jnp.full_like(index, -1).at[:, 1].set(expert)
    check(shape, draw_tokens(shape, 6), (index, weight), draw_stacks(shape, 6))


def test_padding_tokens_get_nothing_and_give_nothing() -> None:
    shape = TEST_SHAPES["odd"]
    h, index, weight = (np.array(array) for array in (draw_tokens(shape, 7), *draw_routing(shape, 7)))
    padding = np.arange(shape.tokens) % 3 == 1
    # Garbage in padding tokens must stay there.
    h[padding], index[padding], weight[padding] = np.nan, -1, np.nan
    stacks = draw_stacks(shape, 7)
    found = np.asarray(run(xla, shape, h, (index, weight), stacks))
    want = run(ref, shape, h[~padding], (index[~padding], weight[~padding]), stacks)
    assert not found[padding].any()
    np.testing.assert_allclose(found[~padding], want, atol=F32_TOLERANCE, rtol=0)


def test_no_local_assignment_gives_zeros() -> None:
    shape = TEST_SHAPES["one_of_two_ranks"]
    index, weight = draw_routing(shape, 8)
    stacks = jax.tree.map(jnp.asarray, draw_stacks(shape, 8))
    assert not run(xla, shape, draw_tokens(shape, 8), (index, weight), stacks, first=100).any()


@pytest.mark.parametrize("block_rows", [1, 4, 16])
def test_only_blocks_with_assignments_are_entered(block_rows: int) -> None:
    """The loop runs sum(ceil(rows of expert / block_rows)) times, and covers each row once."""
    shape = TEST_SHAPES["one_of_two_ranks"]
    for first in (0, 4):
        _covers_each_row_once(shape, block_rows, first)


sort_assignments, cut_into_blocks = (
    jax.jit(xla._moe_sort, static_argnums=3),
    jax.jit(xla._moe_blocks, static_argnums=(1, 2)),
)


def _covers_each_row_once(shape: MoeShape, block_rows: int, first: int) -> None:
    index, weight = draw_routing(shape, 9)
    index = index.at[::4].set(-1)
    token, sorted_weight, start = sort_assignments(index, weight, first, shape.local_experts)
    table, num_blocks = cut_into_blocks(start, index.size, block_rows)
    index, weight, token, sorted_weight = (np.asarray(array) for array in (index, weight, token, sorted_weight))
    counts = [int((index == first + e).sum()) for e in range(shape.local_experts)]
    assert int(num_blocks) == sum(-(-count // block_rows) for count in counts)
    found = []
    for expert, begin, end in np.asarray(table)[: int(num_blocks)]:
        rows = slice(int(begin), min(int(begin) + block_rows, int(end)))
        assert rows.start < rows.stop
        found += [(int(expert), int(t), float(w)) for t, w in zip(token[rows], sorted_weight[rows], strict=True)]
    want = [
        (int(e) - first, t, float(weight[t, k]))
        for (t, k), e in np.ndenumerate(index)
        if first <= e < first + shape.local_experts
    ]
    assert sorted(found) == sorted(want)


def test_a_scan_over_layers_copies_no_stack() -> None:
    """The stacks are loop invariants of the layer scan; temporaries hold single experts."""
    shape = MoeShape(16, 128, 128, 16, 16, 2, 6, 4)
    stacks = jax.tree.map(jnp.asarray, draw_stacks(shape, 10))
    h, (index, weight) = draw_tokens(shape, 10), draw_routing(shape, 10)

    def one_layer(module, h, stacks, layer):
        matrices = (stacks[k] for k in ("w_gate", "w_up", "w_down"))
        options = {"layer": layer, "first_expert": 0, "block_rows": 4}
        return module.experts(h, index, weight, *matrices, None, **options)

    def step(h, stacks):
        return lax.map(lambda n: one_layer(xla, h, stacks, n), jnp.arange(shape.layers))

    with jax.default_matmul_precision("highest"):
        compiled = jax.jit(step).lower(h, stacks).compile()
    one_expert = shape.hidden * shape.intermediate * 4
    assert compiled.memory_analysis().temp_size_in_bytes < 6 * one_expert
    for n, found in enumerate(compiled(h, stacks)):
        np.testing.assert_allclose(found, one_layer(ref, h, stacks, n), atol=F32_TOLERANCE, rtol=0)


# More of them are in test_emitted_ffn.py.
# One line per layout: mesh, axes of tokens (attention-DP), of experts, of expert intermediate.
LAYOUTS = {
    "ep4_etp2": ({"data": 4, "inner": 2}, ("data", "inner"), ("data",), ("inner",)),
    "dp2_tp4_ep4_etp2": ({"data": 2, "tensor": 4}, ("data",), ("tensor",), ("data",)),
}


def sharded(layout: str, block_rows: int, fp8: bool) -> Callable:
    """The MoE layer over eight devices, with the collectives an emitted program would call."""
    sizes, token_axes, expert_axes, inner_axes = LAYOUTS[layout]
    mesh = Mesh(np.asarray(jax.devices()[:8]).reshape(tuple(sizes.values())), tuple(sizes))
    reduce_axes = tuple(a for a in (*expert_axes, *inner_axes) if a not in token_axes)

    def layer(h, index, weight, stacks, biases, scales):
        x = collectives.gather_tokens(h, token_axes)
        index, weight = collectives.gather_routing(index, weight, token_axes)
        first = lax.axis_index(expert_axes) * stacks["w_gate"].shape[1]
        y = xla.experts(
            x, index, weight, *(stacks[k] for k in ("w_gate", "w_up", "w_down")), scales,
            layer=1, first_expert=first, block_rows=block_rows, biases=biases,
            add_b_down=lax.axis_index(inner_axes) == 0 if inner_axes else True,
        )  # fmt: skip
        y = collectives.reduce_scatter_tokens(y, token_axes)
        return collectives.all_reduce(y, reduce_axes) if reduce_axes else y

    tokens = P(token_axes)
    up, down = P(None, expert_axes, None, inner_axes or None), P(None, expert_axes, inner_axes or None)
    stacks = {"w_gate": up, "w_up": up, "w_down": down}
    inner = P(None, expert_axes, inner_axes or None)
    biases = {"b_gate": inner, "b_up": inner, "b_down": P(None, expert_axes)}
    specs = (tokens, tokens, tokens, stacks, biases, stacks if fp8 else None)
    return jax.jit(jax.shard_map(layer, mesh=mesh, in_specs=specs, out_specs=tokens, check_vma=False))


@pytest.mark.parametrize(("layout", "fp8"), [("ep4_etp2", True), ("dp2_tp4_ep4_etp2", False)])
def test_eight_devices_equal_one(layout: str, fp8: bool) -> None:
    """Expert shards hold whole scale blocks: intermediate 256 over two ranks is 128 each."""
    shape = MoeShape(24, 32, 256 if fp8 else 24, 16, 16, 3, 2, 4)
    h, (index, weight) = draw_tokens(shape, 11), draw_routing(shape, 11)
    index = index.at[5].set(-1).at[16:].set(-1)
    stacks, scales = draw_stacks(shape, 11), None
    if fp8:
        pairs = {k: quantize_on_host(w, "float8_e4m3fn") for k, w in stacks.items()}
        stacks, scales = ({k: jnp.asarray(p[n]) for k, p in pairs.items()} for n in (0, 1))
    stacks, biases = jax.tree.map(jnp.asarray, (stacks, draw_biases(shape, 11)))
    with jax.default_matmul_precision("highest"):
        found = sharded(layout, shape.block_rows, fp8)(h, index, weight, stacks, biases, scales)
    want = run(ref, shape, h, (index, weight), stacks | biases, scales)
    np.testing.assert_allclose(found, want, atol=F32_TOLERANCE, rtol=0)
    assert np.abs(np.asarray(want)[:5]).max() > 0.1


# What a call changes of the default, and the weights it has beside shared_up and shared_down.
SHARED: dict[str, tuple[dict[str, Any], tuple[str, ...]]] = {
    "default": ({}, ("shared_gate",)),
    "sigmoid": ({"gate": "sigmoid"}, ("shared_gate", "shared_router")),
    "plain_half": ({"gated": False, "activation": "relu2", "scale": 0.5}, ()),
    "bias": (
        {"bias": True, "gate": "sigmoid"},
        ("shared_gate", "shared_router", "shared_b_gate", "shared_b_up", "shared_b_down"),
    ),
    "clamp": ({"clamp": Clamp(limit=0.6)}, ("shared_gate",)),
}


@pytest.mark.parametrize("option", SHARED)
def test_shared_expert_matches_the_reference(option: str) -> None:
    rng = np.random.default_rng(8)
    options, keys = SHARED[option]
    sizes = {"shared_gate": (64, 40), "shared_up": (64, 40), "shared_down": (40, 64), "shared_router": (64, 1)}
    sizes |= {"shared_b_gate": (40,), "shared_b_up": (40,), "shared_b_down": (64,)}
    sizes = {key: sizes[key] for key in ("shared_up", "shared_down", *keys)}
    w = {k: jnp.asarray(rng.standard_normal(s) * 2 / np.sqrt(s[0]), jnp.float32) for k, s in sizes.items()}
    h = jnp.asarray(rng.standard_normal((11, 64)), jnp.float32)

    run = jax.jit(partial(xla.shared_expert, **options))

    def half(first: int) -> jax.Array:
        """This half of the inner dims; the first one adds the bias of the outer ones."""
        cut, own = slice(first, first + 20), dict(w)
        for key in {"shared_gate", "shared_up", "shared_down", "shared_b_gate", "shared_b_up"} & w.keys():
            own[key] = w[key][:, cut] if key in ("shared_gate", "shared_up") else w[key][cut]
        return run(h, own, add_b_down=jnp.asarray(first == 0))

    with jax.default_matmul_precision("highest"):
        found = run(h, w)
        halves = half(0) + half(20)
    want = ref.shared_expert(h, w, **options)
    np.testing.assert_allclose(found, want, atol=F32_TOLERANCE, rtol=0)
    # Cut in two, the parts sum to the whole.
    np.testing.assert_allclose(halves, want, atol=F32_TOLERANCE, rtol=0)


def test_a_latent_projection_rounds_once() -> None:
    """float32 sums, then the activation dtype; sums are exact here, so both round the same values."""
    rng = np.random.default_rng(13)
    x, w = (jnp.asarray(rng.integers(-16, 17, size) / 64, jnp.bfloat16) for size in ((9, 64), (64, 24)))
    found, want = xla.latent_projection(x, w), ref.latent_projection(x, w)
    assert found.dtype == want.dtype == jnp.bfloat16
    np.testing.assert_array_equal(found.astype(jnp.float32), want.astype(jnp.float32))
