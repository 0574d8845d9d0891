"""Programs with one scale per 512 x 512 values of their float8 experts, on float8 checkpoints with 128 x 128 ones.

The reference reads the stored weights. What the program's may differ by is what rounding once more to e4m3 may: half a
step, 2**-4 of a normal value, 2**-10 scales of a smaller one. What experts return may then differ by what follows from
it for the products, computed beside them.
"""

from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from moec.blocks.core.quant import dequantize_on_host, quantize_on_host
from moec.blocks.moe import xla
from moec.compiler.emit.emit import emit
from moec.compiler.graph.ir import Graph
from moec.compiler.plan.choose import make_plan
from moec.compiler.spec.load import load
from moec.compiler.verify.numerics import compare, sequences
from moec.compiler.verify.random_checkpoint import write_random_checkpoint
from moec.compiler.verify.reference import WeightOf, checkpoint_weights, forward
from moec.runtime.checkpoint import SINGLE
from moec.runtime.program import load_program
from moec.runtime.score import trace
from moec.runtime.weights import load_weights

SPEC = Path(__file__).parent / "specs" / "wide_scales.yaml"
F8, WIDE, EDGE = "float8_e4m3fn", "plan.dtypes.scale_block=512", 512
MATRICES = ("w_gate", "w_up", "w_down")
MESHES = {
    "cpu": ("cpu", ()),
    "cpu:2 tp": ("cpu:2", ("plan.attention.tp=2", "plan.experts={ep: 1, tp: 2}")),
    "cpu:4": ("cpu:4", ("plan.attention.dp=4", "plan.experts.ep=4")),
}


def write_float8_checkpoint(graph: Graph, folder: Path) -> None:
    """Random weights, experts in float8 with a scale per 128 x 128; neighbouring blocks' scales differ up to 2**10."""
    write_random_checkpoint(graph, folder)
    tensors, rng = load_file(folder / SINGLE), np.random.default_rng(7)
    for name, value in list(tensors.items()):
        if not name.endswith((".gate_up", ".down")):
            continue
        experts, rows, columns = value.shape
        spread = 2.0 ** rng.uniform(-10, 0, (experts, rows // 128, 1, columns // 128, 1))
        blocks = value.reshape(experts, rows // 128, 128, columns // 128, 128) * spread
        tensors[name], tensors[name + "_scale_inv"] = quantize_on_host(blocks.reshape(value.shape), F8)
    save_file(tensors, folder / SINGLE)


def moved(stored: np.ndarray, scale: np.ndarray) -> np.ndarray:
    """The bound of what requantising moves; the factor covers float32's roundings of value, scale and quotient."""
    spread = scale.repeat(EDGE, -2).repeat(EDGE, -1)
    return np.maximum(np.abs(stored) * 2**-4, spread * 2**-10) * (1 + 2**-20)


@pytest.mark.parametrize("mesh", ["cpu", *(pytest.param(m, marks=pytest.mark.slow) for m in list(MESHES)[1:])])
def test_a_program_with_wide_blocks_means_its_requantised_weights(mesh: str, tmp_path: Path) -> None:
    """In float32 otherwise: within 1e-4 of the reference on the weights that theory lets the stored ones become."""
    target, pins = MESHES[mesh]
    pins = [f"plan.dtypes.expert={F8}", WIDE, *pins]
    request = load(str(SPEC), target=target, workload="tiny", overrides=pins)
    plan = make_plan(request)
    emit(request.graph, plan, tmp_path / "program")
    assert "block=(512, 512)" in (tmp_path / "program" / "weights.py").read_text()
    write_float8_checkpoint(request.graph, tmp_path / "weights")
    program, notes = load_program(tmp_path / "program"), list[str]()
    devices = program.mesh(jax.devices()[: plan.mesh.num_devices])
    weights = load_weights(program, devices, tmp_path / "weights", on_note=notes.append)
    assert [note.split(":")[1] for note in notes[1:]] == [f" stacks.moe.{key} in {F8}" for key in MATRICES]
    assert "requantised to float8_e4m3fn (one scale per 512 x 512 block)" in notes[0]
    stored = checkpoint_weights(request.graph, tmp_path / "weights")
    ids = [sequences(program, request.graph.dims.vocab_size, seed=0)[0][:6]]
    loaded = {key: np.asarray(value) for key, value in weights["stacks"]["moe"].items()}
    meaning = forward(request.graph, loaded_weights(stored, loaded), ids[0])
    found = trace(program, devices, weights, ids, [[len(ids[0])]])
    errors = compare("requantised", found, [meaning])
    assert 0 < max(errors.hidden_rel) <= 1e-4 and 0 < errors.logits_abs <= 1e-4, errors
    # The stored weights mean something else: the comparison would see the wrong scales.
    assert compare("stored", found, [forward(request.graph, stored, ids[0])]).logits_abs > 10 * errors.logits_abs


def loaded_weights(stored: WeightOf, loaded: dict[str, np.ndarray]) -> WeightOf:
    """The stored weights, and experts as the program holds them, within the bound of what is stored."""

    def weight_of(key: str, layer: int | None) -> np.ndarray:
        value, name = stored(key, layer), key.removeprefix("moe.")
        if name not in MATRICES or layer is None:
            return value
        scale = loaded[f"{name}_scale"][layer]
        assert scale.shape == (4, value.shape[1] // EDGE, value.shape[2] // EDGE)
        back = dequantize_on_host(loaded[name][layer], scale)
        off = np.abs(back - value)
        assert off.max() > 0 and (off <= moved(value, scale)).all()
        return back

    return weight_of


def test_experts_return_what_the_bound_on_their_weights_allows() -> None:
    """|x (W + dW)| off by at most |x| |dW|, through SwiGLU (slope of silu at most 1.1) and the second product."""
    rng = np.random.default_rng(11)
    hidden, inner, experts, tokens, top_k = 512, 512, 4, 9, 2
    wide, stored, off = {}, {}, {}
    for key in MATRICES:
        w = rng.standard_normal((1, experts, 4, 128, 4, 128)) * 2.0 ** rng.uniform(-6, 0, (1, experts, 4, 1, 4, 1))
        q, scale = quantize_on_host((w / hidden**0.5).astype(np.float32).reshape(1, experts, hidden, inner), F8)
        stored[key] = dequantize_on_host(q, scale)
        block = np.abs(stored[key]).max((-1, -2), keepdims=True) / np.float32(448)
        wide[key] = (jnp.asarray((stored[key] / block).astype(q.dtype)), jnp.asarray(block))
        off[key] = moved(stored[key], block)[0].astype(np.float64)
    h = rng.standard_normal((tokens, hidden)).astype(np.float32)
    index = np.stack([rng.permutation(experts)[:top_k] for _ in range(tokens)]).astype(np.int32)
    weight = rng.uniform(0.1, 1, (tokens, top_k)).astype(np.float32)
    found = xla.experts(
        jnp.asarray(h),
        jnp.asarray(index),
        jnp.asarray(weight),
        wide["w_gate"][0],
        wide["w_up"][0],
        wide["w_down"][0],
        {key: scale for key, (_, scale) in wide.items()},
        layer=0,
        first_expert=0,
        block_rows=4,
    )
    wanted, bound = np.zeros((tokens, hidden)), np.zeros((tokens, hidden))
    for (token, choice), expert in np.ndenumerate(index):
        gate_w, up_w, down_w = (stored[key][0, expert].astype(np.float64) for key in MATRICES)
        d_gate, d_up, d_down = (off[key][expert] for key in MATRICES)
        x = h[token].astype(np.float64)
        gate, up, e_gate, e_up = x @ gate_w, x @ up_w, np.abs(x) @ d_gate, np.abs(x) @ d_up
        silu = gate / (1 + np.exp(-gate))
        act, e_act = silu * up, 1.1 * e_gate * (np.abs(up) + e_up) + np.abs(silu) * e_up
        wanted[token] += weight[token, choice] * (act @ down_w)
        bound[token] += weight[token, choice] * (e_act @ (np.abs(down_w) + d_down) + np.abs(act) @ d_down)
    error = np.abs(np.asarray(found) - wanted)
    assert (error <= bound * (1 + 1e-4)).all()
    assert error.max() > 1e-3  # far above float32: the weights did move
