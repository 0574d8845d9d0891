"""Which stored tensors make up each weight of a program, and everything that keeps a checkpoint from filling it."""

from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

from moec.blocks.core.array_info import PACKED, SCALED, ArrayInfo, Op, Source

from .checkpoint import INDEX, Checkpoint, Stored, named
from .convert import FLOAT8, FLOATS, extent_of, scale_ops, scale_shape, squeeze, stored_rank, stored_shape, turned
from .packed import scale_block, scale_dtypes, side_tensors, words_shape
from .program import Loadable

Path = tuple[str, ...]


@dataclass(frozen=True)
class Piece:
    """What fills one layer of a weight: one stored tensor, or one per expert (dim 0 of the layer).

    packed: the format of PACKED in which the tensors hold 4-bit values.
    """

    tensors: tuple[str, ...]
    ops: tuple[Op, ...]
    per_expert: bool
    packed: str | None = None


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

    @property
    def block(self) -> tuple[int, int]:
        """(rows, columns) of the weight [in, out] under one of its scales."""
        own = SCALED[self.info.dtype]
        return (self.scale and self.scale.block) or (own.rows, own.columns)


@dataclass(frozen=True)
class _Use:
    """A weight's claim on a stored tensor: it must yield `wanted` after the piece's ops."""

    target: Target
    piece: Piece

    @property
    def ops(self) -> tuple[Op, ...]:
        return self.piece.ops

    @property
    def wanted(self) -> tuple[int, ...]:
        return layer_shape(self.target.info)[1:] if self.piece.per_expert else layer_shape(self.target.info)


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


def resolve(program: Loadable, checkpoint: Checkpoint) -> tuple[tuple[Target, ...], list[str]]:
    """Every weight with its stored tensors, and all problems; the targets are complete only without problems."""
    leaves = dict(flatten(program.weights()))
    lost: dict[str, str] = {}
    targets, known = [], set[str]()
    for path, info in leaves.items():
        if info.scale_of is None:
            for piece in _alternatives(info):
                known |= {*piece.tensors, *(x for name in piece.tensors for x in _beside(name, piece))}
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
        return Piece((name,), source.ops, per_expert=False, packed=source.packed)
    names = tuple(name.replace("{expert}", str(e)) for e in range(layer_shape(info)[0]))
    return Piece(names, source.ops, per_expert=True, packed=source.packed)


def _beside(name: str, piece: Piece) -> Iterable[str]:
    return side_tensors(name, piece.packed).values()


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


def _tensor_problems(program: Loadable, targets: list[Target], checkpoint: Checkpoint) -> list[str]:
    """Wrong dtypes, shapes and block scales of the chosen tensors; each message once."""
    uses = defaultdict(list)
    for target in targets:
        for piece in target.pieces:
            for name in piece.tensors:
                uses[name].append(_Use(target, piece))
    found: dict[str, None] = {}
    for name, claims in uses.items():
        found.update(dict.fromkeys(_problems_of(program, checkpoint, checkpoint.tensors[name], claims)))
    return list(found)


def _problems_of(program: Loadable, checkpoint: Checkpoint, stored: Stored, uses: list[_Use]) -> Iterator[str]:
    if uses[0].piece.packed:
        yield from _packed_problems(checkpoint, stored, uses, uses[0].piece.packed)
        return
    if stored.dtype.name not in FLOATS:
        yield f"{stored.name}: stored as {stored.dtype.name}, expected a float dtype"
        return
    shape = squeeze(stored.shape, stored_rank(len(uses[0].wanted), uses[0].ops))
    misfit = list(_misfits(stored, shape, uses))
    yield from misfit
    if stored.dtype.name in FLOAT8 and not misfit:
        yield from _scale_problems(program, checkpoint, stored, shape, uses)


def _expected(uses: list[_Use]) -> dict[tuple[int, ...], None]:
    """The shapes that the ops of all weights together want of a tensor: one, unless the weights disagree."""
    extent = max((extent_of(op) for use in uses for op in use.ops), default=0)
    return dict.fromkeys(stored_shape(use.wanted, use.ops, extent) for use in uses)


def _misfits(stored: Stored, shape: tuple[int, ...], uses: list[_Use]) -> Iterator[str]:
    """Shapes that differ from what the ops of all weights cut out of the tensor together."""
    for expected in _expected(uses):
        if shape != expected:
            yield f"{stored.name}: shape {list(stored.shape)}, expected {list(expected)}"


def _packed_problems(checkpoint: Checkpoint, stored: Stored, uses: list[_Use], packed: str) -> Iterator[str]:
    """A packed tensor has words of its format, and scales beside it; shapes follow from those of the values."""
    word = PACKED[packed].stored
    if stored.dtype.name != word:
        yield f"{stored.name}: stored as {stored.dtype.name}, expected {word} ({packed} values)"
        return
    for shape in _expected(uses):
        expected = words_shape(shape, packed)
        if stored.shape != expected:
            yield f"{stored.name}: shape {list(stored.shape)}, expected {list(expected)} ({packed} of {list(shape)})"
            return
        yield from _side_problems(checkpoint, stored.name, shape, packed)


def _side_problems(checkpoint: Checkpoint, name: str, shape: tuple[int, ...], packed: str) -> Iterator[str]:
    """The scales of packed values [..., out, in], and their stored shape where there is one."""
    sides = side_tensors(name, packed)
    scale = checkpoint.tensors.get(sides["scales"])
    expected, dtypes = scale_shape(shape, scale_block(packed)), scale_dtypes(packed)
    if scale is None:
        yield f"{sides['scales']}: missing (block scales of {name}, which holds {packed} values)"
    elif scale.dtype.name not in dtypes:
        wanted = dtypes[0] if len(dtypes) == 1 else "a float dtype"
        yield f"{scale.name}: stored as {scale.dtype.name}, expected {wanted} (scales of {packed} values)"
    elif scale.shape != expected:
        yield f"{scale.name}: shape {list(scale.shape)}, expected {list(expected)}"
    if sides.get("shape") in checkpoint.tensors and sides["shape"] not in named(checkpoint.problems):
        said = checkpoint.read(sides["shape"]).tolist()
        if said != list(shape):
            yield f"{sides['shape']}: holds {said}, expected {list(shape)}"


def _scale_problems(
    program: Loadable, checkpoint: Checkpoint, stored: Stored, shape: tuple[int, ...], uses: list[_Use]
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
        kept = keeps_bits(stored, use.piece, use.target, program.SCALE_BLOCK)
        if kept and scale_ops(use.ops, shape, program.SCALE_BLOCK) is None:
            yield f"{stored.name}: {use.target.label} would cut through its {program.SCALE_BLOCK} scale blocks"


def keeps_bits(stored: Stored, piece: Piece, target: Target, block: tuple[int, int] | None) -> bool:
    """Whether a weight takes over the stored float8 or 4-bit values and scales as they are.

    block: of stored float8 tensors. 4-bit formats and weights in them have the same.
    """
    if target.scale is None:
        return False
    if piece.packed:
        return PACKED[piece.packed].dtype == target.info.dtype
    return stored.dtype.name == target.info.dtype and turned(piece.ops, block or (1, 1)) == target.block


def _surplus(program: Loadable, checkpoint: Checkpoint, known: set[str]) -> list[str]:
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
