"""docs/kernels.md: predicted steps before and after each kernel are the planner's, counts are those recorded."""

import json
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


# The rows of the table of counts: our case, and a peer that is not the case's own.
COUNTED = (
    ("gdn-decode-bf16", None), ("gdn-decode-f32", None), ("gdn-decode-bf16", "gdn-v3-decode"),
    ("moe-grouped-fp8", None), ("moe-grouped-fp8-512", None), ("moe-grouped-fp8-exact", None),
    ("rpa-decode-fp8", None), ("rpa-decode-bf16", None), ("router-64", None), ("router-512", None),
    ("dispatch-512", None),
)  # fmt: skip


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


def rounds(value: float, text: str) -> bool:
    """Whether text is value at the digits it has."""
    digits = len(text.partition(".")[2])
    return abs(float(text.replace(",", "")) - value) <= 0.5000001 * 10**-digits


@pytest.mark.parametrize("line", range(len(COUNTED)))
def test_counts_are_the_recorded_ones(root: Path, line: int) -> None:
    """Peer's bundles and what is around them, ours, ratio and bar: the one of the case is the last."""
    results = root / "benchmarks" / "kernels" / "results"
    ours, peers = (json.loads((results / f"{name}_tpu7x.json").read_text()) for name in ("kernels", "peers"))
    table = (root / "docs" / "kernels.md").read_text().partition("| work (one device of DP8/EP8")[2].split("\n\n")[0]
    rows = [[cell.strip() for cell in one.strip("| ").split(" | ")] for one in table.splitlines()[2:]]
    assert len(rows) == len(COUNTED)
    name, other = COUNTED[line]
    case = ours["kernels"][name]
    peer = peers["peers"][other or case["peer"]]
    unit, _, theirs, own, ratio, bar = rows[line][1:]
    assert unit == {"KV token": "key"}.get(case["unit"], case["unit"]) and peer["unit"] == case["unit"]
    assert rounds(peer["bundles"], theirs.split()[0]) and rounds(case["bundles"], own)
    around = re.search(r"\+([\d.,]+) around", theirs)
    assert around is None or rounds(peer["around"], around[1])
    assert rounds(case["bundles"] / peer["bundles"], ratio)
    held = None if other else case["bar"]
    assert re.findall(r"[\d.]+", bar)[-1:] == ([] if held is None else [f"{held:g}"])
