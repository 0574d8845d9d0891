"""Calling an emitted step: all buckets that will be used are compiled for the devices at hand before the first call."""

from collections.abc import Callable, Collection, Sequence
from typing import Any

import jax
from jax.sharding import Mesh

from moec.blocks.core.array_info import PACKED, ArrayInfo
from moec.blocks.core.program import abstract_arrays, laid_out

from .packing import Row, choose_bucket, pack, place
from .program import Program


class Stepper:
    """One family of a program's steps (STEPS, STEPS_LOGITS or STEPS_TAPPED) on one mesh, compiled when made.

    names: the buckets that may be used. weights and state give the shapes to compile for.
    """

    def __init__(
        self,
        program: Program,
        mesh: Mesh,
        steps: dict[str, Callable[..., Any]],
        names: Collection[str],
        weights: Any,
        state: Any,
    ):
        self._program, self._mesh = program, mesh
        self._buckets = {name: bucket for name, bucket in program.BUCKETS.items() if name in names}
        infos = dict(jax.tree.leaves_with_path(program.weights()))
        weight_shapes = jax.tree.map_with_path(lambda path, array: _shape(array, infos.get(path)), weights)
        state_shapes = jax.tree.map(_shape, state)
        self._compiled = {name: self._compile(name, steps[name], weight_shapes, state_shapes) for name in self._buckets}

    def __call__(self, weights: Any, state: Any, ranks: Sequence[Sequence[Row]]) -> Any:
        """Run the rows of all ranks in the smallest bucket that takes them."""
        name = choose_bucket(self._buckets, ranks)
        assert name is not None, f"none of {list(self._buckets)} takes these rows: {ranks}"
        batch = place(self._program, self._mesh, pack(self._buckets[name], ranks))
        return self._compiled[name](weights, state, batch)

    def _compile(self, name: str, step: Any, weights: Any, state: Any) -> Callable[..., Any]:
        """The step's executable. COMPILE_OPTIONS are the TPU compiler's: other backends refuse them.

        jax keeps executables with the program's jitted function: the same shapes compile once.
        """
        options = self._program.COMPILE_OPTIONS if self._mesh.devices.flat[0].platform == "tpu" else {}
        batch = abstract_arrays(self._program.batch(name), self._program.RULES, self._mesh)
        compiled = step.lower(weights, state, batch).compile(compiler_options=options)
        # jax 0.10.2: an array of 4-bit values on XLA:CPU says sub_byte_element_size_in_bits=0 of its layout, compiled
        # steps ask for 4, and their call refuses the array (check_array_xla_sharding_layout_match of its
        # interpreters/pxla.py). The jitted step does not compare, and finds the executable just made:
        # tests/runtime/test_step.py counts compilations.
        return step if not options and _has_4_bit(weights) else compiled


def _has_4_bit(weights: Any) -> bool:
    dtypes = {form.dtype for form in PACKED.values()}
    return any(leaf.dtype.name in dtypes for leaf in jax.tree.leaves(weights))


def _shape(array: jax.Array, info: ArrayInfo | None = None) -> jax.ShapeDtypeStruct:
    """info: what the program declares, for the order of dims in device memory."""
    sharding = laid_out(info, array.sharding) if info else array.sharding
    return jax.ShapeDtypeStruct(array.shape, array.dtype, sharding=sharding)
