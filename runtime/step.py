"""Calling an emitted step: the right bucket, compiled for the devices at hand."""

from collections.abc import Callable, Sequence
from typing import Any

from jax.sharding import Mesh

from .packing import Row, choose_bucket, pack, place
from .program import Program


class Stepper:
    """One family of a program's steps (STEPS, STEPS_LOGITS or STEPS_TAPPED) on one mesh."""

    def __init__(self, program: Program, mesh: Mesh, steps: dict[str, Callable[..., Any]]):
        self._program, self._mesh, self._steps = program, mesh, steps
        self._compiled: dict[str, Callable[..., Any]] = {}

    def __call__(self, weights: Any, state: Any, ranks: Sequence[Sequence[Row]]) -> Any:
        """Run the rows of all ranks in the smallest bucket that takes them."""
        buckets = {name: self._program.BUCKETS[name] for name in self._steps}
        name = choose_bucket(buckets, ranks)
        assert name is not None, f"no bucket takes these rows: {ranks}"
        batch = place(self._program, self._mesh, pack(buckets[name], ranks))
        if name not in self._compiled:
            self._compiled[name] = self._compile(name, weights, state, batch)
        return self._compiled[name](weights, state, batch)

    def _compile(self, name: str, *args: Any) -> Callable[..., Any]:
        """The jitted step, or its executable where the program's compiler options apply.

        COMPILE_OPTIONS are the TPU compiler's; other backends refuse them.
        """
        step = self._steps[name]
        if self._mesh.devices.flat[0].platform != "tpu" or not self._program.COMPILE_OPTIONS:
            return step
        return step.lower(*args).compile(compiler_options=self._program.COMPILE_OPTIONS)  # type: ignore[attr-defined]
