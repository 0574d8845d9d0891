"""What a short-convolution block adds to an emitted program."""

from ..core.emission import Constant, Emission, Site, sum_over_heads
from .block import Fields


def emit(fields: Fields, site: Site) -> Emission:
    """Constants and call of the gated short convolution under the site's cut."""
    imports, combine = sum_over_heads(site, "b_o" if fields.bias else None)
    return Emission(
        imports=(site.function("short_conv"), *imports),
        constants=(Constant(f"{site.prefix}_CONV", str(fields.conv_kernel), "taps of the causal convolution"),),
        doc=f"Gated short convolution: {fields.channels} channels, {fields.conv_kernel} taps.",
        fields={
            "name": site.name,
            "p": site.prefix,
            "options": ("bias=True",) if fields.bias else (),
            "combine": combine,
        },
    )
