"""Vector memory and limits of the counting sort (tpu_dispatch.py). No jax."""

from math import ceil

from ..core.work import Load

_LANES = 128


def dispatch_vmem_bytes(tokens: int, top_k: int, num_local: int) -> int:
    """Vector memory of tpu_dispatch.py for the choices of all ranks' tokens, which stay on the chip."""
    tokens = ceil(tokens / 256) * 256
    sublanes = ceil(top_k / 8) * 8
    by_token = 2 * _LANES * 4 + 2 * sublanes * 4 + ceil(num_local / 64) * 64 * 2
    places = ceil(tokens * top_k / (64 * _LANES)) * 64 * _LANES
    return tokens * by_token + places * 3 * 4 + num_local * _LANES * 4


def dispatch_refuse(tokens: int, top_k: int, num_local: int, load: Load) -> list[str]:
    """Why the counting sort cannot order the choices of this many tokens; [] when it can."""
    found = []
    if tokens * top_k >= 2**24:
        found.append(f"{tokens} tokens x {top_k} choices: the kernel counts below {2**24}")
    if top_k > _LANES:
        found.append(f"top_k {top_k}: the kernel takes up to {_LANES}")
    if (need := dispatch_vmem_bytes(tokens, top_k, num_local)) > load.chip.vmem_bytes:
        found.append(f"{need} bytes of vector memory for {tokens} tokens: the chip has {load.chip.vmem_bytes}")
    return found


__all__ = ["dispatch_refuse", "dispatch_vmem_bytes"]
