"""What a dense MLP adds to an emitted program, and the parts of it that the shared expert of a mixture uses too."""

from collections.abc import Sequence

from ..core.emission import Constant, Emission, Site, by_bucket
from .block import Fields
from .clamp_fields import ClampFields, clamp_text

Imports = list[tuple[str, str]]
CLAMP_MODULE = "moec.blocks.mlp.clamp"  # what limits are, for every variant
LINE = 102  # columns of a line inside a block function
FIRST_DEVICE = "add_b_down=lax.axis_index((*DATA, *TENSOR)) == 0"  # of all devices


def emit(fields: Fields, site: Site) -> Emission:
    """All of it on every device, or all ranks' tokens through each device's share of it."""
    imports: Imports = [site.function("dense_mlp")]
    clamp = clamp_constants(f"{site.prefix}_CLAMP", fields.clamp, imports)
    t = "A" if site.mlp_sharded and site.dp > 1 else "T"
    arguments = (f"h_{t}D", *_arguments(fields, site))
    call = {
        "gather": gather_lines(site, imports) if site.mlp_sharded else (),
        "lines": call_lines(f"y_{t}D", "dense_mlp", arguments, ".astype(h_TD.dtype)"),
        "combine": return_lines(site, imports, "y", "inner dims") if site.mlp_sharded else (),
    }
    doc = f"{'gated ' if fields.gated else ''}{fields.activation} network of {fields.intermediate_size}."
    return Emission(tuple(imports), clamp, doc[0].upper() + doc[1:], call)


def _arguments(fields: Fields, site: Site) -> tuple[str, ...]:
    """Arguments of dense_mlp after the tokens; only what differs from its defaults."""
    own = f'w["{site.name}"]'
    found = [f'{own}["w_gate"]' if fields.gated else "None", f'{own}["w_up"]', f'{own}["w_down"]']
    found += [f'activation="{fields.activation}"'] if fields.activation != "silu" else []
    if fields.bias:
        keys = ("b_gate", "b_up", "b_down") if fields.gated else ("b_up", "b_down")
        found += [f'{key}={own}["{key}"]' for key in keys]
        found += [FIRST_DEVICE] if site.mlp_sharded else []
    return (*found, *([f"clamp={site.prefix}_CLAMP"] if fields.clamp else []))


def clamp_constants(name: str, clamp: ClampFields | None, imports: Imports) -> tuple[Constant, ...]:
    """The constant that holds the limits, when there are any."""
    if clamp is None:
        return ()
    imports.append((CLAMP_MODULE, "Clamp"))
    return (Constant(name, clamp_text(clamp), "limits of gate and up"),)


def gather_lines(site: Site, imports: Imports) -> tuple[str, ...]:
    """All ranks' tokens, for a network that is cut over all devices."""
    if site.dp == 1:
        return ()
    imports.append((site.collectives, "gather_tokens"))
    return ("h_AD = gather_tokens(h_TD, DATA)  # A: the tokens of all ranks",)


def return_lines(site: Site, imports: Imports, y: str, what: str, d: str = "D") -> tuple[str, ...]:
    """Partial sums y_A<d> (y_T<d> with one rank) of all devices to whole ones of this rank's tokens, y_T<d>."""
    return (*scatter_lines(site, imports, y, what, d), *reduce_lines(site, imports, y, what, d))


def scatter_lines(site: Site, imports: Imports, y: str, what: str, d: str = "D") -> tuple[str, ...]:
    """Partial sums of all devices back to their rank."""
    if site.dp == 1:
        return ()
    end = f"  # sum over {what}, back to own tokens"
    return call_lines(f"{y}_T{d}", scatter_name(site, imports), (f"{y}_A{d}", *scatter_arguments(site)), end)


def reduce_lines(site: Site, imports: Imports, y: str, what: str, d: str = "D") -> tuple[str, ...]:
    """Partial sums of the devices of one rank to whole ones."""
    if site.tp == 1:
        return ()
    imports.append((site.collectives, "all_reduce"))
    call = f"{y}_T{d} = all_reduce({y}_T{d}, TENSOR)"
    return (f"{call}  # the devices of one rank hold different {what}",)


def scatter_name(site: Site, imports: Imports) -> str:
    """The function that returns partial sums to their rank."""
    name = site.returns.function("reduce_scatter") if site.returns else "reduce_scatter_tokens"
    imports.append((site.returns.module if site.returns else site.collectives, name))
    return name


def scatter_arguments(site: Site) -> tuple[str, ...]:
    """Its arguments after the sums."""
    if site.returns is None:
        return ("DATA",)
    # One collective_id serves all calls: they are over the same axes.
    tuning = {name: by_bucket(site.returns_tuning[name]) for name, _ in site.returns.tiles}
    return ("DATA", "chip=CHIP", *(f"{name}=COLLECTIVES_{name.upper()}{index}" for name, index in tuning.items()))


def call_lines(target: str, function: str, arguments: Sequence[str], end: str = "") -> tuple[str, ...]:
    """`target = function(arguments)end`, one argument per line when one line is too short."""
    line = f"{target} = {function}({', '.join(arguments)}){end}"
    if len(line) <= LINE:
        return (line,)
    return (f"{target} = {function}(", *(f"    {argument}," for argument in arguments), f"){end}")
