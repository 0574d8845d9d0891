"""The emitted program against the composed float32 references, on random weights, layer by layer.

The program runs on whatever devices it is given (virtual ones in tests) and loads its weights
through the loader users get; the reference reads the same files without it.
"""

import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np

from moec.runtime.program import Program, load_program
from moec.runtime.score import Trace, trace
from moec.runtime.weights import load_weights

from ..graph.count import total_params
from ..graph.ir import Graph
from ..plan.plan import Plan
from . import chunks
from .random_checkpoint import write_random_checkpoint, writes_packed
from .reference import Meaning, checkpoint_weights, forward
from .report import Check, Frozen, Section, Status, combine, skipped, verdict

# Largest |difference| for float32 programs: logits absolute, hidden states in units of the layer's RMS.
LOGITS_BOUND = 1e-4
HIDDEN_BOUND = 1e-4
LENGTHS = (37, 9, 18, 5, 13, 2, 11, 7)
SINGLE_STEPS = 4
# The references run token by token in Python.
MAX_PARAMS = 200_000_000
CHECK = "numerics"


class Errors(Frozen):
    """One way of cutting the sequences. hidden_*: embedding, input of layers 1 to L-1, after the final norm.

    *_abs: largest |difference|; *_rel: the same over the reference's RMS.
    """

    kind: str
    hidden_abs: tuple[float, ...]
    hidden_rel: tuple[float, ...]
    logits_abs: float
    logits_rel: float


class NumericsReport(Frozen):
    """Result of verify_numerics. reason: why nothing was compared, "" when it was."""

    program: str
    mesh: str
    seed: int
    layers: tuple[str, ...]
    reason: str = ""
    errors: tuple[Errors, ...] = ()

    @property
    def checks(self) -> tuple[Check, ...]:
        if self.reason:
            return (skipped(CHECK, self.reason),)
        return tuple(check for errors in self.errors for check in _judge(errors, self.layers))

    @property
    def status(self) -> Status:
        return combine(check.status for check in self.checks)

    def sections(self) -> tuple[Section, ...]:
        """For report.render."""
        title = f"numerics {self.program} on {self.mesh}, random weights (seed {self.seed})"
        return (Section(title=title, facts=_rows(self), checks=self.checks),)


def verify_numerics(
    program_dir: Path, plan: Plan, graph: Graph, *, devices: Sequence[Any] | None = None, seed: int = 0
) -> NumericsReport:
    """Run full prefill, ragged chunks and cached single steps; compare every layer with the reference."""
    names = tuple(layer.kind for _, layer in graph.layers())
    mesh_text = " x ".join(f"{name} {size}" for name, size in plan.mesh.axes) or "one device"
    blank = NumericsReport(program=plan.model, mesh=mesh_text, seed=seed, layers=names)
    available = list(jax.devices() if devices is None else devices)
    reason = why_not(plan, graph, len(available))
    if reason:
        return blank.model_copy(update={"reason": reason})
    program = load_program(program_dir)
    with tempfile.TemporaryDirectory(prefix="moec-random-") as folder:
        write_random_checkpoint(graph, Path(folder), seed=seed)
        ids = sequences(program, graph.dims.vocab_size, seed)
        weight_of = checkpoint_weights(graph, Path(folder))
        meanings = [forward(graph, weight_of, tokens) for tokens in ids]
        mesh = program.mesh(available[: plan.mesh.num_devices])
        weights = load_weights(program, mesh, folder)
    cap = chunks.largest_chunk(program, len(ids))
    lengths = [len(tokens) for tokens in ids]
    cuts = {
        "full prefill": chunks.whole(lengths, cap),
        "ragged chunks": chunks.ragged(lengths, cap, seed),
        "cached steps": chunks.steps(lengths, cap, SINGLE_STEPS),
    }
    errors = [compare(kind, trace(program, mesh, weights, ids, cut), meanings) for kind, cut in cuts.items()]
    return blank.model_copy(update={"errors": tuple(errors)})


def why_not(plan: Plan, graph: Graph, num_devices: int) -> str:
    """Why this program cannot be compared here, "" when it can. Experts may keep the bits they are stored in."""
    dtypes = {name: dtype for name, dtype in plan.dtypes.model_dump().items() if name != "scale_block"}
    lower = {name: dtype for name, dtype in dtypes.items() if dtype not in ("float32", "activation")}
    if graph.checkpoint and "expert" in lower and writes_packed(graph, lower["expert"]):
        del lower["expert"]
    if lower:
        text = ", ".join(f"{name} {dtype}" for name, dtype in lower.items())
        return f"the plan is not float32 ({text}): experts chosen differently would hide every other error"
    if graph.checkpoint is None:
        return "the spec has no checkpoint table: there is no layout to write random weights in"
    if total_params(graph) > MAX_PARAMS:
        return f"{total_params(graph):,} parameters: the token-by-token reference takes at most {MAX_PARAMS:,}"
    if plan.mesh.num_devices > num_devices:
        return f"the program needs {plan.mesh.num_devices} devices, {num_devices} are visible"
    return ""


def sequences(program: Program, vocab: int, seed: int) -> list[list[int]]:
    """Random ids: one sequence more than ranks, so that one rank runs two rows at once."""
    rng = np.random.default_rng(seed)
    rows = min(bucket.seqs_per_rank for bucket in program.BUCKETS.values())
    count = min(program.NUM_RANKS + 1, rows * program.NUM_RANKS)
    room = (program.NUM_PAGES - 1) // 2 * program.PAGE_SIZE
    lengths = [min(LENGTHS[i % len(LENGTHS)], program.MAX_CONTEXT, room) for i in range(count)]
    return [rng.integers(0, vocab, n).tolist() for n in lengths]


def compare(kind: str, traces: Sequence[Trace], meanings: Sequence[Meaning]) -> Errors:
    """Largest differences over all sequences and tokens."""
    hidden = np.concatenate([t.hidden for t in traces], axis=1), np.concatenate([m.hidden for m in meanings], axis=1)
    logits = np.concatenate([t.logits for t in traces]), np.concatenate([m.logits for m in meanings])
    layers = [difference(got, wanted) for got, wanted in zip(*hidden, strict=True)]
    logits_abs, logits_rel = difference(*logits)
    return Errors(
        kind=kind,
        hidden_abs=tuple(absolute for absolute, _ in layers),
        hidden_rel=tuple(relative for _, relative in layers),
        logits_abs=logits_abs,
        logits_rel=logits_rel,
    )


def difference(got: np.ndarray, wanted: np.ndarray) -> tuple[float, float]:
    """(max |difference|, the same over the wanted values' RMS); NaN and infinity count as infinite."""
    assert got.shape == wanted.shape, (got.shape, wanted.shape)
    absolute = float(np.abs(got.astype(np.float64) - wanted).max())
    if not np.isfinite(absolute):
        return float("inf"), float("inf")
    return absolute, absolute / float(np.sqrt(np.mean(wanted.astype(np.float64) ** 2)))


def _judge(errors: Errors, layers: tuple[str, ...]) -> tuple[Check, ...]:
    worst = int(np.argmax(errors.hidden_rel))
    broken = [i for i, error in enumerate(errors.hidden_rel) if not error <= HIDDEN_BOUND]
    place = f"first above at {_place(broken[0], layers)}" if broken else f"worst at {_place(worst, layers)}"
    hidden = f"max {errors.hidden_rel[worst]:.2e} of the layer's RMS, bound {HIDDEN_BOUND:.0e}, {place}"
    logits = f"max |error| {errors.logits_abs:.2e}, bound {LOGITS_BOUND:.0e}"
    return (
        verdict(f"{errors.kind}: layers", not broken, hidden, max_rel=errors.hidden_rel[worst]),
        verdict(f"{errors.kind}: logits", errors.logits_abs <= LOGITS_BOUND, logits, max_abs=errors.logits_abs),
    )


def _place(index: int, layers: tuple[str, ...]) -> str:
    """hidden[i] is what came out of layer i - 1."""
    if index == 0:
        return "the embedding"
    after = f"the output of layer {index - 1} ({layers[index - 1]})"
    return f"{after} and the final norm" if index == len(layers) else after


def _rows(report: NumericsReport) -> tuple[tuple[str, str], ...]:
    """Max |error| per layer, one row per layer, one number per kind."""
    if not report.errors:
        return ()
    head = ("max |error|", ", ".join(errors.kind for errors in report.errors))
    rows = [
        (_place(i, report.layers), ", ".join(f"{errors.hidden_abs[i]:.1e}" for errors in report.errors))
        for i in range(len(report.layers) + 1)
    ]
    return (head, *rows, ("logits", ", ".join(f"{errors.logits_abs:.1e}" for errors in report.errors)))
