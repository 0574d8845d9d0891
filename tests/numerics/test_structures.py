"""Structures that no recorded model has, as programs on virtual meshes, against the composed references.

A tied head, two layer groups with overridden block instances, and heads cut four ways with
replicated key/value heads: full prefill, ragged chunks and cached steps, layer by layer.
"""

from pathlib import Path

import pytest

from moec.compiler.emit.emit import emit
from moec.compiler.graph.show import show_graph
from moec.compiler.plan.choose import make_plan
from moec.compiler.plan.plan import Plan
from moec.compiler.spec.load import load
from moec.compiler.spec.schema import Request
from moec.compiler.verify.numerics import verify_numerics

SPECS = Path(__file__).parent / "specs"


def check(name: str, target: str, folder: Path, *pins: str) -> tuple[Request, Plan]:
    """Emit the spec's program, hold every layer to the reference."""
    request = load(str(SPECS / f"{name}.yaml"), target=target, workload="tiny", overrides=pins)
    plan = make_plan(request)
    emit(request.graph, plan, folder / "program")
    report = verify_numerics(folder / "program", plan, request.graph)
    assert report.status == "pass", report.checks
    assert len(report.errors) == 3
    assert max(report.errors[0].hidden_abs) > 0
    return request, plan


@pytest.mark.slow
def test_tied_head(tmp_path: Path) -> None:
    request, _ = check("tied_head", "cpu", tmp_path)
    assert request.graph.head.tied


@pytest.mark.slow
@pytest.mark.parametrize("placed", ["replicated", "sharded"])
def test_tied_head_on_a_mesh(placed: str, tmp_path: Path) -> None:
    pins = ("plan.attention={dp: 2, tp: 2}", f"plan.embed={placed}", f"plan.head={placed}")
    _, plan = check("tied_head", "cpu:4", tmp_path, *pins)
    assert (plan.embed, plan.head) == (placed, placed)


def test_two_groups_with_overridden_blocks(tmp_path: Path) -> None:
    request, _ = check("two_groups", "cpu:2", tmp_path, "plan.attention.dp=2", "plan.experts.ep=2")
    assert len(request.graph.groups) == 2
    assert list(request.graph.blocks()) == ["gdn", "moe", "gqa", "gqa_2", "moe_2"]


@pytest.mark.slow
@pytest.mark.parametrize("cut", ["ep4", "tp4", "ep2tp2"])
def test_four_way_tensor_parallel(cut: str, tmp_path: Path) -> None:
    experts = {"ep4": (), "tp4": ("plan.experts.tp=4",), "ep2tp2": ("plan.experts={ep: 2, tp: 2}",)}[cut]
    request, plan = check("wide_tp", "cpu:4", tmp_path, "plan.attention.tp=4", *experts)
    assert plan.mesh.tp == 4 > request.graph.blocks()["gqa"].fields.model_dump()["num_kv_heads"]


@pytest.mark.slow
def test_tensor_parallel_beside_data_parallel(tmp_path: Path) -> None:
    """Eight devices: two attention ranks of four, experts over all of them."""
    pins = ("plan.attention={dp: 2, tp: 4}", "plan.experts={ep: 4, tp: 2}", "plan.shared_expert=sharded")
    _, plan = check("wide_tp", "cpu:8", tmp_path, *pins)
    assert (plan.mesh.dp, plan.mesh.tp, plan.mesh.ep, plan.mesh.etp) == (2, 4, 4, 2)


@pytest.mark.slow
@pytest.mark.parametrize(("target", "pins"), [("cpu", ()), ("cpu:4", ("plan.attention={dp: 2, tp: 2}",))])
def test_mixers_with_channel_and_constant_decays(target: str, pins: tuple[str, ...], tmp_path: Path) -> None:
    """Decays that depend on a layer's place in the model, and a norm over heads that are cut."""
    request, plan = check("linear_mixers", target, tmp_path, *pins)
    assert request.graph.layers_of("lin") == (1, 2, 5, 6)
    assert "tensor" in plan.mesh.attention_tp or not pins


# Of tests/numerics/specs/residual_forms.yaml, as `moec show graph` writes them; x, h and y are also its blocks.
RESIDUAL_FORMULAS = (
    "x + 0.75 * h(ffn_norm(x))",
    "x + mixer_post_norm(x(x))",
    "x + ffn_post_norm(h(ffn_norm(x)))",
    "x * layer.scale",
    "x + 0.5 * (x(norm(x)) + h(norm(x)))",
    "x + x(x_norm(x)) + h(h_norm(x)) + y(y_norm(x))",
    "1.25 * mixer_norm(x) + x(mixer_norm(x))",
    "0.75 * ffn_norm(x) + h(ffn_norm(x))",
    "x + ffn_post_norm(y_post_norm(y(y_norm(x))) + h_post_norm(h(h_norm(x))))",
    "x + 0.75 * (y(ffn_norm(x)) + h(ffn_norm(x)))",
    "x + 0.5 * x(norm(x))",
    "x + 0.75 * y(norm(x))",
)


@pytest.mark.parametrize(
    ("target", "pins"),
    [
        ("cpu", ()),
        pytest.param("cpu:4", ("plan.attention={dp: 2, tp: 2}", "plan.mlp=sharded"), marks=pytest.mark.slow),
    ],
)
def test_residual_forms(target: str, pins: tuple[str, ...], tmp_path: Path) -> None:
    """Each form as docs/spec.md writes it; the program and the reference agree on every layer's output."""
    request, plan = check("residual_forms", target, tmp_path, *pins)
    shown = show_graph(request.graph)
    for formula in RESIDUAL_FORMULAS:
        assert f"     {formula}\n" in shown, formula
    assert plan.mlp == ("sharded" if pins else "replicated")
