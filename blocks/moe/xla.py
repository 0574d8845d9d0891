"""Mixture of experts in plain JAX: routed experts, shared expert. Which experts: ../router/xla.py.

Legend: T tokens, D hidden (of the routed experts: their own width), K top_k, E local experts,
I expert intermediate (local), L layers in a stack, A = T*K assignments (token, expert),
B rows of a block, N blocks at most.
"""

from typing import Literal

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.typing import DTypeLike

from ..activation.names import Activation
from ..core.quant import dequantize_blocks
from ..mlp.clamp import Clamp
from ..mlp.xla import dense_mlp


def _moe_sort(index_TK: Array, weight_TK: Array, first_expert: Array | int, num_local: int) -> tuple[Array, ...]:
    """Order assignments by local expert -> (token [A], weight [A] float32, start [E+1]).

    Expert e owns entries start[e]:start[e+1]; assignments of other ranks' experts and of
    padding (index -1) come after start[E]. Tokens rise within an expert.
    """
    top_k = index_TK.shape[1]
    local_A = index_TK.reshape(-1) - first_expert
    local_A = jnp.where((local_A >= 0) & (local_A < num_local), local_A, num_local)
    shift = max(local_A.size - 1, 1).bit_length()
    assert (num_local + 1) << shift <= 2**31, "assignments * experts exceed int32"
    # Expert and assignment share one unique key, so an unstable sort is exact.
    key_A = (local_A << shift) | jnp.arange(local_A.size, dtype=jnp.int32)
    weight_A = weight_TK.reshape(-1).astype(jnp.float32)
    key_A, weight_A = lax.sort((key_A, weight_A), num_keys=1, is_stable=False)
    bound_E = jnp.arange(num_local + 1, dtype=jnp.int32) << shift
    start_E = jnp.sum(key_A[None, :] < bound_E[:, None], axis=1, dtype=jnp.int32)
    return (key_A & ((1 << shift) - 1)) // top_k, weight_A, start_E


def _moe_blocks(start_E: Array, num_assignments: int, block_rows: int) -> tuple[Array, Array]:
    """Cut each expert's run into blocks -> (table [N, 3] of (expert, first, end), number in use)."""
    num_local = start_E.shape[0] - 1
    most = num_assignments // block_rows + min(num_local, num_assignments)
    blocks_E = -(-(start_E[1:] - start_E[:-1]) // block_rows)
    ends_E = jnp.cumsum(blocks_E)
    block_N = jnp.arange(most, dtype=jnp.int32)
    expert_N = jnp.sum(block_N[:, None] >= ends_E[None, :], axis=1, dtype=jnp.int32)
    # One-hot sums instead of gathers of 1-word rows.
    mine_NE = expert_N[:, None] == jnp.arange(num_local, dtype=jnp.int32)[None, :]
    begin_N = jnp.sum(mine_NE * (start_E[:-1] - (ends_E - blocks_E) * block_rows)[None, :], axis=1)
    end_N = jnp.sum(mine_NE * start_E[None, 1:], axis=1)
    return jnp.stack([expert_N, begin_N + block_N * block_rows, end_N], axis=1), ends_E[-1]


def _moe_expert(stack: Array, scale_E: Array | None, layer: Array | int, expert: Array, dtype: DTypeLike) -> Array:
    """One expert's matrix out of the stack [L, E, ...], as `dtype`.

    One slice by (layer, expert): slicing the layer first would copy all its experts.
    """
    w = lax.dynamic_slice(stack, (layer, expert, 0, 0), (1, 1, *stack.shape[2:]))[0, 0]
    if scale_E is None:
        return w.astype(dtype)
    return dequantize_blocks(w, lax.dynamic_index_in_dim(scale_E, expert, keepdims=False), dtype)


def _moe_bias(stack: Array, layer: Array | int, expert: Array) -> Array:
    """One expert's bias out of its stack [L, E, ...]."""
    return lax.dynamic_slice(stack, (layer, expert, 0), (1, 1, stack.shape[2]))[0, 0]


def experts(
    h_TD: Array,
    index_TK: Array,
    weight_TK: Array,
    w_gate: Array | None,
    w_up: Array,
    w_down: Array,
    scales: dict[str, Array] | None,
    *,
    layer: Array | int,
    first_expert: Array | int,
    block_rows: int,
    activation: Activation = "silu",
    biases: dict[str, Array] | None = None,
    add_b_down: Array | bool = True,
    clamp: Clamp | None = None,
    weigh: Literal["output", "input"] = "output",
) -> Array:
    """Sum of weighted local experts per token -> [T, D] float32, partial over ep and etp.

    w_gate, w_up [L, E, D, I], w_down [L, E, I, D]; w_gate None: experts without a gate. scales: None
    or the block scales of each by the same name. biases: b_gate, b_up [L, E, I], b_down [L, E, D];
    add_b_down is true on one of the devices that share an expert. weigh: the weight multiplies an
    expert's output, or its input. layer and first_expert may be traced. A token names an expert
    once. Work follows the assignments: blocks that hold none are never entered.
    """
    # Scales are small: one layer of them re-laid out here saves re-laying out them all.
    layer_scales = {name: lax.dynamic_index_in_dim(s, layer, keepdims=False) for name, s in (scales or {}).items()}
    token_A, weight_A, start_E = _moe_sort(index_TK, weight_TK, first_expert, w_up.shape[1])
    table_N3, num_blocks = _moe_blocks(start_E, token_A.size, block_rows)
    # A block may read past the last entry; its rows there are masked.
    token_A, weight_A = jnp.pad(token_A, (0, block_rows)), jnp.pad(weight_A, (0, block_rows))
    row_B = jnp.arange(block_rows, dtype=jnp.int32)

    def matrix(key: str, stack: Array, expert: Array) -> Array:
        return _moe_expert(stack, layer_scales.get(key), layer, expert, h_TD.dtype)

    def bias(key: str, expert: Array) -> Array | None:
        return _moe_bias(biases[key], layer, expert) if biases and key in biases else None

    def block(n: Array, y_TD: Array) -> Array:
        expert, first, end = lax.dynamic_index_in_dim(table_N3, n, keepdims=False)
        token_B = lax.dynamic_slice(token_A, (first,), (block_rows,))
        weight_B = lax.dynamic_slice(weight_A, (first,), (block_rows,))
        gate = None if w_gate is None else matrix("w_gate", w_gate, expert)
        up, down = matrix("w_up", w_up, expert), matrix("w_down", w_down, expert)
        x_BD = h_TD.at[token_B].get(mode="promise_in_bounds")
        if weigh == "input":
            x_BD = (x_BD.astype(jnp.float32) * weight_B[:, None]).astype(h_TD.dtype)
        out_BD = dense_mlp(
            x_BD,
            gate,
            up,
            down,
            activation=activation,
            b_gate=bias("b_gate", expert),
            b_up=bias("b_up", expert),
            b_down=bias("b_down", expert),
            add_b_down=add_b_down,
            clamp=clamp,
        )
        # Unused rows go past the end, each to its own place, and are dropped.
        target_B = jnp.where(first + row_B < end, token_B, h_TD.shape[0] + row_B)
        weighted_BD = out_BD * weight_B[:, None] if weigh == "output" else out_BD
        return y_TD.at[target_B].add(weighted_BD, mode="drop", unique_indices=True, indices_are_sorted=True)

    return lax.fori_loop(0, num_blocks, block, jnp.zeros(h_TD.shape, jnp.float32))


def latent_projection(x: Array, w: Array) -> Array:
    """x w in x's dtype: hidden to the width of the routed experts, or their sum back; float32 sums."""
    return jnp.dot(x, w, preferred_element_type=jnp.float32).astype(x.dtype)


def shared_expert(
    h_TD: Array,
    w: dict[str, Array],
    *,
    gate: Literal["sigmoid", "none"] = "none",
    gated: bool = True,
    activation: Activation = "silu",
    bias: bool = False,
    add_b_down: Array | bool = True,
    clamp: Clamp | None = None,
    scale: float = 1.0,
) -> Array:
    """The expert every token passes -> [T, D] float32, partial when its intermediate is cut.

    w: shared_gate when gated, shared_up [D, I], shared_down [I, D], shared_b_gate, shared_b_up,
    shared_b_down with bias, and shared_router [D, 1] for gate "sigmoid". add_b_down as in dense_mlp.
    """
    y_TD = dense_mlp(
        h_TD,
        w["shared_gate"] if gated else None,
        w["shared_up"],
        w["shared_down"],
        activation=activation,
        b_gate=w["shared_b_gate"] if bias and gated else None,
        b_up=w["shared_b_up"] if bias else None,
        b_down=w["shared_b_down"] if bias else None,
        add_b_down=add_b_down,
        clamp=clamp,
    )
    if gate == "sigmoid":
        y_TD = y_TD * jax.nn.sigmoid(jnp.dot(h_TD, w["shared_router"], preferred_element_type=jnp.float32))
    return y_TD if scale == 1 else y_TD * scale
