"""HBM traffic of one layer, counted from what libtpu compiled for the committed program's chip, widths and tiles.

Before: the XLA form of the same function; for the sums of expert rows a gather + reduce, the form that a program has
without kernels of its own (blocks/moe/xla.py avoids it by adding block by block). After: the kernel. Operands and
results of instructions are the compiler's (moec/compiler/verify/traffic.py has the rules).

A kernel's bytes are those of its copies: their sizes, in which loops they stand and how many there are is read off the
compiled bundles. How often a loop runs is not there, because it depends on data (rows of the batch, rows of experts),
in XLA's loop over decode rows too: those passes are this file's arithmetic, for decode rows that all have a state and
for choices that are spread evenly.
So a copy that is too large, doubled, or in a loop deeper than said is found here, a loop that makes a pass too many is
not; that every row is taken once is what the kernels' numerics tests show.

`python test_traffic.py DIR CASE...` compiles cases in a process of its own and leaves optimised HLO and bundles in DIR.
"""

import math
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest

from moec.blocks.gated_delta.block import Fields as GatedDelta
from moec.blocks.moe.block import Fields as Moe
from moec.compiler.plan.chip import chip_limits
from moec.compiler.plan.plan import Plan
from moec.compiler.spec.load import load
from moec.compiler.verify import bundles, hlo
from moec.compiler.verify.traffic import FREE, Moved, operands, traffic
from moec.targets.target import load_target

pytestmark = [pytest.mark.aot, pytest.mark.timeout(900)]

# Widths, tiles and pools of the committed program, one device of it in its decode step.
MODEL, TARGET, WORKLOAD = "qwen3.5-397b-a17b", "tpu7x:2x2x1", "decode_512x9216"
COMMITTED = Path(__file__).parents[2] / "generated/qwen3_5_397b_a17b/tpu7x_2x2x1/decode_512x9216/plan.json"
PLAN = Plan.model_validate_json(COMMITTED.read_bytes())
GRAPH = load(MODEL, target=TARGET, workload=WORKLOAD).graph
DECODE = next(bucket for bucket in PLAN.buckets if bucket.name == "decode")
CHIP = chip_limits(load_target(PLAN.target))
# Gated DeltaNet, every row with a state. Hidden is small, because weights are not what is counted.
GDN, HIDDEN, LANES = cast(GatedDelta, GRAPH.blocks()["gdn"].fields), 1024, CHIP.lanes
ROWS, LAYERS, SLOTS = DECODE.seqs_per_rank, len(GRAPH.layers_of("gdn")), PLAN.slots_per_rank
CHANNELS = 2 * GDN.num_qk_heads + GDN.num_v_heads
CONV = (PLAN.dtypes.conv, (LAYERS, SLOTS, (GDN.conv_kernel - 1) * CHANNELS, LANES))
STATE = (PLAN.dtypes.state, (LAYERS, SLOTS, GDN.num_v_heads, GDN.dk, GDN.dv))
# Combine: the tokens of all ranks, uniform routing.
ROUTER, WIDTH = cast(Moe, GRAPH.blocks()["moe"].fields).router, GRAPH.dims.hidden_size
TOKENS, TOP_K, EXPERTS = DECODE.tokens_per_rank * PLAN.mesh.dp, ROUTER.top_k, ROUTER.num_experts // PLAN.mesh.ep
LOCAL_ROWS = TOKENS * TOP_K // PLAN.mesh.ep
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


def dma_bytes(tree: bundles.Node, direction: str, *stretches: tuple[int, int]) -> int:
    """Bytes copied in one direction by one launch.

    stretches: of each stretch of bundles that starts such copies, in textual order, how many loops stand around it,
    and how often it runs in all. Sizes and loops are the compiled ones.
    """
    assert bundles.static(tree).bytes.keys() <= {"hbm_to_vmem", "vmem_to_hbm", "hbm_to_smem"}  # the last: tables
    found = [(node.path.count("L"), node.own) for node in tree.walk() if node.own.bytes.get(direction)]
    assert not any(own.unsized for _, own in found)
    assert [loops for loops, _ in found] == [loops for loops, _ in stretches], found
    return sum(int(own.bytes[direction]) * times for (_, own), (_, times) in zip(found, stretches, strict=True))


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
    read = dma_bytes(trees["gdn_decode"], "hbm_to_vmem", (0, 1), (0, 1), (1, ROWS - 1))
    written = dma_bytes(trees["gdn_decode"], "vmem_to_hbm", (1, ROWS))
    once = ROWS * (state + window)
    # What is more are the rows' inputs, gates and outputs.
    assert once <= read <= 1.02 * once
    assert once <= written <= 1.02 * once

    after = total(traffic(module, module.entry, {"gdn_decode": (read, written)}))
    saved = before - after
    # The kernel has its inputs and outputs in HBM, XLA keeps them in VMEM: far less than a pass over the states.
    assert saved.sum() >= 0.9 * ROWS * state, f"read and written: {before} before, {after} after"


def test_sums_of_expert_rows_have_no_array_of_every_choice(tmp_path: Path) -> None:
    """Every token's choices, 10 rows, are read and written less: nothing holds [tokens x top_k, hidden]."""
    from moec.blocks.moe import tpu_combine

    found = compiled(tmp_path, "gather_reduce", "combine_rows", "combine_stream")

    module, _ = found["gather_reduce"]
    moved = traffic(module, module.entry)
    before = total(moved)
    made = {m.inst.name for m in moved if m.written >= EVERY_CHOICE}
    read_again = sum(size for m in moved for name, size in m.reads.items() if name in made)
    # At least: XLA also makes it in float32.
    assert sum(m.written for m in moved if m.inst.name in made) >= EVERY_CHOICE <= read_again

    # By token, of a word of bits of a tile: one copy per local row. By row: pieces, the first ones ahead.
    ahead, pieces = tpu_combine._COMBINE_DEPTH, LOCAL_ROWS // PLAN.tuning["moe.stream_rows.decode"]
    for case, bucket, copies in (
        ("combine_rows", "mixed", [(3, LOCAL_ROWS)]),
        ("combine_stream", "decode", [(2, ahead), (2, pieces - ahead)]),
    ):
        tiles = TOKENS // PLAN.tuning[f"moe.combine_tokens.{bucket}"]
        module, trees = found[case]
        body = [i for body in module.computations.values() for i in body]
        large = [i for i in body if max(map(array_bytes, hlo.arrays_of(i.type)), default=0) >= EVERY_CHOICE]
        # The experts' output has room for every choice; only local rows are in it.
        assert [i.opcode for i in large] == ["parameter"], large
        (kernel,) = (name for name in trees if name.startswith(case))
        read = dma_bytes(trees[kernel], "hbm_to_vmem", *copies)
        written = dma_bytes(trees[kernel], "vmem_to_hbm", (1, tiles))
        assert (read, written) == (LOCAL_ROWS * ROW_BYTES, SUM_BYTES)
        (call,) = (m for m in traffic(module, module.entry) if m.inst.opcode == "custom-call")
        tables = sum(size for name, size in call.reads.items() if name != large[0].name)
        saved = before - total(traffic(module, module.entry, {kernel: (read + tables, written)}))
        rows_per_token = saved / (TOKENS * ROW_BYTES)
        assert min(rows_per_token) >= TOP_K, f"rows per token read and written less: {rows_per_token}"


def total(moved: list[Moved]) -> np.ndarray:
    """Bytes read and written."""
    return np.array([sum(m.read for m in moved), sum(m.written for m in moved)])


# --- the worker ---


def gated_delta_case(sharding: Any, name: str) -> tuple[Callable[..., Any], tuple[Any, ...], tuple[int, ...]]:
    """Function, arguments and which of them are donated: one layer's mixer over decode rows."""
    import jax

    from moec.blocks.core.batch import Batch, index_rows
    from moec.blocks.gated_delta.tpu_fused import gated_delta_fused
    from moec.blocks.gated_delta.xla import gated_delta

    mixer = (
        gated_delta if name == "gdn_xla" else partial(gated_delta_fused, chip=CHIP, unroll=PLAN.tuning["gdn.unroll"])
    )
    options: dict[str, Any] = {
        "num_qk_heads": GDN.num_qk_heads, "num_v_heads": GDN.num_v_heads, "head_k_dim": GDN.dk, "head_v_dim": GDN.dv,
        "conv_kernel": GDN.conv_kernel, "norm_eps": 1e-6, "norm_zero_centered": False,
        "chunk": PLAN.tuning["gdn.chunk"], "max_q": DECODE.max_q,
    }  # fmt: skip

    def run(h: Any, w: Any, conv: Any, state: Any, batch: Any, layer: Any) -> Any:
        out, conv, state = mixer(h, w, conv, state, batch, index_rows(batch), pool_layer=layer, **options)
        return conv, state, h + out

    def array(*dims: int, dtype: str = "bfloat16") -> Any:
        return jax.ShapeDtypeStruct(dims, dtype, sharding=sharding)

    heads, qk, v = GDN.num_v_heads, GDN.num_qk_heads * GDN.dk, GDN.num_v_heads * GDN.dv
    widths = {"w_q": qk, "w_k": qk, "w_v": v, "w_z": v, "w_b": heads, "w_a": heads}
    w = {key: array(HIDDEN, width) for key, width in widths.items()}
    w |= {key: array(width, GDN.conv_kernel) for key, width in {"conv_q": qk, "conv_k": qk, "conv_v": v}.items()}
    w |= {key: array(heads, dtype="float32") for key in ("a_log", "dt_bias")}
    w |= {"out_norm": array(GDN.dv), "w_o": array(v, HIDDEN)}
    ints = partial(array, dtype="int32")
    row, has_state = ints(ROWS), array(ROWS, dtype="bool")
    batch = Batch(row, row, ints(ROWS + 1), row, ints(ROWS, 4), row, has_state, ints(3), None)  # type: ignore[arg-type]
    return (
        run,
        (array(ROWS, HIDDEN), w, array(*CONV[1], dtype=CONV[0]), array(*STATE[1], dtype=STATE[0]), batch, ints()),
        (2, 3),
    )


def sum_case(sharding: Any, name: str) -> tuple[Callable[..., Any], tuple[Any, ...], tuple[int, ...]]:
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
    weights, geometry = array("float32", TOKENS, TOP_K), {"width": WIDTH, "chip": CHIP}
    cases: dict[str, tuple[Callable[..., Any], tuple[Any, ...]]] = {
        "gather_reduce": (gather_reduce, (array("bfloat16", choices, WIDTH), places, weights)),
        # Of the mixed step's chunks, which it sums the same way.
        "combine_rows": (
            partial(combine_rows, tile_tokens=PLAN.tuning["moe.combine_tokens.mixed"], **geometry),
            (words, places, weights),
        ),
        "combine_stream": (
            partial(
                combine_stream,
                tile_tokens=PLAN.tuning["moe.combine_tokens.decode"],
                tile_rows=PLAN.tuning["moe.stream_rows.decode"],
                **geometry,
            ),
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

    device = topologies.get_topology_desc(PLAN.target, platform="tpu").devices[0]
    mesh = jax.sharding.Mesh(np.array([device]), ("x",))
    sharding = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())
    for case in cases:
        make = gated_delta_case if case.startswith("gdn") else sum_case
        function, arguments, donated = make(sharding, case)
        options: dict[str, Any] = {
            **PLAN.compile_options,
            "xla_dump_to": f"{folder}/{case}",
            "xla_dump_hlo_as_text": True,
        }
        jax.jit(function, donate_argnums=donated).lower(*arguments).compile(compiler_options=options)


if __name__ == "__main__":
    main(*sys.argv[1:])
