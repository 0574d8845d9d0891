"""What a mixture-of-experts block adds to an emitted program."""

from ..core.emission import Constant, Emission, Site, share
from ..mlp.emit import FIRST_DEVICE, Imports, call_lines, clamp_constants, gather_lines, return_lines
from ..router.emit import route_arguments
from .block import Fields


def emit(fields: Fields, site: Site) -> Emission:
    """Route, gather the tokens of all ranks, run local experts, reduce back; shared expert where the plan put it."""
    imports: Imports = [(site.parts["router"], "route"), (site.module, "experts")]
    router = fields.router
    route = route_arguments(router, site.dims, site.name, f"{site.prefix}_TOP_K")
    call = {
        "route": call_lines("index_TK, weight_TK", "route", route),
        "before": _before(fields, site, imports),
        "y": f"y_{_tokens(site)}{_width(fields)}",
        "arguments": _arguments(fields, site),
        "combine": _combine(fields, site, imports),
    }
    clamps = clamp_constants(f"{site.prefix}_CLAMP", fields.experts.clamp, imports)
    if fields.shared:
        imports.append((site.module, "shared_expert"))
        clamps += clamp_constants(f"{site.prefix}_SHARED_CLAMP", fields.shared.clamp, imports)
    doc = f"{router.num_experts} experts of {fields.experts.intermediate_size}, top {router.top_k}"
    doc += f", shared expert of {fields.shared.width}." if fields.shared else "."
    constants = (*_constants(fields, site), *clamps)
    return Emission(tuple(imports), constants, doc, call, reads_residual=router.input == "residual")


def _tokens(site: Site) -> str:
    """Shape suffix of the tokens the experts see: A = all ranks' tokens when they are gathered."""
    return "A" if site.dp > 1 else "T"


def _width(fields: Fields) -> str:
    """Shape suffix of the width the routed experts see."""
    return "Z" if fields.experts.latent_size else "D"


def _constants(fields: Fields, site: Site) -> tuple[Constant, ...]:
    experts, reason = share(fields.router.num_experts, site.ep, "experts", "ep")
    rows = "{" + ", ".join(f'"{bucket}": {n}' for bucket, n in site.tuning["block_rows"].items()) + "}"
    return (
        Constant(f"{site.prefix}_EXPERTS", experts, reason),
        Constant(f"{site.prefix}_TOP_K", str(fields.router.top_k), "experts per token"),
        Constant(f"{site.prefix}_BLOCK_ROWS", rows, "token rows of one expert's GEMM block"),
    )


def _before(fields: Fields, site: Site, imports: Imports) -> tuple[str, ...]:
    """From this rank's tokens to what the experts see."""
    lines = []
    h, d = ("z", "Z") if fields.experts.latent_size else ("h", "D")
    if fields.experts.latent_size:
        imports.append((site.module, "latent_projection"))
        call = f'z_TZ = latent_projection(h_TD, w["{site.name}"]["latent_in"])'
        lines.append(f"{call}  # Z: width of the routed experts")
    if site.dp > 1:
        imports += [(site.collectives, "gather_tokens"), (site.collectives, "gather_routing")]
        lines.append(f"{h}_A{d} = gather_tokens({h}_T{d}, DATA)  # A: the tokens of all ranks")
        lines.append("index_AK, weight_AK = gather_routing(index_TK, weight_TK, DATA)  # one packed all-gather")
    return tuple(lines)


def _arguments(fields: Fields, site: Site) -> tuple[str, ...]:
    """Arguments of experts(); after the required ones only what differs from its defaults."""
    experts, t = fields.experts, _tokens(site)
    keys = ("gate", "up", "down") if experts.gated else ("up", "down")
    found = [
        f"z_{t}Z" if experts.latent_size else f"h_{t}D",
        f"index_{t}K",
        f"weight_{t}K",
        'stack["w_gate"]' if experts.gated else "None",
        'stack["w_up"]',
        'stack["w_down"]',
        _table({f"w_{key}": f"w_{key}_scale" for key in keys}) if site.scaled else "None",
        "layer=layer",
        f"first_expert=lax.axis_index(EXPERT) * {site.prefix}_EXPERTS" if site.ep > 1 else "first_expert=0",
        f"block_rows={site.prefix}_BLOCK_ROWS[bucket]",
    ]
    found += [f'activation="{experts.activation}"'] if experts.activation != "silu" else []
    if experts.bias:
        found.append("biases=" + _table({f"b_{key}": f"b_{key}" for key in keys}))
        # Expert axes are major to minor, so the devices that share an expert are neighbours.
        found += [f"add_b_down=lax.axis_index((*DATA, *TENSOR)) % {site.etp} == 0"] if site.etp > 1 else []
    found += [f"clamp={site.prefix}_CLAMP"] if experts.clamp else []
    return (*found, *(['weigh="input"'] if fields.router.apply == "input" else []))


def _table(keys: dict[str, str]) -> str:
    """A dict of stacks by argument name."""
    return "{" + ", ".join(f'"{name}": stack["{key}"]' for name, key in keys.items()) + "}"


def _combine(fields: Fields, site: Site, imports: Imports) -> tuple[str, ...]:
    """From the partial sums of this device's experts to the block's output."""
    t, d, latent = _tokens(site), _width(fields), fields.experts.latent_size is not None
    together = fields.shared is not None and site.shared_sharded and not latent
    lines: list[str] = []
    if together:
        lines += _shared_lines(fields, site, f"s_{t}D", f"h_{t}D")
        lines.append(f"y_{t}D = y_{t}D + s_{t}D  # cut over all devices, summed below")
    lines.append(f"y_{t}{d} = y_{t}{d}.astype(h_TD.dtype)  # partial sums travel in the activation dtype")
    lines += return_lines(site, imports, "y", "experts", d)
    if latent:
        lines.append(f'y_TD = latent_projection(y_TZ, w["{site.name}"]["latent_out"])')
    if fields.shared is None or together:
        return tuple(lines)
    return (*lines, *_shared_alone(fields, site, imports))


def _shared_alone(fields: Fields, site: Site, imports: Imports) -> tuple[str, ...]:
    """The shared expert added to the finished sum of the routed ones; a share of it has its own way back."""
    if not site.shared_sharded:
        return (*_shared_lines(fields, site, "s_TD", "h_TD"), "y_TD = (y_TD + s_TD).astype(h_TD.dtype)")
    t = _tokens(site)
    return (
        *gather_lines(site, imports),
        *_shared_lines(fields, site, f"s_{t}D", f"h_{t}D", ".astype(h_TD.dtype)"),
        *return_lines(site, imports, "s", "shares"),
        "y_TD = y_TD + s_TD",
    )


def _shared_lines(fields: Fields, site: Site, target: str, tokens: str, end: str = "") -> tuple[str, ...]:
    """The call of shared_expert; only what differs from its defaults."""
    shared = fields.shared
    assert shared is not None
    found = [tokens, f'w["{site.name}"]']
    found += ['gate="sigmoid"'] if shared.gate == "sigmoid" else []
    found += [] if fields.shared_is_gated else ["gated=False"]
    found += [f'activation="{fields.shared_activation}"'] if fields.shared_activation != "silu" else []
    if shared.bias:
        found += ["bias=True", *([FIRST_DEVICE] if site.shared_sharded else [])]
    found += [f"clamp={site.prefix}_SHARED_CLAMP"] if shared.clamp else []
    found += [f"scale={shared.scale!r}"] if shared.scale != 1 else []
    return call_lines(target, "shared_expert", found, end)
