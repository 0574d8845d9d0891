"""What a mixture-of-experts block adds to an emitted program."""

from ..core.emission import Constant, Emission, Site, share, tile_argument, tile_constant, tile_constants, tile_lines
from ..mlp.emit import FIRST_DEVICE, Imports, call_lines, clamp_constants, gather_lines, reduce_lines, return_lines
from ..router.emit import route_arguments
from .block import Fields

DENSE = "moec.blocks.moe.xla"  # what every token passes; one variant


def emit(fields: Fields, site: Site) -> Emission:
    """Route, gather the tokens of all ranks, run local experts, reduce back; shared expert where the plan put it."""
    router = fields.router
    chunked = _returns_in_chunks(fields, site)
    experts = site.function("experts_reduce_scatter" if chunked else "experts")
    imports: Imports = [experts]
    call = {
        "before": (*_route(fields, site, imports), *_before(fields, site, imports)),
        "call": f"y_{'T' if chunked else _tokens(site)}{_width(fields)} = {experts[1]}",
        "arguments": _arguments(fields, site),
        "combine": _combine(fields, site, imports),
    }
    clamps = clamp_constants(f"{site.prefix}_CLAMP", fields.experts.clamp, imports)
    if fields.shared:
        imports.append((DENSE, "shared_expert"))
        clamps += clamp_constants(f"{site.prefix}_SHARED_CLAMP", fields.shared.clamp, imports)
    doc = f"{router.num_experts} experts of {fields.experts.intermediate_size}, top {router.top_k}"
    doc += f", shared expert of {fields.shared.width}." if fields.shared else "."
    constants = (*_constants(fields, site), *clamps)
    return Emission(tuple(imports), constants, doc, call, reads_residual=router.input == "residual")


def _packs(site: Site) -> bool:
    """Whether routing is packed before the gather: by the router's kernel, or because row scales travel with it."""
    return site.dp > 1 and (site.parts["router"].kernel or site.gathers_float8)


def _route(fields: Fields, site: Site, imports: Imports) -> tuple[str, ...]:
    """From h_TD to which experts each token visits, and with which weights; padding tokens visit none."""
    router = site.parts["router"]
    source, matrix, *options = (
        *route_arguments(fields.router, site.dims, site.name, f"{site.prefix}_TOP_K"),
        *tile_lines(site, "router"),
    )
    if router.kernel and _packs(site):
        name = router.function("route_packed")
        imports.append((router.module, name))
        return call_lines("packed_T2K", name, (source, matrix, "valid_T=rows.valid", *options))
    imports.append((router.module, router.function("route")))
    lines = call_lines("index_TK, weight_TK", router.function("route"), (source, matrix, *options))
    lines = (*lines, "index_TK = jnp.where(rows.valid[:, None], index_TK, -1)  # padding tokens visit no expert")
    if not _packs(site):
        return lines
    imports.append((site.collectives, "pack_routing"))
    return (*lines, "packed_T2K = pack_routing(index_TK, weight_TK)")


def _gather(fields: Fields, site: Site, imports: Imports) -> tuple[str, ...]:
    """All ranks' tokens and their routing: two messages."""
    h, d = ("z", "Z") if fields.experts.latent_size else ("h", "D")
    if site.gathers_float8:
        imports += [(site.collectives, "gather_tokens_float8"), (site.collectives, "dequantize_tokens")]
        call = f"q_A{d}, scale_A1, index_AK, weight_AK = gather_tokens_float8({h}_T{d}, packed_T2K, DATA)"
        return (
            f"{call}  # 2 messages",
            f"{h}_A{d} = dequantize_tokens(q_A{d}, scale_A1, h_TD.dtype)  # A: the tokens of all ranks",
        )
    imports.append((site.collectives, "gather_tokens"))
    lines = (f"{h}_A{d} = gather_tokens({h}_T{d}, DATA)  # A: the tokens of all ranks",)
    if _packs(site):
        imports.append((site.collectives, "gather_routing_packed"))
        return (*lines, "index_AK, weight_AK = gather_routing_packed(packed_T2K, DATA)")
    imports.append((site.collectives, "gather_routing"))
    return (*lines, "index_AK, weight_AK = gather_routing(index_TK, weight_TK, DATA)  # one packed all-gather")


def _tokens(site: Site) -> str:
    """Shape suffix of the tokens the experts see: A = all ranks' tokens when they are gathered."""
    return "A" if site.dp > 1 else "T"


def _width(fields: Fields) -> str:
    """Shape suffix of the width the routed experts see."""
    return "Z" if fields.experts.latent_size else "D"


def _returns_in_chunks(fields: Fields, site: Site) -> bool:
    """Whether in some bucket one part of the sums is on its way while the next is made: then experts return them."""
    if not _tuned(site, "return_chunks") or site.dp == 1 or max(site.tuning["return_chunks"].values()) == 1:
        return False
    assert site.returns is None, "a kernel that returns sums runs beside no other kernel"
    assert not _shared_travels_along(fields, site), "the shared expert is added before sums travel"
    return True


def _tuned(site: Site, name: str) -> bool:
    """Whether the plan has a decision that only some kernels' programs have."""
    return site.variant.kernel and name in site.tuning


def _shared_travels_along(fields: Fields, site: Site) -> bool:
    """Whether the shared expert's share is added to the routed experts' sums, of the same width."""
    return fields.shared is not None and site.shared_sharded and fields.experts.latent_size is None


def _constants(fields: Fields, site: Site) -> tuple[Constant, ...]:
    experts, reason = share(fields.router.num_experts, site.ep, "experts", "ep")
    return (
        Constant(f"{site.prefix}_EXPERTS", experts, reason),
        Constant(f"{site.prefix}_TOP_K", str(fields.router.top_k), "experts per token"),
        *tile_constants(site),
        *_chunk_constants(fields, site),
        *_unpermute_constants(site),
        *_row_constants(site),
    )


def _row_constants(site: Site) -> tuple[Constant, ...]:
    """Present where the kernel multiplies with float8 experts."""
    if not _tuned(site, "row_parts"):
        return ()
    what = "float8 parts of a row in products; 0 = weights are widened to bfloat16"
    return (tile_constant(f"{site.prefix}_ROW_PARTS", site.tuning["row_parts"], what),)


def _chunk_constants(fields: Fields, site: Site) -> tuple[Constant, ...]:
    if not _returns_in_chunks(fields, site):
        return ()
    what = "messages in which sums return, one beside the sums of the next"
    return (tile_constant(f"{site.prefix}_RETURN_CHUNKS", site.tuning["return_chunks"], what),)


def _unpermute_constants(site: Site) -> tuple[Constant, ...]:
    """Present where in some bucket the SparseCores sum experts' rows."""
    if not _tuned(site, "sparsecore_rows"):
        return ()
    what = "expert rows a subcore of the SparseCores copies at once to sum them; 0 = the TensorCore sums"
    return (tile_constant(f"{site.prefix}_SPARSECORE_ROWS", site.tuning["sparsecore_rows"], what),)


def _before(fields: Fields, site: Site, imports: Imports) -> tuple[str, ...]:
    """From this rank's tokens to what the experts see."""
    lines = []
    if fields.experts.latent_size:
        imports.append((DENSE, "latent_projection"))
        call = f'z_TZ = latent_projection(h_TD, w["{site.name}"]["latent_in"])'
        lines.append(f"{call}  # Z: width of the routed experts")
    return (*lines, *_gather(fields, site, imports)) if site.dp > 1 else tuple(lines)


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
        *tile_lines(site),
    ]
    found += [tile_argument(site, "sparsecore_rows")] if _tuned(site, "sparsecore_rows") else []
    found += [f"axes=DATA, {tile_argument(site, 'return_chunks')}"] if _returns_in_chunks(fields, site) else []
    found += [tile_argument(site, "row_parts")] if _tuned(site, "row_parts") else []
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
    together = _shared_travels_along(fields, site)
    lines: list[str] = []
    if together:
        lines += _shared_lines(fields, site, f"s_{t}D", f"h_{t}D")
        lines.append(f"y_{t}D = y_{t}D + s_{t}D  # cut over all devices, summed below")
    if _returns_in_chunks(fields, site):
        lines += reduce_lines(site, imports, "y", "experts", d)
    else:
        lines.append(f"y_{t}{d} = y_{t}{d}.astype(h_TD.dtype)  # partial sums travel in the activation dtype")
        lines += return_lines(site, imports, "y", "experts", d)
    if latent:
        lines.append(f'y_TD = latent_projection(y_TZ, w["{site.name}"]["latent_out"])')
    if fields.shared is None or together:
        return tuple(lines)
    return (*lines, *_shared_alone(fields, site, imports))


def _shared_alone(fields: Fields, site: Site, imports: Imports) -> tuple[str, ...]:
    """The shared expert added to the finished sum of the routed ones; a share of it has its own reduce-scatter."""
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
