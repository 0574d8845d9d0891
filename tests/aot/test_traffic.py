"""HBM traffic of one layer on tpu7x at the flagship's widths, counted from what libtpu compiled: XLA and kernels.

`python test_traffic.py DIR CASE...` compiles cases in a process of its own and leaves optimised HLO and bundles in DIR.
"""

import math
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from moec.compiler.verify import bundles, hlo
from moec.compiler.verify.traffic import FREE, Moved, operands, traffic

pytestmark = [pytest.mark.aot, pytest.mark.timeout(900)]

# Gated DeltaNet: few rows; hidden is small, because weights are not what is counted. Pools too large for vector memory.
ROWS, LAYERS, SLOTS, HIDDEN, QK_HEADS, V_HEADS, LANES, TAPS = 32, 45, 65, 1024, 16, 64, 128, 4
CONV = ("bfloat16", (LAYERS, SLOTS, (TAPS - 1) * (2 * QK_HEADS + V_HEADS), LANES))
STATE = ("bfloat16", (LAYERS, SLOTS, V_HEADS, LANES, LANES))
# The way back from experts: one rank of EP8, uniform routing.
TOKENS, TOP_K, WIDTH, TILE, EXPERTS, STREAM_DEPTH = 512, 10, 4096, 32, 64, 8
LOCAL_ROWS = TOKENS * TOP_K // 8
ROW_BYTES, SUM_BYTES = WIDTH * 2, TOKENS * WIDTH * 4
EVERY_CHOICE = TOKENS * TOP_K * ROW_BYTES  # bytes of [tokens * top_k, width] in bfloat16


def compiled(folder: Path, *cases: str) -> dict[str, tuple[hlo.Module, dict[str, bundles.Node]]]:
    """Each case's module and its kernels' control trees."""
    worker = [sys.executable, __file__, str(folder), *cases]
    done = subprocess.run(worker, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    kernels = [(name.rsplit(".", 1)[0], file) for name, file in bundles.modules(folder)]
    trees = {k: bundles.parse(file.read_text()) for k, file in kernels if k.startswith(("gdn_", "combine_"))}
    texts = {case: next((folder / case).glob("*.after_optimizations.txt")) for case in cases}
    return {case: (hlo.parse(text.read_text()), trees) for case, text in texts.items()}


def dma_bytes(tree: bundles.Node, direction: str, *passes: int) -> int:
    """Bytes copied, from how often each stretch that starts such copies runs, in textual order."""
    assert bundles.static(tree).bytes.keys() <= {"hbm_to_vmem", "vmem_to_hbm", "hbm_to_smem"}  # the last: tables
    found = [node.own for node in tree.walk() if node.own.bytes.get(direction)]
    assert len(found) == len(passes) and not any(own.unsized for own in found)
    return sum(int(own.bytes[direction]) * times for own, times in zip(found, passes, strict=True))


def touching(module: hlo.Module, pool: hlo.ArrayType) -> list[hlo.Instruction]:
    """Instructions of the whole program with this type as an operand or a result, copies among them; none fused."""
    fused = {name for body in module.computations.values() for i in body if i.opcode == "fusion" for name in i.called}
    found: list[hlo.Instruction] = []
    for body in (body for name, body in module.computations.items() if name not in fused):
        holds = {i.name for i in body if pool in hlo.arrays_of(i.type)}
        found += [i for i in body if i.opcode not in FREE and (i.name in holds or holds & set(operands(i)))]
    return found


def pool_bytes(module: hlo.Module, computation: str, pool: hlo.ArrayType) -> tuple[int, int]:
    """Read from and written to the pool in one pass through the computation."""
    holds = {i.name for i in module.computations[computation] if pool in hlo.arrays_of(i.type)}
    moved = traffic(module, computation)
    read = sum(size for m in moved for name, size in m.reads.items() if name in holds)
    return read, sum(m.written for m in moved if m.inst.name in holds)


def array_bytes(array: hlo.ArrayType) -> int:
    return math.prod(array[1]) * np.dtype(array[0]).itemsize


def slot_bytes(pool: hlo.ArrayType) -> int:
    return array_bytes((pool[0], pool[1][2:]))


def test_state_and_window_are_read_once_and_written_once(tmp_path: Path) -> None:
    found = compiled(tmp_path, "gdn_xla", "gdn_fused")
    state, window = slot_bytes(STATE), slot_bytes(CONV)

    # Before: the row loop reads a row's state for the two products, and once more to update it.
    module, _ = found["gdn_xla"]
    loops = [i for body in module.computations.values() for i in body if i.opcode == "while"]
    (body,) = {loop.attr("body") for loop in loops if STATE in hlo.arrays_of(loop.type)}
    assert pool_bytes(module, body, STATE) == (2 * state, state)
    assert pool_bytes(module, module.entry, CONV) == (ROWS * window, ROWS * window)
    per_row = traffic(module, body)
    before = total(traffic(module, module.entry)) + ROWS * total(per_row)

    # After: one instruction has the pools, in place, and its copies are each row's state and window in and out.
    module, trees = found["gdn_fused"]
    kernels = touching(module, STATE)
    assert [i.name.rsplit(".", 1)[0] for i in kernels] == ["gdn_decode"] and touching(module, CONV) == kernels
    assert "output_to_operand_aliasing={{1}: (7, {}), {2}: (8, {})}" in kernels[0].attrs
    assert {0, 1} <= set(module.aliased_outputs)
    # Set-up, the first row, every row but the first while the one before is worked on.
    read = dma_bytes(trees["gdn_decode"], "hbm_to_vmem", 1, 1, ROWS - 1)
    written = dma_bytes(trees["gdn_decode"], "vmem_to_hbm", ROWS)
    once = ROWS * (state + window)
    # What is more are the rows' inputs, gates and outputs.
    assert once <= read <= 1.02 * once
    assert once <= written <= 1.02 * once

    after = total(traffic(module, module.entry, {"gdn_decode": (read, written)}))
    saved = before - after
    # The kernel has its inputs and outputs in HBM, XLA keeps them in VMEM: far less than a pass over the states.
    assert saved.sum() >= 0.9 * ROWS * state, f"read and written: {before} before, {after} after"


def test_sums_of_expert_rows_have_no_array_of_every_choice(tmp_path: Path) -> None:
    found = compiled(tmp_path, "gather_reduce", "combine_rows", "combine_stream")

    module, _ = found["gather_reduce"]
    moved = traffic(module, module.entry)
    before = total(moved)
    made = {m.inst.name for m in moved if m.written >= EVERY_CHOICE}
    read_again = sum(size for m in moved for name, size in m.reads.items() if name in made)
    # At least: XLA also makes it in float32.
    assert sum(m.written for m in moved if m.inst.name in made) >= EVERY_CHOICE <= read_again

    tiles, pieces = TOKENS // TILE, LOCAL_ROWS // TILE
    # By token: one copy per local row. By row: pieces, the first ones ahead.
    for case, copies in {
        "combine_rows": (LOCAL_ROWS,),
        "combine_stream": (STREAM_DEPTH, pieces - STREAM_DEPTH),
    }.items():
        module, trees = found[case]
        body = [i for body in module.computations.values() for i in body]
        large = [i for i in body if max(map(array_bytes, hlo.arrays_of(i.type)), default=0) >= EVERY_CHOICE]
        # The experts' output has room for every choice; only local rows are in it.
        assert [i.opcode for i in large] == ["parameter"], large
        (kernel,) = (name for name in trees if name.startswith(case))
        read = dma_bytes(trees[kernel], "hbm_to_vmem", *copies)
        written = dma_bytes(trees[kernel], "vmem_to_hbm", tiles)
        assert (read, written) == (LOCAL_ROWS * ROW_BYTES, SUM_BYTES)
        (call,) = (m for m in traffic(module, module.entry) if m.inst.opcode == "custom-call")
        tables = sum(size for name, size in call.reads.items() if name != large[0].name)
        saved = before - total(traffic(module, module.entry, {kernel: (read + tables, written)}))
        assert min(saved) >= EVERY_CHOICE, f"read and written less: {saved}"


def total(moved: list[Moved]) -> np.ndarray:
    """Bytes read and written."""
    return np.array([sum(m.read for m in moved), sum(m.written for m in moved)])


# --- the worker ---


def gated_delta_case(
    sharding: Any, name: str, chip: Any
) -> tuple[Callable[..., Any], tuple[Any, ...], tuple[int, ...]]:
    """Function, arguments and which of them are donated: one layer's mixer over decode rows."""
    import jax

    from moec.blocks.core.batch import Batch, index_rows
    from moec.blocks.gated_delta.tpu_fused import gated_delta_fused
    from moec.blocks.gated_delta.xla import gated_delta

    mixer = gated_delta if name == "gdn_xla" else partial(gated_delta_fused, chip=chip, unroll=4)
    options: dict[str, Any] = {
        "num_qk_heads": QK_HEADS, "num_v_heads": V_HEADS, "head_k_dim": LANES, "head_v_dim": LANES, "conv_kernel": TAPS,
        "norm_eps": 1e-6, "norm_zero_centered": False, "chunk": 64, "max_q": 1,
    }  # fmt: skip

    def run(h: Any, w: Any, conv: Any, state: Any, batch: Any, layer: Any) -> Any:
        out, conv, state = mixer(h, w, conv, state, batch, index_rows(batch), pool_layer=layer, **options)
        return conv, state, h + out

    def array(*dims: int, dtype: str = "bfloat16") -> Any:
        return jax.ShapeDtypeStruct(dims, dtype, sharding=sharding)

    qk, v = QK_HEADS * LANES, V_HEADS * LANES
    widths = {"w_q": qk, "w_k": qk, "w_v": v, "w_z": v, "w_b": V_HEADS, "w_a": V_HEADS}
    w = {key: array(HIDDEN, width) for key, width in widths.items()}
    w |= {key: array(width, TAPS) for key, width in {"conv_q": qk, "conv_k": qk, "conv_v": v}.items()}
    w |= {key: array(V_HEADS, dtype="float32") for key in ("a_log", "dt_bias")}
    w |= {"out_norm": array(LANES), "w_o": array(v, HIDDEN)}
    ints = partial(array, dtype="int32")
    row, has_state = ints(ROWS), array(ROWS, dtype="bool")
    batch = Batch(row, row, ints(ROWS + 1), row, ints(ROWS, 4), row, has_state, ints(3), None)  # type: ignore[arg-type]
    return run, (array(ROWS, HIDDEN), w, array(*CONV[1]), array(*STATE[1]), batch, ints()), (2, 3)


def sum_case(sharding: Any, name: str, chip: Any) -> tuple[Callable[..., Any], tuple[Any, ...], tuple[int, ...]]:
    """The weighted sum of each token's expert rows, as XLA is given it, or by a kernel."""
    import jax
    import jax.numpy as jnp

    from moec.blocks.moe.tpu_combine import combine_rows, combine_stream

    def gather_reduce(rows: Any, place: Any, weight: Any) -> Any:
        chosen = rows.at[jnp.maximum(place, 0).reshape(-1)].get(mode="promise_in_bounds")
        weighted = chosen.reshape(TOKENS, TOP_K, WIDTH).astype(jnp.float32) * weight[:, :, None]
        return jnp.sum(jnp.where((place >= 0)[:, :, None], weighted, 0), axis=1)

    def array(dtype: str, *dims: int) -> Any:
        return jax.ShapeDtypeStruct(dims, dtype, sharding=sharding)

    choices, flat = TOKENS * TOP_K, array("int32", TOKENS * TOP_K)
    words, places = array("int32", choices, WIDTH // 256, LANES), array("int32", TOKENS, TOP_K)
    weights, tiles = array("float32", TOKENS, TOP_K), {"width": WIDTH, "chip": chip, "tile_tokens": TILE}
    cases: dict[str, tuple[Callable[..., Any], tuple[Any, ...]]] = {
        "gather_reduce": (gather_reduce, (array("bfloat16", choices, WIDTH), places, weights)),
        "combine_rows": (partial(combine_rows, **tiles), (words, places, weights)),
        "combine_stream": (
            partial(combine_stream, tile_rows=TILE, **tiles),
            (words, flat, flat, array("int32", EXPERTS + 1), weights),
        ),
    }
    return *cases[name], ()


def main(folder: str, *cases: str) -> None:
    import os

    dumped = f"--xla_jf_dump_to={folder} --xla_jf_dump_llo_text=true"
    os.environ |= {"JAX_PLATFORMS": "cpu", "ALLOW_MULTIPLE_LIBTPU_LOAD": "1", "TPU_SKIP_MDS_QUERY": "1"}
    os.environ["LIBTPU_INIT_ARGS"] = f"{dumped} --xla_jf_dump_llo_pass_label_regex=.*final_bundles.*"
    import jax
    from jax.experimental import topologies

    from moec.blocks.core.chip import ChipLimits

    device = topologies.get_topology_desc("tpu7x:2x2x1", platform="tpu").devices[0]
    mesh = jax.sharding.Mesh(np.array([device]), ("x",))
    sharding = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())
    chip = ChipLimits(64 << 20, 128, 8, ("bfloat16",), cores_per_chip=2)
    for case in cases:
        make = gated_delta_case if case.startswith("gdn") else sum_case
        function, arguments, donated = make(sharding, case, chip)
        options: dict[str, Any] = {"xla_tpu_control_large_2nd_minor_layout_for_x16": "false"}
        options |= {"xla_dump_to": f"{folder}/{case}", "xla_dump_hlo_as_text": True}
        jax.jit(function, donate_argnums=donated).lower(*arguments).compile(compiler_options=options)


if __name__ == "__main__":
    main(*sys.argv[1:])
