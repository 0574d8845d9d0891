"""What returns to its rank in a program: partial sums of its blocks, through one variant of the collectives."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from ..core.declare import ModelDims
from ..core.work import Collective, Load, Term

Work = Callable[[Any, ModelDims, Load], tuple[Term, ...]]


@dataclass(frozen=True)
class Returning:
    """Every block of a program with its work: what a place declares that serves them all. blocks: (work, fields)."""

    blocks: tuple[tuple[Work, Any], ...]

    def messages(self, dims: ModelDims, load: Load) -> tuple[Collective, ...]:
        """The reduce-scatters of one layer of each block."""
        terms = (term for work, fields in self.blocks for term in work(fields, dims, load))
        found = tuple(term for term in terms if isinstance(term, Collective) and term.kind == "reduce-scatter")
        # The kernel is called with one collective_id, which calls over other devices must not share.
        assert all(term.axes == ("attention_dp",) for term in found), found
        return found

    def widths(self, dims: ModelDims, load: Load) -> tuple[int, ...]:
        """Widths of what is scattered, ascending, each once."""
        return tuple(sorted({message.shape[1] for message in self.messages(dims, load)}))
