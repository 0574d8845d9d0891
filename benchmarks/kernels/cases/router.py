"""The router and the order of its choices: Qwen3.5-397B, hidden 4096, 512 experts, top 10, 64 experts per device.

The router's counts hold the gate projection, which its peer (XLA's softmax and top_k of given logits) does not.
"""

from collections.abc import Callable, Mapping
from typing import Any

from jax.sharding import AbstractMesh

from benchmarks.kernels.case import Arg, Case
from moec.blocks.core.chip import ChipLimits
from moec.blocks.core.work import tuned_key
from moec.blocks.moe.tpu_dispatch import dispatch
from moec.blocks.router.tpu_cost import TUNED_BY
from moec.blocks.router.tpu_fused import route_packed_fused

HIDDEN, EXPERTS, TOP_K, LOCAL = 4096, 512, 10, 64


def _route(chip: ChipLimits, mesh: AbstractMesh, tiles: Mapping[str, int]) -> Callable[..., Any]:
    def run(h_TD: Any, w_router: Any, valid_T: Any) -> Any:
        return route_packed_fused(
            h_TD,
            w_router,
            valid_T=valid_T,
            chip=chip,
            route_tokens=tiles["route_tokens"],
            route_hidden=tiles["route_hidden"],
            top_k=TOP_K,
        )

    return run


def _dispatch(chip: ChipLimits, mesh: AbstractMesh, tiles: Mapping[str, int]) -> Callable[..., Any]:
    # Sliced out of the packed array, as the program has it after its all-gather.
    def run(packed_T2K: Any, first_expert: Any) -> Any:
        return dispatch(packed_T2K[:, :TOP_K], first_expert=first_expert[0], num_local=LOCAL, chip=chip)

    return run


def _router_case(tokens: int) -> Case:
    return Case(
        name=f"router-{tokens}",
        block="router",
        variant="tpu_fused",
        build=_route,
        args=(Arg((tokens, HIDDEN), "bfloat16"), Arg((HIDDEN, EXPERTS), "bfloat16"), Arg((tokens,), "bool")),
        unit="token",
        units=tokens,
        floor_bytes=(tokens + EXPERTS) * HIDDEN * 2 + tokens * 2 * TOP_K * 4,
        kernels=(r"router_fused.*",),
        tiles={"route_tokens": tokens, "route_hidden": HIDDEN},
        grid={"route_hidden": (1024, 2048, HIDDEN)},
        shape=tuned_key(TUNED_BY, tokens=tokens, width=HIDDEN, experts=EXPERTS, weight="bfloat16"),
        peer=f"xla-top-k-{tokens}",
        bar=0.33,
    )


def _dispatch_case(tokens: int, peer: str = "") -> Case:
    rows = tokens * TOP_K * LOCAL // EXPERTS
    return Case(
        name=f"dispatch-{tokens}",
        block="moe",
        variant="tpu_grouped",
        build=_dispatch,
        args=(Arg((tokens, 2 * TOP_K), "int32"), Arg((1,), "int32")),
        unit="token",
        units=tokens,
        floor_bytes=tokens * TOP_K * 4 * 4,
        kernels=(r"moe_dispatch.*",),
        # Products of 8192 places at most fill the rows of this device's share of uniformly drawn choices.
        trips={r"moe_dispatch.*": {"L1.I0.L0": -(-rows // 8192)}},
        peer=peer,
        bar=0.33 if peer else None,
    )


CASES = (
    _router_case(64),
    _router_case(512),
    _dispatch_case(512, "xla-argsorts-512"),
    _dispatch_case(8192),
)
