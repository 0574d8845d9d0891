"""Which messages the blocks exchange, in the order the emitted program places them. Meaning: ref.py."""

from ..core.declare import ModelDims
from ..core.work import Collective, Load

DP, TP = ("attention_dp",), ("attention_tp",)


def sum_over_heads(dims: ModelDims, load: Load) -> tuple[Collective, ...]:
    """A mixer's output when its heads are cut: one all-reduce over tp."""
    if load.degrees.tp == 1:
        return ()
    shape, what = (load.tokens, dims.hidden_size), "sum over the heads of a rank"
    return (Collective("combine heads", "all-reduce", TP, load.dtypes.activation, shape, what),)


def gather_for_experts(top_k: int, dims: ModelDims, load: Load) -> tuple[Collective, ...]:
    """All ranks' tokens to every device: hidden states, then indices and weights packed in one int32 array."""
    if load.degrees.dp == 1:
        return ()
    rows, hidden, act = load.gathered_tokens, dims.hidden_size, load.dtypes.activation
    return (
        Collective("gather hidden", "all-gather", DP, act, (rows, hidden), "hidden states of all ranks"),
        Collective(
            "gather routing", "all-gather", DP, "int32", (rows, 2 * top_k), "expert indices and weights, packed"
        ),
    )


def return_from_experts(dims: ModelDims, load: Load) -> tuple[Collective, ...]:
    """Partial expert sums back to their rank, then summed over the devices of the rank."""
    hidden, act = dims.hidden_size, load.dtypes.activation
    found = []
    if load.degrees.dp > 1:
        what = "sum over experts, back to own tokens"
        found.append(Collective("return tokens", "reduce-scatter", DP, act, (load.gathered_tokens, hidden), what))
    if load.degrees.tp > 1:
        what = "sum over the experts within a rank"
        found.append(Collective("combine experts", "all-reduce", TP, act, (load.tokens, hidden), what))
    return tuple(found)
