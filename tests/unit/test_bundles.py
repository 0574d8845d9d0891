"""The control tree of two small dumps of libtpu 0.0.52 (tests/fixtures/bundles) and of snippets of them.

loops: a grid of 16 with a dynamic fori_loop around one of 7 trips; branches: two pl.when of opposite sense, a
while_loop counting 20 down by 2, a cond with both sides, a transfer of dynamic size.
"""

from pathlib import Path

import pytest

from moec.compiler.verify.bundles import Node, executed, modules, parse, static

DUMP = Path(__file__).parents[1] / "fixtures" / "bundles"


def tree(name: str) -> Node:
    return parse(dict(modules(DUMP))[name].read_text())


def nodes(root: Node) -> dict[str, Node]:
    return {node.path: node for node in root.walk()}


def test_modules_are_named_as_their_calls() -> None:
    assert [name for name, _ in modules(DUMP)] == ["loops.1", "branches.1"]


def test_every_bundle_belongs_to_one_node() -> None:
    for name, total in (("loops.1", 117), ("branches.1", 113)):  # "total scheduled bundles" of the same dump
        root = tree(name)
        assert static(root).bundles == total == root.last + 1
        for node in root.walk():
            covered = sum(child.last - child.first + 1 for child in node.children)
            assert node.own.bundles == node.last - node.first + 1 - covered
            assert all(node.first <= child.first <= child.last <= node.last for child in node.children)


def test_loops_nest_with_their_trips() -> None:
    found = nodes(tree("loops.1"))
    assert {path: node.trips for path, node in found.items() if node.path.rsplit(".", 1)[-1].startswith("L")} == {
        "L0": 17,  # grid of 16, one more pass to write the last block
        "L0.I0.I1.L0": None,  # bound from scalar memory
        "L0.I0.I1.L0.L0": 7,
    }


def test_a_given_number_of_trips_replaces_an_unknown_one() -> None:
    root = tree("loops.1")
    inner = nodes(root)["L0.I0.I1.L0"]
    once, thrice = executed(root, {}), executed(root, {"L0.I0.I1.L0": 3})
    assert once.unknown == ("L0.I0.I1.L0",) and thrice.unknown == ()
    assert executed(root, {"*": 3}) == thrice
    body = executed(inner, {}).counts
    assert body.bundles == inner.own.bundles + 7 * inner.children[0].own.bundles
    assert thrice.counts.bundles - once.counts.bundles == 17 * 2 * body.bundles


def test_a_share_counts_a_region_in_part() -> None:
    root = tree("loops.1")
    region = nodes(root)["L0.I0.I0"]
    share = executed(root, {"L0.I0.I0": 0.25}).counts.bundles
    assert executed(root, {}).counts.bundles - share == 17 * 0.75 * region.own.bundles


def test_a_loop_in_a_region_that_never_runs_needs_no_trips() -> None:
    assert executed(tree("loops.1"), {"L0.I0.I1": 0}).unknown == ()


def test_branches_are_siblings_and_both_sides_of_a_cond_are_seen() -> None:
    root = tree("branches.1")
    assert [child.path for child in root.children] == ["I0", "I1", "L0", "I2", "I3"]
    assert nodes(root)["L0"].trips == 10  # from 20 down by 2
    assert nodes(root)["I0"].own.vmatmul == 1


def test_matrix_unit_and_transfers_are_counted() -> None:
    counts = static(tree("branches.1"))
    assert (counts.vmatmul, counts.pushes) == (1, 17)
    # The bounds checks name transfers too; the lengths are one scalar-memory word each.
    assert (counts.dmas, counts.unsized) == (3, 1)
    assert counts.bytes == {"hbm_to_vmem": 0, "vmem_to_hbm": 8 * 128 * 4, "vmem_to_smem": 16 * 4}
    assert executed(tree("loops.1"), {"L0.I0.I1.L0": 2}).counts.bytes["hbm_to_vmem"] == 17 * 2 * 8 * 128 * 4


def test_spills_are_bundles_that_move_a_spilled_register() -> None:
    text = """
  0x0   :  { %1 = vst [vmem:[#allocation8_spill] sm:$0xff], %v9  ;;  %v2 = vld [vmem:[#allocation9_spill]] }
  0x1   :  { %v3 = vld [vmem:[#allocation9_spill] sm:$0xff] }
  0x2   :  { %v4 = vld [vmem:[#allocation3] sm:$0xff] }
"""
    assert static(parse(text)).spills == 2


@pytest.mark.parametrize(
    ("step", "test", "back", "trips"),
    [
        ("sadd.s32 1, %s1_s0", "scmp.ge.s32.totalorder %s2_s0, 5", "!%p1_p0", 5),
        ("sadd.s32 2, %s1_s0", "scmp.ge.s32.totalorder %s2_s0, 5", "!%p1_p0", 3),
        ("sadd.s32 1, %s1_s0", "scmp.lt.s32.totalorder %s2_s0, 5", "%p1_p0", 5),
        ("sadd.s32 1, %s1_s0", "scmp.ne.s32.totalorder %s2_s0, 5", "%p1_p0", 5),
        ("sadd.s32 1, %s1_s0", "scmp.gt.s32.totalorder %s2_s0, 5", "!%p1_p0", 6),
        ("sadd.s32 1, %s1_s0", "scmp.ge.s32.totalorder %s1_s0, 5", "!%p1_p0", 6),
        ("sadd.s32 4294967295, %s1_s0", "scmp.le.s32.totalorder %s2_s0, -4", "!%p1_p0", 4),
        ("sadd.s32 1, %s1_s0", "scmp.ge.s32.totalorder %s2_s0, %s7_s7", "!%p1_p0", 9),
        ("sadd.s32 1, %s1_s0", "scmp.ge.s32.totalorder %s2_s0, %s8_s8", "!%p1_p0", None),
        ("smul.u32 2, %s1_s0", "scmp.ge.s32.totalorder %s2_s0, 5", "!%p1_p0", None),
    ],
)
def test_trips_follow_from_start_step_and_bound(step: str, test: str, back: str, trips: float | None) -> None:
    text = f"""
     0   :  {{ %s0_s0 = smov.u32 (!%p9_p9), 0  ;;  %s7_s7 = smov.u32 9  ;;  %s8_s8 = sld [smem:[0]] }}
   0x1 LB: > {{ %s1_s0 = sphi %s0_s0, %s2_s0 /* phi copy */ }} /* Start region 3 */
   0x2   : > {{ %s2_s0 = {step}  ;;  %p1_p0 = {test} /* loop exit test */ }}
   0x3   :  {{ %4 = sbr.rel ({back}) target = $region3 }}
   0x4   :  {{}}
   0x5   :  {{ %5 = sfence }}
"""
    (loop,) = parse(text).children
    assert (loop.path, loop.trips) == ("L0", trips)
