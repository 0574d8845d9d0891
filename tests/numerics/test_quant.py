"""Block scales: host and device agree, quantisation stays within half a step, ragged last blocks."""

import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from moec.blocks.core.quant import (
    E4M3_MAX,
    dequantize_blocks,
    dequantize_on_host,
    quantize_on_host,
    scale_shape,
)

SHAPES = [(128, 128), (160, 192), (3, 130, 5), (2, 3, 256, 160), (1, 1)]


def draw(shape: tuple[int, ...], seed: int = 0) -> np.ndarray:
    """Normal values whose magnitude varies by block, so that a misplaced scale shows."""
    rng = np.random.default_rng(seed)
    size = np.add.outer(np.arange(shape[-2]) // 128 * 3, np.arange(shape[-1]) // 128 * 5)
    return (rng.standard_normal(shape) * 2.0**size).astype(np.float32)


@pytest.mark.parametrize("shape", SHAPES)
def test_one_scale_per_started_block(shape: tuple[int, ...]) -> None:
    q, scale = quantize_on_host(draw(shape))
    assert q.shape == shape
    assert q.dtype == ml_dtypes.float8_e4m3fn
    assert scale.dtype == np.float32
    assert scale.shape == scale_shape(shape) == (*shape[:-2], -(-shape[-2] // 128), -(-shape[-1] // 128))


@pytest.mark.parametrize("shape", SHAPES)
def test_value_is_q_times_the_scale_of_its_block(shape: tuple[int, ...]) -> None:
    q, scale = quantize_on_host(draw(shape))
    found = dequantize_on_host(q, scale)
    for index in [*list(np.ndindex(shape))[::7], tuple(size - 1 for size in shape)]:
        *lead, i, j = index
        assert found[index] == np.float32(q[index]) * scale[(*lead, i // 128, j // 128)]


@pytest.mark.parametrize("shape", SHAPES)
def test_quantisation_error_is_at_most_half_a_step(shape: tuple[int, ...]) -> None:
    """e4m3 has 3 mantissa bits: half a step is 1/16 of the value, or 2**-10 scales below 2**-6."""
    w = draw(shape)
    q, scale = quantize_on_host(w)
    step = np.maximum(np.abs(w) / 16, 2.0**-10 * dequantize_on_host(np.ones_like(q), scale))
    assert (np.abs(dequantize_on_host(q, scale) - w) <= step * (1 + 1e-5)).all()


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_device_and_host_give_the_same_bits(shape: tuple[int, ...], dtype: type) -> None:
    q, scale = quantize_on_host(draw(shape))
    found = dequantize_blocks(jnp.asarray(q), jnp.asarray(scale), dtype)
    assert found.dtype == dtype
    np.testing.assert_array_equal(np.asarray(found), dequantize_on_host(q, scale).astype(dtype))


def test_the_peak_of_each_block_is_the_largest_e4m3() -> None:
    w = draw((256, 256), seed=3)
    q, _ = quantize_on_host(w)
    blocks = np.abs(q.astype(np.float32)).reshape(2, 128, 2, 128)
    np.testing.assert_array_equal(blocks.max(axis=(1, 3)), E4M3_MAX)


def test_rounding_never_overflows_to_nan() -> None:
    """Peaks p where p / (p / 448) rounds above 448 exist; e4m3fn has no infinity to catch them."""
    peaks = np.random.default_rng(1).uniform(1e-3, 1e3, 4096).astype(np.float32)
    w = np.zeros((4096, 1, 1), np.float32)
    w[:, 0, 0] = peaks
    q, _ = quantize_on_host(w)
    assert np.isfinite(q.astype(np.float32)).all()


def test_zero_blocks_stay_zero() -> None:
    w = draw((200, 130))
    w[:128, :128] = 0
    q, scale = quantize_on_host(w)
    found = dequantize_on_host(q, scale)
    assert not found[:128, :128].any()
    assert found[128:, 128:].any()


def test_scales_of_another_shape_are_refused() -> None:
    q, scale = quantize_on_host(draw((160, 192)))
    with pytest.raises(AssertionError):
        dequantize_on_host(q, scale[:1])
    with pytest.raises(AssertionError):
        dequantize_blocks(jnp.asarray(q), jnp.asarray(scale[:1]), jnp.float32)
