"""HBM bytes of instructions, on HLO text written for the purpose: one rule after the other."""

import pytest

from moec.compiler.verify import hlo
from moec.compiler.verify.traffic import Moved, traffic

# Bytes: a row of the pool is 1024, the pool 8192.
FUSED = """
%fused_read (p0: bf16[8,512], p1: s32[]) -> f32[512] {
  %p0 = bf16[8,512]{1,0:T(8,128)} parameter(0)
  %p1 = s32[]{:T(128)S(6)} parameter(1)
  %zero = s32[] constant(0)
  %view = bf16[8,512]{1,0:T(8,128)} bitcast(%p0)
  %one = bf16[1,512]{1,0:T(8,128)} dynamic-slice(%view, %p1, %zero), dynamic_slice_sizes={1,512}
  %same = bf16[1,512]{1,0:T(8,128)} dynamic-slice(%view, %p1, %zero), dynamic_slice_sizes={1,512}
  %sum = bf16[1,512]{1,0:T(8,128)} add(%one, %same)
  %wide = f32[1,512]{1,0:T(8,128)} convert(%sum)
  ROOT %flat = f32[512]{0:T(512)} bitcast(%wide)
}

%fused_update (p0: bf16[8,512], p1: bf16[1,512], p2: s32[]) -> bf16[8,512] {
  %p0 = bf16[8,512]{1,0:T(8,128)} parameter(0)
  %p1 = bf16[1,512]{1,0:T(8,128)} parameter(1)
  %p2 = s32[]{:T(128)S(6)} parameter(2)
  %zero = s32[] constant(0)
  ROOT %set = bf16[8,512]{1,0:T(8,128)} dynamic-update-slice(%p0, %p1, %p2, %zero)
}

%fused_new (p1: bf16[1,512], p2: s32[]) -> bf16[8,512] {
  %p1 = bf16[1,512]{1,0:T(8,128)} parameter(0)
  %p2 = s32[]{:T(128)S(6)} parameter(1)
  %zero = s32[] constant(0)
  %none = bf16[] constant(0)
  %zeros = bf16[8,512]{1,0:T(8,128)} broadcast(%none), dimensions={}
  ROOT %set = bf16[8,512]{1,0:T(8,128)} dynamic-update-slice(%zeros, %p1, %p2, %zero)
}

%fused_two (p0: bf16[8,512]) -> (bf16[8,512], f32[8,512]) {
  %p0 = bf16[8,512]{1,0:T(8,128)} parameter(0)
  %wide = f32[8,512]{1,0:T(8,128)} convert(%p0)
  ROOT %both = (bf16[8,512]{1,0:T(8,128)S(1)}, f32[8,512]{1,0:T(8,128)}) tuple(%p0, %wide)
}

%replace (a: bf16[], b: bf16[]) -> bf16[] {
  %a = bf16[] parameter(0)
  ROOT %b = bf16[] parameter(1)
}

%accumulate (a: bf16[], b: bf16[]) -> bf16[] {
  %a = bf16[] parameter(0)
  %b = bf16[] parameter(1)
  ROOT %sum = bf16[] add(%a, %b)
}
"""
ARGUMENTS = """
  %pool = bf16[8,512]{1,0:T(8,128)} parameter(0)
  %row = bf16[1,512]{1,0:T(8,128)} parameter(1)
  %index = s32[]{:T(128)S(6)} parameter(2)
  %near = bf16[8,512]{1,0:T(8,128)S(1)} parameter(3)
  %rows = s32[2,1]{1,0:T(1,128)S(1)} parameter(4)
  %two = bf16[2,512]{1,0:T(8,128)} parameter(5)
"""
POOL = "bf16[8,512]{1,0:T(8,128)}"
KERNEL = 'custom_call_target="tpu_custom_call"'


def moved(*lines: str, dmas: dict[str, tuple[int, int]] | None = None) -> list[Moved]:
    body = "\n".join(f"  {line}" for line in lines)
    text = f"HloModule tiny, num_partitions=1\n{FUSED}\nENTRY %main () -> f32[] {{{ARGUMENTS}{body}\n}}\n"
    module = hlo.parse(text)
    return traffic(module, module.entry, dmas)


@pytest.mark.parametrize(
    ("line", "read", "written"),
    [
        ("%x = f32[8,512]{1,0} convert(%pool)", 8192, 16384),
        ("%x = bf16[8,512]{1,0:T(8,128)S(1)} negate(%pool)", 8192, 0),
        (f"%x = {POOL} negate(%near)", 0, 8192),
        (f"%x = {POOL} add(%pool, %pool)", 8192, 8192),
        ("%x = bf16[1,512]{1,0} dynamic-slice(%pool, %index, %index), dynamic_slice_sizes={1,512}", 1024, 1024),
        ("%x = bf16[2,512]{1,0} gather(%pool, %rows), slice_sizes={1,512}", 2048, 2048),
        (f"%x = {POOL} dynamic-update-slice(%pool, %row, %index, %index)", 1024, 1024),
        (f"%x = {POOL} scatter(%pool, %rows, %two), to_apply=%replace", 2048, 2048),
        (f"%x = {POOL} scatter(%pool, %rows, %two), to_apply=%accumulate", 4096, 2048),
        ("%x = f32[512]{0:T(512)} fusion(%pool, %index), calls=%fused_read", 1024, 2048),
        (f"%x = {POOL} fusion(%pool, %row, %index), calls=%fused_update", 1024, 1024),
        (f"%x = {POOL} fusion(%row, %index), calls=%fused_new", 1024, 8192),
        (
            "%x = (bf16[8,512]{1,0:T(8,128)S(1)}, f32[8,512]{1,0:T(8,128)}) fusion(%pool), calls=%fused_two",
            8192,
            16384,
        ),
        (f"%x = f32[8,512]{{1,0}} custom-call(%pool, %near), {KERNEL}", 8192, 16384),
    ],
)
def test_bytes_of_one_instruction(line: str, read: int, written: int) -> None:
    (found,) = moved(line)
    assert (found.read, found.written) == (read, written)


def test_halves_of_a_copy_read_first_and_write_last() -> None:
    found = moved(
        f"%s = (bf16[8,512]{{1,0:S(1)}}, {POOL}, u32[]{{:S(2)}}) copy-start(%pool)", f"%d = {POOL} copy-done(%s)"
    )
    assert [(m.inst.name, m.read, m.written) for m in found] == [("s", 8192, 0), ("d", 0, 8192)]


def test_what_moves_nothing_is_left_out() -> None:
    assert (
        moved(f"%v = {POOL} bitcast(%pool)", f"%t = ({POOL}) tuple(%v)", f"%g = {POOL} get-tuple-element(%t), index=0")
        == []
    )


def test_kernel_that_updates_a_pool_counts_its_copies() -> None:
    line = f"%decode.3 = (f32[512]{{0}}, {POOL}) custom-call(%row, %pool), {KERNEL}, "
    line += "output_to_operand_aliasing={{1}: (1, {})}"
    (found,) = moved(line, dmas={"decode": (1024, 3072)})
    assert (found.read, found.written) == (1024, 3072)
    with pytest.raises(AssertionError, match=r"decode\.3 updates operands in place"):
        moved(line)
