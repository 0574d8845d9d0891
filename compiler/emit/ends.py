"""What an emitted program has around its layers: pools, their write after the layers, embedding, head, buckets."""

from dataclasses import dataclass

from ..graph.ir import Graph
from ..plan.plan import BucketPlan, Plan
from .arrays import StateArray
from .constants import WIDTH, text


@dataclass(frozen=True)
class PoolView:
    """One state array of the emitted `state` function. info: lines of its ArrayInfo's arguments; size: of POOLS."""

    key: str
    info: tuple[str, ...]
    size: str


def pool_view(pool: StateArray, plan: Plan) -> PoolView:
    layers, inner = f"{pool.block.upper()}_LAYERS", pool.inner_text
    axes = text(("rank", None, None, *pool.axes))
    if pool.paged:
        shape = f'(NUM_RANKS, {layers} * pages["{pool.key}"], PAGE_SIZE, {inner})'
        page_bytes = pool.bytes_per_entry * plan.page_size
        size = f'"tokens_per_page": PAGE_SIZE, "bytes_per_page": {page_bytes}, "window": {pool.window}'
    else:
        shape = f'(NUM_RANKS, {layers}, slots["{pool.key}"], {inner})'
        size = f'"bytes_per_slot": {pool.bytes_per_entry}'
    rest = f'"{pool.dtype}", {axes}'
    info = (f"{shape}, {rest}",) if len(shape) + len(rest) + 14 <= WIDTH else (f"{shape},", f"{rest},")
    return PoolView(pool.key, info, "{" + size + "}")


def kv_writes(graph: Graph, pools: tuple[StateArray, ...]) -> tuple[tuple[str, str], ...]:
    """Per pool written after the scan: the new rows of all its layers in layer order."""
    found = []
    for pool in pools:
        if pool.carried:
            continue
        parts = [
            f'new_kv{i}["{pool.key}"]'
            for i, group in enumerate(graph.groups)
            if any(inst.name == pool.block for layer in group.layers for inst in layer.blocks)
        ]
        found.append((pool.key, ", ".join(parts)))
    return tuple(found)


def embed_text(graph: Graph, plan: Plan) -> str:
    found = 'lookup(w["embed"]["table"], tokens_T)'
    if plan.embed == "sharded":
        found = 'lookup_sharded(w["embed"]["table"], tokens_T, DATA, TENSOR)'
    return times(graph.embed.scale, f"{found}.astype(ACTIVATION)")


def head_text(graph: Graph, plan: Plan) -> tuple[str, ...]:
    """Lines that compute logits from h_TD and end in a return."""
    head = graph.head
    matrix = 'w["embed"]["table"].T' if head.tied else 'w["head"]["w"]'
    sharded = plan.head == "sharded"
    call = f"logits_sharded(h_TD, {matrix}, DATA, TENSOR)" if sharded else f"logits(h_TD, {matrix})"
    lines = [f"logits_TV = {call}"]
    if head.bias:
        lines.append('logits_TV = logits_TV + w["head"]["b"].astype(jnp.float32)')
    if head.scale != 1:
        lines.append(f"logits_TV = {head.scale!r} * logits_TV")
    if head.softcap:
        lines.append(f"logits_TV = {head.softcap!r} * jnp.tanh(logits_TV / {head.softcap!r})")
    return (f"return {call}",) if len(lines) == 1 else (*lines, "return logits_TV")


def bucket_text(bucket: BucketPlan) -> str:
    return (
        f"Bucket(tokens_per_rank={bucket.tokens_per_rank}, seqs_per_rank={bucket.seqs_per_rank}, "
        f"max_q={bucket.max_q}, pages_per_seq={bucket.pages_per_seq})"
    )


def times(factor: float, name: str) -> str:
    return name if factor == 1 else f"{factor!r} * {name}"
