"""Pages and slots of one rank, and the device state they index. Page 0 and slot 0 are sinks for padding."""

from collections.abc import Iterable

from jax import Array
from jax.sharding import Mesh

from moec.blocks.core.array_info import ArrayInfo

from .placement import sharding_of, zeros
from .program import Program


class PageAllocator:
    """Hands out pages 1 .. num_pages - 1 of one rank, lowest first."""

    def __init__(self, num_pages: int):
        assert num_pages >= 2, f"{num_pages} pages: page 0 is the sink, so nothing could be stored"
        self._free = list(range(num_pages - 1, 0, -1))
        self._taken: set[int] = set()

    @property
    def available(self) -> int:
        return len(self._free)

    def allocate(self, count: int) -> tuple[int, ...]:
        """Take `count` pages; the caller has looked at `available`."""
        assert 0 <= count <= self.available, (count, self.available)
        pages = tuple(self._free.pop() for _ in range(count))
        self._taken.update(pages)
        return pages

    def free(self, pages: Iterable[int]) -> None:
        """Give pages back; each must be taken."""
        for page in sorted(pages, reverse=True):
            self._taken.remove(page)
            self._free.append(page)


class SlotAllocator:
    """Hands out slots 1 .. num_slots - 1 of one rank, one per sequence."""

    def __init__(self, num_slots: int):
        self._ids = PageAllocator(num_slots)

    @property
    def available(self) -> int:
        return self._ids.available

    def allocate(self) -> int:
        """Take a slot. Its old contents stay: a new sequence runs with has_state False."""
        return self._ids.allocate(1)[0]

    def free(self, slot: int) -> None:
        self._ids.free((slot,))


def state_info(program: Program, num_pages: int, num_slots: int) -> dict[str, ArrayInfo]:
    """The program's abstract state with as many pages, or slots, in every pool; counts per rank, sinks included."""
    pages = {key: num_pages for key, pool in program.POOLS.items() if "bytes_per_page" in pool}
    slots = {key: num_slots for key, pool in program.POOLS.items() if "bytes_per_slot" in pool}
    return program.state(pages, slots)


def allocate_state(program: Program, mesh: Mesh, num_pages: int, num_slots: int) -> dict[str, Array]:
    """The program's state, zeros made on the devices; counts are per rank, sinks included."""
    infos = state_info(program, num_pages, num_slots)
    return {key: zeros(info, sharding_of(program, mesh, info)) for key, info in infos.items()}
