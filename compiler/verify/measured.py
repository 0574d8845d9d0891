"""What one ahead-of-time compile was asked and what it gave: the records between aot.py and its worker."""

from typing import Literal

from .collectives import Collective
from .kernels import Kernel
from .report import Frozen


class Request(Frozen):
    """One compile. Paths are absolute; num_pages and num_slots are counts per attention-DP rank.

    topology: "tpu7x:2x2x1" (libtpu) or "cpu:N" (N virtual devices).
    keep_dump: directory that receives the XLA dump; null = the dump is read and deleted.
    """

    program_dir: str
    topology: str
    bucket: str
    num_pages: int
    num_slots: int
    cache_dir: str
    lock_file: str
    keep_dump: str | None = None


class Buffer(Frozen):
    """One buffer of the compiler's memory report. shapes: the values that share it."""

    bytes: int
    shapes: str


class Memory(Frozen):
    """Bytes per device as the compiler reports them. total = argument + output - alias + temp."""

    argument: int
    output: int
    alias: int
    temp: int
    code: int

    @property
    def total(self) -> int:
        return self.argument + self.output - self.alias + self.temp


class Oom(Frozen):
    """The compiler's own out-of-memory verdict, bytes per device."""

    needed: int
    available: int


class StateArray(Frozen):
    """One array of the program's state. bytes: its share of one device."""

    name: str
    bytes: int
    aliased: bool


class Measured(Frozen):
    """Result of one compile. Everything but `cached` is what is stored in the cache.

    seconds: lower_s = trace to StableHLO; compile_s (wall) and compile_cpu_s = XLA.
    message: first lines of the compiler's error, "" when it compiled.
    """

    outcome: Literal["compiled", "oom", "error"]
    bucket: str
    plan_digest: str
    versions: dict[str, str]
    key: str = ""
    cached: bool = False
    lower_s: float = 0.0
    compile_s: float = 0.0
    compile_cpu_s: float = 0.0
    peak_rss_bytes: int = 0
    memory: Memory | None = None
    oom: Oom | None = None
    state: tuple[StateArray, ...] = ()
    buffers: tuple[Buffer, ...] = ()
    collectives: tuple[Collective, ...] = ()
    kernels: tuple[Kernel, ...] = ()
    message: str = ""
