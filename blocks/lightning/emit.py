"""What a lightning block adds to an emitted program."""

from itertools import pairwise

from ..core.emission import Constant, Emission, Site, share, sum_over_heads, tile_constants, tile_lines
from .block import Fields


def emit(fields: Fields, site: Site) -> Emission:
    """Constants and call of lightning attention under the site's cut."""
    norm = fields.out_norm.resolve(site.dims.norm)
    imports, combine = sum_over_heads(site)
    name = site.prefix
    heads, reason = share(fields.num_heads, site.tp, "heads")
    slopes = f"lightning_slopes({fields.num_heads}, {index_text(site.layers)}, {fields.decay_layers})"
    constants = (
        Constant(f"{name}_HEADS", heads, reason),
        Constant(f"{name}_HEAD_DIM", str(fields.head_dim), "dims per head"),
        Constant(f"{name}_SLOPES", slopes, "decay by absolute layer and head"),
        *tile_constants(site),
    )
    return Emission(
        imports=(site.function("lightning"), site.function("lightning_slopes"), *imports),
        constants=constants,
        doc=f"Lightning attention: {fields.num_heads} heads of {fields.head_dim}.",
        fields={
            "name": site.name,
            "p": name,
            "norm_eps": repr(norm.eps),
            "zero_centered": norm.zero_centered,
            "options": _options(fields, site),
            "tiles": tile_lines(site),
            "combine": combine,
        },
    )


def _options(fields: Fields, site: Site) -> tuple[str, ...]:
    """Keywords of the call that are not at their default."""
    found = [] if fields.activation == "silu" else [f'activation="{fields.activation}"']
    return (*found, "sum_axes=TENSOR") if site.tp > 1 else tuple(found)


def index_text(layers: tuple[int, ...]) -> str:
    """Layer indices as a short expression: a range, a pattern that repeats, or the numbers."""
    assert layers, "the plan places no layer with this block"
    steps = {later - earlier for earlier, later in pairwise(layers)}
    if len(steps) <= 1:
        step, first = min(steps, default=1), layers[0]
        bounds = [first, layers[-1] + 1, step] if step > 1 else [first, layers[-1] + 1] if first else [layers[-1] + 1]
        return f"range({', '.join(map(str, bounds))})"
    for count in range(2, len(layers) // 2 + 1):
        period = layers[count] - layers[0]
        repeats, rest = divmod(len(layers), count)
        if not rest and layers == tuple(period * i + j for i in range(repeats) for j in layers[:count]):
            return f"[{period} * i + j for i in range({repeats}) for j in {index_text(layers[:count])}]"
    return str(layers)
