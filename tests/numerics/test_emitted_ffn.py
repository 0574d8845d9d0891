"""The lines that moe and mlp blocks emit, run over eight devices, against what the blocks mean.

What emit.py and call.j2 write goes from h_TD to y_TD; here it stands in a function of its own under
shard_map, with weights cut by the blocks' own axes. Float32 tolerance: as in test_moe.py; what
travels between devices is float32 too.

What the lines of kernel variants call runs in Pallas' TPU interpreter; what they give to SparseCores, in its emulation
(tpu_sparsecore_emulation.py), since no interpreter has them.
"""

import importlib
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from types import ModuleType, SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.experimental.pallas import tpu as pltpu
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from moec.blocks.collectives import variants as collectives
from moec.blocks.core.chip import ChipLimits
from moec.blocks.core.declare import BlockFields, ModelDims, NormFields, Weight
from moec.blocks.core.emission import Site
from moec.blocks.core.program import abstract_mesh
from moec.blocks.core.quant import dequantize_on_host, quantize_on_host
from moec.blocks.registry import BLOCKS, EMITTERS, PARTS, REFERENCES
from moec.compiler.emit.render import render

F32_TOLERANCE = 1e-4
DIMS = ModelDims(hidden_size=32, vocab_size=64, norm=NormFields())
TOKENS = 24


@dataclass(frozen=True)
class Layout:
    """Mesh axes and which of them cut tokens, heads and experts; placed: networks cut over all devices."""

    sizes: dict[str, int]
    data: tuple[str, ...]
    tensor: tuple[str, ...]
    expert: tuple[str, ...]
    placed: bool = False

    def degree(self, axes: tuple[str, ...]) -> int:
        return int(np.prod([self.sizes[axis] for axis in axes]))

    @property
    def expert_tp(self) -> tuple[str, ...]:
        return tuple(axis for axis in self.sizes if axis not in self.expert)


LAYOUTS = {
    "one_device": Layout({"data": 1}, ("data",), (), ("data",)),
    "dp8": Layout({"data": 8}, ("data",), (), ("data",)),
    "dp8_cut": Layout({"data": 8}, ("data",), (), ("data",), placed=True),
    "tp8_cut": Layout({"tensor": 8}, (), ("tensor",), ("tensor",), placed=True),
    "dp4_tp2_etp2": Layout({"data": 4, "tensor": 2}, ("data",), ("tensor",), ("data",)),
    "dp2_tp4_ep4_etp2_cut": Layout(
        {"data": 2, "inner": 2, "tensor": 2}, ("data",), ("inner", "tensor"), ("data", "inner"), placed=True
    ),
}
KERNEL_LAYOUTS = {"dp4_tp2_ep8": Layout({"data": 4, "tensor": 2}, ("data",), ("tensor",), ("data", "tensor"))}


@dataclass(frozen=True)
class Case:
    """A block's fields, and the layouts whose lines differ from those of other cases.

    site: what the plan decided otherwise than for plain XLA; constants: of the program, which its kernels take.
    """

    kind: str
    layouts: tuple[str, ...]
    fields: dict[str, Any] = field(default_factory=dict)
    dims: ModelDims = DIMS
    tokens: int = TOKENS
    site: dict[str, Any] = field(default_factory=dict)
    constants: dict[str, Any] = field(default_factory=dict)


CLAMP = {"limit": 0.8, "alpha": 1.702, "up_offset": 1.0}
# Over the cases of a kind every layout appears; what is added once (biases of the outer dims, the shared expert) is
# seen with tokens, tensor and expert axes cut.
CASES = {
    "mlp": Case("mlp", ("dp8_cut",), {"intermediate_size": 48}),
    "mlp_plain": Case(
        "mlp",
        ("one_device", "tp8_cut"),
        {"intermediate_size": 48, "gated": False, "activation": "relu2", "bias": True},
    ),
    "mlp_clamped": Case(
        "mlp",
        ("dp8", "dp2_tp4_ep4_etp2_cut"),
        {"intermediate_size": 48, "activation": "gelu_tanh", "bias": True, "clamp": CLAMP},
    ),
    "moe": Case(
        "moe",
        ("one_device", "dp8_cut"),
        {
            "router": {"num_experts": 16, "top_k": 3},
            "experts": {"intermediate_size": 24},
            "shared": {"intermediate_size": 40, "gate": "sigmoid"},
        },
    ),
    "moe_bias_clamp": Case(
        "moe",
        ("dp8", "tp8_cut", "dp4_tp2_etp2", "dp2_tp4_ep4_etp2_cut"),
        {
            "router": {"num_experts": 16, "top_k": 3, "bias": True, "score": "none", "weights": "softmax"},
            "experts": {"intermediate_size": 24, "bias": True, "clamp": CLAMP},
            "shared": {"num": 2, "intermediate_size": 20, "bias": True, "gate": "sigmoid", "clamp": {"limit": 0.5}},
        },
    ),
    "moe_latent_plain": Case(
        "moe",
        ("dp4_tp2_etp2", "dp2_tp4_ep4_etp2_cut"),
        {
            "router": {
                "num_experts": 16,
                "top_k": 3,
                "score": "sigmoid",
                "correction": "score",
                "logits_dtype": "float32",
                "groups": {"num": 4, "keep": 2},
                "scale": 2.5,
                "cast": False,
            },
            "experts": {
                "intermediate_size": 24,
                "gated": False,
                "activation": "relu2",
                "latent_size": 16,
                "bias": True,
            },
            "shared": {"intermediate_size": 40, "bias": True, "scale": 0.5},
        },
    ),
    "moe_residual": Case(
        "moe",
        ("dp8", "tp8_cut"),
        {
            "router": {
                "num_experts": 16,
                "top_k": 3,
                "input": "residual",
                "in_norm": {"eps": 1e-5, "zero_centered": True},
                "logits_scale": 0.18,
                "logits_softcap": 3.0,
                "expert_scale": True,
            },
            "experts": {"intermediate_size": 24, "activation": "gelu_tanh"},
        },
    ),
    "moe_weighs_input": Case(
        "moe",
        ("dp8_cut", "dp2_tp4_ep4_etp2_cut"),
        {
            "router": {
                "num_experts": 16,
                "top_k": 3,
                "score": "none",
                "weights": "sigmoid",
                "renormalize": False,
                "apply": "input",
            },
            "experts": {"intermediate_size": 24},
            "shared": {"intermediate_size": 40, "gated": False, "activation": "gelu"},
        },
    ),
}


# Sizes that fill memory tiles, so that no kernel refuses them.
ALIGNED: dict[str, Any] = {"dims": replace(DIMS, hidden_size=128), "tokens": 128}
CHIP = ChipLimits(vmem_bytes=64 << 20, lanes=128, sublanes=8, mxu_dtypes=("bfloat16",), cores_per_chip=2)
RETURNS = {"returns": collectives.VARIANTS[1]}


def returning(shards_per_chip: int, micro_batches: int) -> dict[str, Any]:
    tiles = {"COLLECTIVES_SHARDS_PER_CHIP": shards_per_chip, "COLLECTIVES_MICRO_BATCHES": {"mixed": micro_batches}}
    return {"CHIP": CHIP, **tiles}


def grouped(chunks: int, sparsecore_rows: int = 0) -> dict[str, Any]:
    """Another bucket returns in chunks, so that the lines are the same for one."""
    tiles = {"block_rows": 8, "combine_tokens": 8, "stream_rows": 8 if chunks == 1 else 0, "return_chunks": chunks}
    tiles |= {"sparsecore_rows": sparsecore_rows} if sparsecore_rows else {}
    tuning: dict[str, Any] = {name: {"mixed": value} for name, value in tiles.items()} | {"inner_tile": 128}
    tuning["return_chunks"]["other"] = 2
    return {"variant": BLOCKS["moe"]().VARIANTS[1], "tuning": tuning}


EXPERTS = {"router": {"num_experts": 16, "top_k": 3}, "experts": {"intermediate_size": 128}}
SHARED = {"shared": {"intermediate_size": 128, "gate": "sigmoid"}}
KERNEL_CASES = {
    "mlp_returns": Case(
        "mlp", ("dp8_cut",), {"intermediate_size": 48}, **ALIGNED, site=RETURNS, constants=returning(2, 2)
    ),
    "moe_returns": Case("moe", ("dp4_tp2_etp2",), EXPERTS | SHARED, **ALIGNED, site=RETURNS, constants=returning(1, 2)),
    "moe_chunks": Case("moe", ("dp8",), EXPERTS | SHARED, **ALIGNED, site=grouped(2), constants={"CHIP": CHIP}),
    "moe_one_chunk": Case("moe", ("dp8",), EXPERTS, **ALIGNED, site=grouped(1), constants={"CHIP": CHIP}),
    "moe_chunks_tp": Case("moe", ("dp4_tp2_ep8",), EXPERTS, **ALIGNED, site=grouped(2), constants={"CHIP": CHIP}),
}


# Rows that fill whole memory tiles, as a SparseCore copies them.
WIDE: dict[str, Any] = {"dims": replace(DIMS, hidden_size=1024), "tokens": 128}
SPARSE = {"CHIP": replace(CHIP, sparse_cores=2, sc_subcores=16, sc_lanes=16, sc_vmem_bytes=512 << 10)}
SPARSECORE = Case("moe", ("dp8",), EXPERTS, **WIDE, site=grouped(1, 8), constants=SPARSE)


def declared(case: Case) -> tuple[ModuleType, BlockFields]:
    block = BLOCKS[case.kind]()
    fields = block.Fields(kind=case.kind, **case.fields)
    assert not block.check(fields, case.dims)
    return block, fields


def draw(declared: dict[str, Weight], seed: int) -> dict[str, jax.Array]:
    """Matrices that keep magnitudes, gains near 1, biases of order 0.3."""
    rng = np.random.default_rng(seed)
    found = {}
    for name, weight in declared.items():
        value = rng.standard_normal(weight.shape)
        if weight.init == "gain":
            value = 1 + 0.2 * value
        else:
            value = 0.3 * value if weight.init == "bias" else value * 1.5 / np.sqrt(weight.shape[-2])
        found[name] = jnp.asarray(value, jnp.float32)
    return found


def program(case: Case, layout: Layout, scaled: bool) -> tuple[str, dict[str, Any]]:
    """Source of a function around the emitted lines, and the names it needs."""
    dp, tp, ep = (layout.degree(axes) for axes in (layout.data, layout.tensor, layout.expert))
    options: dict[str, Any] = {"tuning": {"block_rows": {"mixed": 4}}, **case.site}
    options = {"variant": BLOCKS[case.kind]().VARIANTS[0], **options}
    if "COLLECTIVES_MICRO_BATCHES" in case.constants:
        # By bucket, with one that differs, as the constant is.
        options["returns_tuning"] = {"shards_per_chip": 1, "micro_batches": {"decode": 0, "mixed": 1}}
    site = Site(
        name="own",
        collectives="moec.blocks.collectives.xla",
        dims=case.dims,
        dp=dp,
        tp=tp,
        ep=ep,
        etp=dp * tp // ep,
        shared_sharded=layout.placed,
        mlp_sharded=layout.placed,
        scaled=scaled,
        parts={"router": PARTS["router"]().VARIANTS[0]},
        **options,
    )
    emission = EMITTERS[case.kind]().emit(declared(case)[1], site)
    assert emission.reads_residual == (case.fields.get("router", {}).get("input") == "residual")
    names: dict[str, Any] = {"jnp": jnp, "lax": lax, "DATA": layout.data, "TENSOR": layout.tensor}
    names |= {"EXPERT": layout.expert, **case.constants}
    for module, name in emission.imports:
        names[name] = getattr(importlib.import_module(module), name)
    lines = [f"{constant.name} = {constant.text}" for constant in emission.constants]
    residual = "x_TD, " if emission.reads_residual else ""
    lines.append(f"def own_block(h_TD, {residual}w, stack, rows, layer, bucket):")
    lines += ["    " + line for line in render(f"{case.kind}/call.j2", **emission.fields).splitlines()]
    return "\n".join([*lines, "    return y_TD"]), names


def second_layer(array: jax.Array) -> jax.Array:
    """The array as layer 1 of a stack; layer 0 holds other values."""
    return jnp.stack([jnp.flip(array), array])


def emitted(
    case: Case,
    layout: Layout,
    h: jax.Array,
    x: jax.Array,
    weights: dict[str, jax.Array],
    valid: jax.Array,
    interpret: bool,
) -> jax.Array:
    """y [T, D] of the emitted function on the layout's devices; the block is the second layer of the stacks."""
    source, names = program(case, layout, "w_up_scale" in weights)
    exec(source, names)
    block, fields = declared(case)
    roles = {
        "expert_ep": layout.expert,
        "expert_tp": layout.expert_tp,
        "shared": tuple(layout.sizes) if layout.placed else (),
        "mlp": tuple(layout.sizes) if layout.placed else (),
    }
    specs, values = {}, {}
    for name, weight in block.weights(fields, case.dims).items():
        axes = [roles[block.AXES[axis]] or None if axis else None for axis in weight.axes]
        specs[name] = P(None, *axes) if weight.stacked else P(*axes)
        values[name] = second_layer(weights[name]) if weight.stacked else weights[name]
        if f"{name}_scale" in weights:
            specs[f"{name}_scale"], values[f"{name}_scale"] = specs[name], second_layer(weights[f"{name}_scale"])
    residual = "x_TD" in source.split("):")[0]

    def step(h, x, w, valid):
        args = (h, x) if residual else (h,)
        return names["own_block"](*args, {"own": w}, w, SimpleNamespace(valid=valid), 1, "mixed")

    kernels = pltpu.force_tpu_interpret_mode(pltpu.InterpretParams()) if interpret else nullcontext()
    if "sparsecore_rows" in case.site.get("tuning", {}):
        with jax.default_matmul_precision("highest"), kernels:
            return sparsecore_step(step, layout, (h, x, values, valid), specs)
    devices = np.asarray(jax.devices()[: layout.degree(tuple(layout.sizes))]).reshape(tuple(layout.sizes.values()))
    mesh = Mesh(devices, tuple(layout.sizes))
    tokens = P(layout.data or None)
    in_specs = (tokens, tokens, specs, tokens)
    call = jax.shard_map(step, mesh=mesh, in_specs=in_specs, out_specs=tokens, check_vma=False)
    with jax.default_matmul_precision("highest"), kernels:
        return jax.jit(call)(h, x, values, valid)


def sparsecore_step(step: Any, layout: Layout, values: tuple[Any, ...], specs: dict[str, Any]) -> jax.Array:
    """As jit_step does it: traced for a chip, run on the devices of the arguments, whoever interprets kernels there."""
    devices = jax.devices()[: layout.degree(tuple(layout.sizes))]
    mesh, tokens = Mesh(np.asarray(devices).reshape(tuple(layout.sizes.values())), tuple(layout.sizes)), P(layout.data)
    in_specs = (tokens, tokens, specs, tokens)
    placed = jax.tree.map(lambda spec, one: jax.device_put(one, NamedSharding(mesh, spec)), in_specs, values)
    traced = abstract_mesh(layout.sizes, ("TPU7x", 1))
    call = jax.shard_map(step, mesh=traced, in_specs=in_specs, out_specs=tokens, check_vma=False)
    return jax.jit(call)(*placed)


def agree(
    case: Case, layout: str, weights: dict[str, jax.Array], meant: dict[str, jax.Array], interpret: bool | None = None
) -> None:
    """The emitted lines with `weights` give what the block means with `meant`, padding tokens aside.

    interpret: whether Pallas' TPU interpreter runs; None = where the lines call kernels.
    """
    interpret = bool(case.constants) if interpret is None else interpret
    rng = np.random.default_rng(2)
    x, h = (jnp.asarray(rng.standard_normal((case.tokens, case.dims.hidden_size)), jnp.float32) for _ in range(2))
    valid = jnp.asarray(rng.uniform(size=case.tokens) < 0.8)
    found = emitted(case, (LAYOUTS | KERNEL_LAYOUTS)[layout], h, x, weights, valid, interpret)
    want = REFERENCES[case.kind]().apply(declared(case)[1], case.dims, h, meant, None, None, x, 0)
    found, want, valid = (np.asarray(array) for array in (found, want, valid))
    np.testing.assert_allclose(found[valid], want[valid], atol=F32_TOLERANCE, rtol=0)
    assert np.abs(want).max() > 0.5
    assert np.isfinite(found).all()


@pytest.mark.parametrize(
    ("name", "layout"), [(name, layout) for name, case in CASES.items() for layout in case.layouts]
)
def test_emitted_lines_compute_what_the_block_means(name: str, layout: str) -> None:
    block, fields = declared(CASES[name])
    weights = draw(block.weights(fields, DIMS), seed=1)
    agree(CASES[name], layout, weights, weights)


@pytest.mark.slow
@pytest.mark.parametrize("name", KERNEL_CASES)
def test_emitted_lines_of_kernels_compute_it_too(name: str) -> None:
    case = KERNEL_CASES[name]
    block, fields = declared(case)
    weights = draw(block.weights(fields, case.dims), seed=1)
    for layout in case.layouts:
        agree(case, layout, weights, weights)


@pytest.mark.slow
def test_sums_on_sparsecores_compute_it_too() -> None:
    """By the emulation: on a CPU an emitted program of TPU kernels has no other SparseCore."""
    block, fields = declared(SPARSECORE)
    weights = draw(block.weights(fields, SPARSECORE.dims), seed=1)
    assert "sparsecore_rows=OWN_SPARSECORE_ROWS," in program(SPARSECORE, LAYOUTS["dp8"], False)[0]
    agree(SPARSECORE, "dp8", weights, weights)


def test_a_cpu_without_the_interpreter_refuses_kernels_beside_sparsecores() -> None:
    """The emulation stands in for SparseCores only where an interpreter stands in for the kernels before them."""
    block, fields = declared(SPARSECORE)
    weights = draw(block.weights(fields, SPARSECORE.dims), seed=1)
    with pytest.raises(ValueError, match="Only interpret mode is supported on CPU backend"):
        agree(SPARSECORE, "dp8", weights, weights, interpret=False)


@pytest.mark.parametrize(
    ("name", "dtype"),
    [("moe_bias_clamp", "float8_e4m3fn"), ("moe_latent_plain", "float4_e2m1fn")],
)
def test_emitted_lines_pass_block_scales(name: str, dtype: str) -> None:
    block, fields = declared(CASES[name])
    weights = draw(block.weights(fields, DIMS), seed=3)
    meant = dict(weights)
    for key in ("w_gate", "w_up", "w_down"):
        if key in weights:
            q, scale = quantize_on_host(np.asarray(weights[key]), dtype)
            weights[key], weights[f"{key}_scale"] = jnp.asarray(q), jnp.asarray(scale)
            meant[key] = jnp.asarray(dequantize_on_host(q, scale))
    agree(CASES[name], "dp8", weights, meant)


@pytest.mark.parametrize("kind", ["mlp", "moe"])
def test_every_layout_is_seen(kind: str) -> None:
    assert {layout for case in CASES.values() if case.kind == kind for layout in case.layouts} == LAYOUTS.keys() - (
        {"dp4_tp2_etp2"} if kind == "mlp" else set()  # as one_device: experts are cut, dense networks are not
    )
