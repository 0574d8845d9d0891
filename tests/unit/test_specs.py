"""docs/models.md: every shipped spec of a real model has its row, and the row says what the planner says."""

import re
from pathlib import Path

import pytest

from moec.compiler.emit.package import program_files
from moec.compiler.graph.count import active_params, total_params
from moec.compiler.plan.choose import make_plan
from moec.compiler.problems import ProblemsError
from moec.compiler.spec.load import list_models, load

PAGE = Path(__file__).parents[2] / "docs" / "models.md"
FIRST, WORKLOAD = "tpu7x:2x2x1", "chat_1k1k_c128"
GIB = 2**30
READABLE = 400  # lines of an emitted program at most
SIZES = {"M": 1e6, "B": 1e9, "T": 1e12}
Row = dict[str, str]


def _rows() -> dict[str, Row]:
    """Rows of the table by spec; the first cell is a link whose text is the name."""
    lines = [line.strip("| ").split(" | ") for line in PAGE.read_text().splitlines() if line.startswith("| ")]
    head, *rows = lines
    return {re.sub(r"\[(.*)\]\(.*\)", r"\1", cells[0]): dict(zip(head, cells, strict=True)) for cells in rows}


ROWS = _rows()


def test_every_shipped_model_has_a_row() -> None:
    assert list(ROWS) == [name for name in list_models() if not name.startswith("tiny/")]


@pytest.mark.parametrize("model", ROWS)
def test_parameters_are_counted_to_the_digit_and_near_what_is_published(model: str) -> None:
    graph, row = load(model).graph, ROWS[model]
    total, active = total_params(graph), active_params(graph)
    assert (row["parameters"], row["active"]) == (f"{total:,}", f"{active:,}")
    published = [float(text[:-1]) * SIZES[text[-1]] for text in row["published"].split(", ")]
    # Some publish "3B" for 3.4 billion, and without the embedding table; the totals are told to three digits.
    assert total == pytest.approx(published[0], rel=0.025)
    table = graph.dims.vocab_size * graph.dims.hidden_size
    assert 0.8 * published[1] < active - table * (not graph.head.tied) < 1.25 * published[1]


@pytest.mark.parametrize("model", ROWS)
def test_the_plan_is_as_documented(model: str) -> None:
    row = ROWS[model]
    if row["planned on"] != FIRST:
        with pytest.raises(ProblemsError) as caught:
            make_plan(load(model, target=FIRST, workload=WORKLOAD))
        problem = caught.value.problems[0]
        short = re.search(r" per device, ([\d.]+) too much", problem.text)
        assert short and row[f"on {FIRST}"] == f"{short.group(1)} GiB short"
        assert f"{row['planned on']} would hold it" in problem.hint
    else:
        assert row[f"on {FIRST}"] == "fits"
    request = load(model, target=row["planned on"], workload=WORKLOAD)
    plan = make_plan(request)
    assert program_files(request.graph, plan)["model.py"].count("\n") <= READABLE
    chosen = next(one for one in plan.candidates if one.verdict == "CHOSEN")
    assert row["experts"] == plan.dtypes.expert
    assert row["sharding"] == f"{chosen.attention}, {chosen.experts}"
    assert row["GiB"] == f"{plan.memory.arguments_bytes / GIB:.1f}"


@pytest.mark.parametrize(
    ("model", "changes"),
    [
        (model, changes)
        for model, row in ROWS.items()
        if row[f"on {FIRST}"].endswith("short")
        for changes in ("workload.concurrency=64", "plan.dtypes.kv=float8_e4m3fn", "plan.dtypes.expert=int4")
    ],
)
def test_what_is_short_of_memory_fits_as_the_page_says(model: str, changes: str) -> None:
    assert ROWS[model][f"on {FIRST}"].endswith("short")
    make_plan(load(model, target=FIRST, workload=WORKLOAD, overrides=[changes]))
