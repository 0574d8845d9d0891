"""The search space and the meshes of its points."""

from dataclasses import replace
from math import prod

import pytest

from moec.compiler.graph.ir import Graph
from moec.compiler.plan.space import Option, enumerate_options, factor_pairs, indivisible, mesh_of
from moec.compiler.spec.load import load

DP8 = Option(8, 1, 8, 1, "replicated", "replicated", "replicated", "replicated")


@pytest.fixture(scope="module")
def big() -> Graph:
    return load("qwen3.5-397b-a17b").graph


def test_factor_pairs() -> None:
    assert factor_pairs(8) == ((8, 1), (4, 2), (2, 4), (1, 8))
    assert factor_pairs(1) == ((1, 1),)


def test_every_option_once(big: Graph) -> None:
    options = list(enumerate_options(big, 8))
    assert len(options) == len(set(options)) == 4 * 4 * 8
    assert all(o.dp * o.tp == o.ep * o.etp == 8 for o in options)
    assert len(list(enumerate_options(big, 1))) == 1


def test_a_model_without_shared_expert_has_no_placement_for_it() -> None:
    graph = load("qwen3-30b-a3b").graph
    assert {o.shared_expert for o in enumerate_options(graph, 8)} == {"replicated"}


@pytest.mark.parametrize(
    ("degrees", "axes", "dp", "tp", "ep", "etp"),
    [
        ((8, 1, 8, 1), (("data", 8),), ("data",), (), ("data",), ()),
        ((1, 8, 8, 1), (("tensor", 8),), (), ("tensor",), ("tensor",), ()),
        ((4, 2, 8, 1), (("data", 4), ("tensor", 2)), ("data",), ("tensor",), ("data", "tensor"), ()),
        ((8, 1, 4, 2), (("data", 4), ("inner", 2)), ("data", "inner"), (), ("data",), ("inner",)),
        ((1, 8, 4, 2), (("inner", 4), ("tensor", 2)), (), ("inner", "tensor"), ("inner",), ("tensor",)),
        (
            (2, 4, 4, 2),
            (("data", 2), ("inner", 2), ("tensor", 2)),
            ("data",),
            ("inner", "tensor"),
            ("data", "inner"),
            ("tensor",),
        ),
        (
            (4, 2, 2, 4),
            (("data", 2), ("inner", 2), ("tensor", 2)),
            ("data", "inner"),
            ("tensor",),
            ("data",),
            ("inner", "tensor"),
        ),
        ((1, 1, 1, 1), (("data", 1),), ("data",), (), ("data",), ()),
    ],
)
def test_mesh_refines_both(
    degrees: tuple[int, int, int, int],
    axes: tuple[tuple[str, int], ...],
    dp: tuple[str, ...],
    tp: tuple[str, ...],
    ep: tuple[str, ...],
    etp: tuple[str, ...],
) -> None:
    mesh = mesh_of(replace(DP8, dp=degrees[0], tp=degrees[1], ep=degrees[2], etp=degrees[3]))
    assert mesh is not None
    assert (mesh.axes, mesh.attention_dp, mesh.attention_tp, mesh.expert_ep, mesh.expert_tp) == (axes, dp, tp, ep, etp)


@pytest.mark.parametrize("devices", [1, 2, 4, 6, 8, 12, 16, 64])
def test_every_mesh_has_the_wanted_degrees(big: Graph, devices: int) -> None:
    for option in enumerate_options(big, devices):
        mesh = mesh_of(option)
        if mesh is None:
            assert max(option.dp, option.ep) % min(option.dp, option.ep)
            continue
        assert (mesh.dp, mesh.tp, mesh.ep, mesh.etp) == (option.dp, option.tp, option.ep, option.etp)
        assert len(mesh.axes) <= 3 and prod(size for _, size in mesh.axes) == devices
        names = tuple(name for name, _ in mesh.axes)
        assert mesh.attention_dp + mesh.attention_tp == mesh.expert_ep + mesh.expert_tp == names
        assert len(set(names)) == len(names)


def test_degrees_without_common_axes() -> None:
    assert mesh_of(replace(DP8, dp=4, tp=3, ep=6, etp=2)) is None


def test_key_value_heads_are_replicated_others_are_not(big: Graph) -> None:
    assert indivisible(big, replace(DP8, dp=1, tp=8), "bfloat16") is None  # 2 key/value heads, four devices each
    cut = indivisible(big, replace(DP8, dp=2, tp=32, ep=64), "bfloat16")
    assert cut is not None
    assert (cut.scope, cut.what, cut.size, cut.degree) == ("gdn", "qk_heads", 16, 32)


def test_fractions_of_a_head_are_refused() -> None:
    graph = load("mixtral-8x7b").graph  # 32 query and 8 key/value heads
    cut = indivisible(graph, replace(DP8, dp=1, tp=12, ep=4, etp=3), "bfloat16")
    assert cut is not None and cut.size % cut.degree
    assert indivisible(graph, replace(DP8, dp=1, tp=16, ep=8, etp=2), "bfloat16") is None


def test_scales_are_cut_with_their_weights(big: Graph) -> None:
    option = replace(DP8, ep=1, etp=16)
    assert indivisible(big, option, "bfloat16") is None
    cut = indivisible(big, option, "float8_e4m3fn")
    assert cut is not None and (cut.size, cut.degree) == (8, 16)


def test_4_bit_scales_are_cut_where_the_in_dim_is() -> None:
    graph = load("mixtral-8x7b").graph  # w_down has 14336 = 448 * 32 rows
    assert indivisible(graph, replace(DP8, dp=64, ep=1, etp=64), "int4") is None
    cut = indivisible(graph, replace(DP8, dp=1024, ep=1, etp=1024), "int4")
    assert str(cut) == "moe: 448 scale blocks of 32 expert_intermediate over 1024 devices"
    assert (
        indivisible(graph, replace(DP8, dp=1024, ep=1, etp=1024, embed="replicated", head="replicated"), "bfloat16")
        is None
    )


def test_vocabulary_must_divide(big: Graph) -> None:
    cut = indivisible(big, replace(DP8, dp=512, ep=512, embed="sharded"), "bfloat16")
    assert cut is None  # 248320 = 512 * 485
    cut = indivisible(big, replace(DP8, dp=1024, ep=512, etp=2, head="sharded"), "bfloat16")
    assert cut is not None and cut.what == "vocabulary entries"
