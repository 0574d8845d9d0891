"""How many values of a float8 expert share one scale: as the checkpoint stores them, unless a pin says otherwise.

Wider blocks make less work of a product's scales and are lossy, so no predicted time alone takes them: requantising
divides every value by its new block's scale S = peak / 448 and rounds it once more to e4m3, to 3 bits behind the
leading one. A value whose quotient is at least 2**-6, the smallest normal, moves by at most 2**-4 of itself; a smaller
one by half the subnormals' step, 2**-10 S, and becomes 0 up to that size. Nothing saturates: the peak itself becomes
448, the largest e4m3.
"""

from dataclasses import replace

from moec.blocks.core.array_info import E4M3, FLOAT8_EDGES

from .dtypes import refuse_scale_block, stored_edge
from .evaluate import Priced, Question, evaluate
from .plan import ScaleChoice

RELATIVE_ERROR = 2.0**-4
ABSOLUTE_ERROR = 2.0**-10 / 448  # of the block's peak


def scale_choices(question: Question, chosen: Priced) -> tuple[ScaleChoice, ...]:
    """Every granularity that float8 experts may have, the chosen one first; () without them."""
    own = question.dtypes.scale_block
    if question.dtypes.expert != E4M3:
        return ()
    first = ScaleChoice(
        edge=own,
        verdict="CHOSEN",
        why=_why_chosen(question),
        delta_us=_delta_us(chosen, chosen),
        scale_bytes=_scale_bytes(question, chosen),
        **_bounds(question, own),
    )
    return (first, *(_other(question, chosen, edge) for edge in FLOAT8_EDGES if edge != own))


def _why_chosen(question: Question) -> str:
    edge, stored = question.dtypes.scale_block, stored_edge(question.graph)
    why = f"plan.dtypes.scale_block={edge}" if question.pins.dtypes.scale_block else "as stored"
    return f"{why}: bits of float8 checkpoints are kept" if edge == stored else f"{why}: requantised when loaded"


def _other(question: Question, chosen: Priced, edge: int) -> ScaleChoice:
    """A granularity that was not chosen, and what it would change at the chosen sharding."""
    dtypes = replace(question.dtypes, scale_block=edge)
    asked = replace(question, dtypes=dtypes, _weights={}, _variants={})
    refused = [problem.text.removeprefix("UNSUPPORTED: ") for problem in refuse_scale_block(question.graph, dtypes)]
    found = None if refused else evaluate(asked, chosen.option)
    if not isinstance(found, Priced):
        return ScaleChoice(edge=edge, verdict="REFUSED", why=refused[0] if found is None else found.why)
    pin = question.pins.dtypes.scale_block
    return ScaleChoice(
        edge=edge,
        verdict="PINNED" if pin else "LOSSY",
        why=f"excluded by plan.dtypes.scale_block={pin}" if pin else f"only plan.dtypes.scale_block={edge} takes it",
        delta_us=_delta_us(found, chosen),
        scale_bytes=_scale_bytes(asked, found),
        **_bounds(question, edge),
    )


def _delta_us(one: Priced, chosen: Priced) -> dict[str, float]:
    """Predicted step time over the chosen one's, by bucket; + 0.0 turns -0.0 into 0.0."""
    return {name: round((cost.seconds - chosen.costs[name].seconds) * 1e6, 3) + 0.0 for name, cost in one.costs.items()}


def _scale_bytes(question: Question, priced: Priced) -> int:
    sizes = question.weight_bytes(priced.option.degrees)
    return sum(size for component, size in sizes.items() if component.endswith(".scales"))


def _bounds(question: Question, edge: int) -> dict[str, float]:
    """What a value may move by against the stored one."""
    lossy = edge != stored_edge(question.graph)
    return {"relative_error": RELATIVE_ERROR * lossy, "absolute_error": ABSOLUTE_ERROR * lossy}
