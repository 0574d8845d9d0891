"""Moving whole sequences between recurrent-state slots: what snapshots and reuse need.

A slot pool is [L, slots, ...] on one rank ("sampled" is [slots]); entry 0 is the sink.
"""

from typing import Any

from jax import Array

State = dict[str, Array]


def copy_slots(state: State, source: Array, target: Array, *, keys: tuple[str, ...]) -> State:
    """Slot `target` becomes a copy of slot `source` in every pool of `keys`; source, target: int32 scalars."""
    return state | {
        key: state[key].at[_slot_index(state[key], target)].set(state[key][_slot_index(state[key], source)])
        for key in keys
    }


def zero_slots(state: State, slot: Array, *, keys: tuple[str, ...]) -> State:
    """Slot `slot` becomes zeros in every pool of `keys`."""
    return state | {key: state[key].at[_slot_index(state[key], slot)].set(0) for key in keys}


def _slot_index(pool: Array, slot: Array) -> tuple[Any, ...]:
    return (slot,) if pool.ndim == 1 else (slice(None), slot)
