"""Reading a recorded reference (keys: recorded.py); free of jax, so that it can be checked before anything runs."""

import re
from pathlib import Path

import numpy as np

from ..problems import Problem, ProblemsError

REQUIRED = ("ids_a", "logits_a", "ids_b", "logits_b", "gen_prompt", "gen")
OPTIONAL = ("logits_step",)
TAP = "hidden_a_"  # + layer: its input for ids_a [2, n, D]; the last one is the output of the final norm
STEP_PREFILL = 20
STEPS = 15


def read_reference(path: Path) -> dict[str, np.ndarray]:
    """The recording's arrays; a file that is none is a problem of the user's."""
    try:
        with path.open("rb") as file:
            archive = np.load(file)
            if not isinstance(archive, np.lib.npyio.NpzFile):
                raise ValueError("one array, not an archive of them (.npz)")
            taps = [name for name in archive.files if re.fullmatch(TAP + "[0-9]+", name)]
            arrays = {name: archive[name] for name in (*REQUIRED, *OPTIONAL, *taps) if name in archive.files}
    except Exception as error:  # a damaged archive raises whatever zipfile, zlib and numpy run into
        reason = str(error).partition("\n")[0] or type(error).__name__
        raise ProblemsError([Problem("", f"cannot read the reference {path}: {reason}")]) from error
    lacking = [name for name in REQUIRED if name not in arrays]
    if lacking:
        text = f"{path} lacks {', '.join(lacking)}"
        raise ProblemsError([Problem("", text, hint=f"a recorded reference holds {', '.join(REQUIRED)}")])
    if found := [*_forms(arrays)] or [*_sizes(arrays)]:
        raise ProblemsError([Problem("", f"{path}: {text}") for text in found])
    return arrays


def positions(arrays: dict[str, np.ndarray]) -> int:
    """Tokens of the longest sequence."""
    length = {name: arrays[name].shape[1] for name in ("ids_a", "ids_b", "gen_prompt", "gen")}
    return max(length["ids_a"], length["ids_b"], length["gen_prompt"] + length["gen"])


def check_vocab(path: Path, arrays: dict[str, np.ndarray], vocab: int, program: str) -> None:
    """The recording must be of a model with the program's vocabulary."""
    found = arrays["logits_a"].shape[-1]
    if found != vocab:
        raise ProblemsError(
            [Problem("", f"{path} has logits of {found} tokens, the vocabulary of {program} is {vocab}")]
        )


def _forms(arrays: dict[str, np.ndarray]) -> list[str]:
    """Arrays of another kind or rank than documented."""
    found = []
    for name, array in arrays.items():
        values = name.startswith(("logits", TAP))
        kind, kinds, rank = ("floats", "f", 3) if values else ("integers", "iu", 2)
        if array.dtype.kind not in kinds or array.ndim != rank or 0 in array.shape:
            last = "hidden" if name.startswith(TAP) else "vocabulary"
            axes = f"[sequences, tokens, {last}]" if values else "[sequences, tokens]"
            found.append(f"{name} is {array.dtype} {list(array.shape)}, expected {kind} {axes}, none of them 0")
    return found


def _sizes(arrays: dict[str, np.ndarray]) -> list[str]:
    """Sizes that do not fit each other."""
    vocab = arrays["logits_a"].shape[2]
    wanted = {f"logits_{part}": (*arrays[f"ids_{part}"].shape, vocab) for part in "ab"}
    if "logits_step" in arrays:
        wanted["logits_step"] = (1, STEPS, vocab)
    found = [
        f"{name} has shape {list(arrays[name].shape)}, expected {list(shape)}"
        for name, shape in wanted.items()
        if arrays[name].shape != shape
    ]
    found += [
        f"{name} has {len(arrays[name])} sequences, expected 1"
        for name in ("ids_b", "gen_prompt", "gen")
        if len(arrays[name]) != 1
    ]
    if arrays["ids_b"].shape[1] < STEP_PREFILL + STEPS:
        need = f"{STEP_PREFILL + STEPS} ({STEP_PREFILL} to prefill, {STEPS} cached steps)"
        found.append(f"ids_b has {arrays['ids_b'].shape[1]} tokens, at least {need} are needed")
    for name in ("ids_a", "ids_b", "gen_prompt", "gen"):
        strange = arrays[name][(arrays[name] < 0) | (arrays[name] >= vocab)]
        if strange.size:
            found.append(f"{name} holds token {strange[0]}: valid ids are 0 to {vocab - 1}")
    return found
