"""Source ops on stored tensors, on their shapes and on their block scales, against plain numpy."""

import numpy as np
import pytest

from moec.blocks.core.array_info import Op
from moec.runtime.convert import apply_ops, dequantize, extent_of, scale_ops, scale_shape, stored_rank, stored_shape

STORED = (24, 10)


def numbers(*shape: int) -> np.ndarray:
    return np.arange(np.prod(shape)).reshape(shape)


def test_group_slice_takes_the_same_piece_of_each_group() -> None:
    """Rows [q0 k0 v0, q1 k1 v1, ...] as fused projections have them head by head."""
    q, k, v = numbers(6, 5), numbers(6, 5) + 100, numbers(12, 5) + 200
    fused = np.concatenate([np.concatenate([q[i : i + 2], k[i : i + 2], v[2 * i : 2 * i + 4]]) for i in (0, 2, 4)])
    for start, stop, part in ((0, 2, q), (2, 4, k), (4, 8, v)):
        np.testing.assert_array_equal(apply_ops(fused, (("group_slice", -2, 3, start, stop),)), part)
        np.testing.assert_array_equal(apply_ops(fused.T, (("group_slice", -1, 3, start, stop),)), part.T)
        np.testing.assert_array_equal(apply_ops(fused[:, 0], (("group_slice", -1, 3, start, stop),)), part[:, 0])


def test_stack_separates_experts() -> None:
    experts = numbers(4, 6, 5)
    np.testing.assert_array_equal(apply_ops(experts.reshape(24, 5), (("stack", 4),)), experts)
    np.testing.assert_array_equal(
        apply_ops(experts.reshape(24, 5), (("stack", 4), ("slice", -2, 0, 3), ("transpose",))),
        experts[:, :3].swapaxes(-1, -2),
    )


OPS: dict[str, tuple[Op, ...]] = {
    "none": (),
    "slice": (("slice", -2, 18, 24),),
    "groups": (("group_slice", -2, 3, 4, 8), ("transpose",)),
    "stride": (("stride", -2, 1, 2), ("transpose",)),
    "stack": (("stack", 4), ("slice", -2, 3, 6), ("transpose",)),
    "stacked groups": (("stack", 2), ("group_slice", -2, 3, 2, 4)),
    "repeat": (("transpose",), ("repeat", -1, 6, 3)),
}


@pytest.mark.parametrize("name", OPS)
def test_stored_shape_undoes_the_ops(name: str) -> None:
    ops = OPS[name]
    found = apply_ops(numbers(*STORED), ops)
    # A slice is the tensor's last piece here, so its end says how large the tensor is.
    extent = max((extent_of(op) for op in ops), default=0)
    assert stored_shape(found.shape, ops, extent) == STORED
    assert stored_rank(found.ndim, ops) == 2


@pytest.mark.parametrize("block", [(3, 5), (1, 5), (2, 4)])
@pytest.mark.parametrize("name", OPS)
def test_scales_follow_their_values(name: str, block: tuple[int, int]) -> None:
    """Ops on scales, where they are allowed, give the scales of the values the ops leave."""
    ops, rng = OPS[name], np.random.default_rng(0)
    q = rng.integers(-4, 4, STORED).astype(np.float32).astype("float8_e4m3fn")
    scale = rng.integers(1, 9, scale_shape(STORED, block)).astype(np.float32)
    on_scales = scale_ops(ops, STORED, block)
    cuts_a_block = {
        "groups": block[0] in (3, 2) and 8 % block[0] + 4 % block[0] > 0,
        "stride": block[0] > 1,
        "stack": 3 % block[0] > 0,
        "stacked groups": block[0] == 3,
        "repeat": True,
    }.get(name, False)
    assert (on_scales is None) == cuts_a_block
    if on_scales is None:
        return
    wanted = apply_ops(dequantize(q, scale, block), ops)
    turned = block[::-1] if ("transpose",) in ops else block
    found = np.ascontiguousarray(apply_ops(q, ops))
    np.testing.assert_array_equal(dequantize(found, apply_ops(scale, on_scales), turned), wanted)
