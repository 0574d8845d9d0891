"""verify_aot on miniature programs: they compile, state is donated, collectives and kernels are counted and judged."""

import json
import shutil
from pathlib import Path

import pytest

from moec.compiler.emit.emit import emit
from moec.compiler.emit.package import plan_digest
from moec.compiler.plan.choose import make_plan
from moec.compiler.plan.plan import Plan
from moec.compiler.spec.load import load
from moec.compiler.verify import aot
from moec.compiler.verify.aot import AotBucket, block_layers, verify_aot
from moec.compiler.verify.cache import cache_key
from moec.compiler.verify.checks import check_kernels
from moec.compiler.verify.kernels import planned_kernels

pytestmark = pytest.mark.aot

TOY = Path(__file__).parent / "toy"
TOPOLOGY = "tpu7x:2x2x1"
LAYERS = {"gqa": 3, "moe": 3}
PLAIN: dict[str, dict[str, int]] = {"decode": {}, "tiny": {}}  # no kernels
ALIGNED = str(Path(__file__).parents[1] / "numerics" / "specs" / "aligned.yaml")


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("aot-cache")


def compile_one(
    plan: Plan,
    bucket: str,
    cache_dir: Path,
    topology: str = TOPOLOGY,
    num_pages: int | None = None,
    kernels: dict[str, dict[str, int]] = PLAIN,
) -> AotBucket:
    """One bucket of the miniature program, made out to be of this plan."""
    digest = plan_digest(plan)
    folder = cache_dir / f"program-{digest}"
    shutil.copytree(TOY, folder, dirs_exist_ok=True)
    text = (TOY / "model.py").read_text().replace('PLAN_DIGEST = "toy"', f'PLAN_DIGEST = "{digest}"')
    (folder / "model.py").write_text(text)
    report = verify_aot(
        folder,
        plan,
        topology,
        layers=LAYERS,
        kernels=kernels,
        cache_dir=cache_dir,
        buckets=[bucket],
        num_pages=num_pages,
    )
    assert not report.reason
    return report.buckets[0]


def status(bucket: AotBucket) -> dict[str, str]:
    return {check.name: check.status for check in bucket.checks}


def detail(bucket: AotBucket, name: str) -> str:
    return next(check.detail for check in bucket.checks if check.name == name)


def test_collectives_and_donation_as_planned(toy_plan: Plan, cache: Path) -> None:
    bucket = compile_one(toy_plan, "decode", cache)
    assert set(status(bucket).values()) <= {"pass", "skipped"}, [c for c in bucket.checks if c.status == "fail"]
    assert detail(bucket, "collectives per layer") == "as planned: 6 all-gather, 3 reduce-scatter"
    assert [array.aliased for array in bucket.measured.state] == [True, True]
    memory = bucket.measured.memory
    assert memory is not None and memory.alias >= sum(array.bytes for array in bucket.measured.state)
    offloaded = {c.thread for c in bucket.measured.collectives if c.in_loop}
    assert offloaded == {"sparsecore"}


def test_second_run_comes_from_the_cache(toy_plan: Plan, cache: Path) -> None:
    first = compile_one(toy_plan, "decode", cache)
    again = compile_one(toy_plan, "decode", cache)
    assert again.measured.cached
    assert again.measured.collectives == first.measured.collectives
    assert again.measured.key == first.measured.key
    assert json.loads(again.model_dump_json())["measured"]["cached"] is True


def test_compiler_flags_of_the_environment_are_part_of_the_key(monkeypatch: pytest.MonkeyPatch) -> None:
    keys = set()
    for name, flags in (("XLA_FLAGS", ""), ("XLA_FLAGS", "--xla_a=1"), ("LIBTPU_INIT_ARGS", "--xla_tpu_b=1")):
        monkeypatch.setenv(name, flags)
        keys.add(cache_key("module {}", {}, {}, TOPOLOGY))
    assert len(keys) == 3
    monkeypatch.setenv("HOME", "/elsewhere")
    assert cache_key("module {}", {}, {}, TOPOLOGY) in keys


def test_dumps_are_kept_where_asked(toy_plan: Plan, tmp_path: Path) -> None:
    """Also for a result that the cache already has."""
    for dumps in (tmp_path / "first", tmp_path / "second"):
        report = verify_aot(
            TOY,
            toy_plan,
            "cpu:8",
            layers=LAYERS,
            kernels=PLAIN,
            cache_dir=tmp_path,
            buckets=["decode"],
            keep_dumps=dumps,
        )
        assert not report.buckets[0].measured.cached
        (hlo,) = (dumps / "decode").glob("*after_optimizations.txt")
        assert "all-gather" in hlo.read_text()


def test_plan_with_other_collectives_fails(toy_plan: Plan, cache: Path) -> None:
    """A plan that promises no routing gather, and an all-reduce instead of the scatter."""
    kept = [c for c in toy_plan.collectives if c.what != "routing"]
    changed = [c.model_copy(update={"op": "all-reduce"}) if c.op == "reduce-scatter" else c for c in kept]
    plan = toy_plan.model_copy(update={"collectives": tuple(changed)})
    bucket = compile_one(plan, "decode", cache)
    assert status(bucket)["collectives per layer"] == "fail"
    text = detail(bucket, "collectives per layer")
    assert "unplanned 3 x all-gather int32[256] over data in moe" in text
    assert "missing 3 x all-reduce bfloat16[32768] over data in moe" in text
    assert status(bucket)["collectives per step"] == "pass"


def test_plan_with_kernels_fails_on_a_program_of_plain_xla(toy_plan: Plan, cache: Path) -> None:
    bucket = compile_one(toy_plan, "decode", cache, kernels={"decode": {"rpa_decode": 3}})
    assert status(bucket)["kernels"] == "fail"
    assert detail(bucket, "kernels") == "planned: 3 rpa_decode; missing 3 x rpa_decode"
    assert detail(compile_one(toy_plan, "decode", cache), "kernels") == "as planned: none"


@pytest.mark.timeout(900)
def test_compiled_steps_launch_the_kernels_of_the_plan(tmp_path: Path) -> None:
    """Three layers of Gated DeltaNet and one of attention, each with experts: decode rows alone, then prefill too."""
    pins = [f"plan.variants.{name}" for name in ("moe=tpu_grouped", "router=tpu_fused", "gdn=tpu_fused")]
    request = load(ALIGNED, target=TOPOLOGY, workload="default", overrides=pins)
    plan = make_plan(request)
    emit(request.graph, plan, tmp_path / "program")
    kernels = planned_kernels(request.graph, plan)
    report = verify_aot(
        tmp_path / "program",
        plan,
        TOPOLOGY,
        layers=block_layers(request.graph),
        kernels=kernels,
        cache_dir=tmp_path,
        buckets=["decode", "mixed"],
    )
    decode, mixed = report.buckets
    assert [c for bucket in report.buckets for c in bucket.checks if c.status == "fail"] == []
    experts = "4 combine_stream, {}4 grouped, 4 moe_dispatch, 4 router_fused, 1 rpa_decode"
    assert detail(decode, "kernels") == "as planned: " + experts.format("3 gdn_decode, ")
    assert (
        detail(mixed, "kernels") == "as planned: " + experts.format("3 gdn_decode, 3 gdn_prefill, ") + ", 1 rpa_prefill"
    )
    # Each is refused by the plan of the other, and by one that chose XLA for one block.
    assert check_kernels(decode.measured.kernels, kernels["mixed"]).status == "fail"
    assert check_kernels(mixed.measured.kernels, kernels["decode"]).status == "fail"
    other = load(ALIGNED, target=TOPOLOGY, workload="default", overrides=[*pins[:2], "plan.variants.gdn=xla"])
    found = check_kernels(decode.measured.kernels, planned_kernels(other.graph, make_plan(other))["decode"])
    assert (found.status, "unplanned 3 x gdn_decode" in found.detail) == ("fail", True)


def test_rewritten_scatter_is_reported(toy_plan: Plan, cache: Path) -> None:
    """At two tokens per rank XLA turns the reduce-scatter into an all-reduce: said, not failed."""
    bucket = compile_one(toy_plan, "tiny", cache)
    assert status(bucket)["collectives per layer"] == "pass"
    assert "XLA made an all-reduce of 3 x reduce-scatter" in detail(bucket, "collectives per layer")


def test_out_of_hbm_is_a_failed_check_with_numbers(toy_plan: Plan, cache: Path) -> None:
    bucket = compile_one(toy_plan, "decode", cache, num_pages=6_000_000)
    assert bucket.measured.outcome == "oom"
    assert bucket.measured.oom is not None
    needed, available = bucket.measured.oom.needed, bucket.measured.oom.available
    assert needed > 6_000_000 * 3 * 16 * 256 * 2 > available > 90 << 30
    assert status(bucket) == {"same plan": "pass", "compiles": "fail"}
    assert max(b.bytes for b in bucket.measured.buffers) > available


def test_program_of_another_plan_fails(toy_plan: Plan, cache: Path) -> None:
    report = verify_aot(TOY, toy_plan, TOPOLOGY, layers=LAYERS, kernels=PLAIN, cache_dir=cache, buckets=["decode"])
    assert status(report.buckets[0])["same plan"] == "fail"


def test_wrong_topology_is_an_error(toy_plan: Plan, cache: Path) -> None:
    bucket = compile_one(toy_plan, "decode", cache, "tpu7x:2x2x2")
    assert bucket.measured.outcome == "error"
    assert "on the 16 devices of tpu7x:2x2x2" in bucket.measured.message


def test_without_libtpu_it_is_skipped(toy_plan: Plan, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(aot.importlib.util, "find_spec", lambda name: None)
    monkeypatch.setattr(aot.platform, "system", lambda: "Darwin")
    monkeypatch.setattr(aot.platform, "machine", lambda: "arm64")
    report = verify_aot(TOY, toy_plan, TOPOLOGY, layers=LAYERS, kernels=PLAIN, cache_dir=cache)
    assert report.status == "skipped"
    assert report.reason == "libtpu has no wheel for Darwin arm64: run this check on Linux x86_64"


def test_crash_of_the_worker_is_an_error(toy_plan: Plan, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(aot, "WORKER", "moec.compiler.verify.no_such_worker")
    bucket = compile_one(toy_plan, "decode", cache)
    assert bucket.measured.outcome == "error"
    assert "No module named" in bucket.measured.message
