"""What people read of a plan."""

import io
import re

import pytest
from rich.console import Console

from moec.compiler.plan.choose import make_plan
from moec.compiler.plan.plan import Plan
from moec.compiler.plan.report import plan_markdown, render_plan, sections
from moec.compiler.spec.load import load
from moec.targets.target import load_target


@pytest.fixture(scope="module")
def plan() -> Plan:
    return make_plan(load("qwen3.5-397b-a17b", target="tpu7x-8", workload="decode_512x9216"))


def rendered(plan: Plan, width: int) -> str:
    console = Console(width=width, file=io.StringIO(), force_terminal=False)
    render_plan(plan, console)
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def test_terminal_page_has_every_section(plan: Plan) -> None:
    text = rendered(plan, 160)
    for section in sections(plan):
        assert section.title in text
    for part in (
        "attention DP8, experts EP8 on 8 devices",
        "512 sequences at once, 8192 tokens in, 1024 out",
        "94.74 GiB usable",
        "a tie within 15 %",
        "128 plans enumerated",
    ):
        assert part in text
    assert max(map(len, text.splitlines())) <= 160


def test_narrow_terminals_still_show_all_verdicts(plan: Plan) -> None:
    text = rendered(plan, 80)
    assert {"CHOSEN", "DOMINATED", "HBM", "TIE"} <= set(text.split())


def test_predictions_carry_band_and_provenance(plan: Plan) -> None:
    (section,) = [s for s in sections(plan) if s.title.startswith("Predictions")]
    assert len(section.rows) == len(plan.estimates) > 8
    for (_, value, band, origin), estimate in zip(section.rows, plan.estimates.values(), strict=True):
        assert value and origin == estimate.provenance
        assert estimate.band_from
        assert band == (estimate.band_from if estimate.band_pct == 0 else f"±{estimate.band_pct:g} %")
    definite = {name: e.band_from for name, e in plan.estimates.items() if e.band_pct == 0}
    assert definite == {"decode_floor": "lower bound", "mixed_steps_per_token": "definition"}


def test_bands_are_those_of_the_target(plan: Plan) -> None:
    bands = load_target("tpu7x-8").bands
    assert plan.estimates["tpot"].band_pct == bands.step_time_pct.value
    assert plan.estimates["tpot"].band_from == f"benchmark: {bands.step_time_pct.source}"
    needed, left, most = (plan.estimates[name] for name in ("hbm_needed", "hbm_headroom", "max_sequences"))
    assert needed.band_pct == bands.memory_pct.value
    # The same bytes are a larger share of what is left.
    assert left.band_pct * left.value == pytest.approx(needed.band_pct * needed.value, rel=0.05)
    assert needed.band_pct < most.band_pct < left.band_pct
    text = plan_markdown(plan)
    assert f"Times may be off by {bands.step_time_pct.value:g} % (benchmark: " in text
    assert "no emitted program was ever timed" in text


def test_a_cpu_plan_says_that_its_numbers_are_assumptions() -> None:
    small = make_plan(load("tiny/qwen3_5_moe", target="cpu", workload="tiny"))
    text = plan_markdown(small)
    assert "published" not in text and "exact" not in text
    assert "| assumed | bytes streamed once at 10 GB/s (assumption) |" in text
    assert "in 8 GiB (assumption)" in text
    assert re.search(r"Numbers of targets/cpu: \d\d assumption", text)
    assert all(e.band_from.startswith("assumption: ") for e in small.estimates.values() if e.band_pct)


@pytest.mark.parametrize("key", ["decode_step", "mixed_step"])
def test_breakdown_adds_up(plan: Plan, key: str) -> None:
    bucket = key.removesuffix("_step")
    total = sum(t.layers * t.us for t in plan.breakdown if t.bucket == bucket) / 1e3
    assert total == pytest.approx(plan.estimates[key].value, rel=1e-4)
    assert sum(plan.estimates[key].terms.values()) == pytest.approx(plan.estimates[key].value, rel=1e-4)
    assert {t.binding for t in plan.breakdown} <= {"HBM", "MXU", "VPU", "ICI", "D2D", "fixed"}


def test_the_floor_is_below_the_estimate(plan: Plan) -> None:
    assert plan.estimates["decode_floor"].value < plan.estimates["decode_step"].value


def test_nothing_is_called_measured(plan: Plan) -> None:
    for text in (rendered(plan, 160), plan_markdown(plan)):
        lines = [line for line in text.lower().splitlines() if "measured" in line]
        assert all("never measured" in line or "nothing here was measured" in line for line in lines)


def test_markdown_tables_are_well_formed(plan: Plan) -> None:
    text = plan_markdown(plan)
    assert text.startswith("# qwen3.5-397b-a17b on tpu7x:2x2x1\n")
    assert text.endswith("\n") and not text.endswith("\n\n")
    tables = [block.splitlines() for block in text.split("\n\n") if block.startswith("|")]
    assert len(tables) == len(sections(plan))
    for table in tables:
        assert len({line.replace("\\|", "").count("|") for line in table}) == 1


def test_a_small_plan_reads_well_too() -> None:
    small = make_plan(load("tiny/qwen3_5_moe", target="cpu", workload="tiny"))
    text = rendered(small, 120)
    assert "None: nothing is exchanged." in text
    assert "attention DP1, experts EP1 on 1 device (mesh data 1)" in text


def test_a_narrow_terminal_keeps_the_reasons(plan: Plan) -> None:
    """The why of a refusal is words, not a column cut to nothing."""
    text = " ".join(rendered(plan, 80).split())
    assert "needs" in text
    assert "sequences of 9216" in text
    assert max(map(len, rendered(plan, 80).splitlines())) <= 80
