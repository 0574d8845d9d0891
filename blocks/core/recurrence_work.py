"""Work and tuning of recurrence.py's loops on one device. No jax."""

from collections.abc import Mapping
from math import gcd

from .work import Load, Stream, Term, Vector, itemsize

# Passes of a decode step over a row's state: two reads (for the output, for the update) and one write.
_STATE_PASSES = 3


def chunk(load: Load, most: int) -> int:
    """Tokens of one chunk, `most` at most: a divisor of the page size.

    Chunks start where a row's tokens start, which is a page border: so a prefix is cut into the
    same chunks whether it was cached or not.
    """
    return gcd(most, load.page_size)


def chunk_tuning(loads: Mapping[str, Load], most: int) -> dict[str, int]:
    """Prefill chunk length, the same in every bucket."""
    return {"chunk": min(chunk(load, most) for load in loads.values())}


def recur(load: Load, values: int, flops: int) -> tuple[Term, ...]:
    """Decode rows: each one's state of so many values is read, updated and written, at `flops` per value."""
    if not load.decode_rows:
        return ()
    state = values * itemsize(load.dtypes.state)
    return (
        Stream("recur", _STATE_PASSES * load.decode_rows * state, state),
        Vector("recur", flops * load.decode_rows * values),
    )
