"""A whole program of the kernel variants, in TPU interpret mode on eight virtual devices, against the references.

The emitted package is that of the TPU target: its kernels run through Pallas' TPU interpreter
(jax.experimental.pallas.tpu.InterpretParams), everything else on XLA:CPU. It runs in a process of its own, in which
XLA:CPU does not optimise: the interpreter's programs are large, and compiling them well takes longer than running them.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from moec.compiler.emit.emit import emit
from moec.compiler.graph.ir import Graph
from moec.compiler.plan.choose import make_plan
from moec.compiler.plan.plan import Plan
from moec.compiler.spec.load import load

SPEC = Path(__file__).parent / "specs" / "aligned.yaml"
FLOAT32 = [f"plan.dtypes.{role}=float32" for role in ("activation", "weight", "expert", "kv", "state", "conv")]
SIZES = ["workload.concurrency=8", "workload.isl=16", "workload.osl=8", "workload.max_context=32"]
# Small steps: the interpreter's time goes with the rows of expert blocks. At these sizes XLA is predicted faster in
# places, so the kernels are pinned.
STEPS = ["plan.page_size=16", "plan.max_batched_tokens=16"]
KERNELS = [f"plan.variants.{pin}" for pin in ("gdn=tpu_fused", "gqa=tpu_ragged", "moe=tpu_grouped", "router=tpu_fused")]
PROMPT, NEW = 16, 4


def asked() -> tuple[Graph, Plan]:
    """The aligned model and its plan of kernels, for Ironwood, in float32."""
    request = load(str(SPEC), target="tpu7x:2x2x1", workload="default", overrides=FLOAT32 + SIZES + STEPS + KERNELS)
    return request.graph, make_plan(request)


def kernels(plan: Plan) -> dict[str, str]:
    """Blocks and parts that run a kernel."""
    return {name: variant for name, variant in plan.variants.items() if variant.startswith("tpu_")}


def run(folder: Path) -> dict[str, float]:
    """One prefill chunk and NEW decode steps on each of eight ranks: the largest errors."""
    import jax
    from conftest import pass_numpy
    from jax.experimental.pallas import tpu as pltpu

    from moec.compiler.verify.numerics import compare
    from moec.compiler.verify.random_checkpoint import write_random_checkpoint
    from moec.compiler.verify.reference import checkpoint_weights, forward
    from moec.runtime.program import load_program
    from moec.runtime.score import trace
    from moec.runtime.weights import load_weights

    pass_numpy()
    graph, _ = asked()
    write_random_checkpoint(graph, folder, seed=0)
    program = load_program(folder / "program")
    ids = [[(17 * rank + 31 * t) % graph.dims.vocab_size for t in range(PROMPT + NEW)] for rank in range(8)]
    weight_of = checkpoint_weights(graph, folder)
    meanings = [forward(graph, weight_of, tokens) for tokens in ids]
    mesh = program.mesh(jax.devices()[:8])
    weights = load_weights(program, mesh, folder)
    # Copies land when they are started: that they land no earlier than they may is what the kernels' own tests see to.
    with pltpu.force_tpu_interpret_mode(pltpu.InterpretParams(dma_execution_mode="eager")):
        traces = trace(program, mesh, weights, ids, [[PROMPT, *[1] * NEW]] * len(ids))
    errors = compare("prefill and steps", traces, meanings)
    return {"hidden": max(errors.hidden_rel), "logits": errors.logits_abs}


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_program_of_kernels_agrees_with_the_references(tmp_path: Path) -> None:
    """Every layer and the logits within 1e-4, the bound of XLA programs in float32."""
    graph, plan = asked()
    assert kernels(plan).keys() == {"gdn", "gqa", "moe", "moe.router"}, plan.variant_choices
    emit(graph, plan, tmp_path / "program")
    text = (tmp_path / "program" / "model.py").read_text()
    assert all(f"= {name}(" in text for name in ("gated_delta_fused", "attention_ragged", "route_packed_fused"))
    flags = "--xla_force_host_platform_device_count=8 --xla_backend_optimization_level=0"
    env = {**os.environ, "JAX_PLATFORMS": "cpu", "NPROC": "16", "XLA_FLAGS": flags}
    done = subprocess.run([sys.executable, __file__, str(tmp_path)], env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-4000:]
    errors = json.loads(done.stdout.splitlines()[-1])
    # Zero would mean that nothing was compared.
    assert 0 < errors["hidden"] <= 1e-4 and 0 < errors["logits"] <= 1e-4, errors


@pytest.mark.parametrize(("block", "reason"), [("gdn", "128"), ("gqa", "head_dim"), ("moe", "128")])
def test_unaligned_models_are_refused_with_the_reason(block: str, reason: str) -> None:
    """The recorded oracles have dims of 16 and 64: the plan takes plain XLA and says why."""
    plan = make_plan(load("tiny/qwen3_5_moe", target="tpu7x:2x2x1", workload="tiny"))
    assert not kernels(plan).keys() & {"gdn", "gqa", "moe"}
    refused = {one.scope: one.why for one in plan.variant_choices if one.verdict == "REFUSED"}
    assert reason in refused[block]


if __name__ == "__main__":
    print(json.dumps(run(Path(sys.argv[1]))))
