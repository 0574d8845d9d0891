"""Block scales: host and device agree, quantisation stays within half a step, ragged last blocks."""

import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from moec.blocks.core.array_info import SCALED
from moec.blocks.core.quant import (
    LARGEST,
    dequantize_blocks,
    dequantize_on_host,
    quantize_on_host,
    scale_shape,
)

SHAPES = [(128, 128), (160, 192), (3, 130, 5), (2, 3, 256, 160), (1, 1)]
DTYPES = list(SCALED)


def draw(shape: tuple[int, ...], dtype: str, seed: int = 0) -> np.ndarray:
    """Normal values whose magnitude varies by block, so that a misplaced scale shows."""
    rng, block = np.random.default_rng(seed), SCALED[dtype]
    size = np.add.outer(np.arange(shape[-2]) // block.rows * 3, np.arange(shape[-1]) // block.columns * 5) % 16
    return (rng.standard_normal(shape) * 2.0**size).astype(np.float32)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
def test_one_scale_per_started_block(shape: tuple[int, ...], dtype: str) -> None:
    q, scale = quantize_on_host(draw(shape, dtype), dtype)
    rows, columns = {"float8_e4m3fn": (128, 128), "float4_e2m1fn": (32, 1), "int4": (32, 1)}[dtype]
    assert q.shape == shape
    assert q.dtype.name == dtype
    assert scale.dtype.name == ("float32" if dtype == "float8_e4m3fn" else "bfloat16")
    wanted = (*shape[:-2], -(-shape[-2] // rows), -(-shape[-1] // columns))
    assert scale.shape == scale_shape(shape, dtype) == wanted


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
def test_value_is_q_times_the_scale_of_its_block(shape: tuple[int, ...], dtype: str) -> None:
    q, scale = quantize_on_host(draw(shape, dtype), dtype)
    found, block = dequantize_on_host(q, scale), SCALED[dtype]
    for index in [*list(np.ndindex(shape))[::7], tuple(size - 1 for size in shape)]:
        *lead, i, j = index
        wanted = np.float32(q[index]) * np.float32(scale[(*lead, i // block.rows, j // block.columns)])
        assert found[index] == wanted


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
def test_quantisation_error_is_at_most_half_a_step(shape: tuple[int, ...], dtype: str) -> None:
    """Half a step is 2^-(mantissa bits + 1) of the value, or half the smallest step times the scale.

    e4m3: 1/16, or 2^-10 scales; e2m1: 1/4, or 1/4 of a scale; int4: half a scale. The bfloat16 scales of the
    latter may be 2^-9 too small, and what then lies above the largest value is cut: 2^-9 of the value more.
    """
    w = draw(shape, dtype)
    q, scale = quantize_on_host(w, dtype)
    relative, absolute = {"float8_e4m3fn": (1 / 16, 2**-10), "float4_e2m1fn": (1 / 4, 1 / 4), "int4": (0, 1 / 2)}[dtype]
    ones = np.ones(shape, np.float32).astype(q.dtype)
    step = np.maximum(np.abs(w) * relative, absolute * dequantize_on_host(ones, scale))
    cut = 0 if dtype == "float8_e4m3fn" else 2**-9 * np.abs(w)
    assert (np.abs(dequantize_on_host(q, scale) - w) <= step * (1 + 1e-5) + cut).all()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("wide", [jnp.float32, jnp.bfloat16])
def test_device_and_host_give_the_same_bits(shape: tuple[int, ...], dtype: str, wide: type) -> None:
    q, scale = quantize_on_host(draw(shape, dtype), dtype)
    found = dequantize_blocks(jnp.asarray(q), jnp.asarray(scale), wide)
    assert found.dtype == wide
    np.testing.assert_array_equal(np.asarray(found), dequantize_on_host(q, scale).astype(wide))


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_peak_of_each_block_is_the_largest_value(dtype: str) -> None:
    w, block = draw((256, 256), dtype, seed=3), SCALED[dtype]
    q, _ = quantize_on_host(w, dtype)
    blocks = np.abs(q.astype(np.float32)).reshape(256 // block.rows, block.rows, 256 // block.columns, block.columns)
    np.testing.assert_array_equal(blocks.max(axis=(1, 3)), LARGEST[dtype])


@pytest.mark.parametrize("dtype", DTYPES)
def test_every_value_is_its_own_nearest(dtype: str) -> None:
    """A scale of 1 and the dtype's own values come back as they are; halves between them go to the even code."""
    codes = np.arange(256, dtype=np.uint8).view(ml_dtypes.float8_e4m3fn) if dtype == "float8_e4m3fn" else None
    own = np.unique((np.arange(16, dtype=np.uint8).view(dtype) if codes is None else codes).astype(np.float32))
    own = own[np.abs(own) <= LARGEST[dtype]]  # without NaN and -8
    w = np.zeros((SCALED[dtype].rows, own.size), np.float32)
    w[0], w[1] = LARGEST[dtype], own
    q, scale = quantize_on_host(w, dtype)
    assert (scale == 1).all()
    np.testing.assert_array_equal(q[1].astype(np.float32), own)
    w[1, 1:] = (own[1:] + own[:-1]) / 2
    halves = quantize_on_host(w, dtype)[0][1, 1:]
    assert (halves.view(np.uint8) % 2 == 0).all()


@pytest.mark.parametrize("dtype", DTYPES)
def test_rounding_never_overflows(dtype: str) -> None:
    """Peaks p where p / (p / 448) rounds above 448 exist; e4m3fn has no infinity to catch them, int4 wraps."""
    peaks = np.random.default_rng(1).uniform(1e-3, 1e3, 4096).astype(np.float32)
    w = np.zeros((4096, 1, 1), np.float32)
    w[:, 0, 0] = peaks
    q, _ = quantize_on_host(w, dtype)
    np.testing.assert_array_equal(q.astype(np.float32), LARGEST[dtype])


@pytest.mark.parametrize("dtype", DTYPES)
def test_zero_blocks_stay_zero_and_nan_spoils_its_block_alone(dtype: str) -> None:
    w = draw((200, 130), dtype)
    w[:128, :128] = 0
    w[199, 129] = np.nan
    q, scale = quantize_on_host(w, dtype)
    found, block = dequantize_on_host(q, scale), SCALED[dtype]
    assert not found[:128, :128].any()
    first = 199 // block.rows * block.rows, 129 // block.columns * block.columns
    assert np.isnan(found[first[0] :, first[1] :]).all()
    assert np.isfinite(found[: first[0]]).all() and np.isfinite(found[:, : first[1]]).all() and found[128:, 64:].any()


@pytest.mark.parametrize("dtype", DTYPES)
def test_scales_of_another_shape_are_refused(dtype: str) -> None:
    q, scale = quantize_on_host(draw((160, 192), dtype), dtype)
    with pytest.raises(AssertionError):
        dequantize_on_host(q, scale[:1])
    with pytest.raises(AssertionError):
        dequantize_blocks(jnp.asarray(q), jnp.asarray(scale[:1]), jnp.float32)
