"""Collectives over one and two mesh axes against their meaning on the stack of all shards.

Gathers move bits, so they are compared exactly. Sums of eight float32 values of order 1 in any
order differ by a few 1e-7.
"""

import re
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from moec.blocks.collectives import ref, xla

MESHES = {
    "one_axis": ({"data": 8}, ("data",)),
    "two_axes": ({"data": 4, "tensor": 2}, ("data", "tensor")),
    "two_axes_reversed": ({"data": 4, "tensor": 2}, ("tensor", "data")),
    "one_of_two": ({"data": 4, "tensor": 2}, ("tensor",)),
}


def on_shards(mesh_name: str, call: Callable, *stacks: jax.Array) -> list[np.ndarray]:
    """call(local arrays..., axes) on every shard; arguments and results stacked [N, ...] over the axes."""
    sizes, axes = MESHES[mesh_name]
    mesh = Mesh(np.asarray(jax.devices()[:8]).reshape(tuple(sizes.values())), tuple(sizes))

    def local(*arrays):
        return jax.tree.map(lambda a: a[None], call(*(a[0] for a in arrays), axes))

    spec = P(axes)
    found = jax.shard_map(local, mesh=mesh, in_specs=spec, out_specs=spec, check_vma=False)(*stacks)
    return [np.asarray(a) for a in jax.tree.leaves(found)]


def shards(mesh_name: str) -> int:
    sizes, axes = MESHES[mesh_name]
    return int(np.prod([sizes[a] for a in axes]))


def draw(*shape: int) -> jax.Array:
    return jnp.asarray(np.random.default_rng(0).standard_normal(shape), jnp.float32)


@pytest.mark.parametrize("mesh", MESHES)
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16, jnp.int32])
def test_gather_tokens(mesh: str, dtype: type) -> None:
    x = (10 * draw(shards(mesh), 3, 5)).astype(dtype)
    (found,) = on_shards(mesh, xla.gather_tokens, x)
    np.testing.assert_array_equal(found, ref.gather_tokens(x))


@pytest.mark.parametrize("mesh", MESHES)
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_gather_routing_keeps_all_bits(mesh: str, dtype: type) -> None:
    """Padding (-1), zero, tiny and negative weights arrive as they left."""
    num = shards(mesh)
    index = jnp.asarray(np.random.default_rng(1).integers(-1, 512, (num, 3, 4)), jnp.int32)
    weight = draw(num, 3, 4).at[:, 0, 0].set(0).at[:, 1, 1].set(-0.0).at[:, 2, 2].set(1e-30).astype(dtype)
    found_index, found_weight = on_shards(mesh, xla.gather_routing, index, weight)
    want_index, want_weight = ref.gather_routing(index, weight)
    assert found_weight.dtype == dtype
    np.testing.assert_array_equal(found_index, want_index)
    bits = np.uint32 if dtype == jnp.float32 else np.uint16
    np.testing.assert_array_equal(found_weight.view(bits), np.asarray(want_weight).view(bits))


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_gather_routing_is_one_all_gather(dtype: type) -> None:
    mesh = Mesh(np.asarray(jax.devices()[:8]), ("data",))
    spec = P("data")
    gather = jax.shard_map(
        lambda i, w: xla.gather_routing(i, w, ("data",)),
        mesh=mesh,
        in_specs=spec,
        out_specs=(P(), P()),
        check_vma=False,
    )
    args = jnp.zeros((16, 10), jnp.int32), jnp.zeros((16, 10), dtype)
    text = jax.jit(gather).lower(*args).compile().as_text()
    gathers = re.findall(r"(\w+\[[\d,]*\])\S* all-gather(?:-start)?\(", text)
    assert gathers == ["s32[16,20]"]


@pytest.mark.parametrize("mesh", MESHES)
def test_reduce_scatter_tokens(mesh: str) -> None:
    num = shards(mesh)
    y = draw(num, num * 3, 5)
    (found,) = on_shards(mesh, xla.reduce_scatter_tokens, y)
    np.testing.assert_allclose(found, ref.reduce_scatter_tokens(y), atol=2e-6, rtol=0)


@pytest.mark.parametrize("mesh", MESHES)
def test_all_reduce(mesh: str) -> None:
    y = draw(shards(mesh), 3, 5)
    (found,) = on_shards(mesh, xla.all_reduce, y)
    np.testing.assert_allclose(found, ref.all_reduce(y), atol=2e-6, rtol=0)


@pytest.mark.parametrize("mesh", MESHES)
def test_scatter_undoes_gather(mesh: str) -> None:
    """Reducing what was gathered gives each shard its own tokens, times the number of shards."""
    x = jnp.round(8 * draw(shards(mesh), 3, 5))
    (found,) = on_shards(mesh, lambda a, axes: xla.reduce_scatter_tokens(xla.gather_tokens(a, axes), axes), x)
    np.testing.assert_array_equal(found, shards(mesh) * x)


@pytest.mark.parametrize("call", [xla.gather_tokens, xla.reduce_scatter_tokens, xla.all_reduce])
def test_no_axes_is_an_error(call: Callable) -> None:
    with pytest.raises(AssertionError, match="no axis"):
        call(jnp.zeros((2, 3)), ())
