"""Work of causal_conv.py on one device. No jax."""

from .work import Load, Stream, Term, Vector, itemsize


def convolve(load: Load, channels: int, taps: int) -> tuple[Term, ...]:
    """Windows read and written; each tap reads every token (from the step or from the window) once."""
    window, tokens = window_bytes(load, channels, taps), load.tokens * channels * itemsize(load.dtypes.activation)
    return (
        Stream("convolve", 2 * window, window),
        Stream("convolve", (taps + 1) * tokens, tokens),
        Vector("convolve", 2 * taps * load.tokens * channels),
    )


def window_bytes(load: Load, channels: int, taps: int) -> int:
    """The windows of all rows of a step."""
    return load.seqs * (taps - 1) * channels * itemsize(load.dtypes.conv)
