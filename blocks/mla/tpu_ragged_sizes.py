"""Sizes of the ragged latent-attention kernel, for the kernel and for its cost: no jax."""

from math import gcd, lcm
from typing import Protocol

_MLA_ITEMSIZE = {"float32": 4, "bfloat16": 2, "float8_e4m3fn": 1, "float8_e5m2": 1}
_MLA_LANES = 128
# Query rows of one product in prefill: their scores with 512 keys are half of what the register file spills per tile.
_MLA_TILE_ROWS = 256
# What the compiler takes for itself: values that do not fit the registers.
_MLA_SLACK = 4 << 20


class MlaSizes(Protocol):
    """The part of MlaKernelShape that decides how much memory the kernel takes."""

    @property
    def prefill(self) -> bool: ...
    @property
    def block_tokens(self) -> int: ...
    @property
    def tile_tokens(self) -> int: ...
    @property
    def num_heads(self) -> int: ...
    @property
    def latent(self) -> int: ...
    @property
    def row(self) -> int: ...
    @property
    def keys(self) -> int: ...
    @property
    def buffers(self) -> int: ...
    @property
    def group(self) -> int: ...


def mla_tile_rows(dtype: str) -> int:
    """Rows of a memory tile of an activation dtype: 8 of 32 bit."""
    return 32 // _MLA_ITEMSIZE[dtype]


def mla_group(page_size: int) -> int:
    """Rows that are written together: whole tiles of every cache dtype where pages allow, and never part of a page."""
    return gcd(page_size, 32)


def mla_step_keys(wanted: int, page_size: int) -> int:
    """Keys of a step near `wanted`: whole pages, and whole rows of lanes of scores."""
    unit = lcm(page_size, _MLA_LANES)
    return max(wanted // unit, 1) * unit


def mla_query_block(rows: int, num_heads: int, tokens: int) -> tuple[int, int]:
    """Tokens of a prefill query block that make up to `rows` score rows, and of one product within it."""
    block = max(min(rows // num_heads, tokens), 1)
    most = max(_MLA_TILE_ROWS // num_heads, 1)
    return block, next(tile for tile in range(min(block, most), 0, -1) if block % tile == 0)


def mla_contraction(rows: int, latent: int) -> int:
    """Values per cached row that one product of `rows` query rows takes at once.

    Pieces of one lane row enter the matrix unit as they lie, but use half of its depth; wider ones pass the transpose
    unit first, whose time shows unless many query rows share it.
    """
    return latent if rows >= _MLA_TILE_ROWS else _MLA_LANES


def mla_vmem_bytes(sizes: MlaSizes, seqs: int, tokens: int, activation: str, cache: str) -> int:
    """Scoped VMEM: the buffers in tpu_ragged.py's order, and room for a tile's scores."""
    M, tile = sizes.block_tokens * sizes.num_heads, sizes.tile_tokens * sizes.num_heads
    act, kv = _MLA_ITEMSIZE[activation], _MLA_ITEMSIZE[cache]
    keys = sizes.buffers * sizes.keys * sizes.row * kv
    queries = 2 * M * (sizes.row + sizes.latent) * act
    softmax = M * (2 * _MLA_LANES + sizes.latent) * 4
    new = 2 * sizes.group * sizes.row * kv + (0 if sizes.prefill else seqs * sizes.row * 4)
    scores = 3 * tile * sizes.keys * 4
    return keys + queries + softmax + new + scores + _MLA_SLACK


__all__ = [
    "MlaSizes",
    "mla_contraction",
    "mla_group",
    "mla_query_block",
    "mla_step_keys",
    "mla_tile_rows",
    "mla_vmem_bytes",
]
