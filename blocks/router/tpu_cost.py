"""Work, limits and tiles of the fused router kernel (tpu_fused.py). No jax.

The functions take the router's fields, not a block's: a mixture of experts calls them for its router.
"""

from collections.abc import Mapping
from math import ceil

from ..core.declare import ModelDims
from ..core.work import Gemm, Load, Term, Vector, itemsize, off_steps, tuned_key
from .router_fields import Router

LANES = 128
ROWS = 64  # tokens the kernel works on at once
# A block of tokens reads the whole matrix, unless the matrix is one piece: as many tokens as keep that rare.
TILE_TOKENS = 512
# Pieces of the matrix: small enough to multiply one while the next arrives, large enough to pay a step's set-up.
TILE_HIDDEN = 4096
# Share of vector memory that one kernel may take: XLA keeps arrays of the layers around in the rest.
MEMORY_SHARE = 2
DTYPES = ("bfloat16", "float32")
# What decides tiles, of one device.
TUNED_BY = ("tokens", "width", "experts", "weight")


def work(router: Router, dims: ModelDims, load: Load) -> tuple[Term, ...]:
    """The projection, and the choice: scores of all experts, then top_k rounds over one vector of lanes per token."""
    logits = load.dtypes.activation if router.logits_dtype == "activation" else "float32"
    vectors = ceil(router.num_experts / LANES)
    scores = vectors * LANES * (16 + 2.5 * vectors)
    rounds = router.top_k * LANES * (5 + 2 * vectors)
    return (
        Gemm("route", load.tokens, router.num_experts, dims.hidden_size, logits, load.dtypes.weight),
        Vector("choose experts", load.tokens * (scores + rounds)),
    )


def tuning(router: Router, dims: ModelDims, loads: Mapping[str, Load]) -> dict[str, int]:
    """Tokens of a block and rows of the matrix per step, per bucket."""
    found = {}
    for bucket, load in loads.items():
        found[f"route_tokens.{bucket}"], found[f"route_hidden.{bucket}"] = tiles(router, dims, load)
    return found


def kernels(tiles: Mapping[str, int], *, prefills: bool) -> dict[str, int]:
    """Launches of one layer by kernel, named up to its sizes. prefills: the bucket takes rows of several tokens."""
    return {"router_fused": 1}


def tiles(router: Router, dims: ModelDims, load: Load) -> tuple[int, int]:
    """Tokens of a block, rows of the matrix at a time: as tuned, else the variant's own."""
    tokens, hidden = _own_tiles(router, dims, load)
    tuned = load.tuned_tiles("router.tpu_fused", shape_key(router, dims, load))
    return tuned.get("route_tokens", tokens), tuned.get("route_hidden", hidden)


def shape_key(router: Router, dims: ModelDims, load: Load) -> str:
    """What tuned tiles are kept by."""
    width, experts = dims.hidden_size, router.num_experts
    return tuned_key(TUNED_BY, tokens=load.tokens, width=width, experts=experts, weight=load.dtypes.weight)


def _own_tiles(router: Router, dims: ModelDims, load: Load) -> tuple[int, int]:
    """One block of tokens reads the matrix in pieces; more blocks read it once, as long as it fits."""
    tokens = min(ceil(load.tokens / ROWS) * ROWS, TILE_TOKENS)
    hidden = dims.hidden_size
    pieces = [hidden // n for n in range(1, hidden // LANES + 1) if hidden % (n * LANES) == 0]
    pieces = pieces or [hidden]
    if load.tokens > tokens and _vmem_bytes(router, tokens, pieces[0], load) <= _memory(load):
        return tokens, pieces[0]
    small = [piece for piece in pieces if piece <= TILE_HIDDEN]
    return tokens, small[0] if small else pieces[-1]


def vmem_bytes(router: Router, dims: ModelDims, load: Load) -> int:
    """Scoped vector memory of the kernel at its tiles."""
    return _vmem_bytes(router, *tiles(router, dims, load), load)


def _memory(load: Load) -> int:
    return load.chip.vmem_bytes // MEMORY_SHARE


def _vmem_bytes(router: Router, tokens: int, hidden: int, load: Load) -> int:
    """Operands and results are there twice (one arrives or leaves), the logits once."""
    experts = ceil(router.num_experts / LANES) * LANES
    operands = tokens * hidden * itemsize(load.dtypes.activation) + hidden * experts * itemsize(load.dtypes.weight)
    results = 2 * tokens * LANES * 4 + 4 * experts * 8 * 4
    return 2 * (operands + results) + tokens * experts * 4


def temp_bytes(router: Router, dims: ModelDims, load: Load) -> int:
    """Indices and weights, rows padded to whole lanes; the logits stay on the chip."""
    return load.tokens * LANES * 4 * 2


def refuse(router: Router, dims: ModelDims, load: Load) -> list[str]:
    """Why this kernel cannot route this load; [] when it can."""
    found = []
    if load.chip.lanes != LANES:
        found.append(f"{load.chip.lanes} lanes: the kernel is written for {LANES}")
    for what, dtype in (("activations", load.dtypes.activation), ("router weights", load.dtypes.weight)):
        if dtype not in DTYPES:
            found.append(f"{what} in {dtype}: the kernel takes {' or '.join(DTYPES)}")
    if router.weights == "sparsemixer":
        found.append("weights sparsemixer: the kernel takes score, softmax, sigmoid")
    if router.renormalize and router.renorm_power not in (1, 2):
        found.append(f"renorm_power {router.renorm_power}: the kernel takes 1 or 2")
    if 2 * router.top_k > LANES:
        found.append(f"top_k {router.top_k}: the kernel takes up to {LANES // 2}")
    found = found or _refuse_tiles(router, dims, load)
    if not found and (need := vmem_bytes(router, dims, load)) > load.chip.vmem_bytes:
        found.append(f"{need} bytes of vector memory: the chip has {load.chip.vmem_bytes}")
    return found


def _refuse_tiles(router: Router, dims: ModelDims, load: Load) -> list[str]:
    """Why the kernel does not take its tiles; own ones it does."""
    block, hidden = tiles(router, dims, load)
    found = off_steps({"route_tokens": block}, {"route_tokens": ROWS})
    if block >= load.tokens + ROWS:
        found.append(f"route_tokens {block}: there are {load.tokens}")
    if hidden < 1 or dims.hidden_size % hidden:
        found.append(f"route_hidden {hidden}: the kernel takes what divides {dims.hidden_size}")
    return found
