"""Planned bytes against the compiler's layouts, the emitter's arrays and the model's sizes."""

import json
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest

from moec.blocks.core.array_info import ArrayInfo
from moec.blocks.core.work import Degrees, Dtypes
from moec.blocks.registry import axis_roles
from moec.compiler.emit import arrays as emitted
from moec.compiler.graph.weights import residual_weights
from moec.compiler.plan.choose import ask, make_plan
from moec.compiler.plan.evaluate import Question
from moec.compiler.plan.memory import (
    LocalArray,
    TempModel,
    available_bytes,
    component_bytes,
    largest,
    layer_arrays,
    needed_bytes,
    padded_bytes,
    pinned_rows,
    state_arrays,
    vocabulary_arrays,
)
from moec.compiler.plan.plan import Plan
from moec.compiler.plan.space import Option, mesh_of
from moec.compiler.plan.steps import Steps
from moec.compiler.plan.tuned import tiles
from moec.compiler.plan.variants import places
from moec.compiler.spec.load import load
from moec.compiler.spec.schema import Request
from moec.targets.target import Tiling, load_target

GIB = 2**30
DP8 = Option(8, 1, 8, 1, "sharded", "sharded", "replicated", "replicated")
TP8 = Option(1, 8, 8, 1, "sharded", "sharded", "sharded", "replicated")
NO_TEMP = TempModel(base_bytes=0, scale=0)
NO_TILING = Tiling(sublanes=1, lanes=1, source="test")


def request(*overrides: str, workload: str = "decode_512x9216", target: str = "tpu7x-8") -> Request:
    return load("qwen3.5-397b-a17b", target=target, workload=workload, overrides=overrides)


def question(*overrides: str, **changes: object) -> Question:
    return replace(ask(request(*overrides)), **changes)  # type: ignore[arg-type]


def test_padding_is_what_the_compiler_lays_out(root: Path) -> None:
    evidence = json.loads((root / "targets/tpu7x/evidence/argument_layouts.json").read_text())
    tiling = load_target("tpu7x-8").tiling
    assert len(evidence["rows"]) > 40
    wrong = [row for row in evidence["rows"] if padded_bytes(tuple(row[0]), row[1], tiling) != row[2]]
    assert not wrong


def test_rows_of_an_embedding_table_are_pinned_where_they_are_no_whole_tiles() -> None:
    """libtpu 0.0.52 says 1104.6 and 1129.2 MiB for a step that only gathers rows, the ids included: left alone it
    takes the order of dims that pads less, and copies the table to the other in every step."""
    tiling, shape = load_target("tpu7x-8").tiling, (201088, 2880)
    assert padded_bytes(shape, "bfloat16", tiling) / 2**20 == pytest.approx(1104.6, abs=0.1)
    assert padded_bytes(shape, "bfloat16", tiling, row_major=True) / 2**20 == pytest.approx(1129.2, abs=0.1)
    assert pinned_rows("embed.table", shape, tiling) and not pinned_rows("head.w", shape, tiling)
    assert not pinned_rows("embed.table", (201088, 2944), tiling)
    assert not pinned_rows("embed.table", shape, load_target("cpu").tiling)


def test_plans_agree_with_compiled_programs(root: Path) -> None:
    """Arguments to the byte (a plan counts the mixed bucket's batch), arguments and temporaries within 0.2 %."""
    rows = json.loads((root / "targets/tpu7x/evidence/aot_memory.json").read_text())["rows"]
    assert {row[3] for row in rows} == {"decode", "mixed"}
    for model, workload, overrides, bucket, arguments, temporaries in rows:
        memory = make_plan(load(model, target="tpu7x-8", workload=workload, overrides=tuple(overrides))).memory
        assert 0 <= memory.arguments_bytes - arguments < (1 if bucket == "mixed" else 100_000)
        total = memory.arguments_bytes + memory.temp_bytes[bucket]
        assert total == pytest.approx(arguments + temporaries, rel=0.002)


def sequence_bytes(tp: int, kv: int, state: int) -> int:
    """One sequence of 9216 tokens on one device, counted from the model's sizes; kv, state: bytes of a value."""
    keys_and_values = 15 * 9216 * 2 * max(1, 2 // tp) * 256
    return keys_and_values * kv + 45 * 64 // tp * 128 * 128 * state + 45 * 3 * (2 * 16 + 64) // tp * 128 * 2


@pytest.mark.parametrize("option", [DP8, TP8])
@pytest.mark.parametrize(
    ("kv", "state"), [("bfloat16", "bfloat16"), ("float8_e4m3fn", "bfloat16"), ("bfloat16", "float32")]
)
def test_capacity_is_the_room_over_a_sequence(option: Option, kv: str, state: str) -> None:
    asked = question(f"plan.dtypes.kv={kv}", f"plan.dtypes.state={state}", temp_model=NO_TEMP)
    room = asked.target.usable_bytes - asked.target.reserve_bytes - sum(asked.weight_bytes(option.degrees).values())
    one = sequence_bytes(option.tp, 1 if kv == "float8_e4m3fn" else 2, 4 if state == "float32" else 2)
    found = asked.max_sequences(option)
    assert found == pytest.approx(room / one * option.dp, rel=0.012)
    # At 512 sequences of 8k + 1k tokens only attention data parallelism fits, or a float8 cache.
    assert (found > 512) == (option.tp == 1 or kv == "float8_e4m3fn")


def test_largest_agrees_with_a_scan() -> None:
    for limit in range(40):
        for start in (1, 7, 64):
            assert largest(lambda n, limit=limit: n <= limit, start) == limit


def test_replicated_heads_cost_their_copies() -> None:
    """Two key/value heads on eight devices: one per device, four times the bytes of an even cut."""
    asked = question()
    steps = Steps(seqs=8, mixed_tokens=64, page_size=256, pages_per_seq=4, served=8)

    def kv(tp: int) -> int:
        found = component_bytes(state_arrays(asked.graph, Degrees(tp=tp), asked.dtypes, steps, NO_TILING), NO_TILING)
        return found["gqa.kv"]

    assert kv(1) == 2 * kv(2) == 2 * kv(4) == 2 * kv(8)


def _local(info: ArrayInfo, degrees: Degrees) -> tuple[tuple[int, ...], str]:
    cut = (degrees.of(axis_roles()[axis]) if axis else 1 for axis in info.axes)
    return tuple(size // by for size, by in zip(info.shape, cut, strict=True)), info.dtype


def _emitted_weights(asked: Question, plan: Plan, degrees: Degrees) -> Counter[tuple[tuple[int, ...], str]]:
    graph = asked.graph
    infos = list(emitted.top_arrays(graph, plan).values())
    for group in graph.groups:
        for position, layer in enumerate(group.layers):
            layers = group.layer_indices(position)
            infos += [emitted.residual_array(graph, key, plan, layers) for key in residual_weights(graph, layer)]
            for inst in layer.blocks:
                infos += emitted.dense_arrays(graph, inst, plan, layers).values()
    for inst in graph.blocks().values():
        infos += emitted.expert_arrays(graph, inst, plan).values()
    return Counter(_local(info, degrees) for info in infos)


def _tuning(asked: Question, option: Option, steps: Steps) -> dict[str, int]:
    loads, variants = asked.loads(option, steps), asked.variants(option).variants
    return {
        f"{place.inst.name}.{key}": value
        for place in places(asked.graph)
        for key, value in tiles(asked.target, place, variants[place.name], asked.graph.dims, loads).values.items()
    }


CASES = [
    ("qwen3.5-397b-a17b", "tpu7x-8", "decode_512x9216", DP8),
    ("qwen3.5-397b-a17b", "tpu7x-8", "decode_512x9216", TP8),
    ("tiny/qwen3_5_moe", "cpu:8", "tiny", replace(DP8, dp=4, tp=2, shared_expert="sharded")),
    ("tiny/qwen3_5_moe", "cpu", "tiny", Option(1, 1, 1, 1, "replicated", "replicated", "replicated", "replicated")),
    ("mixtral-8x7b", "tpu7x-8", "decode_512x9216", replace(TP8, ep=4, etp=2, shared_expert="replicated")),
    ("deepseek-v3", "tpu7x-8", "decode_512x9216", TP8),
]


@pytest.mark.parametrize(("model", "target", "workload", "option"), CASES)
def test_planned_arrays_are_the_emitted_ones(model: str, target: str, workload: str, option: Option) -> None:
    asked = ask(load(model, target=target, workload=workload))
    mesh, steps = mesh_of(option), asked.steps(option, 4)
    plan = Plan.model_construct(
        target=asked.target.name,
        mesh=mesh,
        dtypes=asked.dtypes,
        embed=option.embed,
        head=option.head,
        shared_expert=option.shared_expert,
        mlp=option.mlp,
        variants=asked.variants(option).names(),
        tuning=_tuning(asked, option, steps),
    )
    planned: list[LocalArray] = [
        *vocabulary_arrays(asked.graph, option.degrees, asked.dtypes, asked.target.tiling),
        *layer_arrays(asked.graph, option.degrees, asked.dtypes),
    ]
    found = Counter((array.shape, array.dtype) for array in planned)
    assert found == _emitted_weights(asked, plan, option.degrees)
    tiling = asked.target.tiling
    pools = {a.component: a for a in state_arrays(asked.graph, option.degrees, asked.dtypes, steps, tiling)}
    for pool in emitted.state_arrays(asked.graph, plan):
        cut = [option.degrees.of(axis_roles()[axis]) if axis else 1 for axis in pool.axes]
        inner = tuple(size // by for size, by in zip(pool.inner, cut, strict=True))
        count = (pool.layers * steps.num_pages, steps.page_size) if pool.paged else (pool.layers, steps.num_slots)
        assert pools[pool.key].shape == (1, *count, *inner)
        assert pools[pool.key].dtype == pool.dtype


@pytest.mark.parametrize(("target", "row"), [("tpu7x-8", 640), ("cpu:8", 576)])
def test_rows_are_padded_where_memory_has_tiles(target: str, row: int) -> None:
    """A latent row of 512 + 64 values is whole tiles of 128 lanes, and itself on a CPU."""
    asked = ask(load("deepseek-v3", target=target, workload="decode_512x9216"))
    steps = Steps(seqs=8, mixed_tokens=64, page_size=256, pages_per_seq=4, served=8)
    found = state_arrays(asked.graph, Degrees(), asked.dtypes, steps, asked.target.tiling)
    assert {one.shape[-1] for one in found if one.component == "mla.kv"} == {row}


def test_plan_memory_adds_up() -> None:
    plan = make_plan(request())
    memory = plan.memory
    assert memory.arguments_bytes == sum(memory.components.values())
    assert needed_bytes(memory) == memory.arguments_bytes + max(memory.temp_bytes.values())
    assert available_bytes(memory) == memory.usable_bytes - memory.reserve_bytes
    assert needed_bytes(memory) <= available_bytes(memory)
    headroom = plan.estimates["hbm_headroom"].value * GIB
    assert headroom == pytest.approx(available_bytes(memory) - needed_bytes(memory), rel=1e-4)
    most = int(plan.estimates["max_sequences"].value)
    asked, option = question(), DP8
    fits = {n: needed_bytes(asked.memory(option, asked.steps(option, n))) for n in (most // 8, most // 8 + 1)}
    assert [size <= available_bytes(memory) for size in fits.values()] == [True, False]


def test_dtypes_of_roles() -> None:
    dtypes = Dtypes("bfloat16", "bfloat16", "float8_e4m3fn", "float8_e4m3fn", "float32", "bfloat16")
    roles = {role: dtypes.of(role) for role in ("linear", "expert", "decay", "kv", "state", "head")}
    assert roles == {
        "linear": "bfloat16",
        "expert": "float8_e4m3fn",
        "decay": "float32",
        "kv": "float8_e4m3fn",
        "state": "float32",
        "head": "bfloat16",
    }


@pytest.mark.aot
def test_layout_evidence_is_still_what_the_compiler_says(root: Path) -> None:
    """Compiles one-argument programs for tpu7x and compares argument bytes (about 20 s)."""
    import jax
    import jax.numpy as jnp
    from jax.experimental import topologies
    from jax.sharding import SingleDeviceSharding

    described = topologies.get_topology_desc("tpu7x:2x2x1", platform="tpu")
    sharding = SingleDeviceSharding(described.devices[0])
    rows = json.loads((root / "targets/tpu7x/evidence/argument_layouts.json").read_text())["rows"]
    for shape, dtype, expected in rows[::4]:
        info = jax.ShapeDtypeStruct(tuple(shape), jnp.dtype(dtype), sharding=sharding)
        compiled = jax.jit(lambda x: x.astype(jnp.float32).sum()).lower(info).compile()
        memory = compiled.memory_analysis()
        assert memory is not None and memory.argument_size_in_bytes == expected, (shape, dtype)


def test_pages_and_slots_are_one_budget_with_their_padding() -> None:
    """What the pools' entries take, tiles filled up, is what the memory plan counts; a flat state fills whole tiles."""
    plan = make_plan(load("qwen3.5-397b-a17b", target="tpu7x-8", workload="decode_512x9216"))
    pools = {pool.key: pool for pool in plan.cache}
    for key, pool in pools.items():
        assert round(pool.entries * pool.padded_bytes) == plan.memory.components[key]
    assert pools["gdn.conv"].padded_bytes == pools["gdn.conv"].bytes == 45 * 3 * 12288 * 2
    assert pools["gqa.kv"].per_sequence == plan.buckets[0].pages_per_seq
    # One value per slot lies in tiles of whole lanes.
    assert pools["sampled"].padded_bytes > pools["sampled"].bytes
    # A CPU has no tiles: nothing is padded, and a flat state stays flat.
    plain = make_plan(load("tiny/qwen3_5_moe", target="cpu", workload="tiny"))
    assert all(pool.padded_bytes == pool.bytes for pool in plain.cache)
