"""What a mixture-of-experts block adds to an emitted program."""

from ..core.emission import Constant, Emission, Site, share
from .block import Fields

Imports = list[tuple[str, str]]


def emit(fields: Fields, site: Site) -> Emission:
    """Route, gather the tokens of all ranks, run local experts, reduce back; shared expert where the plan put it."""
    imports: Imports = [(site.module, "route"), (site.module, "experts")]
    if fields.shared:
        imports.append((site.module, "shared_expert"))
    gather = _gather(site, imports)
    combine = _combine(fields, site, imports)
    router = fields.router
    call = {
        "name": site.name,
        "p": site.prefix,
        "t": _tokens(site),
        "score": router.score,
        "renormalize": router.renormalize,
        "scale": repr(router.scale),
        "gather": gather,
        "scales": _scales(site),
        "first_expert": f"lax.axis_index(EXPERT) * {site.prefix}_EXPERTS" if site.ep > 1 else "0",
        "activation": fields.experts.activation,
        "combine": combine,
    }
    doc = f"{router.num_experts} experts of {fields.experts.intermediate_size}, top {router.top_k}"
    doc += f", shared expert of {fields.shared.intermediate_size}." if fields.shared else "."
    return Emission(tuple(imports), _constants(fields, site), doc, call)


def _tokens(site: Site) -> str:
    """Shape suffix of the tokens the experts see: A = all ranks' tokens when they are gathered."""
    return "A" if site.dp > 1 else "T"


def _constants(fields: Fields, site: Site) -> tuple[Constant, ...]:
    experts, reason = share(fields.router.num_experts, site.ep, "experts", "ep")
    rows = "{" + ", ".join(f'"{bucket}": {n}' for bucket, n in site.tuning["block_rows"].items()) + "}"
    return (
        Constant(f"{site.prefix}_EXPERTS", experts, reason),
        Constant(f"{site.prefix}_TOP_K", str(fields.router.top_k), "experts per token"),
        Constant(f"{site.prefix}_BLOCK_ROWS", rows, "token rows of one expert's GEMM block"),
    )


def _scales(site: Site) -> str:
    if not site.scaled:
        return "None"
    return "{" + ", ".join(f'"{key}": stack["{key}_scale"]' for key in ("w_gate", "w_up", "w_down")) + "}"


def _gather(site: Site, imports: Imports) -> tuple[str, ...]:
    if site.dp == 1:
        return ()
    imports += [(site.collectives, "gather_tokens"), (site.collectives, "gather_routing")]
    return (
        "h_AD = gather_tokens(h_TD, DATA)  # A: the tokens of all ranks",
        "index_AK, weight_AK = gather_routing(index_TK, weight_TK, DATA)  # one packed all-gather",
    )


def _combine(fields: Fields, site: Site, imports: Imports) -> tuple[str, ...]:
    t = _tokens(site)
    lines = []
    if fields.shared and site.shared_sharded:
        lines.append(f"y_{t}D = y_{t}D + {_shared_call(fields, site, t)}  # cut over all devices, summed below")
    lines.append(f"y_{t}D = y_{t}D.astype(x_TD.dtype)  # partial sums travel in the activation dtype")
    if site.dp > 1:
        imports.append((site.collectives, "reduce_scatter_tokens"))
        lines.append("y_TD = reduce_scatter_tokens(y_AD, DATA)  # sum over experts, back to own tokens")
    if site.tp > 1:
        imports.append((site.collectives, "all_reduce"))
        lines.append("y_TD = all_reduce(y_TD, TENSOR)  # the devices of one rank hold different experts")
    if fields.shared and not site.shared_sharded:
        lines.append(f"y_TD = (y_TD + {_shared_call(fields, site, 'T')}).astype(x_TD.dtype)")
    return tuple(lines)


def _shared_call(fields: Fields, site: Site, tokens: str) -> str:
    assert fields.shared is not None
    gate, activation = fields.shared.gate, fields.experts.activation
    return f'shared_expert(h_{tokens}D, w["{site.name}"], gate="{gate}", activation="{activation}")'
