"""An emitted program against a recorded reference (ref.npz) on the checkpoint it was recorded from.

Keys: ids_a [2, n], logits_a, ids_b [1, m], logits_b (full forward passes, float32); gen_prompt [1, k]
and gen [1, g] (greedy continuation); optionally logits_step [1, s, V] (prefill of STEP_PREFILL
tokens of ids_b, then s single cached steps), else the rows of logits_b stand for it.
"""

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from moec.runtime.generate import generate
from moec.runtime.program import Program, load_program
from moec.runtime.score import score, trace
from moec.runtime.weights import Progress, load_weights

from ..problems import Problem, ProblemsError
from . import chunks
from .recording import STEP_PREFILL, STEPS, TAP, check_vocab, read_reference
from .report import Check, Frozen, Section, Status, combine, verdict

TOLERANCE = 1e-4
SEED = 0


class Recorded(Frozen):
    """Result of verify_recorded. max_abs_err: kind -> largest |logit difference|; greedy ids side by side.

    load_notes: conversions of the checkpoint that lost bits. first_difference: where the hidden states part,
    when the logits do and the recording has the hidden states.
    """

    program: str
    reference: str
    tolerance: float
    max_abs_err: dict[str, float]
    greedy: tuple[int, ...]
    greedy_wanted: tuple[int, ...]
    load_notes: tuple[str, ...] = ()
    first_difference: str = ""

    @property
    def checks(self) -> tuple[Check, ...]:
        logits = [
            verdict(kind, err <= self.tolerance, f"max_abs_err {err:.3e}, tolerance {self.tolerance:.0e}", max_abs=err)
            for kind, err in self.max_abs_err.items()
        ]
        same = sum(a == b for a, b in zip(self.greedy, self.greedy_wanted, strict=False))
        text = f"{same} of {len(self.greedy_wanted)} ids equal"
        return (*logits, verdict("greedy ids", self.greedy == self.greedy_wanted, text, equal=same))

    @property
    def status(self) -> Status:
        return combine(check.status for check in self.checks)

    def sections(self) -> tuple[Section, ...]:
        """For report.render."""
        facts = tuple(("note", note) for note in self.load_notes)
        facts += (("first difference", self.first_difference),) if self.first_difference else ()
        return (Section(title=f"recorded reference {self.reference}: {self.program}", facts=facts, checks=self.checks),)


def verify_recorded(
    program_dir: Path,
    weights_dir: Path,
    reference: Path,
    *,
    tolerance: float = TOLERANCE,
    devices: Sequence[Any] | None = None,
    progress: Progress | None = None,
) -> Recorded:
    """Full prefill, ragged chunks, cached steps and greedy generation against the recording."""
    arrays = read_reference(reference)
    program = load_program(program_dir)
    check_vocab(reference, arrays, program.VOCAB, program.NAME)
    mesh = mesh_on(program, list(jax.devices() if devices is None else devices))
    notes: list[str] = []
    weights = load_weights(program, mesh, weights_dir, progress, on_note=notes.append)
    errors = {
        kind: _error(score(program, mesh, weights, ids, cuts), wanted)
        for kind, (ids, cuts, wanted) in cases(program, arrays).items()
    }
    prompt, wanted = arrays["gen_prompt"][0].tolist(), arrays["gen"][0].tolist()
    (completion,) = generate(program, mesh, weights, [prompt], max_tokens=len(wanted))
    wrong = max(errors.values()) > tolerance
    return Recorded(
        first_difference=_first_difference(program, mesh, weights, arrays, tolerance) if wrong else "",
        program=program.NAME,
        reference=str(reference),
        tolerance=tolerance,
        max_abs_err=errors,
        greedy=completion.tokens,
        greedy_wanted=tuple(wanted),
        load_notes=tuple(notes),
    )


def _first_difference(
    program: Program, mesh: Mesh, weights: Any, arrays: Mapping[str, np.ndarray], tolerance: float
) -> str:
    """The first recorded hidden state that the program does not reproduce, relative to its root mean square."""
    ids = arrays["ids_a"].tolist()
    lengths = [len(tokens) for tokens in ids]
    traces = trace(program, mesh, weights, ids, chunks.whole(lengths, chunks.largest_chunk(program, len(ids))))
    last = len(traces[0].hidden) - 1
    for index in range(last + 1):
        wanted = arrays.get(f"{TAP}{index}")
        if wanted is None or wanted.shape[-1] != traces[0].hidden.shape[-1]:
            return ""
        error = _error([one.hidden[index] for one in traces], list(wanted))
        if error > tolerance * max(float(np.sqrt(np.mean(wanted**2))), 1.0):
            place = "the embedding" if index == 0 else f"layer {index - 1}"
            return f"{place if index < last else f'{place} or the final norm'} (max_abs_err {error:.3e})"
    return "the head: all recorded hidden states agree"


def mesh_on(program: Program, devices: Sequence[Any]) -> Mesh:
    """The program's mesh on the first of the devices; too few are a problem of the user's."""
    needed = math.prod(program.MESH_AXES.values())
    if len(devices) < needed:
        text = f"{program.NAME} needs {needed} devices, {len(devices)} are visible"
        raise ProblemsError([Problem("", text, hint=f"--target cpu:{needed} gives virtual ones")])
    return program.mesh(devices[:needed])


Case = tuple[list[list[int]], list[list[int]], list[np.ndarray]]  # ids, chunks, wanted logits per sequence


def cases(program: Program, arrays: Mapping[str, np.ndarray]) -> dict[str, Case]:
    """Kind -> what to run and what it must give."""
    found: dict[str, Case] = {}
    for part in "ab":
        ids, wanted = arrays[f"ids_{part}"].tolist(), list(arrays[f"logits_{part}"])
        lengths, cap = [len(tokens) for tokens in ids], chunks.largest_chunk(program, len(ids))
        found[f"full {part}"] = (ids, chunks.whole(lengths, cap), wanted)
        found[f"ragged {part}"] = (ids, chunks.ragged(lengths, cap, SEED), wanted)
    last = STEP_PREFILL + STEPS
    stepped = arrays["logits_b"][:, :last].copy()
    if "logits_step" in arrays:
        stepped[:, STEP_PREFILL:] = arrays["logits_step"]
    cuts = chunks.steps([last], chunks.largest_chunk(program, 1), STEPS)
    found["cached steps"] = (arrays["ids_b"][:, :last].tolist(), cuts, list(stepped))
    return found


def _error(got: Sequence[np.ndarray], wanted: Sequence[np.ndarray]) -> float:
    """Largest |difference|; NaN counts as infinite."""
    worst = np.max([np.abs(a.astype(np.float64) - b).max() for a, b in zip(got, wanted, strict=True)])
    return float(worst) if np.isfinite(worst) else float("inf")
