"""What an attention block adds to an emitted program."""

from ..core.emission import Constant, Emission, Site, cache_name, share, sum_over_heads, tile_constants, tile_lines
from ..core.head_fields import gate_options, temperature_text
from ..core.rope_fields import rope_imports, rope_text
from .block import Fields, has_gains, value_dim


def emit(fields: Fields, site: Site) -> Emission:
    """Constants and call of grouped-query attention under the site's cut; only options in use are written."""
    imports, combine = sum_over_heads(site)
    if fields.bias.out:
        combine = (*combine, f'y_TD = y_TD + w["{site.name}"]["b_o"].astype(y_TD.dtype)')
    values = f" ({value_dim(fields)} for values)" if value_dim(fields) != fields.head_dim else ""
    heads = f"{fields.num_q_heads} query heads on {fields.num_kv_heads} key/value heads of {fields.head_dim}{values}"
    return Emission(
        imports=(site.function("attention"), *rope_imports(fields.rope), *imports),
        constants=_constants(fields, site),
        doc=f"{heads}{_scope(fields)}.",
        fields={
            "call": f"y_TD, {cache_name(site)} = {site.function('attention')[1]}",
            "name": site.name,
            "p": site.prefix,
            "options": _options(fields, site),
            "tiles": tile_lines(site),
            "combine": combine,
        },
    )


def _scope(fields: Fields) -> str:
    if fields.window is not None:
        return f", {fields.window} keys back"
    return f", within chunks of {fields.chunk}" if fields.chunk is not None else ""


def _options(fields: Fields, site: Site) -> tuple[str, ...]:
    """Keyword lines of the call, in the order of its signature."""
    p, scale = site.prefix, f"{site.prefix}_HEAD_DIM**-0.5" if fields.scale is None else repr(fields.scale)
    lines = {
        f"v_head_dim={p}_V_HEAD_DIM": value_dim(fields) != fields.head_dim,
        f"rope={p}_ROPE": fields.rope is not None,
        **_norm_options(fields, site),
        "qkv_bias=True": fields.bias.qkv,
        "keys_as_values=True": fields.keys_as_values,
        f"clip_qkv={fields.clip_qkv!r}": fields.clip_qkv is not None,
        f"window={p}_WINDOW": fields.window is not None,
        f"chunk={p}_CHUNK": fields.chunk is not None,
        "sinks=True": fields.sinks,
        f"softcap={fields.softcap!r}": fields.softcap is not None,
        f"scale={scale}": True,
        f"value_scale={fields.value_scale!r}": fields.value_scale != 1,
        f"temperature={p}_TEMPERATURE": fields.temperature is not None,
        **gate_options(fields.output_gate),
        "sum_axes=TENSOR": sums_over_heads(fields, site.tp),
    }
    return tuple(line for line, used in lines.items() if used)


def _norm_options(fields: Fields, site: Site) -> dict[str, bool]:
    norm, normed = fields.norm.resolve(site.dims.norm), fields.qk_norm != "none" or fields.v_norm != "none"
    return {
        f'qk_norm="{fields.qk_norm}"': fields.qk_norm != "none",
        f'qk_norm_place="{fields.qk_norm_place}"': fields.qk_norm_place == "after_rope",
        "v_norm=True": fields.v_norm == "head",
        f"norm_eps={norm.eps!r}": normed,
        "norm_zero_centered=True": has_gains(fields) and norm.zero_centered,
    }


def sums_over_heads(fields: Fields, tp: int) -> bool:
    """Whether a norm over all heads has to be summed over devices."""
    return fields.qk_norm == "full" and tp > 1


def _constants(fields: Fields, site: Site) -> tuple[Constant, ...]:
    name, kv_copies = site.prefix, max(site.tp // fields.num_kv_heads, 1)
    q_heads, q_reason = share(fields.num_q_heads, site.tp, "query heads")
    kv_heads, kv_reason = share(fields.num_kv_heads * kv_copies, site.tp, "key/value heads")
    if kv_copies > 1:
        kv_reason = f"{fields.num_kv_heads} key/value heads, each on {kv_copies} devices (tp {site.tp})"
    return (
        Constant(f"{name}_Q_HEADS", q_heads, q_reason),
        Constant(f"{name}_KV_HEADS", kv_heads, kv_reason),
        Constant(f"{name}_HEAD_DIM", str(fields.head_dim), "dims per head"),
        *_option_constants(fields, name),
        *tile_constants(site),
    )


def _option_constants(fields: Fields, name: str) -> tuple[Constant, ...]:
    found = []
    if value_dim(fields) != fields.head_dim:
        found.append(Constant(f"{name}_V_HEAD_DIM", str(value_dim(fields)), "dims per value head"))
    if fields.rope is not None:
        found.append(Constant(f"{name}_ROPE", rope_text(fields.rope), "rotary embedding of queries and keys"))
    if fields.window is not None:
        found.append(Constant(f"{name}_WINDOW", str(fields.window), "keys a query sees at most, itself included"))
    if fields.chunk is not None:
        found.append(Constant(f"{name}_CHUNK", str(fields.chunk), "a query sees the keys of its chunk of positions"))
    if fields.temperature is not None:
        found.append(Constant(f"{name}_TEMPERATURE", *temperature_text(fields.temperature)))
    return tuple(found)
