"""docs/kernels.md: its table of predicted steps before and after each kernel is what the planner says."""

import re
from functools import cache
from pathlib import Path

import pytest

from moec.compiler.plan.choose import make_plan
from moec.compiler.plan.plan import Plan
from moec.compiler.spec.load import load

KERNELS = {
    "gated_delta.tpu_fused": ("gdn", "tpu_fused"),
    "attention.tpu_ragged": ("gqa", "tpu_ragged"),
    "moe.tpu_grouped": ("moe", "tpu_grouped"),
    "router.tpu_fused": ("router", "tpu_fused"),
}
FLOAT8 = ("plan.dtypes.kv=float8_e4m3fn", "plan.dtypes.gather=float8_e4m3fn")


@cache
def planned(kernels: tuple[str, ...], pins: tuple[str, ...] = ()) -> Plan:
    """The flagship's plan with these kernels and plain XLA elsewhere."""
    chosen = {block: variant if name in kernels else "xla" for name, (block, variant) in KERNELS.items()}
    overrides = [*(f"plan.variants.{block}={variant}" for block, variant in chosen.items()), *pins]
    return make_plan(load("qwen3.5-397b-a17b", target="tpu7x-8", workload="decode_512x9216", overrides=overrides))


def scope_ms(plan: Plan, bucket: str, scope: str) -> float:
    return sum(term.us * term.layers for term in plan.breakdown if (term.bucket, term.scope) == (bucket, scope)) / 1e3


def row(name: str, kernels: tuple[str, ...]) -> str:
    plan = planned(kernels)
    steps = [f"{plan.estimates[key].value:.2f}" for key in ("decode_step", "mixed_step")]
    changes = ["", ""]
    if len(kernels) == 1:
        block = KERNELS[kernels[0]][0]
        scope = "moe" if block == "router" else block
        changes = [
            f"{scope} {scope_ms(planned(()), bucket, scope):.2f} → {scope_ms(plan, bucket, scope):.2f}"
            for bucket in ("decode", "mixed")
        ]
    return " ".join(f"| {' | '.join([name, *steps, *changes])} |".split())


def table() -> list[str]:
    whole = tuple(KERNELS)
    rows = [row("plain XLA", ()), *(row(f"`{name}`", (name,)) for name in whole), row("all of them", whole)]
    plan = planned(whole, FLOAT8)
    steps = [f"{plan.estimates[key].value:.2f}" for key in ("decode_step", "mixed_step")]
    return [*rows, f"| all, with float8 cache and gather | {' | '.join(steps)} | | |"]


@pytest.mark.parametrize("line", range(len(KERNELS) + 3))
def test_before_and_after_is_the_planners(root: Path, line: int) -> None:
    text = (root / "docs" / "kernels.md").read_text()
    documented = re.findall(r"^\| .*\d+\.\d\d \| \d+\.\d\d \|.*\|$", text, flags=re.MULTILINE)
    assert documented[line] == table()[line]
