"""Work of the token embedding (xla.py), on one device, once per step."""

from ..collectives.cost import DP, TP
from ..core.declare import ModelDims
from ..core.work import Collective, Load, Stream, Term, itemsize


def work(dims: ModelDims, load: Load) -> tuple[Term, ...]:
    """Row gather; with a cut vocabulary, ids out to all ranks and rows back."""
    dtype, hidden = load.dtypes.weight, dims.hidden_size
    row = hidden * itemsize(dtype)
    if load.degrees.embed == 1:
        return (Stream("look up", 2 * load.tokens * row, load.tokens * row),)
    rows = load.gathered_tokens
    found: list[Term] = []
    if load.degrees.dp > 1:
        found.append(Collective("gather ids", "all-gather", DP, "int32", (rows,), "token ids of all ranks"))
    found.append(Stream("look up", 2 * rows * row, rows * row))
    if load.degrees.dp > 1:
        what = "embedding rows, back to own tokens"
        found.append(Collective("return rows", "reduce-scatter", DP, dtype, (rows, hidden), what))
    if load.degrees.tp > 1:
        what = "embedding rows over the devices of a rank"
        found.append(Collective("combine rows", "all-reduce", TP, dtype, (load.tokens, hidden), what))
    return tuple(found)


def temp_bytes(dims: ModelDims, load: Load) -> int:
    """Looked-up rows."""
    rows = load.tokens if load.degrees.embed == 1 else 2 * load.gathered_tokens
    return rows * dims.hidden_size * itemsize(load.dtypes.weight)
