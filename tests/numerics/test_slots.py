"""Moving sequences between recurrent-state slots of an emitted program, per rank and in every slot pool."""

from pathlib import Path

import jax
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from moec.blocks.core.program import partition_specs
from moec.compiler.emit.emit import emit
from moec.compiler.plan.choose import make_plan
from moec.compiler.spec.load import load
from moec.runtime.program import load_program

RANKS, SLOTS, PAGES = 4, 5, 3


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory):
    pins = ["plan.attention.dp=4", "plan.attention.tp=2", "plan.experts.ep=8"]
    request = load("tiny/qwen3_5_moe", target="cpu:8", workload="tiny", overrides=pins)
    folder: Path = tmp_path_factory.mktemp("program") / "tiny"
    emit(request.graph, make_plan(request), folder)
    return load_program(folder)


def random_state(program, seed: int) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(seed)
    infos = program.state(dict.fromkeys(program.POOLS, PAGES), dict.fromkeys(program.POOLS, SLOTS))
    return {key: rng.integers(1, 100, info.shape).astype(info.dtype) for key, info in infos.items()}


def call(program, function, state: dict[str, np.ndarray], *slots: np.ndarray) -> dict[str, np.ndarray]:
    """function(state, *slots) on the program's mesh."""
    mesh = program.mesh(jax.devices())
    infos = program.state(dict.fromkeys(program.POOLS, PAGES), dict.fromkeys(program.POOLS, SLOTS))
    specs = partition_specs(infos, program.RULES)
    placed = {key: jax.device_put(pool, NamedSharding(mesh, specs[key])) for key, pool in state.items()}
    return jax.device_get(function(placed, *(jax.device_put(s, NamedSharding(mesh, P("data"))) for s in slots)))


def slot_axis(pool: np.ndarray) -> int:
    """[R, L, slots, ...], and [R, slots] for the sampled tokens."""
    return 1 if pool.ndim == 2 else 2


def taken(pool: np.ndarray, rank: int, slot: int) -> np.ndarray:
    return np.take(pool[rank], slot, axis=slot_axis(pool) - 1)


def test_copy_slot_moves_one_slot_per_rank_and_nothing_else(program):
    before = random_state(program, 0)
    source, target = np.array([1, 2, 0, 4], np.int32), np.array([3, 2, 1, 1], np.int32)
    after = call(program, program.copy_slot, before, source, target)
    for key, pool in before.items():
        for rank in range(RANKS):
            for slot in range(SLOTS if "bytes_per_slot" in program.POOLS[key] else 0):
                origin = source[rank] if slot == target[rank] else slot
                np.testing.assert_array_equal(taken(after[key], rank, slot), taken(pool, rank, origin))
    np.testing.assert_array_equal(after["gqa.kv"], before["gqa.kv"])


def test_zero_slot_clears_one_slot_per_rank_and_nothing_else(program):
    before = random_state(program, 1)
    slots = np.array([0, 1, 2, 4], np.int32)
    after = call(program, program.zero_slot, before, slots)
    for key, pool in before.items():
        for rank in range(RANKS):
            for slot in range(SLOTS if "bytes_per_slot" in program.POOLS[key] else 0):
                wanted = taken(pool, rank, slot) * (slot != slots[rank])
                np.testing.assert_array_equal(taken(after[key], rank, slot), wanted)
    np.testing.assert_array_equal(after["gqa.kv"], before["gqa.kv"])
