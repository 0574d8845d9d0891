"""Which stored tensors make up each weight of a program, and everything that keeps a checkpoint from filling it."""

from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

from moec.blocks.core.array_info import ArrayInfo, Op, Source

from .checkpoint import INDEX, Checkpoint, Stored, named
from .convert import FLOAT8, FLOATS, scale_ops, scale_shape, squeeze, stored_shape
from .program import Program

Path = tuple[str, ...]


@dataclass(frozen=True)
class Piece:
    """What fills one layer of a weight: one stored tensor, or one per expert (dim 0 of the layer)."""

    tensors: tuple[str, ...]
    ops: tuple[Op, ...]
    per_expert: bool


@dataclass(frozen=True)
class Target:
    """One array to load: its place in the weight tree and a piece per layer (one without a layer dim).

    scale: the sibling array of block scales that is filled with it.
    """

    path: Path
    info: ArrayInfo
    scale: ArrayInfo | None
    pieces: tuple[Piece, ...]

    @property
    def label(self) -> str:
        return ".".join(self.path)


@dataclass(frozen=True)
class _Use:
    """A weight's claim on a stored tensor: it must yield `wanted` after `ops`."""

    target: Target
    ops: tuple[Op, ...]
    wanted: tuple[int, ...]


def layer_shape(info: ArrayInfo) -> tuple[int, ...]:
    """Shape of one layer of an array."""
    return info.shape[1:] if info.layers else info.shape


def scale_path(path: Path) -> Path:
    """Where the block scales of a weight are in the tree."""
    return (*path[:-1], f"{path[-1]}_scale")


def flatten(tree: dict[str, Any], path: Path = ()) -> Iterator[tuple[Path, ArrayInfo]]:
    """The leaves of a nested dict with their paths, in order."""
    for key, node in tree.items():
        if isinstance(node, dict):
            yield from flatten(node, (*path, key))
        else:
            yield (*path, key), node


def resolve(program: Program, checkpoint: Checkpoint) -> tuple[tuple[Target, ...], list[str]]:
    """Every weight with its stored tensors, and all problems; the targets are complete only without problems."""
    leaves = dict(flatten(program.weights()))
    lost: dict[str, str] = {}
    targets, known = [], set[str]()
    for path, info in leaves.items():
        if info.scale_of is None:
            known |= {name for piece in _alternatives(info) for name in piece.tensors}
            targets.append(_target(path, info, leaves.get(scale_path(path)), checkpoint, lost))
    told = named(checkpoint.problems)
    problems = [*checkpoint.problems, *(message for name, message in lost.items() if name not in told)]
    problems += [f"{t.label}: the program names no checkpoint tensor for it" for t in targets if not t.info.sources]
    problems += _tensor_problems(program, targets, checkpoint)
    return tuple(targets), problems + _surplus(program, checkpoint, known)


def _alternatives(info: ArrayInfo) -> Iterator[Piece]:
    for layer in info.layers or (-1,):
        yield from (_piece(source, layer, info) for source in info.sources)


def _piece(source: Source, layer: int, info: ArrayInfo) -> Piece:
    name = source.tensor.replace("{layer}", str(layer))
    if "{expert}" not in name:
        return Piece((name,), source.ops, per_expert=False)
    experts = range(layer_shape(info)[0])
    return Piece(tuple(name.replace("{expert}", str(e)) for e in experts), source.ops, per_expert=True)


def _target(
    path: Path, info: ArrayInfo, scale: ArrayInfo | None, checkpoint: Checkpoint, lost: dict[str, str]
) -> Target:
    """Choose a piece per layer; the tensors missing of the closest alternative go to `lost`."""
    pieces = []
    for layer in info.layers or (-1,):
        options = [_piece(source, layer, info) for source in info.sources]
        complete = [p for p in options if all(name in checkpoint.tensors for name in p.tensors)]
        pieces += complete[:1]
        if options and not complete:
            missing = _closest(options, checkpoint)
            lost.update({name: f"{name}: missing{_whence(name, checkpoint)}" for name in missing})
    return Target(path, info, scale, tuple(pieces))


def _closest(options: list[Piece], checkpoint: Checkpoint) -> tuple[str, ...]:
    """The missing tensors of the alternative that the checkpoint comes closest to having."""

    def distance(names: tuple[str, ...], total: int) -> tuple[float, float, int]:
        words = names[0].split(".")
        matched = sum(".".join(words[:n]) in checkpoint.prefixes for n in range(1, len(words)))
        unheard = sum(name not in checkpoint.absent for name in names)
        return unheard / total, len(names) / total, len(words) - matched

    lacking = [tuple(name for name in p.tensors if name not in checkpoint.tensors) for p in options]
    best = min(range(len(options)), key=lambda i: distance(lacking[i], len(options[i].tensors)))
    return lacking[best]


def _whence(name: str, checkpoint: Checkpoint) -> str:
    return f" ({INDEX} places it in {checkpoint.absent[name]})" if name in checkpoint.absent else ""


def _tensor_problems(program: Program, targets: list[Target], checkpoint: Checkpoint) -> list[str]:
    """Wrong dtypes, shapes and block scales of the chosen tensors; each message once."""
    uses = defaultdict(list)
    for target in targets:
        for piece in target.pieces:
            wanted = layer_shape(target.info)[1:] if piece.per_expert else layer_shape(target.info)
            for name in piece.tensors:
                uses[name].append(_Use(target, piece.ops, wanted))
    found: dict[str, None] = {}
    for name, claims in uses.items():
        found.update(dict.fromkeys(_problems_of(program, checkpoint, checkpoint.tensors[name], claims)))
    return list(found)


def _problems_of(program: Program, checkpoint: Checkpoint, stored: Stored, uses: list[_Use]) -> Iterator[str]:
    if stored.dtype.name not in FLOATS:
        yield f"{stored.name}: stored as {stored.dtype.name}, expected a float dtype"
        return
    shape = squeeze(stored.shape, _stored_rank(uses[0]))
    misfit = list(_misfits(stored, shape, uses))
    yield from misfit
    if stored.dtype.name in FLOAT8 and not misfit:
        yield from _scale_problems(program, checkpoint, stored, shape, uses)


def _stored_rank(use: _Use) -> int:
    """Rank before the ops: the wanted one, since only a reshape could change it."""
    return len(use.wanted)


def _misfits(stored: Stored, shape: tuple[int, ...], uses: list[_Use]) -> Iterator[str]:
    """Shapes that differ from what the ops of all weights cut out of the tensor together."""
    extent = max([int(op[3]) for use in uses for op in use.ops if op[0] == "slice"], default=0)
    for use in uses:
        expected = stored_shape(use.wanted, use.ops, extent)
        if expected is not None and shape != expected:
            yield f"{stored.name}: shape {list(stored.shape)}, expected {list(expected)}"


def _scale_problems(
    program: Program, checkpoint: Checkpoint, stored: Stored, shape: tuple[int, ...], uses: list[_Use]
) -> Iterator[str]:
    """A float8 tensor needs its block scales, and float8 weights need them cut at block borders."""
    if program.SCALE_SUFFIX is None or program.SCALE_BLOCK is None:
        yield f"{stored.name}: stored as {stored.dtype.name}, but the program declares no block scales"
        return
    name = stored.name + program.SCALE_SUFFIX
    if name not in checkpoint.tensors:
        yield f"{name}: missing (block scales of {stored.name}, which is stored as {stored.dtype.name})"
        return
    scale, expected = checkpoint.tensors[name], scale_shape(shape, program.SCALE_BLOCK)
    if scale.dtype.name not in FLOATS:
        yield f"{name}: stored as {scale.dtype.name}, expected a float dtype"
    if squeeze(scale.shape, len(expected)) != expected and scale.shape != expected:
        yield f"{name}: shape {list(scale.shape)}, expected {list(expected)}"
    for use in uses:
        if keeps_bits(stored, use.target) and scale_ops(use.ops, shape, program.SCALE_BLOCK) is None:
            yield f"{stored.name}: {use.target.label} would cut through its {program.SCALE_BLOCK} scale blocks"


def keeps_bits(stored: Stored, target: Target) -> bool:
    """Whether a weight takes over the stored float8 values and scales as they are."""
    return target.scale is not None and stored.dtype.name == target.info.dtype


def _surplus(program: Program, checkpoint: Checkpoint, known: set[str]) -> list[str]:
    """Tensors that no source names, the program does not ignore, and that are no block scales of a float8 tensor."""
    suffix = program.SCALE_SUFFIX
    scales = {t.name + suffix for t in checkpoint.tensors.values() if t.dtype.name in FLOAT8} if suffix else set()
    return [
        f"{name}: surplus, no weight of the program needs it"
        for name in checkpoint.tensors
        if name not in known and not _scales_known(name, suffix, known, scales) and not _ignored(name, program.IGNORE)
    ]


def _scales_known(name: str, suffix: str | None, known: set[str], scales: set[str]) -> bool:
    return suffix is not None and name in scales and name.removesuffix(suffix) in known


def _ignored(name: str, patterns: Iterable[str]) -> bool:
    return any(fnmatchcase(name, pattern) for pattern in patterns)
