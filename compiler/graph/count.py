"""Parameter and state counts of a graph, exact."""

import math
from fractions import Fraction

from moec.blocks.core.declare import PagedState, Weight

from .ir import Graph, Layer
from .weights import block_state, layer_weights, model_weights


def num_values(weight: Weight) -> int:
    """Values of one layer's weight."""
    return math.prod(weight.shape)


def total_params(graph: Graph) -> int:
    """All parameters of the text decoder: layers, embedding, head, final norm."""
    outside = sum(num_values(weight) for weight in model_weights(graph).values())
    return outside + sum(_layer_sum(graph, layer, active=False) for _, layer in graph.layers())


def active_params(graph: Graph) -> int:
    """Parameters one token uses: experts by top_k, with the embedding table, without the final norm."""
    outside = sum(num_values(weight) for key, weight in model_weights(graph).items() if key != "final_norm")
    return outside + sum(_layer_sum(graph, layer, active=True) for _, layer in graph.layers())


def params_by_role(graph: Graph) -> dict[str, int]:
    """Total parameters per dtype role ("linear", "expert", ...)."""
    found: dict[str, int] = {}
    weights = list(model_weights(graph).values())
    for _, layer in graph.layers():
        weights += layer_weights(graph, layer).values()
    for weight in weights:
        found[weight.role] = found.get(weight.role, 0) + num_values(weight)
    return found


def kv_values_per_token(graph: Graph) -> int:
    """Values all layers together cache per token."""
    return _state_values(graph, paged=True)


def slot_values(graph: Graph) -> int:
    """Values all layers together keep per sequence (recurrent state and conv windows)."""
    return _state_values(graph, paged=False)


def _layer_sum(graph: Graph, layer: Layer, active: bool) -> int:
    weights = layer_weights(graph, layer).values()
    return sum(_active_values(weight) if active else num_values(weight) for weight in weights)


def _active_values(weight: Weight) -> int:
    # active_fraction is top_k / num_experts as a float; the exact ratio has the experts dim as denominator.
    if weight.active_fraction == 1.0:
        return num_values(weight)
    fraction = Fraction(weight.active_fraction).limit_denominator(weight.shape[0])
    return int(num_values(weight) * fraction)


def _state_values(graph: Graph, paged: bool) -> int:
    total = 0
    for _, layer in graph.layers():
        for inst in layer.blocks:
            states = block_state(graph, inst)
            total += sum(math.prod(state.shape) for state in states if isinstance(state, PagedState) == paged)
    return total
