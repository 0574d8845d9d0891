"""Which cores sum experts' rows: one choice per bucket by predicted time, its pin, its refusals, what is emitted."""

from functools import cache
from pathlib import Path

import pytest

from moec.compiler.commands.agreement import literals, planned
from moec.compiler.emit.package import program_files
from moec.compiler.emit.standalone import standalone_files
from moec.compiler.graph.ir import Graph
from moec.compiler.plan.choose import make_plan
from moec.compiler.plan.plan import Plan, VariantChoice
from moec.compiler.plan.sections import kernels
from moec.compiler.problems import Problem, ProblemsError
from moec.compiler.spec.load import load

FLAGSHIP = "qwen3.5-397b-a17b"
ALIGNED = str(Path(__file__).parents[1] / "numerics" / "specs" / "aligned.yaml")
SPARSECORE = "plan.variants.unpermute=sparsecore"
GROUPED = "plan.variants.moe=tpu_grouped"
# A TensorCore so slow that its sums of many tokens, but not those of few, take longer than the SparseCores'.
SLOW_TENSORCORE = "target.vector_tflops=2.57"
# Experts in bfloat16, which a v6e multiplies: sizes for one rank of eight.
V6E = ("plan.dtypes.expert=bfloat16", "workload.concurrency=64", "workload.max_context=128", "workload.isl=64")


@cache
def asked(*overrides: str, model: str = FLAGSHIP, target: str = "tpu7x:2x2x1") -> tuple[Graph, Plan]:
    workload = "decode_512x9216" if model == FLAGSHIP else "default"
    request = load(model, target=target, workload=workload, overrides=list(overrides))
    return request.graph, make_plan(request)


def problems(*overrides: str, model: str = FLAGSHIP, target: str = "tpu7x:2x2x1") -> tuple[Problem, ...]:
    with pytest.raises(ProblemsError) as raised:
        asked(*overrides, model=model, target=target)
    return tuple(raised.value.problems)


def verdicts(plan: Plan, bucket: str) -> dict[str, VariantChoice]:
    return {one.variant: one for one in plan.variant_choices if one.scope == f"unpermute.{bucket}"}


def test_the_tensorcore_is_predicted_faster_and_the_plan_says_on_what_numbers() -> None:
    graph, plan = asked()
    for bucket in ("decode", "mixed"):
        found = verdicts(plan, bucket)
        assert plan.variants[f"unpermute.{bucket}"] == "tensorcore"
        assert (found["tensorcore"].verdict, found["sparsecore"].verdict) == ("CHOSEN", "SLOWER")
        (own,) = (one for one in plan.variant_choices if (one.scope, one.variant) == ("moe", "tpu_grouped"))
        assert found["tensorcore"].us == {bucket: own.us[bucket]}
        assert found["sparsecore"].us[bucket] > own.us[bucket]
        assert "times the predicted time of tensorcore" in found["sparsecore"].why
        assert "of the SparseCores assumed: clock (GHz) 1.75, start (us) 3" in found["sparsecore"].why
    assert any(note.startswith("Sums of experts' rows on the SparseCores") for note in plan.notes)
    assert plan.device is None and not any("sparsecore" in key for key in plan.tuning)
    text = program_files(graph, plan)["model.py"]
    assert "sparsecore_rows" not in text and "device=" not in text


def test_a_pin_sums_on_the_sparsecores_in_all_buckets() -> None:
    """Whole sums return: the compiler's reduce-scatters are on the same cores."""
    graph, plan = asked(SPARSECORE)
    assert plan.variants["moe"] == "tpu_grouped" and plan.device == ("TPU7x", 1)
    assert plan.tuning["moe.sparsecore_rows.decode"] == plan.tuning["moe.sparsecore_rows.mixed"] == 16
    assert not any("return_chunks" in key for key in plan.tuning)
    for bucket in ("decode", "mixed"):
        found = verdicts(plan, bucket)
        assert plan.variants[f"unpermute.{bucket}"] == "sparsecore"
        assert found["sparsecore"].why.startswith("plan.variants.unpermute;")
        assert (found["tensorcore"].verdict, found["tensorcore"].why) == (
            "PINNED", "excluded by plan.variants.unpermute",
        )  # fmt: skip
        ops = {one.op: one for one in plan.breakdown if (one.bucket, one.scope) == (bucket, "moe")}
        assert ops["combine"].binding == ops["start SparseCores"].binding == "SparseCore"
        assert ops["start SparseCores"].us == 3
    text = program_files(graph, plan)["model.py"]
    assert 'DEVICE = ("TPU7x", 1)  # what jax calls a device' in text
    assert "MOE_SPARSECORE_ROWS = 16  # expert rows a subcore" in text
    assert "y_AD = experts_grouped(" in text and "sparsecore_rows=MOE_SPARSECORE_ROWS," in text
    assert "            matmul_precision=MATMUL_PRECISION,\n            device=DEVICE,\n        )" in text
    found = literals(text)
    wanted = planned(plan)
    assert {name: found.get(name) for name in wanted} == wanted
    assert "def unpermute_sparsecore(" in standalone_files(graph, plan)["model.py"]


def test_a_pin_of_the_tensorcore_is_kept_too() -> None:
    _, plan = asked("plan.variants.unpermute=tensorcore", SLOW_TENSORCORE, GROUPED)
    assert {plan.variants[f"unpermute.{bucket}"] for bucket in ("decode", "mixed")} == {"tensorcore"}
    assert verdicts(plan, "mixed")["sparsecore"].verdict == "PINNED"


def test_each_bucket_takes_the_cores_that_are_predicted_faster() -> None:
    graph, plan = asked(SLOW_TENSORCORE, GROUPED, "plan.attention.dp=8", "plan.shared_expert=replicated")
    assert (plan.variants["unpermute.decode"], plan.variants["unpermute.mixed"]) == ("tensorcore", "sparsecore")
    assert verdicts(plan, "mixed")["tensorcore"].verdict == verdicts(plan, "decode")["sparsecore"].verdict == "SLOWER"
    text = program_files(graph, plan)["model.py"]
    assert 'MOE_SPARSECORE_ROWS = {"decode": 0, "mixed": 16}  #' in text and "device=DEVICE," in text
    assert "sparsecore_rows=MOE_SPARSECORE_ROWS[bucket]," in text


def test_the_report_shows_both_cores_for_each_bucket() -> None:
    _, plan = asked()
    (section,) = kernels(plan)
    mine = [row for row in section.rows if row[0].startswith("unpermute.")]
    assert [row[:2] for row in mine] == [
        (f"unpermute.{bucket}", core) for bucket in ("decode", "mixed") for core in ("tensorcore", "sparsecore")
    ]
    assert all(len([cell for cell in row[3:5] if cell]) == 1 for row in mine)


def test_refusals_name_the_rule() -> None:
    _, narrow = asked(GROUPED, model=ALIGNED)
    rule = "width 256: the SparseCores copy rows of whole memory tiles, multiples of 2048"
    assert {verdicts(narrow, bucket)["sparsecore"].why for bucket in ("decode", "mixed")} == {rule}
    assert {verdicts(narrow, bucket)["tensorcore"].verdict for bucket in ("decode", "mixed")} == {"CHOSEN"}
    texts = [problem.text for problem in problems(SPARSECORE, model=ALIGNED)]
    assert texts and any(f"plan.variants.unpermute=sparsecore: {rule} (bucket decode)" in text for text in texts)


def test_a_pin_that_a_pinned_variant_has_not_is_refused() -> None:
    texts = [problem.text for problem in problems(SPARSECORE, "plan.variants.moe=xla")]
    assert any("plan.variants.unpermute=sparsecore: moe xla has no sums on the SparseCores" in text for text in texts)
    texts = [problem.text for problem in problems(SPARSECORE, model="tiny/qwen3_5_moe")]
    assert any("plan.variants.unpermute=sparsecore: moe tpu_grouped: width 64" in text for text in texts)


@pytest.mark.parametrize(
    ("pin", "model", "target", "text", "hint"),
    [
        ("sparsecor", FLAGSHIP, "tpu7x:2x2x1", "no cores 'sparsecor'", "did you mean 'sparsecore'?"),
        ("sparsecore", "tiny/qwen3_5_moe", "cpu", "only moe.tpu_grouped has the choice, not for cpu", "leave it out"),
    ],
)
def test_pins_that_name_nothing(pin: str, model: str, target: str, text: str, hint: str) -> None:
    (problem,) = problems(f"plan.variants.unpermute={pin}", model=model, target=target)
    assert problem.path == "plan.variants.unpermute" and text in problem.text and problem.hint == hint


def test_smaller_subcores_of_v6e_take_narrow_rows_only() -> None:
    """256 KiB hold the rows and sums of width 2048, not of 4096."""
    shape = (GROUPED, *V6E)
    _, taken = asked("model.hidden_size=2048", SPARSECORE, *shape, model=ALIGNED, target="v6e:2x4")
    assert taken.device == ("TPU v6 lite", 1) and taken.variants["unpermute.mixed"] == "sparsecore"
    _, refused = asked("model.hidden_size=4096", *shape, model=ALIGNED, target="v6e:2x4")
    for bucket in ("decode", "mixed"):
        found = verdicts(refused, bucket)["sparsecore"]
        assert found.verdict == "REFUSED" and found.why.startswith("a subcore needs ") and "has 262144" in found.why
