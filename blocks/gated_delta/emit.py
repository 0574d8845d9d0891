"""What a gated-delta block adds to an emitted program."""

from ..core.emission import Constant, Emission, Site, share, sum_over_heads, tile_constants, tile_lines
from .block import Fields


def emit(fields: Fields, site: Site) -> Emission:
    """Constants and call of Gated DeltaNet under the site's cut."""
    norm = fields.out_norm.resolve(site.dims.norm)
    imports, combine = sum_over_heads(site)
    name = site.prefix
    qk_heads, qk_reason = share(fields.num_qk_heads, site.tp, "query/key heads")
    v_heads, v_reason = share(fields.num_v_heads, site.tp, "value heads")
    constants = (
        Constant(f"{name}_QK_HEADS", qk_heads, qk_reason),
        Constant(f"{name}_V_HEADS", v_heads, v_reason),
        Constant(f"{name}_K_DIM", str(fields.dk), "query/key dims per head"),
        Constant(f"{name}_V_DIM", str(fields.dv), "value dims per head"),
        Constant(f"{name}_CONV", str(fields.conv_kernel), "taps of the causal convolution"),
        *tile_constants(site),
    )
    per = " with a decay per channel" if fields.decay.per == "channel" else ""
    return Emission(
        imports=(site.function("gated_delta"), *imports),
        constants=constants,
        doc=f"Gated DeltaNet{per}: {fields.num_v_heads} value, {fields.num_qk_heads} query/key heads of {fields.dk}.",
        fields={
            "call": f"y_TD, conv_pool, state_pool = {site.function('gated_delta')[1]}",
            "name": site.name,
            "p": name,
            "norm_eps": repr(norm.eps),
            "zero_centered": norm.zero_centered,
            "options": _options(fields),
            "tiles": tile_lines(site),
            "combine": combine,
        },
    )


def _options(fields: Fields) -> tuple[str, ...]:
    """Keywords of the call that are not at their default."""
    found = ["channel_decay=True"] if fields.decay.per == "channel" else []
    if fields.decay.lower_bound is not None:
        found.append(f"decay_lower_bound={fields.decay.lower_bound!r}")
    if fields.gate.activation != "silu":
        found.append(f'gate_activation="{fields.gate.activation}"')
    if fields.negative_eigenvalues:
        found.append("negative_eigenvalues=True")
    return tuple(found)
