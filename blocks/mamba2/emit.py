"""What a Mamba-2 block adds to an emitted program."""

from ..core.emission import Constant, Emission, Site, share, sum_over_heads, tile_constants, tile_lines
from .block import Fields


def emit(fields: Fields, site: Site) -> Emission:
    """Constants and call of Mamba-2 under the site's cut."""
    norm = fields.out_norm.resolve(site.dims.norm)
    imports, combine = sum_over_heads(site, "b_o" if fields.proj_bias else None)
    return Emission(
        imports=(site.function("mamba2"), *imports),
        constants=_constants(fields, site),
        doc=f"Mamba-2: {fields.num_heads} heads of {fields.head_dim} in {fields.num_groups} groups, "
        f"state {fields.state_size}.",
        fields={
            "name": site.name,
            "p": site.prefix,
            "norm_eps": repr(norm.eps),
            "options": _options(fields, site, norm.zero_centered),
            "tiles": tile_lines(site),
            "combine": combine,
        },
    )


def _constants(fields: Fields, site: Site) -> tuple[Constant, ...]:
    name, copies = site.prefix, max(site.tp // fields.num_groups, 1)
    heads, heads_reason = share(fields.num_heads, site.tp, "heads")
    groups, groups_reason = share(fields.num_groups * copies, site.tp, "groups")
    if copies > 1:
        groups_reason = f"{fields.num_groups} groups, each on {copies} devices (tp {site.tp})"
    return (
        Constant(f"{name}_HEADS", heads, heads_reason),
        Constant(f"{name}_GROUPS", groups, groups_reason),
        Constant(f"{name}_HEAD_DIM", str(fields.head_dim), "channels per head"),
        Constant(f"{name}_STATE", str(fields.state_size), "state per channel"),
        Constant(f"{name}_CONV", str(fields.conv_kernel), "taps of the causal convolution"),
        *tile_constants(site),
    )


def _options(fields: Fields, site: Site, zero_centered: bool) -> tuple[str, ...]:
    """Keywords of the options in use; the others keep their defaults."""
    limits = fields.time_step
    words = {
        "norm_zero_centered=True": zero_centered,
        f"time_step_min={limits.min!r}": limits.min > 0,
        f"time_step_max={limits.max!r}": limits.max is not None,
        "conv_bias=True": fields.conv_bias,
        "proj_bias=True": fields.proj_bias,
        "sum_axes=TENSOR": site.tp > fields.num_groups,
        f"norm_groups={fields.num_groups}": site.tp > fields.num_groups,
    }
    return tuple(word for word, used in words.items() if used)
