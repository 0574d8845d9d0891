"""Recorded variants: of every block, of what blocks call, of the program's own parts; emitted imports follow them."""

from moec.compiler.emit.view import emission
from moec.compiler.plan.choose import make_plan
from moec.compiler.plan.variants import OTHERS
from moec.compiler.spec.load import load


def test_the_plan_records_every_part_and_the_imports_follow() -> None:
    request = load("tiny/mixtral", target="cpu", workload="tiny")
    plan = make_plan(request)
    assert plan.variants.keys() == {*request.graph.blocks(), "moe.router", *OTHERS}
    block = request.graph.blocks()["moe"]
    for router in ("xla", "other"):
        chosen = plan.model_copy(update={"variants": plan.variants | {"moe.router": router}})
        assert (f"moec.blocks.router.{router}", "route") in emission(block, request.graph, chosen).imports
