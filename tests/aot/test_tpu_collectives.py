"""What libtpu makes of the collectives' TPU variants for tpu7x:2x2x1, hidden 4096: messages, copies, schedule.

`python test_tpu_collectives.py CASE TOKENS` compiles one case in a process of its own and prints what it found.
"""

import json
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

pytestmark = [pytest.mark.aot, pytest.mark.timeout(900)]

TARGET, HIDDEN, TOP_K, CHUNKS = "tpu7x:2x2x1", 4096, 10, 4
DECODE, MIXED = 64, 1024  # tokens per device


def compiled(case: str, tokens: int) -> dict[str, Any]:
    worker = [sys.executable, __file__, case, str(tokens)]
    done = subprocess.run(worker, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


Message = tuple[str, str, int, tuple[str, ...]]  # kind, dtype, elements of the full array, mesh axes


def messages(found: dict[str, Any]) -> Counter[Message]:
    return Counter((op, dtype, elements, tuple(axes)) for op, dtype, elements, axes in found["collectives"])


@pytest.mark.parametrize(("case", "tokens"), [("kernel", DECODE), ("kernel", MIXED), ("kernel_two_axes", DECODE)])
def test_kernel_counts_as_one_reduce_scatter(case: str, tokens: int) -> None:
    """To XLA it is a call like others; what it says of itself is what moec verify counts. Nothing is copied for it."""
    found = compiled(case, tokens)
    axes = ("data", "tensor") if case == "kernel_two_axes" else ("data",)
    assert messages(found) == {("reduce-scatter", "bfloat16", 8 * tokens * HIDDEN, axes): 1}
    opcodes = [opcode for opcode, _, _ in found["entry"] if opcode not in ("parameter", "bitcast", "constant")]
    # The fusions stand for what is around it in a program; large operands wait in HBM, small ones in vector memory.
    assert opcodes == ["fusion", "custom-call", "fusion"]
    assert found["compile_s"] <= 60


@pytest.mark.parametrize("tokens", [DECODE, MIXED])
def test_gathers_are_two_messages(tokens: int) -> None:
    """float8 halves the larger one; the scales are one column more of the other."""
    every, data = 8 * tokens, ("data",)
    assert messages(compiled("gather", tokens)) == {
        ("all-gather", "bfloat16", every * HIDDEN, data): 1,
        ("all-gather", "int32", every * 2 * TOP_K, data): 1,
    }
    assert messages(compiled("gather_fp8", tokens)) == {
        ("all-gather", "float8_e4m3fn", every * HIDDEN, data): 1,
        ("all-gather", "int32", every * (2 * TOP_K + 1), data): 1,
    }


@pytest.mark.parametrize("tokens", [DECODE, MIXED])
def test_next_chunk_is_summed_while_one_is_on_its_way(tokens: int) -> None:
    """In the schedule, a combine kernel stands between the begin and the end of every reduce-scatter but the last."""
    found = compiled("chunks", tokens)
    each = ("reduce-scatter", "bfloat16", 8 * tokens * HIDDEN // CHUNKS, ("data",))
    assert messages(found) == {each: CHUNKS}
    entry = found["entry"]
    # An offloaded collective begins with the update that hands it its operand; its start only reserves memory.
    begun = {name: i for i, (opcode, name, _) in enumerate(entry) if opcode == "async-update"}
    ended = [(operand, i) for i, (opcode, _, operand) in enumerate(entry) if opcode == "async-done"]
    spans = [(begun[operand.lstrip("%")], i) for operand, i in ended]
    kernels = [i for i, (opcode, name, _) in enumerate(entry) if opcode == "custom-call" and "combine_rows" in name]
    assert len(spans) == len(kernels) == CHUNKS
    assert sum(any(begin < kernel < end for kernel in kernels) for begin, end in spans) == CHUNKS - 1
    # Only the first kernel runs with nothing on its way.
    assert [k for k in kernels if not any(begin < k < end for begin, end in spans)] == kernels[:1]


# --- the worker ---


def functions(mesh: Any, tokens: int) -> dict[str, tuple[Callable, tuple[Any, ...]]]:
    """Case -> the function of one device and its arguments, global shapes."""
    import jax
    import jax.numpy as jnp

    from moec.blocks.collectives import tpu_chunked, tpu_hierarchical, xla
    from moec.blocks.core.chip import ChipLimits
    from moec.blocks.moe.tpu_combine import combine_rows

    chip = ChipLimits(64 << 20, 128, 8, ("bfloat16",), cores_per_chip=2)
    axes, every = tuple(mesh.axis_names), 8 * tokens
    batches = 2 if tokens == DECODE else 16

    def array(dtype: Any, *dims: int) -> Any:
        sharding = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec(axes))
        return jax.ShapeDtypeStruct(dims, dtype, sharding=sharding)

    def kernel(y_AD: Any) -> Any:
        doubled = y_AD * 2  # what stands before it in a program: not an argument
        options = {"chip": chip, "shards_per_chip": 2, "micro_batches": batches}
        return tpu_hierarchical.reduce_scatter_hierarchical(doubled, axes, **options) + 1

    def gather(x_TD: Any, packed: Any) -> Any:
        return xla.gather_tokens(x_TD, axes), xla.gather_routing_packed(packed, axes)

    def chunks(out: Any, place: Any, weight: Any) -> Any:
        combine = partial(combine_rows, out, width=HIDDEN, chip=chip, tile_tokens=32)
        options = {"scatter": xla.reduce_scatter_tokens, "num_chunks": CHUNKS, "dtype": jnp.bfloat16}
        return tpu_chunked.combine_reduce_scatter(combine, place, weight, axes, **options)

    rows = 8 * every * TOP_K
    tokens_and_routing = (array("bfloat16", every, HIDDEN), array("int32", every, 2 * TOP_K))
    chosen = (array("int32", 8 * every, TOP_K), array("float32", 8 * every, TOP_K))
    sums = (array("bfloat16", 8 * every, HIDDEN),)
    return {
        "kernel": (kernel, sums),
        "kernel_two_axes": (kernel, sums),
        "gather": (gather, tokens_and_routing),
        "gather_fp8": (partial(xla.gather_tokens_float8, axes=axes), tokens_and_routing),
        "chunks": (chunks, (array("int32", rows, HIDDEN // 256, 128), *chosen)),
    }


def main(case: str, tokens: int) -> None:
    import os
    import time

    os.environ |= {"JAX_PLATFORMS": "cpu", "ALLOW_MULTIPLE_LIBTPU_LOAD": "1", "TPU_SKIP_MDS_QUERY": "1"}
    import jax
    from jax.experimental import topologies

    from moec.blocks.core.program import abstract_mesh
    from moec.compiler.verify import hlo
    from moec.compiler.verify.collectives import collectives

    described = topologies.get_topology_desc(TARGET, platform="tpu")
    sizes, names = ((4, 2), ("data", "tensor")) if case == "kernel_two_axes" else ((8,), ("data",))
    mesh = topologies.make_mesh(described, sizes, names)
    function, args = functions(mesh, tokens)[case]
    spec = jax.sharding.PartitionSpec(names)
    # As an emitted program traces: over a mesh without devices.
    traced = abstract_mesh(dict(zip(names, sizes, strict=True)))
    mapped = jax.shard_map(function, mesh=traced, in_specs=spec, out_specs=spec, check_vma=False)
    with tempfile.TemporaryDirectory(prefix="moec-aot-") as dump:
        options = {"xla_tpu_control_large_2nd_minor_layout_for_x16": "false"}
        dumped = {"xla_dump_to": dump, "xla_dump_hlo_as_text": True}
        lowered, start = jax.jit(mapped).lower(*args), time.process_time()
        lowered.compile(compiler_options=options | dumped)
        seconds = time.process_time() - start
        (text,) = (path.read_text() for path in Path(dump).glob("*after_optimizations.txt"))
    module = hlo.parse(text)
    entry = [(inst.opcode, inst.name, inst.operands) for inst in module.computations[module.entry]]
    found = collectives(module, dict(zip(names, sizes, strict=True)))
    told = [(one.op, one.dtype, one.elements, one.axes) for one in found]
    print(json.dumps({"compile_s": seconds, "entry": entry, "collectives": told}))


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
