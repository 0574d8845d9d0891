"""Packed 4-bit weights: bits against tables written out by hand, and loading them kept, widened and quantised."""

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import ml_dtypes
import numpy as np
import pytest

from moec.blocks.core.array_info import SCALED, ArrayInfo, Op, Source
from moec.blocks.core.program import make_mesh
from moec.blocks.core.quant import dequantize_on_host
from moec.runtime.packed import unpack, unpack_scales, words_shape
from moec.runtime.weights import load_weights

# OCP MX v1.0, table 5: codes 0 to 7 of e2m1; 8 more is the same with a sign.
E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
# L layers, E experts, D hidden, I expert width.
L, E, D, I = 2, 4, 64, 96  # noqa: E741
RULES = {"experts": ("data",), "expert_intermediate": ("tensor",)}
MESHES: dict[str, dict[str, int]] = {"1-device": {}, "6-devices": {"data": 2, "tensor": 3}}
DTYPE = {"mxfp4": "float4_e2m1fn", "int4": "int4"}
Write = Callable[[Path, list[dict[str, np.ndarray]]], Path]


def test_mxfp4_bytes_hold_the_even_value_in_the_low_half() -> None:
    codes = np.arange(64).reshape(2, 32) % 16
    words = (codes[:, 0::2] | codes[:, 1::2] << 4).astype(np.uint8).reshape(2, 1, 16)
    assert list(words[0, 0, :2]) == [0x10, 0x32]
    values = unpack(words, "mxfp4")
    assert values.dtype == ml_dtypes.float4_e2m1fn and values.shape == (2, 32)
    np.testing.assert_array_equal(values.astype(np.float32), np.array([*E2M1, *(-x for x in E2M1)])[codes])


def test_int4_words_hold_eight_values_from_the_lowest_bits_on() -> None:
    """0x76543210 + 8 each: 8 is zero, 0 is -8, 15 is 7."""
    words = np.array([[0x76543210, -0x01234568]], np.int32)  # the second is 0xFEDCBA98
    values = unpack(words, "int4")
    assert values.dtype == ml_dtypes.int4 and values.shape == (1, 16)
    np.testing.assert_array_equal(values.astype(np.float32)[0], np.arange(-8, 8))


def test_e8m0_scales_are_powers_of_two_to_both_ends() -> None:
    scales = unpack_scales(np.arange(256, dtype=np.uint8), "mxfp4")
    assert scales.dtype == ml_dtypes.bfloat16
    np.testing.assert_array_equal(scales[:255].astype(np.float64), 2.0 ** (np.arange(255.0) - 127))
    assert np.isnan(scales[255])


def test_words_shape() -> None:
    assert words_shape((4, 6, 96), "mxfp4") == (4, 6, 3, 16)
    assert words_shape((4, 6, 96), "int4") == (4, 6, 12)


def draw(packed: str, *shape: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """(words, scales, the values they mean as float32 [..., out, in])."""
    rng = np.random.default_rng(len(shape))
    codes = rng.integers(0, 16, shape)
    if packed == "mxfp4":
        words = (codes[..., 0::2] | codes[..., 1::2] << 4).astype(np.uint8).reshape(words_shape(shape, packed))
        scales = rng.integers(120, 130, (*shape[:-1], shape[-1] // 32)).astype(np.uint8)
        factors = 2.0 ** (scales.astype(np.float32) - 127)
        values = np.array([*E2M1, *(-x for x in E2M1)], np.float32)[codes]
    else:
        nibbles = codes.reshape(*shape[:-1], -1, 8).astype(np.uint64)
        words = (nibbles << np.arange(0, 32, 4, dtype=np.uint64)).sum(axis=-1).astype(np.uint32).view(np.int32)
        scales = rng.uniform(0.1, 1, (*shape[:-1], shape[-1] // 32)).astype(ml_dtypes.bfloat16)
        factors, values = scales.astype(np.float32), codes.astype(np.float32) - 8
    return words, scales, values * factors.repeat(32, -1)


def program(expert_dtype: str, *sources: tuple[str, str, tuple[Op, ...], str | None]) -> Any:
    """A program with w_up [L, E, D, I] and w_down [L, E, I, D]; sources: (weight, tensor, ops, packed)."""
    shapes = {"w_up": (L, E, D, I), "w_down": (L, E, I, D)}
    axes = {
        "w_up": (None, "experts", None, "expert_intermediate"),
        "w_down": (None, "experts", "expert_intermediate", None),
    }
    tree = {}
    for key, shape in shapes.items():
        found = tuple(Source(tensor, ops, packed) for weight, tensor, ops, packed in sources if weight == key)
        tree[key] = ArrayInfo(shape, expert_dtype, axes[key], found, tuple(range(L)))
        if expert_dtype in SCALED:
            block = SCALED[expert_dtype]
            scales = (*shape[:2], *block.count(*shape[2:]))
            tree[f"{key}_scale"] = ArrayInfo(scales, block.dtype, axes[key], (), tuple(range(L)), scale_of=key)
    plain = {"RULES": RULES, "IGNORE": (), "SCALE_SUFFIX": None, "SCALE_BLOCK": None}
    return SimpleNamespace(weights=lambda: {"moe": tree}, **plain)


T: Op = ("transpose",)
Layout = tuple[
    tuple[tuple[str, str, tuple[Op, ...], str | None], ...], list[dict[str, np.ndarray]], dict[str, np.ndarray]
]


def stacked_mxfp4() -> Layout:
    """Experts stacked, w_up every other row beside a gate nobody asked for."""
    tensors, wanted = {}, {"w_up": [], "w_down": []}
    for layer in range(L):
        for key, name, shape in (("w_up", "gate_up", (E, 2 * I, D)), ("w_down", "down", (E, D, I))):
            words, scales, values = draw("mxfp4", *shape)
            tensors |= {f"{layer}.{name}_blocks": words, f"{layer}.{name}_scales": scales}
            wanted[key].append((values[:, 1::2] if key == "w_up" else values).swapaxes(-1, -2))
    sources = (
        ("w_up", "{layer}.gate_up_blocks", (("stride", -2, 1, 2), T), "mxfp4"),
        ("w_down", "{layer}.down_blocks", (T,), "mxfp4"),
    )
    return sources, [tensors], {key: np.stack(layers) for key, layers in wanted.items()}


def single_int4() -> Layout:
    """One expert a tensor, with the stored shape beside it; w_down's experts one below the other."""
    tensors, ups, downs = {}, [], []
    for layer in range(L):
        found = [draw("int4", I, D) for _ in range(E)]
        for e, (words, scales, _) in enumerate(found):
            name = f"{layer}.{e}.up.weight"
            tensors |= {f"{name}_packed": words, f"{name}_scale": scales, f"{name}_shape": np.array([I, D], np.int64)}
        ups.append(np.stack([values.T for *_, values in found]))
        words, scales, values = draw("int4", E * D, I)
        tensors |= {f"{layer}.down_packed": words, f"{layer}.down_scale": scales}
        downs.append(values.reshape(E, D, I).swapaxes(-1, -2))
    sources = (
        ("w_up", "{layer}.{expert}.up.weight_packed", (T,), "int4"),
        ("w_down", "{layer}.down_packed", (("stack", E), T), "int4"),
    )
    return sources, [tensors], {"w_up": np.stack(ups), "w_down": np.stack(downs)}


LAYOUTS: dict[str, Callable[[], Layout]] = {"mxfp4": stacked_mxfp4, "int4": single_int4}


def load(folder: Path, wanted: Any, mesh: str, whole_bytes: int = 0) -> tuple[dict[str, Any], list[str]]:
    """(the expert arrays, notes of the conversion)."""
    axes, notes = MESHES[mesh] or {"data": 1, "tensor": 1}, list[str]()
    devices = make_mesh(jax.devices()[: int(np.prod(list(axes.values())))], axes)
    tree = load_weights(wanted, devices, folder, on_note=notes.append, whole_bytes=whole_bytes)
    return tree["moe"], [note.partition(": ")[2] for note in notes]


@pytest.mark.parametrize("whole_bytes", [0, 1 << 30], ids=["layer-by-layer", "whole"])
@pytest.mark.parametrize("mesh", MESHES)
@pytest.mark.parametrize("packed", LAYOUTS)
def test_4_bit_experts_keep_values_and_scales(
    packed: str, mesh: str, whole_bytes: int, tmp_path: Path, write_checkpoint: Write
) -> None:
    sources, shards, values = LAYOUTS[packed]()
    folder = write_checkpoint(tmp_path, shards)
    moe, notes = load(folder, program(DTYPE[packed], *sources), mesh, whole_bytes)
    assert notes == []
    for key, expected in values.items():
        q, scale = np.asarray(moe[key]), np.asarray(moe[f"{key}_scale"])
        assert (q.dtype.name, scale.dtype.name) == (DTYPE[packed], "bfloat16")
        np.testing.assert_array_equal(dequantize_on_host(q, scale), expected, err_msg=key)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("packed", LAYOUTS)
def test_packed_experts_are_widened(packed: str, dtype: str, tmp_path: Path, write_checkpoint: Write) -> None:
    sources, shards, values = LAYOUTS[packed]()
    folder = write_checkpoint(tmp_path, shards)
    moe, notes = load(folder, program(dtype, *sources), "6-devices")
    for key, expected in values.items():
        np.testing.assert_array_equal(np.asarray(moe[key]), expected.astype(dtype), err_msg=key)
    # A power of two times e2m1 is exact in bfloat16; 8 bits of a scale times 4 are not.
    rounded = "rounded to bfloat16: 10 tensors stored as int4 (moe.w_up, moe.w_down)"
    assert notes == ([rounded] if (packed, dtype) == ("int4", "bfloat16") else [])


@pytest.mark.parametrize("packed", LAYOUTS)
def test_float_experts_are_quantised(packed: str, tmp_path: Path, write_checkpoint: Write) -> None:
    """To the nearest of the format's values, the largest of each block at the format's largest."""
    rng = np.random.default_rng(5)
    stored = {f"{layer}.{n}": rng.standard_normal(s).astype(np.float32) for layer in range(L) for n, s in FLOATS}
    folder = write_checkpoint(tmp_path, [stored])
    sources = (("w_up", "{layer}.up", (), None), ("w_down", "{layer}.down", (T,), None))
    moe, notes = load(folder, program(DTYPE[packed], *sources), "1-device")
    assert notes == [
        f"quantised to {DTYPE[packed]} (one scale per 32 x 1 block): 4 tensors stored as float32 (moe.w_up, moe.w_down)"
    ]
    grid = np.unique([*E2M1, *(-x for x in E2M1)]) if packed == "mxfp4" else np.arange(-7, 8)
    for key, value in (("w_up", stored["1.up"]), ("w_down", stored["1.down"].swapaxes(-1, -2))):
        q, scale = (np.asarray(moe[name][1]).astype(np.float32) for name in (key, f"{key}_scale"))
        steps = value / scale.repeat(32, -2)
        nearest = np.abs(np.clip(steps, grid[0], grid[-1])[..., None] - grid).min(-1)
        np.testing.assert_allclose(np.abs(q - np.clip(steps, grid[0], grid[-1])), nearest, atol=1e-6)
        assert (np.abs(q).reshape(E, -1, 32, q.shape[-1]).max(axis=2) == grid[-1]).all()


FLOATS = (("up", (E, D, I)), ("down", (E, D, I)))


def test_wider_scales_are_rounded_and_told(tmp_path: Path, write_checkpoint: Write) -> None:
    sources, (tensors,), _ = single_int4()
    for name, value in tensors.items():
        if name.endswith("_scale"):
            tensors[name] = value.astype(np.float32) + np.float32(1e-4)
    folder = write_checkpoint(tmp_path, [tensors])
    moe, notes = load(folder, program("int4", *sources), "1-device")
    assert notes == [
        f"scales rounded to bfloat16: {L * (E + 1)} tensors stored as int4 with float32 scales (moe.w_up, moe.w_down)"
    ]
    expected = tensors["0.2.up.weight_scale"].T.astype(ml_dtypes.bfloat16)
    np.testing.assert_array_equal(np.asarray(moe["w_up_scale"][0, 2]), expected)
