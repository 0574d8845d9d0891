"""What a Mamba block adds to an emitted program."""

from ..core.emission import Constant, Emission, Site, sum_over_heads, tile_constants, tile_lines
from .block import Fields


def emit(fields: Fields, site: Site) -> Emission:
    """Constants and call of Mamba under the site's cut."""
    imports, combine = sum_over_heads(site, "b_o" if fields.proj_bias else None)
    name = site.prefix
    return Emission(
        imports=(site.function("mamba1"), *imports),
        constants=(
            Constant(f"{name}_CONV", str(fields.conv_kernel), "taps of the causal convolution"),
            *tile_constants(site),
        ),
        doc=f"Mamba: {fields.inner_size} channels with a state of {fields.state_size}.",
        fields={
            "name": site.name,
            "p": name,
            "options": _options(fields, site),
            "tiles": tile_lines(site),
            "combine": combine,
        },
    )


def _options(fields: Fields, site: Site) -> tuple[str, ...]:
    """Keywords of the options in use; the others keep their defaults."""
    words = {"conv_bias=True": fields.conv_bias, "proj_bias=True": fields.proj_bias}
    if fields.input_norms is not None:
        norm = fields.input_norms.resolve(site.dims.norm)
        words |= {f"norm_eps={norm.eps!r}": True, "norm_zero_centered=True": norm.zero_centered}
    words["sum_axes=TENSOR"] = site.tp > 1
    return tuple(word for word, used in words.items() if used)
