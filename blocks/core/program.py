"""Mechanism shared by all emitted programs: mesh, partition specs, abstract batches, jitted steps.

An emitted program holds decisions (sizes, RULES, layer functions); this file turns them
into meshes and jitted steps. Nothing here asks for devices while tracing: steps are built
over an AbstractMesh and take the devices of their arguments, so one program compiles for
real chips, virtual CPU devices and ahead-of-time topologies alike. A kernel for SparseCores is
traced for one kind of device: its program says which (`device`), and the mesh carries it.
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental.layout import Format, Layout
from jax.sharding import AbstractDevice, AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec, Sharding

from .array_info import ArrayInfo
from .batch import Batch, Bucket, Sampling, local, ranked

Rules = dict[str, tuple[str, ...]]


def make_mesh(devices: Sequence[Any], mesh_axes: dict[str, int]) -> Mesh:
    """The mesh over `devices`, axes major to minor; neighbours on the last axis are neighbours on the chip."""
    names, sizes = tuple(mesh_axes), tuple(mesh_axes.values())
    return jax.make_mesh(sizes, names, axis_types=(AxisType.Auto,) * len(names), devices=list(devices))


def abstract_mesh(mesh_axes: dict[str, int], device: tuple[str, int] | None = None) -> AbstractMesh:
    """The same mesh without devices, for tracing. device: TPU kind and its TensorCores, for kernels that ask; or None.

    It says nothing of where the program runs: arguments on other devices are taken too.
    """
    names, sizes = tuple(mesh_axes), tuple(mesh_axes.values())
    kind = None if device is None else AbstractDevice(device[0], device[1], "tpu")
    return AbstractMesh(sizes, names, axis_types=(AxisType.Auto,) * len(names), abstract_device=kind)


def partition_spec(info: ArrayInfo, rules: Rules) -> PartitionSpec:
    """Mesh axes of each dim: the program's RULES applied to the logical axes."""
    return PartitionSpec(*(rules[axis] or None if axis else None for axis in info.axes))


def partition_specs(tree: Any, rules: Rules) -> Any:
    """partition_spec over a tree of ArrayInfo."""
    return jax.tree.map(lambda info: partition_spec(info, rules), tree, is_leaf=_is_info)


def laid_out(info: ArrayInfo, sharding: Sharding) -> Sharding | Format:
    """The sharding, with the order of dims in device memory where it is not left to the compiler."""
    return Format(Layout(tuple(range(len(info.shape)))), sharding) if info.row_major else sharding


def abstract_arrays(tree: Any, rules: Rules, mesh: Mesh) -> Any:
    """ShapeDtypeStructs with shardings on `mesh`, for lowering without data."""

    def one(info: ArrayInfo) -> jax.ShapeDtypeStruct:
        sharding = laid_out(info, NamedSharding(mesh, partition_spec(info, rules)))
        return jax.ShapeDtypeStruct(info.shape, jnp.dtype(info.dtype), sharding=sharding)

    return jax.tree.map(one, tree, is_leaf=_is_info)


def batch_info(bucket: Bucket, num_ranks: int) -> Batch:
    """The abstract batch of a bucket: a Batch of ArrayInfo with the leading rank axis."""
    rows, tokens = bucket.seqs_per_rank, bucket.tokens_per_rank

    def info(dtype: str, *dims: int) -> Any:
        return ArrayInfo((num_ranks, *dims), dtype, ("rank", *(None for _ in dims)))

    return Batch(
        tokens=info("int32", tokens),
        positions=info("int32", tokens),
        cu_q=info("int32", rows + 1),
        kv_len=info("int32", rows),
        page_table=info("int32", rows, bucket.pages_per_seq),
        slot=info("int32", rows),
        has_state=info("bool", rows),
        distribution=info("int32", 3),
        sampling=Sampling(
            temperature=info("float32", rows),
            top_k=info("int32", rows),
            top_p=info("float32", rows),
            seed=info("uint32", rows),
        ),
    )


def jit_step(
    step: Callable[..., Any],
    *,
    mesh_axes: dict[str, int],
    in_specs: tuple[Any, ...],
    out_specs: Any,
    donate_state: bool,
    matmul_precision: str,
    device: tuple[str, int] | None = None,
) -> Any:
    """Jit `step(weights, state, batch)` as one shard_map over the whole mesh.

    step sees local shards. The state is donated when donate_state, so that pools are
    updated in place. matmul_precision: jax.default_matmul_precision while tracing.
    device: as in abstract_mesh.
    """

    def traced(weights: Any, state: Any, batch: Any) -> Any:
        with jax.default_matmul_precision(matmul_precision):
            return step(weights, state, batch)

    sharded = jax.shard_map(
        traced, mesh=abstract_mesh(mesh_axes, device), in_specs=in_specs, out_specs=out_specs, check_vma=False
    )
    return jax.jit(sharded, donate_argnums=(1,) if donate_state else ())


def jit_slots(
    function: Callable[..., Any],
    num_slots: int,
    *,
    pools: dict[str, dict[str, Any]],
    mesh_axes: dict[str, int],
    state_specs: Any,
    rank: PartitionSpec,
) -> Any:
    """Jit `function(state, *slots, keys=slot pools)` on local shards; each of the num_slots arguments is int32 [R]."""
    keys = tuple(key for key, pool in pools.items() if "bytes_per_slot" in pool)

    def on_rank(state: Any, *slots: Any) -> Any:
        return ranked(function(local(state), *(slot[0] for slot in slots), keys=keys))

    specs = (state_specs, *(rank for _ in range(num_slots)))
    sharded = jax.shard_map(
        on_rank, mesh=abstract_mesh(mesh_axes), in_specs=specs, out_specs=state_specs, check_vma=False
    )
    return jax.jit(sharded, donate_argnums=(0,))


def _is_info(node: Any) -> bool:
    return isinstance(node, ArrayInfo)
