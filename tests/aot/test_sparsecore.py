"""An emitted step whose experts' rows the SparseCores sum, compiled: the call is there, on its thread; its bundles.

Nothing runs. The emitted program's mesh knows the chip (DEVICE), which is what lets the kernel be traced and lowered
inside a whole step; verify_aot reads the compiler's dump, since as_text() fails on such programs.
"""

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from moec.blocks.moe import tpu_combine_cost
from moec.compiler.emit.emit import emit
from moec.compiler.plan.choose import make_plan
from moec.compiler.spec.load import load
from moec.compiler.verify import hlo
from moec.compiler.verify.aot import block_layers, verify_aot
from moec.compiler.verify.kernels import planned_kernels
from moec.targets.target import load_target

pytestmark = [pytest.mark.aot, pytest.mark.timeout(900)]

SPEC = str(Path(__file__).parents[1] / "numerics" / "specs" / "aligned.yaml")
# The narrowest bfloat16 rows that a SparseCore copies.
WIDTH = 2048
SIZES = ["workload.concurrency=64", "workload.isl=16", "workload.osl=8", "workload.max_context=32"]
STEPS = [f"model.hidden_size={WIDTH}", "plan.page_size=16", "plan.dtypes.expert=bfloat16"]
PINS = ["plan.variants.moe=tpu_grouped", "plan.variants.unpermute=sparsecore"]
DEVICES = """
import json, sys
from jax.experimental import topologies
devices = {name: topologies.get_topology_desc(name, platform="tpu").devices[0] for name in sys.argv[1:]}
print(json.dumps({name: [device.device_kind, device.num_cores] for name, device in devices.items()}))
"""
COUNTED_ON = "tpu7x:2x2x1"  # whose bundles the work model has; other chips' are scaled by lanes


@pytest.mark.parametrize(("target", "bucket"), [("tpu7x:2x2x1", "mixed"), ("v6e:2x4", "decode")])
def test_an_emitted_step_sums_on_the_sparsecores(
    target: str, bucket: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All checks of verify_aot, the call instead of the TensorCore's kernels, and the loops that the plan prices."""
    request = load(SPEC, target=target, workload="default", overrides=[*SIZES, *STEPS, *PINS])
    plan = make_plan(request)
    emit(request.graph, plan, tmp_path / "program")
    (tmp_path / "bundles").mkdir()
    monkeypatch.setenv("LIBTPU_INIT_ARGS", f"--xla_sc_dump_bundles_to={tmp_path / 'bundles'}")
    expected = {"layers": block_layers(request.graph), "kernels": planned_kernels(request.graph, plan)}
    options = {**expected, "cache_dir": tmp_path, "buckets": [bucket], "keep_dumps": tmp_path / "dumps"}
    (found,) = verify_aot(tmp_path / "program", plan, target, **options).buckets
    assert [check for check in found.checks if check.status not in ("pass", "skipped")] == []
    assert found.measured.outcome == "compiled", found.measured.message
    (text,) = (file.read_text() for file in (tmp_path / "dumps" / bucket).glob("*after_optimizations.txt"))
    calls = sparsecore_calls(text)
    tokens = next(one.tokens_per_rank for one in plan.buckets if one.name == bucket) * plan.mesh.dp
    # Layers of one kind are scanned: one call in the body of the three, one of the other.
    assert calls and set(calls) == {f"combine_sparsecore_{tokens}x2_{WIDTH}"}
    assert not any(name.startswith(("combine_rows", "combine_stream")) for name in kernel_names(text))
    programs = [file.read_text() for file in (tmp_path / "bundles").glob("*_bundles.txt")]
    summing = [text for text in programs if "vst.add" in text]
    assert summing
    if target == COUNTED_ON:
        assert_counted(dict(one for text in summing for one in loops(text)))


def sparsecore_calls(text: str) -> list[str]:
    """Kernels that the compiled program starts on its SparseCore thread, by the name they were given."""
    starts = (line for line in text.splitlines() if "async-start(" in line and 'execution_thread="sparsecore"' in line)
    names = (re.match(r"\s+(?:ROOT )?%(combine_sparsecore_\w+)\.call-start", line) for line in starts)
    return [name.group(1) for name in names if name]


def kernel_names(text: str) -> list[str]:
    """Custom calls of the whole program."""
    module = hlo.parse(text)
    return [one.name for body in module.computations.values() for one in body if one.opcode == "custom-call"]


def loops(text: str) -> Iterator[tuple[str, int]]:
    """(what, bundles with their delays) of the vector loops of a subcore's program: rows stored, added, zeros."""
    subcore = text.split("\ntec\n")[1]
    for body in re.findall(r"^\.LBB(\d+_\d+):\n(.*?)(?=^\.LBB)", subcore, re.M | re.S):
        label, lines = body
        branch = re.search(rf"sbr\.rel @p\d+ \.LBB{label}-.*, \$(\d)", lines)
        kind = "added" if "vst.add.f32" in lines else "first" if "vmul.f32" in lines else "none"
        if branch is None or not ("vst.add.f32" in lines or re.search(r"\] =\s+vst v\d", lines)):
            continue
        last = lines[: branch.start()].count("\n0x") + lines.startswith("0x") + int(branch.group(1))
        bundles = re.findall(r"^0x.*?\}", lines, re.M | re.S)[:last]
        delays = sum(int(number, 16) for one in bundles for number in re.findall(r"sdelay \$0x(\w+)", one))
        yield kind, len(bundles) + delays


def assert_counted(found: dict[str, int]) -> None:
    """What the work model says of each loop, within a tenth."""
    assert found.keys() == {"first", "added", "none"}
    # Unrolled eight times; a row of pairs has half as many vectors of words as of zeros.
    trips = tpu_combine_cost._SLOT_WIDTH // (8 * tpu_combine_cost._SPARSE_LANES)
    counted = {kind: bundles * (trips if kind == "none" else trips // 2) for kind, bundles in found.items()}
    assert counted == pytest.approx(tpu_combine_cost._SPARSE_SLOTS, rel=0.1)


def test_targets_name_the_devices_that_the_compiler_has() -> None:
    """What programs are traced for: jax's name of a device and its TensorCores."""
    names = ("tpu7x:2x2x1", "v6e:2x4", "v5p:2x2x1")
    env = {**os.environ, "JAX_PLATFORMS": "cpu", "ALLOW_MULTIPLE_LIBTPU_LOAD": "1", "TPU_SKIP_MDS_QUERY": "1"}
    done = subprocess.run([sys.executable, "-c", DEVICES, *names], env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    for name, device in json.loads(done.stdout.splitlines()[-1]).items():
        cores = load_target(name).sparse_cores
        assert cores is not None and [cores.device_kind, cores.device_cores.value] == device
