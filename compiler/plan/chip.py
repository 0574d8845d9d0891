"""What kernels must respect of a target, as the blocks see it."""

from moec.blocks.core.chip import ChipLimits
from moec.targets.target import Target


def traced_device(target: Target) -> tuple[str, int]:
    """What jax calls one device and how many TensorCores it has: kernels on SparseCores are traced for it."""
    cores = target.sparse_cores
    assert cores is not None, "a kernel on SparseCores was chosen for a chip without them"
    return cores.device_kind, int(cores.device_cores.value)


def chip_limits(target: Target) -> ChipLimits:
    """The limits of one device."""
    sparse = target.sparse_cores
    return ChipLimits(
        vmem_bytes=int(target.vmem_mib.value * 2**20) if target.vmem_mib else 0,
        lanes=target.tiling.lanes,
        sublanes=target.tiling.sublanes,
        mxu_dtypes=target.matrix_dtypes(),
        sparse_cores=int(sparse.num.value) if sparse else 0,
        sc_subcores=int(sparse.subcores.value) if sparse else 0,
        sc_lanes=int(sparse.lanes.value) if sparse else 0,
        sc_vmem_bytes=int(sparse.vmem_kib.value * 2**10) if sparse else 0,
        cores_per_chip=target.cores,
        smem_bytes=int(target.smem_kib.value * 2**10) if target.smem_kib else 0,
    )
