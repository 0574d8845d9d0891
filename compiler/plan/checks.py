"""Questions that no plan answers, whatever the sharding: refused with their reason before any option is looked at."""

from moec.blocks.core.declare import AxisRole
from moec.targets.target import Target

from ..graph.ir import Graph
from ..problems import Problem
from ..spec.schema import PlanPins, Workload
from .space import has_cut
from .steps import least_tokens


def check_room(target: Target) -> list[Problem]:
    """The runtime's reserve must leave something for programs."""
    hbm, reserve = target.hbm_gib.value, target.hbm_reserve_gib.value
    if target.usable_bytes > target.reserve_bytes:
        return []
    text = f"HBM: {hbm:g} GiB per device leave nothing beside the runtime's {reserve:g} GiB"
    return [Problem("target.hbm_gib", text, f"more than target.hbm_reserve_gib={reserve:g}")]


def check_placements(graph: Graph, target: Target, pins: PlanPins) -> list[Problem]:
    """Only what exists can be cut, and only over several devices; a tied head lies where the embedding does."""
    problems = []
    pinned = {"embed": pins.embed, "head": pins.head, "shared_expert": pins.shared_expert, "mlp": pins.mlp}
    sharded = [key for key, place in pinned.items() if place == "sharded"]
    parts: tuple[tuple[str, AxisRole, str], ...] = (
        ("shared_expert", "shared", "shared expert"),
        ("mlp", "mlp", "dense MLP"),
    )
    for key, role, what in parts:
        if key in sharded and not has_cut(graph, role):
            sharded.remove(key)
            text = f"UNSUPPORTED: the model has no {what} to be sharded"
            problems.append(Problem(f"plan.{key}", text, "leave it out"))
    if target.num_devices == 1:
        text = f"UNSUPPORTED: {target.name} is one device, nothing can be sharded"
        problems += [
            Problem(f"plan.{key}", text, "leave it out, or name a target of several devices") for key in sharded
        ]
    if graph.head.tied and pins.embed and pins.head and pins.embed != pins.head:
        text = f"UNSUPPORTED: the head is tied to the embedding, which is pinned to {pins.embed}, got {pins.head}"
        problems.append(Problem("plan.head", text, f"plan.head={pins.embed}"))
    return problems


def check_sizes(workload: Workload, pins: PlanPins) -> list[Problem]:
    """Sizes above everything the workload could fill, were all its sequences on one rank."""
    problems, context, page = [], workload.max_context, pins.page_size or 1
    if page > context:
        text = f"UNSUPPORTED: pages of {page} tokens, but contexts end at workload.max_context={context}"
        problems.append(Problem("plan.page_size", text, f"at most {context}"))
        page = 1
    seqs = pins.max_seqs or workload.concurrency
    most = max(seqs * context, 2 * seqs, least_tokens(page, seqs))
    if pins.max_batched_tokens and pins.max_batched_tokens > most:
        text = f"UNSUPPORTED: a step of {pins.max_batched_tokens} tokens per rank, but {seqs} sequences of {context}"
        problems.append(Problem("plan.max_batched_tokens", f"{text} tokens have at most {most}", f"at most {most}"))
    return problems
