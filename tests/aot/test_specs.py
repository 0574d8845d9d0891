"""The decode step of every shipped model compiled for Ironwood, where docs/models.md plans it: memory and collectives
as planned. Models whose mechanisms another one has are marked aot_all: `make test-aot` compiles them too.

No TPU is needed: libtpu compiles for the topology on any Linux x86-64 machine.
"""

from pathlib import Path

import pytest

from moec.compiler.emit.emit import emit
from moec.compiler.plan.choose import make_plan
from moec.compiler.spec.load import list_models, load
from moec.compiler.verify.aot import block_layers, verify_aot
from moec.compiler.verify.kernels import planned_kernels

# model -> the mechanism it stands for
FIRST = {
    "gpt-oss-20b": "4-bit experts with biases, sinks, rows of the embedding table that are no whole tiles",
    "kimi-linear-48b-a3b": "Kimi Delta Attention and latent attention",
    "minimax-m2": "float8 experts whose columns of scales are no multiple of 8, norms over all heads",
    "mixtral-8x22b": "few wide experts in bfloat16",
    "nemotron-3-nano-30b-a3b": "one block per layer, Mamba-2, experts without a gate",
    "qwen3-next-80b-a3b": "Gated DeltaNet, float8 experts",
}
TWO_HOSTS = ("deepseek-v3", "glm-4.5-355b")  # 0.4 GiB too large for one
WORKLOAD = "chat_1k1k_c128"
# Another test compiles this one at its own workload.
ELSEWHERE = "qwen3.5-397b-a17b"
MODELS = [name for name in list_models() if not name.startswith("tiny/") and name != ELSEWHERE]
MARKED = [pytest.param(name, marks=pytest.mark.aot if name in FIRST else pytest.mark.aot_all) for name in MODELS]


@pytest.mark.timeout(1800)
@pytest.mark.parametrize("model", MARKED)
def test_decode_step_compiles_as_planned(model: str, tmp_path: Path) -> None:
    target = "tpu7x:2x2x2" if model in TWO_HOSTS else "tpu7x:2x2x1"
    request = load(model, target=target, workload=WORKLOAD)
    plan = make_plan(request)
    emit(request.graph, plan, tmp_path / "program")
    report = verify_aot(
        tmp_path / "program",
        plan,
        target,
        layers=block_layers(request.graph),
        kernels=planned_kernels(request.graph, plan),
        cache_dir=tmp_path,
        buckets=["decode"],
    )
    (found,) = report.buckets
    assert [check for check in found.checks if check.status != "pass"] == []
    memory = found.measured.memory
    assert memory is not None
    assert abs(plan.memory.arguments_bytes - memory.argument) <= 0.001 * memory.argument


def test_the_models_named_here_are_shipped() -> None:
    assert {*FIRST, *TWO_HOSTS} < set(MODELS)
