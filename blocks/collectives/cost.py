"""Which messages the blocks exchange, in the order the emitted program places them. Meaning: ref.py."""

from collections.abc import Mapping
from dataclasses import replace

from ..core.declare import ModelDims
from ..core.work import Collective, Load, Stream, Term, itemsize
from .returning import Returning
from .tpu_cost import micro_batches, rounds

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


def gather_for_experts(top_k: int, width: int, load: Load) -> tuple[Term, ...]:
    """All ranks' tokens to every device: hidden states, then indices and weights packed in one int32 array."""
    if load.degrees.dp == 1:
        return ()
    if load.dtypes.gather != "activation":
        return _gather_float8(top_k, width, load)
    shape, what = (load.gathered_tokens, 2 * top_k), "expert indices and weights, packed"
    routing = Collective("gather routing", "all-gather", DP, "int32", shape, what)
    return (*gather_tokens("gather hidden", width, load), routing)


def _gather_float8(top_k: int, width: int, load: Load) -> tuple[Term, ...]:
    """Hidden states in float8; one int32 array of indices, weights and the rows' scales. Back to values after it."""
    rows, act = load.gathered_tokens, itemsize(load.dtypes.activation)
    what = "expert indices, weights and row scales, packed"
    return (
        Stream("quantise hidden", load.tokens * width * (act + 1), load.tokens * width * act),
        Collective("gather hidden", "all-gather", DP, load.dtypes.gather, (rows, width), "hidden states of all ranks"),
        Collective("gather routing", "all-gather", DP, "int32", (rows, 2 * top_k + 1), what),
        Stream("dequantise hidden", rows * width * (act + 1), rows * width),
    )


def return_tokens(
    op: str, combine: str, parts: str, width: int, load: Load, chunks: int = 1
) -> tuple[Collective, ...]:  # fmt: skip
    """Partial sums [A, width] back to their rank (op), then summed over the devices of the rank (combine).

    chunks: messages they return in, each with the same share of every rank's tokens.
    """
    act = load.dtypes.activation
    found = []
    if load.degrees.dp > 1:
        what = f"sum over {parts}, back to own tokens"
        shape = (load.gathered_tokens // chunks, width)
        message = Collective(op, "reduce-scatter", DP, act, shape, what)
        if load.kernel_returns:
            assert chunks == 1, "the kernel cuts into micro-batches itself"
            message = replace(message, rounds=rounds(width, load), batches=micro_batches(width, load))
        found += [message] * chunks
    if load.degrees.tp > 1:
        what = f"sum over the {parts} within a rank"
        found.append(Collective(combine, "all-reduce", TP, act, (load.tokens, width), what))
    return tuple(found)


def return_from_experts(width: int, load: Load) -> tuple[Collective, ...]:
    """Partial expert sums back to their rank, then summed over the devices of the rank."""
    return return_tokens("return tokens", "combine experts", "experts", width, load)


def work(returning: Returning, dims: ModelDims, load: Load) -> tuple[Term, ...]:
    """What the variants of the reduce-scatter differ in, one layer of each block; blocks count it as their own."""
    return returning.messages(dims, load)


def tuning(returning: Returning, dims: ModelDims, loads: Mapping[str, Load]) -> dict[str, int]:
    """Nothing to tune."""
    return {}
