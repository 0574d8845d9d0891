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


def gather_tokens(op: str, width: int, load: Load) -> tuple[Collective, ...]:
    """All ranks' tokens [A, width] to every device."""
    if load.degrees.dp == 1:
        return ()
    shape, what = (load.gathered_tokens, width), "hidden states of all ranks"
    return (Collective(op, "all-gather", DP, load.dtypes.activation, shape, what),)


def gather_for_experts(top_k: int, width: int, load: Load) -> tuple[Collective, ...]:
    """All ranks' tokens to every device: hidden states, then indices and weights packed in one int32 array."""
    if load.degrees.dp == 1:
        return ()
    shape, what = (load.gathered_tokens, 2 * top_k), "expert indices and weights, packed"
    routing = Collective("gather routing", "all-gather", DP, "int32", shape, what)
    return (*gather_tokens("gather hidden", width, load), routing)


def return_tokens(op: str, combine: str, parts: str, width: int, load: Load) -> tuple[Collective, ...]:
    """Partial sums [A, width] back to their rank (op), then summed over the devices of the rank (combine)."""
    act = load.dtypes.activation
    found = []
    if load.degrees.dp > 1:
        what = f"sum over {parts}, back to own tokens"
        found.append(Collective(op, "reduce-scatter", DP, act, (load.gathered_tokens, width), what))
    if load.degrees.tp > 1:
        what = f"sum over the {parts} within a rank"
        found.append(Collective(combine, "all-reduce", TP, act, (load.tokens, width), what))
    return tuple(found)


def return_from_experts(width: int, load: Load) -> tuple[Collective, ...]:
    """Partial expert sums back to their rank, then summed over the devices of the rank."""
    return return_tokens("return tokens", "combine experts", "experts", width, load)
