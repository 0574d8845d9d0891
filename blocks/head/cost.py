"""Work of the vocabulary projection (xla.py) and of sampling from its logits, on one device, once per step."""

from ..collectives.cost import DP, TP
from ..core.declare import ModelDims
from ..core.work import Collective, Gemm, Load, Stream, Term

# Passes over the float32 logits of own rows when all are greedy: written; argmax and logsumexp read them twice each.
# Rows that draw (temperature > 0) add 32 passes for top-k and 64 for top-p: not counted, since a workload does not
# say how it samples.
_GREEDY_PASSES = 5


def work(dims: ModelDims, load: Load) -> tuple[Term, ...]:
    """Logits of each row's last token; with a cut vocabulary, all ranks' rows against a piece of it."""
    act, weight = load.dtypes.activation, load.dtypes.weight
    logits = load.seqs * dims.vocab_size * 4
    sample = Stream("sample", _GREEDY_PASSES * logits, logits)
    if load.degrees.head == 1:
        return (Gemm("logits", load.seqs, dims.vocab_size, dims.hidden_size, act, weight), sample)
    dp, tp, piece = load.degrees.dp, load.degrees.tp, dims.vocab_size // load.degrees.head
    rows = load.seqs * dp
    found: list[Term] = []
    if dp > 1:
        found.append(Collective("gather rows", "all-gather", DP, act, (rows, dims.hidden_size), "last hidden states"))
    found.append(Gemm("logits", rows, piece, dims.hidden_size, act, weight))
    if dp > 1:
        what = "logits, back to own rows"
        found.append(Collective("return logits", "all-to-all", DP, "float32", (rows, piece), what))
    if tp > 1:
        what = "vocabulary pieces of own rows"
        found.append(Collective("join logits", "all-gather", TP, "float32", (load.seqs, dims.vocab_size), what))
    return (*found, sample)


def temp_bytes(dims: ModelDims, load: Load) -> int:
    """Float32 logits: own rows; with a cut vocabulary also its piece for all ranks, once more before a join."""
    own = load.seqs * dims.vocab_size * 4
    if load.degrees.head == 1:
        return own
    piece = own * load.degrees.dp // load.degrees.head
    return own + piece * (2 if load.degrees.dp > 1 and load.degrees.tp > 1 else 1)
