"""Arrays on the devices: shardings from logical axes, zeros made in place, stacks filled layer by layer."""

import gc
import time
import weakref
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from moec.blocks.core.array_info import ArrayInfo
from moec.blocks.core.program import laid_out, partition_spec

from .program import Program

DROP_SECONDS, DROP_POLL_SECONDS = 1.0, 0.001  # how long to wait for the devices to let go of a host buffer


def sharding_of(program: Program, mesh: Mesh, info: ArrayInfo) -> NamedSharding:
    """The sharding of an array: the program's RULES applied to its logical axes."""
    return NamedSharding(mesh, partition_spec(info, program.RULES))


@partial(jax.jit, static_argnums=(0, 1, 2))
def _zeros(shape: tuple[int, ...], dtype: str, sharding: NamedSharding) -> Array:
    return lax.with_sharding_constraint(jnp.zeros(shape, dtype), sharding)


def zeros(info: ArrayInfo, sharding: NamedSharding) -> Array:
    """Zeros made on the devices, each shard where it belongs; nothing passes through the host."""
    return _zeros(info.shape, info.dtype, sharding)


@partial(jax.jit, static_argnums=3, donate_argnums=0)
def _set_layer(stack: Array, layer: Array, index: Array, sharding: NamedSharding) -> Array:
    return lax.with_sharding_constraint(lax.dynamic_update_index_in_dim(stack, layer, index, 0), sharding)


def drop_host_buffers() -> None:
    """Have jax drop its references to host buffers whose arrays are gone or sent.

    It does so in a callback of Python's garbage collector only: without this the next buffer
    would be made while the last one is still alive.
    """
    gc.collect(0)


def _wait_until_dropped(buffer: weakref.ref[np.ndarray]) -> None:
    """Until the devices let go of a host buffer: another thread of theirs does, a little later on a busy machine."""
    deadline = time.monotonic() + DROP_SECONDS
    drop_host_buffers()
    while buffer() is not None and time.monotonic() < deadline:
        time.sleep(DROP_POLL_SECONDS)
        drop_host_buffers()


class HostFill:
    """Builds a small array on the host and sends it whole."""

    def __init__(self, info: ArrayInfo, sharding: NamedSharding):
        self._host: np.ndarray | None = np.empty(info.shape, jnp.dtype(info.dtype))
        self._place = laid_out(info, sharding)
        self._stacked = bool(info.layers)

    def layer(self, index: int) -> np.ndarray:
        """The buffer of one layer, to be filled."""
        assert self._host is not None
        return self._host[index] if self._stacked else self._host

    def commit(self, index: int) -> None:
        """Layer `index` is filled."""

    def result(self) -> Array:
        array, self._host = jax.device_put(self._host, self._place).block_until_ready(), None
        drop_host_buffers()
        return array


class DeviceFill:
    """Allocates a stack once on the devices and writes one layer at a time into it, in place."""

    def __init__(self, info: ArrayInfo, sharding: NamedSharding):
        assert info.layers and not info.row_major, info
        self._shape, self._dtype = info.shape[1:], jnp.dtype(info.dtype)
        self._sharding = sharding
        self._layer_sharding = NamedSharding(sharding.mesh, PartitionSpec(*sharding.spec[1:]))
        self._stack = zeros(info, sharding)
        self._host: np.ndarray | None = None

    def layer(self, index: int) -> np.ndarray:
        """A fresh buffer for one layer; a device may still alias the one before."""
        self._host = np.empty(self._shape, self._dtype)
        return self._host

    def commit(self, index: int) -> None:
        """Send the buffer and forget it once the devices have it, so that the host holds one layer."""
        assert self._host is not None
        buffer = weakref.ref(self._host)
        layer, self._host = jax.device_put(self._host, self._layer_sharding), None
        self._stack = _set_layer(self._stack, layer, np.int32(index), self._sharding).block_until_ready()
        del layer
        _wait_until_dropped(buffer)

    def result(self) -> Array:
        return self._stack


def fill_of(info: ArrayInfo, sharding: NamedSharding, whole_bytes: int) -> HostFill | DeviceFill:
    """The way to build an array: stacks above `whole_bytes` layer by layer on the devices."""
    nbytes = int(np.prod(info.shape)) * jnp.dtype(info.dtype).itemsize
    return DeviceFill(info, sharding) if info.layers and nbytes > whole_bytes else HostFill(info, sharding)
