"""What an attention block adds to an emitted program."""

from ..core.emission import Constant, Emission, Site, share, sum_over_heads
from .block import Fields, Rope

# Without positional encoding nothing is rotated; pairing and theta then have no effect.
NO_ROPE_DIM = 0


def emit(fields: Fields, site: Site) -> Emission:
    """Constants and call of grouped-query attention under the site's cut."""
    norm = fields.norm.resolve(site.dims.norm)
    imports, combine = sum_over_heads(site)
    rope = fields.rope or Rope(dim=2, theta=1.0)
    call = {
        "name": site.name,
        "p": site.prefix,
        "rope_theta": repr(rope.theta),
        "rope_pairing": rope.pairing,
        "qk_norm_eps": repr(norm.eps if fields.qk_norm == "head" else None),
        "zero_centered": norm.zero_centered,
        "output_gate": fields.output_gate == "sigmoid",
        "combine": combine,
    }
    return Emission(
        imports=((site.module, "attention"), *imports),
        constants=_constants(fields, site),
        doc=f"{fields.num_q_heads} query heads on {fields.num_kv_heads} key/value heads of {fields.head_dim}.",
        fields=call,
    )


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
        Constant(
            f"{name}_ROPE_DIM",
            str(fields.rope.dim if fields.rope else NO_ROPE_DIM),
            "rotated dims of each head" if fields.rope else "no positional encoding",
        ),
        Constant(f"{name}_Q_BLOCK", str(site.tuning["q_block"]), "tokens of a row per prefill work item, at most"),
        Constant(f"{name}_KV_BLOCK", str(site.tuning["kv_block"]), "cached keys such an item reads at once"),
    )
