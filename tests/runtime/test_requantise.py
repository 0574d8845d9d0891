"""Wider blocks of scales: the bits that quantising the dequantised values gives, within the bound that theory gives."""

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import ml_dtypes
import numpy as np
import pytest

from moec.blocks.core.array_info import E4M3, ArrayInfo, Source, scaled_block
from moec.blocks.core.program import make_mesh
from moec.blocks.core.quant import dequantize_on_host, quantize_on_host
from moec.runtime.convert import dequantize
from moec.runtime.requantise import RoundingError, requantise, rounding_error
from moec.runtime.weights import load_weights

EDGE = 512
WIDE = scaled_block(E4M3, EDGE)
D, I, E, L = 512, 1024, 2, 2  # noqa: E741
Write = Callable[[Path, list[dict[str, np.ndarray]]], Path]


def draw(rng: np.random.Generator, *shape: int) -> np.ndarray:
    """Floats whose blocks of 128 have peaks up to 2**12 apart, so that some become subnormal and some 0."""
    *lead, rows, columns = shape
    spread = 2.0 ** rng.uniform(-12, 0, (*lead, rows // 128, 1, columns // 128, 1))
    w = rng.standard_normal(shape).reshape(*lead, rows // 128, 128, columns // 128, 128) * spread
    return w.reshape(shape).astype(np.float32)


def bound(stored: np.ndarray, wide_scale: np.ndarray) -> np.ndarray:
    """Half a step of e4m3: 2**-4 of a normal value; below 2**-6 of the scale the steps are 2**-9 of it.

    The factor covers the float32 roundings of value, scale and quotient.
    """
    scale = wide_scale.repeat(EDGE, -2).repeat(EDGE, -1)
    return np.maximum(np.abs(stored) * 2**-4, scale * 2**-10) * (1 + 2**-20)


@pytest.mark.parametrize("block", [(128, 128), (64, 32), (512, 256)])
@pytest.mark.parametrize("turned", [False, True], ids=["rows", "columns"])
def test_the_same_bits_as_through_floats(block: tuple[int, int], turned: bool) -> None:
    """Whatever order the values lie in memory; scales that are no peak / 448, as checkpoints may have."""
    rng = np.random.default_rng(1)
    q = rng.integers(0, 256, (2 * EDGE, EDGE)).astype(np.uint8)
    q[(q & 0x7F) == 0x7F] = 0  # no NaN
    q[:EDGE] &= 0x8F  # small codes only: subnormals and zeros
    values = (np.ascontiguousarray(q.T).T if turned else q).view(ml_dtypes.float8_e4m3fn)
    scale = np.exp(rng.standard_normal((2 * EDGE // block[0], EDGE // block[1]))).astype(ml_dtypes.bfloat16)
    meant = dequantize(q.view(ml_dtypes.float8_e4m3fn), scale, block)
    wanted, wanted_scale = quantize_on_host(meant, E4M3, WIDE)
    found, found_scale, error = requantise(values, scale, block, EDGE)
    np.testing.assert_array_equal(found.view(np.uint8), wanted.view(np.uint8))
    np.testing.assert_array_equal(found_scale, wanted_scale)
    dense = rounding_error(meant, wanted, wanted_scale, EDGE)
    assert (error.values, error.subnormal, error.zeroed, error.saturated, error.relative) == (
        dense.values, dense.subnormal, dense.zeroed, dense.saturated, dense.relative,
    )  # fmt: skip
    assert error.error == pytest.approx(dense.error, rel=1e-9) and error.value == pytest.approx(dense.value, rel=1e-9)


def test_the_error_told_is_the_error_and_within_theory() -> None:
    rng = np.random.default_rng(2)
    q, scale = quantize_on_host(draw(rng, 2 * EDGE, EDGE), E4M3)
    stored = dequantize_on_host(q, scale)
    found, wide, error = requantise(q, scale, (128, 128), EDGE)
    moved = np.abs(dequantize_on_host(found, wide) - stored)
    assert (moved <= bound(stored, wide)).all()
    small = np.abs(stored) < 2**-6 * wide.repeat(EDGE, 0).repeat(EDGE, 1)
    there = stored != 0
    assert error.relative == pytest.approx((moved[~small & there] / np.abs(stored)[~small & there]).max(), rel=1e-6)
    rms = np.sqrt(np.square(moved, dtype=np.float64).sum() / np.square(stored, dtype=np.float64).sum())
    assert (error.error / error.value) ** 0.5 == pytest.approx(rms, rel=1e-6)
    assert error.values == there.sum() and error.subnormal == (small & there).sum() > 0
    assert error.zeroed == (there & (found.astype(np.float32) == 0)).sum() > 0
    assert error.saturated == 0 and np.abs(found.astype(np.float32)).max() == 448
    # Zeroed are exactly those up to half the smallest step.
    limit = 2**-10 * wide.repeat(EDGE, 0).repeat(EDGE, 1)
    zeroed = there & (found.astype(np.float32) == 0)
    assert (np.abs(stored) <= limit * (1 + 2**-20))[zeroed].all() and (np.abs(stored) >= limit)[there & ~zeroed].all()


def test_blocks_of_one_scale_keep_their_bits() -> None:
    """Requantising is exact where the stored scales of a wide block are equal."""
    q, scale = quantize_on_host(draw(np.random.default_rng(3), EDGE, EDGE), E4M3, WIDE)
    found, wide, error = requantise(q, scale.repeat(4, 0).repeat(4, 1), (128, 128), EDGE)
    np.testing.assert_array_equal(found.view(np.uint8), q.view(np.uint8))
    assert error.relative < 2**-20 and wide == pytest.approx(scale, rel=2**-20)


def test_zeros_and_nan() -> None:
    q = np.zeros((EDGE, 2 * EDGE), ml_dtypes.float8_e4m3fn)
    q[5, 600] = np.nan
    found, wide, error = requantise(q, np.ones((4, 8), np.float32), (128, 128), EDGE)
    assert wide[0, 0] == 1 and np.isnan(wide[0, 1]) and not found[:, :EDGE].astype(np.float32).any()
    assert np.isnan(error.relative) and np.isnan((RoundingError() + error).relative)


def program(stored_block: tuple[int, int] | None, edge: int = EDGE) -> Any:
    """Experts in float8 with a scale per edge x edge."""
    axes = (None, "experts", None, None)
    t = ("transpose",)
    fused = "layers.{layer}.gate_up"
    sources = {
        "w_gate": (Source(fused, (("slice", -2, 0, I), t)), Source("layers.{layer}.{expert}.gate", (t,))),
        "w_up": (Source(fused, (("slice", -2, I, 2 * I), t)), Source("layers.{layer}.{expert}.up", (t,))),
        "w_down": (Source("layers.{layer}.down", (t,)), Source("layers.{layer}.{expert}.down", (t,))),
    }
    tree: dict[str, ArrayInfo] = {}
    for key, shape in {"w_gate": (L, E, D, I), "w_up": (L, E, D, I), "w_down": (L, E, I, D)}.items():
        scales = (L, E, shape[2] // edge, shape[3] // edge)
        own = None if edge == 128 else (edge, edge)
        tree[key] = ArrayInfo(shape, E4M3, axes, sources[key], tuple(range(L)))
        tree[f"{key}_scale"] = ArrayInfo(scales, "float32", axes, (), tuple(range(L)), scale_of=key, block=own)
    suffix = "_scale_inv" if stored_block else None
    return SimpleNamespace(
        weights=lambda: tree, RULES={"experts": ()}, IGNORE=(), SCALE_SUFFIX=suffix, SCALE_BLOCK=stored_block
    )


def load(folder: Path, wanted: Any, whole_bytes: int = 1 << 30) -> tuple[dict[str, np.ndarray], list[str]]:
    notes: list[str] = []
    mesh = make_mesh(jax.devices()[:1], {"data": 1})
    found = load_weights(wanted, mesh, folder, on_note=notes.append, whole_bytes=whole_bytes)
    return {key: np.asarray(value) for key, value in found.items()}, notes


def part(tensors: dict[str, np.ndarray], layer: int, key: str) -> np.ndarray:
    """One layer's experts [E, out, in] of a weight that is stored stacked."""
    if key == "down":
        return tensors[f"layers.{layer}.down"]
    return tensors[f"layers.{layer}.gate_up"][:, slice(0, I) if key == "gate" else slice(I, 2 * I)]


@pytest.mark.parametrize("layout", ["single", "stacked"])
def test_stored_float8_is_requantised_when_loaded(layout: str, tmp_path: Path, write_checkpoint: Write) -> None:
    """One by one, or stacked with gate and up fused; layer by layer and whole."""
    rng, tensors, meant = np.random.default_rng(4), {}, dict[str, np.ndarray]()
    if layout == "single":
        drawn = {
            f"layers.{n}.{e}.{key}": draw(rng, *shape)
            for key, shape in {"gate": (I, D), "up": (I, D), "down": (D, I)}.items()
            for n in range(L)
            for e in range(E)
        }
    else:
        drawn = {
            f"layers.{n}.{key}": draw(rng, E, *shape)
            for key, shape in {"gate_up": (2 * I, D), "down": (D, I)}.items()
            for n in range(L)
        }
    for name, value in drawn.items():
        q, scale = quantize_on_host(value, E4M3)
        tensors |= {name: q, name + "_scale_inv": scale}
        meant[name] = dequantize_on_host(q, scale)
    folder = write_checkpoint(tmp_path, [tensors])
    found, notes = load(folder, program((128, 128)))
    for key in ("gate", "up", "down"):
        for n in range(L):
            for e in range(E):
                value = meant[f"layers.{n}.{e}.{key}"] if layout == "single" else part(meant, n, key)[e]
                value = value.T
                wanted, scale = quantize_on_host(value, E4M3, WIDE)
                np.testing.assert_array_equal(found[f"w_{key}"][n, e].view(np.uint8), wanted.view(np.uint8))
                np.testing.assert_array_equal(found[f"w_{key}_scale"][n, e], scale)
                back = dequantize_on_host(found[f"w_{key}"][n, e], scale)
                assert (np.abs(back - value) <= bound(value, scale)).all()
    told, *errors = [note.partition(": ")[2] for note in notes]
    number = 3 * L * E if layout == "single" else 2 * L
    assert told == (
        f"requantised to float8_e4m3fn (one scale per 512 x 512 block): {number} tensors stored as float8_e4m3fn, "
        "one per 128 x 128 (w_gate, w_up, w_down)"
    )
    for key, line in zip(("w_gate", "w_up", "w_down"), errors, strict=True):
        assert line.startswith(f"{key} in float8_e4m3fn: relative error at most ") and "0 saturated" in line
        assert 0 < float(line.split("at most ")[1].split("%")[0]) <= 100 / 17 + 0.01
    again, _ = load(folder, program((128, 128)), whole_bytes=0)
    assert all((again[key].view(np.uint8) == found[key].view(np.uint8)).all() for key in found)
    kept, silent = load(folder, program((128, 128), edge=128))
    assert silent == [] and kept["w_up_scale"].shape == (L, E, 4, 8)


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_floats_are_quantised_with_wide_blocks(dtype: str, tmp_path: Path, write_checkpoint: Write) -> None:
    rng = np.random.default_rng(5)
    shapes = {"gate_up": (E, 2 * I, D), "down": (E, D, I)}
    tensors = {f"layers.{n}.{k}": draw(rng, *s).astype(dtype) for k, s in shapes.items() for n in range(L)}
    found, (told, *errors) = load(write_checkpoint(tmp_path, [tensors]), program(None))
    assert f"quantised to float8_e4m3fn (one scale per 512 x 512 block): {2 * L} tensors stored as {dtype}" in told
    assert "requantised" not in told and len(errors) == 3
    for key in ("gate", "up", "down"):
        for n in range(L):
            value = part(tensors, n, key).astype(np.float32).swapaxes(-1, -2)
            scale = found[f"w_{key}_scale"][n]
            assert scale.shape == (E, value.shape[1] // EDGE, value.shape[2] // EDGE)
            assert (np.abs(dequantize_on_host(found[f"w_{key}"][n], scale) - value) <= bound(value, scale)).all()


def test_a_cut_through_stored_blocks_goes_through_floats(tmp_path: Path, write_checkpoint: Write) -> None:
    """Nothing is refused where no bits are kept: the cut at row I = 1024 lies inside a block of 96 rows."""
    rng, tensors, meant = np.random.default_rng(6), {}, []
    for n in range(L):
        whole = draw(rng, E, 2 * I, D)
        for key, value in {"gate_up": whole, "down": draw(rng, E, D, I)}.items():
            shape = (E, -(-value.shape[1] // 96), -(-value.shape[2] // 96))
            scale = np.exp(rng.standard_normal(shape)).astype(np.float32)
            spread = scale.repeat(96, 1)[:, : value.shape[1]].repeat(96, 2)[..., : value.shape[2]]
            q = np.clip(value / spread * 64, -448, 448).astype(ml_dtypes.float8_e4m3fn)
            tensors |= {f"layers.{n}.{key}": q, f"layers.{n}.{key}_scale_inv": scale}
            if key == "gate_up":
                meant.append((q.astype(np.float32) * spread)[:, I:].swapaxes(-1, -2))
    found, _ = load(write_checkpoint(tmp_path, [tensors]), program((96, 96)))
    for n, value in enumerate(meant):
        back = dequantize_on_host(found["w_up"][n], found["w_up_scale"][n])
        assert (np.abs(back - value) <= bound(value, found["w_up_scale"][n])).all()
