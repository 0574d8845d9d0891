"""What a kernel must respect of a chip: sizes and units of one device, as numbers. No jax, no chip's name.

The plan fills a ChipLimits from targets/; an emitted program holds it as a literal and hands it to its kernels.
"""

from dataclasses import dataclass


@dataclass(frozen=True)
class ChipLimits:
    """One device (a core, where a chip has several).

    vmem_bytes: on-chip vector memory a kernel may use. lanes, sublanes: a float32 memory tile. mxu_dtypes: operands
    its matrix units multiply natively. sparse_cores: offload cores, each of sc_subcores subcores with sc_lanes lanes
    and sc_vmem_bytes of memory; 0 = none. cores_per_chip: devices that share a chip. smem_bytes: scalar memory.
    """

    vmem_bytes: int
    lanes: int
    sublanes: int
    mxu_dtypes: tuple[str, ...]
    sparse_cores: int = 0
    sc_subcores: int = 0
    sc_lanes: int = 0
    sc_vmem_bytes: int = 0
    cores_per_chip: int = 1
    smem_bytes: int = 0


# For what runs no kernel.
NO_LIMITS = ChipLimits(vmem_bytes=0, lanes=1, sublanes=1, mxu_dtypes=())

__all__ = ["NO_LIMITS", "ChipLimits"]
