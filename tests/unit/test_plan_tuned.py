"""Tuned tiles: every kernel's file reaches plan.json and the program, with its origin; wrong ones are refused."""

import json
import shutil
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from moec.compiler.emit.package import program_files
from moec.compiler.plan import tuned
from moec.compiler.plan.choose import ask, make_plan
from moec.compiler.plan.plan import Plan, VariantChoice
from moec.compiler.plan.report import plan_markdown
from moec.compiler.plan.space import Option
from moec.compiler.problems import Problem, ProblemsError
from moec.compiler.spec.load import load
from moec.compiler.spec.schema import Request
from moec.targets import target as targets

QWEN = ("qwen3.5-35b-a3b", "plan.variants.router=tpu_fused")
DEEPSEEK = (
    "tiny/deepseek_v3",
    "plan.variants.mla=tpu_ragged",
    "model.blocks.mla.kv_lora_rank=128",
    "workload.isl=256",
    "workload.osl=64",
    "workload.max_context=512",
    "workload.concurrency=16",
)


@dataclass(frozen=True)
class Tuned:
    """One kernel's file with one tile, and what becomes of it. fits: a value that the kernel takes; bad: one it does
    not, with the reason."""

    asked: tuple[str, ...]
    key: str
    tile: str
    fits: int
    bad: int
    why: str
    place: str
    bucket: str = ""

    @property
    def name(self) -> str:
        """The tile's in plan.json."""
        return f"{self.tile}.{self.bucket}" if self.bucket else self.tile


EXPERTS = (
    "tokens=512,top_k=8,experts=128,width=2048,inner=512,expert=float8_e4m3fn,scale_block=128,rows=activation,chunks=1"
)
GDN = "rows=256,v_heads=32,qk_heads=16,state=bfloat16,decay=head,page=256"
GQA = "rows=256,q_heads=16,kv_heads=2,head_dim=256,page=256,kv=bfloat16,reach=all"
MLA = "rows=8,heads=4,latent=128,page=256,kv=bfloat16"
ROUTER = "tokens=256,width=2048,experts=256,weight=bfloat16"
MEMORY = "the chip has 67108864"
FILES = {
    "attention.tpu_ragged": Tuned(QWEN, GQA, "decode_block", 512, 8192, MEMORY, "gqa"),
    "gated_delta.tpu_fused": Tuned(QWEN, GDN, "unroll", 2, 3, "takes what divides 16 groups", "gdn"),
    "mla.tpu_ragged": Tuned(DEEPSEEK, MLA, "decode_keys", 512, 1 << 18, MEMORY, "mla"),
    "moe.tpu_grouped": Tuned(QWEN, EXPERTS, "block_rows", 16, 8192, MEMORY, "moe", "decode"),
    "router.tpu_fused": Tuned(
        QWEN, ROUTER, "route_hidden", 1024, 768, "takes what divides 2048", "moe.router", "decode"
    ),
}
every_kernel = pytest.mark.parametrize("kernel", FILES)


@pytest.fixture
def folder(tmp_path: Path, root: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """tpu7x as shipped, but nothing tuned; returns the folder of tuned files."""
    shutil.copytree(root / "targets" / "tpu7x", tmp_path / "tpu7x", ignore=shutil.ignore_patterns("tuned"))
    (tmp_path / "tpu7x" / "tuned").mkdir()
    monkeypatch.setattr(targets, "HERE", tmp_path)
    return tmp_path / "tpu7x" / "tuned"


def write(folder: Path, kernel: str, key: str, **tiles: Any) -> None:
    block, _, variant = kernel.partition(".")
    provenance = {"kind": "compiler", "case": "a-case"}
    entry = {tile: {"value": value, "provenance": provenance} for tile, value in tiles.items()}
    document = {"block": block, "variant": variant, "entries": {key: entry}}
    (folder / f"{kernel}.json").write_text(json.dumps(document))


def requested(model: str, *overrides: str) -> Request:
    pins = ["plan.attention.dp=2", "plan.experts.ep=2", *overrides]
    return load(model, target="tpu7x:1x1x1", workload="decode_512x9216", overrides=pins)


def planned(*asked: str) -> tuple[Plan, str]:
    """The plan and model.py."""
    request = requested(*asked)
    plan = make_plan(request)
    return plan, program_files(request.graph, plan)["model.py"]


@cache
def untuned(asked: tuple[str, ...]) -> Plan:
    """To be called with an empty folder."""
    return make_plan(requested(*asked))


def choice(choices: Iterable[VariantChoice], kernel: str, scope: str) -> VariantChoice:
    (found,) = (one for one in choices if (one.scope, one.variant) == (scope, kernel.partition(".")[2]))
    return found


def problems(asked: tuple[str, ...]) -> tuple[Problem, ...]:
    with pytest.raises(ProblemsError) as raised:
        ask(requested(*asked))
    return raised.value.problems


def test_every_kernel_that_can_be_tuned_is_here() -> None:
    assert tuned.kernels().keys() == FILES.keys()


@every_kernel
def test_a_tuned_tile_is_planned_and_emitted_with_its_origin(kernel: str, folder: Path) -> None:
    case = FILES[kernel]
    before, owner = untuned(case.asked), case.place.partition(".")[0]
    write(folder, kernel, case.key, **{case.tile: case.fits})
    plan, source = planned(*case.asked)
    name = f"{owner}.{case.name}"
    assert before.tuning[name] != case.fits
    assert plan.tuning == before.tuning | {name: case.fits}
    origins = choice(plan.variant_choices, kernel, case.place).tiles_from
    assert origins[case.name] == "compiler: a-case"
    assert {origin for tile, origin in origins.items() if tile != case.name} <= {tuned.ANALYTIC}
    (line,) = (line for line in source.splitlines() if line.startswith(f"{owner}_{case.tile} = ".upper()))
    assert f'"{case.bucket}": {case.fits}' in line if case.bucket else f" = {case.fits} " in line
    assert f"tuned {case.name} compiler: a-case" in plan_markdown(plan)


@every_kernel
def test_a_tuned_tile_that_the_kernel_does_not_take_is_refused(kernel: str, folder: Path) -> None:
    case = FILES[kernel]
    write(folder, kernel, case.key, **{case.tile: case.bad})
    question = ask(requested(*case.asked))
    refused = choice(question.variants(Option(2, 1, 2, 1, *["replicated"] * 4)).choices, kernel, case.place)
    assert refused.verdict == "REFUSED"
    assert case.why in refused.why and f"with tuned {case.tile}={case.bad} (tuned/{kernel}.json)" in refused.why


def test_vector_memory_and_work_are_those_of_tuned_tiles(folder: Path) -> None:
    before = untuned(QWEN)
    write(folder, "moe.tpu_grouped", EXPERTS, block_rows=128, inner_tile=128)
    write(folder, "attention.tpu_ragged", GQA, decode_slots=4)
    plan, source = planned(*QWEN)
    for kernel, scope in (("moe.tpu_grouped", "moe"), ("attention.tpu_ragged", "gqa")):
        assert (
            choice(plan.variant_choices, kernel, scope).vmem_bytes
            <= choice(before.variant_choices, kernel, scope).vmem_bytes
        )
    assert (
        choice(plan.variant_choices, "attention.tpu_ragged", "gqa").vmem_bytes
        < choice(before.variant_choices, "attention.tpu_ragged", "gqa").vmem_bytes
    )
    found, was = (choice(one.variant_choices, "moe.tpu_grouped", "moe").us for one in (plan, before))
    assert found["decode"] > was["decode"] and found["mixed"] == was["mixed"]
    # Buckets have their own columns where these differ.
    assert 'MOE_INNER_TILE = {"decode": 128, "mixed": 512}' in source and "inner_tile=MOE_INNER_TILE[bucket]" in source


def test_entries_of_other_shapes_change_nothing(folder: Path) -> None:
    before = untuned(QWEN)
    write(folder, "gated_delta.tpu_fused", GDN.replace("rows=256", "rows=255"), unroll=2)
    assert make_plan(requested(*QWEN)) == before


@pytest.mark.parametrize(
    ("kernel", "key", "tiles", "text", "hint"),
    [
        ("moe.tpu_groped", EXPERTS, {}, "no kernel 'moe.tpu_groped' takes tuned tiles", "'moe.tpu_grouped'"),
        ("collectives.tpu_hierarchical", "x", {}, "no kernel 'collectives.tpu_hierarchical' takes", "valid"),
        ("moe.tpu_grouped", "512x8", {}, "no key of this kernel: '512x8'", "tokens=...,top_k=...,"),
        ("moe.tpu_grouped", EXPERTS, {"tile_tokens": 8}, "no tile 'tile_tokens'", "'combine_tokens'"),
        ("mla.tpu_ragged", MLA, {"keys": 512}, "no tile 'keys'", "decode_keys"),
        ("mla.tpu_ragged", MLA, {"decode_keys": 0}, "decode_keys is 0", "positive"),
    ],
)
def test_wrong_files_are_one_problem_each(
    kernel: str, key: str, tiles: dict[str, int], text: str, hint: str, folder: Path
) -> None:
    write(folder, kernel, key, **tiles)
    (found,) = problems(QWEN)
    assert found.path == f"targets/tpu7x/tuned/{kernel}.json"
    assert text in found.text and hint in found.hint, (found.text, found.hint)


def test_an_entry_without_provenance_is_a_problem(folder: Path) -> None:
    entry = {"unroll": {"value": 2}}
    (folder / "gated_delta.tpu_fused.json").write_text(json.dumps({"entries": {GDN: entry}}))
    (found,) = problems(QWEN)
    assert "unroll has no provenance" in found.text
    (folder / "gated_delta.tpu_fused.json").write_text("{}")
    (found,) = problems(QWEN)
    assert found.text == "no entries"


def test_shipped_files_have_no_problems() -> None:
    for chip in ("tpu7x:2x2x1", "v6e:2x2", "v5p:2x2x1", "cpu"):
        assert tuned.check_tuned(targets.load_target(chip)) == []
