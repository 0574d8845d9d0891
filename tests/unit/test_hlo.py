"""The HLO reader on optimised HLO of small programs.

hlo/*.txt are the after_optimizations dumps (libtpu 0.0.52 for tpu7x:2x2x1, XLA:CPU for cpu_scan) of
tests/aot/toy (scan, small_batch = its bucket "tiny") and of two toys with a 4x2 mesh and with small
gathers. Cut from them: file tables, backend configs (but trip counts) and computations without
collectives, save loop conditions.
"""

from pathlib import Path

import pytest

from moec.compiler.verify import hlo
from moec.compiler.verify.collectives import Collective, collectives, replica_groups

HERE = Path(__file__).parent / "hlo"
MOE = "jit(traced)/shard_map/while/body/closed_call/moe"


def read(name: str, axes: dict[str, int]) -> tuple[hlo.Module, tuple[Collective, ...]]:
    module = hlo.parse((HERE / f"{name}.txt").read_text())
    return module, collectives(module, axes)


def brief(found: tuple[Collective, ...]) -> list[tuple[str, str, tuple[int, ...], int | None]]:
    return [(c.op, c.dtype, c.shape, c.count) for c in found]


def test_offloaded_collectives_of_a_scan() -> None:
    """Wrapped twice: async-start -> async computation -> call -> collective; nested loops beside them."""
    module, found = read("tpu_scan", {"data": 8})
    assert brief(found) == [
        ("all-gather", "int32", (8, 16, 2), 3),
        ("all-gather", "bfloat16", (128, 256), 3),
        ("reduce-scatter", "bfloat16", (128, 256), 3),
        ("all-gather", "bfloat16", (16, 1024), 1),
    ]
    assert [c.op_name for c in found[:3]] == [f"{MOE}/all_gather", f"{MOE}/all_gather", f"{MOE}/reduce_scatter"]
    assert all(c.is_async and c.thread == "sparsecore" for c in found)
    assert all(c.axes == ("data",) and c.group_size == 8 for c in found)
    assert [c.in_loop for c in found] == [True, True, True, False]
    assert module.aliased_outputs == (0, 1)
    assert module.num_devices == 8


def test_scatter_that_became_a_sum() -> None:
    """The all-reduce XLA made of it has lost its scope: the path is that of the loop."""
    _, found = read("tpu_small_batch", {"data": 8})
    reduce = next(c for c in found if c.op == "all-reduce")
    assert (reduce.shape, reduce.count, reduce.is_async) == ((16, 256), 3, False)
    assert reduce.op_name == "jit(traced)/shard_map/while"


def test_axes_of_a_two_axis_mesh() -> None:
    _, found = read("tpu_two_axes", {"data": 4, "tensor": 2})
    assert {c.axes for c in found} == {("tensor",)}
    assert {c.group_size for c in found} == {2}
    assert next(c.shape for c in found if c.op == "reduce-scatter") == (512, 256)
    # The same groups belong to no axis of another mesh.
    _, found = read("tpu_two_axes", {"data": 2, "tensor": 4})
    assert {c.axes for c in found} == {()}


def test_small_gathers_become_sums() -> None:
    _, found = read("tpu_small_gathers", {"tensor": 8})
    assert brief(found) == [("all-reduce", "int32", (512,), 1), ("all-reduce", "float32", (512,), 1)]


def test_cpu_text_with_annotated_trip_counts() -> None:
    """XLA:CPU widens bfloat16 collectives and annotates trip counts."""
    _, found = read("cpu_scan", {"data": 8})
    assert sorted(brief(found)) == [
        ("all-gather", "float32", (16, 1024), 1),
        ("all-gather", "float32", (128, 256), 3),
        ("all-gather", "int32", (128, 2), 3),
        ("reduce-scatter", "float32", (128, 256), 3),
    ]
    assert not any(c.is_async for c in found)


FUSED = """HloModule m, num_partitions=4

%scatter (p: bf16[8,4]) -> bf16[2,4] {
  %p = bf16[8,4]{1,0} parameter(0)
  %zero = s32[] constant(0)
  %all-reduce.1 = bf16[8,4]{1,0} all-reduce(%p), replica_groups=[2,2]<=[2,2]T(1,0), to_apply=%add
  ROOT %slice = bf16[4,4]{1,0} dynamic-slice(%all-reduce.1, %zero, %zero), dynamic_slice_sizes={4,4}
}

%cond (c: (s32[], s32[])) -> pred[] {
  %c = (s32[], s32[]) parameter(0)
  %i = s32[] get-tuple-element(%c), index=0
  %n = s32[] get-tuple-element(%c), index=1
  ROOT %lt = pred[] compare(%i, %n), direction=LT
}

%body (b: (s32[], s32[])) -> (s32[], s32[]) {
  %b = (s32[], s32[]) parameter(0)
  %x = f32[4]{0} constant({1, 2, 3, 4})
  %pair = (f32[4]{0}, s32[2]{0}) all-reduce(%x, %x), replica_groups={}, to_apply=%add
  ROOT %t = (s32[], s32[]) tuple(%b)
}

ENTRY %main (a: bf16[8,4]) -> bf16[4,4] {
  %a = bf16[8,4]{1,0} parameter(0)
  %loop = (s32[], s32[]) while(%a), condition=%cond, body=%body
  %start = (bf16[2,4]{1,0}, bf16[8,4]{1,0}) all-gather-start(%a), replica_groups={{0,1,2,3}}, dimensions={0}
  %done = bf16[8,4]{1,0} all-gather-done(%start)
  ROOT %fusion = bf16[4,4]{1,0} fusion(%a), kind=kCustom, calls=%scatter, metadata={op_name="jit(f)/moe/x"}
}
"""


def test_fused_scatter_start_done_pairs_and_dynamic_loops() -> None:
    module = hlo.parse(FUSED)
    found = collectives(module, {"data": 2, "tensor": 2})
    assert brief(found) == [
        ("all-reduce", "float32", (4,), None),  # the loop's bound is data
        ("all-reduce", "int32", (2,), None),
        ("all-gather", "bfloat16", (8, 4), 1),
        ("reduce-scatter", "bfloat16", (8, 4), 1),
    ]
    assert [c.combined for c in found] == [True, True, False, False]
    assert [c.axes for c in found] == [("data", "tensor")] * 3 + [("data",)]
    assert (found[2].is_async, found[3].op_name) == (True, "jit(f)/moe/x")


CONDITION = """HloModule m, num_partitions=1

%less (p: s32[]) -> pred[] {{
  %p = s32[] parameter(0)
  {inside}
  ROOT %lt = pred[] compare(%p, %limit), direction={direction}
}}

%cond (c: (s32[])) -> pred[] {{
  %c = (s32[]) parameter(0)
  %i = s32[] get-tuple-element(%c), index=0
  %bound = s32[] constant(7)
  ROOT %fused = pred[] fusion({operands}), kind=kLoop, calls=%less
}}

ENTRY %main (a: (s32[])) -> (s32[]) {{
  %a = (s32[]) parameter(0)
  ROOT %loop = (s32[]) while(%a), condition=%cond, body=%less
}}
"""


@pytest.mark.parametrize(
    ("inside", "operands", "direction", "trips"),
    [
        ("%limit = s32[] constant(5)", "%i", "LT", 5),
        ("%limit = s32[] parameter(1)", "%i, %bound", "LT", 7),
        ("%limit = s32[] parameter(1)", "%i, %i", "LT", None),
        ("%limit = s32[] constant(5)", "%i", "GT", None),
    ],
)
def test_trip_count_of_a_fused_condition(inside: str, operands: str, direction: str, trips: int | None) -> None:
    module = hlo.parse(CONDITION.format(inside=inside, operands=operands, direction=direction))
    loop = next(inst for inst in module.computations["main"] if inst.opcode == "while")
    assert hlo.trip_count(module, loop) == trips


@pytest.mark.parametrize(
    ("text", "groups"),
    [
        ("replica_groups={{0,1},{2,3}}, x", ((0, 1), (2, 3))),
        ("replica_groups=[2,2]<=[4], x", ((0, 1), (2, 3))),
        ("replica_groups=[2,2]<=[2,2]T(1,0), x", ((0, 2), (1, 3))),
        ("replica_groups={}, x", ((0, 1, 2, 3),)),
    ],
)
def test_replica_groups(text: str, groups: tuple[tuple[int, ...], ...]) -> None:
    assert replica_groups(text, 4) == groups


def test_not_hlo() -> None:
    with pytest.raises(AssertionError, match="not an HLO module"):
        hlo.parse("module @jit_step {")


KERNEL = """HloModule jit_f, is_scheduled=true, num_partitions=8

ENTRY %main.1 (p: bf16[512,4096]) -> bf16[64,4096] {
  %p = bf16[512,4096]{1,0} parameter(0), sharding={replicated}
  %bitcast = bf16[4,2,64,4096]{3,2,1,0} bitcast(%p)
  %scatter.1 = bf16[64,4096]{1,0} custom-call(%bitcast), custom_call_target="tpu_custom_call", \
operand_layout_constraints={bf16[4,2,64,4096]{3,2,1,0}}, custom_call_has_side_effect=true, \
frontend_attributes={kernel_metadata={
"axes":"data",
"collective":"reduce-scatter",
"mesh_axes":"[\\"data\\"]"
}}, metadata={op_name="jit(f)/moe/pallas_call" stack_frame_id=9}, backend_config={"known_trip_count":{"n":"3"}}
  ROOT %copy.3 = bf16[64,4096]{1,0} copy(%scatter.1)
}
"""


def test_kernels_span_lines_and_may_be_collectives() -> None:
    module = hlo.parse(KERNEL.replace("\\\n", ""))
    call = module.computations["main.1"][2]
    assert (call.opcode, call.op_name) == ("custom-call", "jit(f)/moe/pallas_call")
    assert call.kernel["axes"] == "data" and call.backend.startswith('{"known')
    (found,) = collectives(module, {"data": 8})
    assert (found.op, found.dtype, found.elements, found.axes) == ("reduce-scatter", "bfloat16", 512 * 4096, ("data",))
    assert (found.group_size, found.op_name, found.count) == (8, "jit(f)/moe/pallas_call", 1)
