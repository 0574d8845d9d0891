"""What a latent-attention block adds to an emitted program."""

from ..core.emission import Constant, Emission, Site, cache_name, share, sum_over_heads, tile_constants, tile_lines
from ..core.head_fields import gate_options, temperature_text
from ..core.rope_fields import rope_imports, rope_text, score_mscale
from .block import Fields, default_scale, query_dim, row_values


def emit(fields: Fields, site: Site) -> Emission:
    """Constants and call of latent attention under the site's cut."""
    imports, combine = sum_over_heads(site)
    if fields.bias:
        combine = (*combine, f'y_TD = y_TD + w["{site.name}"]["b_o"].astype(h_TD.dtype)')
    norm = fields.norm.resolve(site.dims.norm)
    call = {
        "call": f"y_TD, {cache_name(site)} = {site.function('mla')[1]}",
        "name": site.name,
        "p": site.prefix,
        "norm_eps": repr(norm.eps),
        "options": _options(fields, site, norm.zero_centered),
        "tiles": tile_lines(site),
        "combine": combine,
    }
    latent = f"a latent of {fields.kv_lora_rank} + {fields.qk_rope_head_dim} values per token"
    return Emission(
        imports=(site.function("mla"), *rope_imports(fields.rope), *imports),
        constants=_constants(fields, site),
        doc=f"{fields.num_heads} heads on {latent}.",
        fields=call,
    )


def _options(fields: Fields, site: Site, zero_centered: bool) -> tuple[str, ...]:
    """Keywords of what is on; the function's defaults are off."""
    named = {
        f"rope_spec={site.prefix}_ROPE": fields.rope is not None,
        "norm_zero_centered=True": zero_centered,
        "query_latent=True": fields.q_lora_rank is not None,
        f"temperature={site.prefix}_TEMPERATURE": fields.temperature is not None,
        **gate_options(fields.output_gate),
        "bias=True": fields.bias,
    }
    return tuple(text for text, on in named.items() if on)


def _constants(fields: Fields, site: Site) -> tuple[Constant, ...]:
    name, tuning = site.prefix, site.tuning
    heads, heads_reason = share(fields.num_heads, site.tp, "heads")
    return (
        Constant(f"{name}_HEADS", heads, heads_reason),
        Constant(f"{name}_KV_LORA_RANK", str(fields.kv_lora_rank), "latent values per token, whole on every device"),
        Constant(f"{name}_QK_NOPE_HEAD_DIM", str(fields.qk_nope_head_dim), "key dims a head takes from the latent"),
        Constant(f"{name}_V_HEAD_DIM", str(fields.v_head_dim), "value dims per head"),
        Constant(f"{name}_ROW", str(tuning["row"]), _row_reason(fields, tuning["row"])),
        *_option_constants(fields, name),
        Constant(f"{name}_SCALE", repr(fields.scale or default_scale(fields)), _scale_reason(fields)),
        *tile_constants(site),
    )


def _option_constants(fields: Fields, name: str) -> tuple[Constant, ...]:
    found = []
    if fields.rope is not None:
        found.append(Constant(f"{name}_ROPE", rope_text(fields.rope), "rotary embedding of queries and the shared key"))
    if fields.temperature is not None:
        found.append(Constant(f"{name}_TEMPERATURE", *temperature_text(fields.temperature)))
    return tuple(found)


def _row_reason(fields: Fields, row: int) -> str:
    values = f"values of a cached row: {fields.kv_lora_rank} latent, {fields.qk_rope_head_dim} of the shared key"
    unused = row - row_values(fields)
    return f"{values}, {unused} unused for whole memory tiles" if unused else values


def _scale_reason(fields: Fields) -> str:
    if fields.scale is not None:
        return "of the scores, as declared"
    root, stretched = f"{query_dim(fields)} dims per query", score_mscale(fields.rope)
    return f"1 / sqrt of {root}" + ("" if stretched == 1 else f", times {stretched:.6g}^2 for YaRN")
