"""Options: ref.py and xla.py of a block take the same ones, and what emit.py leaves out the reference leaves off too.

A block is declared with its required fields, with every option of tests/unit/full_fields, and with each of them alone.
For each of these, what the emitted lines pass to the block's functions is held to what reference.py passes.
"""

import ast
import importlib
import inspect
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache, wraps
from pathlib import Path
from types import ModuleType
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import yaml
from jax import lax
from pydantic import BaseModel

from moec.blocks.core.batch import Batch, Sampling, index_rows
from moec.blocks.core.declare import BlockFields, ModelDims, NormFields, Variant
from moec.blocks.core.emission import Emission, Site
from moec.blocks.registry import BLOCKS, EMITTERS, PARTS, REFERENCES, cost
from moec.compiler.emit.render import render

FULL = Path(__file__).parents[1] / "unit" / "full_fields"
DIMS = ModelDims(hidden_size=37, vocab_size=64, norm=NormFields())
TOKENS = 2
ABSENT = object()  # where a call leaves out what has no default

Call = dict[str, Any]  # options of one call by name, those only that it passes


@dataclass(frozen=True)
class Tuning:
    """Stands for the tuned values of any block: 7, per bucket or not. Their names are gathered in `names`."""

    names: set[str]

    def __getitem__(self, name: str) -> Any:
        self.names.add(name)
        return 7


def _required(model: type[BaseModel], full: dict[str, Any]) -> dict[str, Any]:
    """What a declaration cannot leave out, with the values of `full`."""
    found = {}
    for name, info in model.model_fields.items():
        if info.is_required() and name != "kind":
            nested = isinstance(info.annotation, type) and issubclass(info.annotation, BaseModel)
            found[name] = _required(info.annotation, full[name]) if nested else full[name]  # type: ignore[arg-type]
    return found


def _each_option(model: type[BaseModel], full: dict[str, Any], least: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """The least declaration with one option of `full` on top, for each of them."""
    for name, value in full.items():
        if name not in least:
            yield least | {name: value}
        elif isinstance(least[name], dict):
            annotation = model.model_fields[name].annotation
            assert annotation is not None
            yield from (least | {name: inner} for inner in _each_option(annotation, value, least[name]))


@cache
def declarations(kind: str) -> tuple[BlockFields, ...]:
    """Required fields only, every option, and each option that can stand alone."""
    block, full = BLOCKS[kind](), yaml.safe_load((FULL / f"{kind}.yaml").read_text())
    least = _required(block.Fields, full)
    whole = [block.Fields(kind=kind, **fields) for fields in (least, full)]
    assert not [block.check(fields, DIMS) for fields in whole if block.check(fields, DIMS)]
    alone = [block.Fields(kind=kind, **fields) for fields in _each_option(block.Fields, full, least)]
    return (*whole, *(fields for fields in alone if not block.check(fields, DIMS)))


def modules(kind: str) -> dict[str, ModuleType]:
    """Modules of the block's first variant and of the parts it calls -> their references."""
    variant = BLOCKS[kind]().VARIANTS[0]
    found = [variant.module, *(f"moec.blocks.{part}.xla" for part in variant.parts)]
    return {name: importlib.import_module(f"{name.rpartition('.')[0]}.ref") for name in found}


def emitted(kind: str, fields: BlockFields) -> tuple[Emission, set[str]]:
    """What the block adds to a program on one device, and the names of its tuned values."""
    variant, tuning = BLOCKS[kind]().VARIANTS[0], Tuning(set())
    site = Site(
        name="own",
        variant=variant,
        collectives="moec.blocks.collectives.xla",
        dims=DIMS,
        dp=1,
        tp=1,
        ep=1,
        etp=1,
        shared_sharded=False,
        mlp_sharded=False,
        scaled=False,
        tuning=tuning,  # type: ignore[arg-type]
        layers=(0,),
        parts={part: PARTS[part]().VARIANTS[0] for part in variant.parts},
    )
    return EMITTERS[kind]().emit(fields, site), tuning.names


def functions(kind: str, emission: Emission) -> dict[str, Callable]:
    """The block's functions that the emitted lines call."""
    own = modules(kind)
    pairs = [(module, name) for module, name in emission.imports if module in own]
    return {name: getattr(importlib.import_module(module), name) for module, name in pairs}


def emitted_calls(kind: str, fields: BlockFields) -> list[tuple[str, Call]]:
    """Every call of the block's functions in the emitted text, in order; what is known at run time only is ABSENT."""
    emission, tuned = emitted(kind, fields)
    names: dict[str, Any] = {"jnp": jnp, "lax": lax}
    for module, name in emission.imports:
        names[name] = getattr(importlib.import_module(module), name)
    for constant in emission.constants:
        names[constant.name] = eval(constant.text, dict(names))
    own, found = functions(kind, emission), []
    text = [f"{constant.name} = {constant.text}" for constant in emission.constants]
    text.append(render(f"{kind}/call.j2", **emission.fields))
    for node in ast.walk(ast.parse("\n".join(text))):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in own:
            given = {
                word.arg: _value(word.value, names) for word in node.keywords if word.arg and word.arg not in tuned
            }
            found.append((node.lineno, node.func.id, given))
    return [(name, given) for _, name, given in sorted(found, key=lambda one: one[:2])]


def _value(node: ast.expr, names: dict[str, Any]) -> Any:
    """The argument's value where it hangs on constants alone."""
    try:
        return eval(compile(ast.Expression(node), "call.j2", "eval"), dict(names))
    except NameError:
        return ABSENT


def interpreted_calls(kind: str, fields: BlockFields, monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, Call]]:
    """Every call of the references of the same functions, in order, while the block is interpreted."""
    found: list[tuple[str, Call]] = []

    def recorded(name: str, function: Callable) -> Callable:
        @wraps(function)
        def record(*args: Any, **options: Any) -> Any:
            found.append((name, options))
            return function(*args, **options)

        return record

    with monkeypatch.context() as patch:
        for name, function in functions(kind, emitted(kind, fields)[0]).items():
            ref = modules(kind)[function.__module__]
            patch.setattr(ref, name, recorded(name, getattr(ref, name)))
        _interpret(kind, fields)
    return found


def _interpret(kind: str, fields: BlockFields) -> None:
    rng, batch = np.random.default_rng(0), _batch()
    h, x = (jnp.asarray(rng.standard_normal((TOKENS, DIMS.hidden_size)), jnp.float32) for _ in range(2))
    declared = BLOCKS[kind]().weights(fields, DIMS)
    w = {name: jnp.asarray(rng.standard_normal(one.shape) / 8, jnp.float32) for name, one in declared.items()}
    REFERENCES[kind]().apply(fields, DIMS, h, w, batch, index_rows(batch), x, 0)


def _batch() -> Batch:
    """One sequence that begins here, in slot and page 0."""
    zeros = jnp.zeros(1, jnp.int32)
    return Batch(
        tokens=jnp.zeros(TOKENS, jnp.int32),
        positions=jnp.arange(TOKENS, dtype=jnp.int32),
        cu_q=jnp.asarray([0, TOKENS], jnp.int32),
        kv_len=jnp.asarray([TOKENS], jnp.int32),
        page_table=zeros[None],
        slot=zeros,
        has_state=jnp.zeros(1, bool),
        distribution=jnp.asarray([0, 1, 1], jnp.int32),
        sampling=Sampling(jnp.zeros(1), zeros, jnp.ones(1), jnp.zeros(1, jnp.uint32)),
    )


def _same(a: Any, b: Any) -> bool:
    """Equal values; arrays of run time are never what a call may leave out. Tables may differ in the last bit."""
    if isinstance(a, np.ndarray) and isinstance(b, np.ndarray):
        return np.shape(a) == np.shape(b) and np.allclose(a, b, rtol=1e-6, atol=0)
    arrays = isinstance(a, jax.Array | np.ndarray) or isinstance(b, jax.Array | np.ndarray)
    return a is b if arrays else bool(a == b)


def _differences(function: Callable, program: Call, meaning: Call) -> dict[str, tuple[Any, Any]]:
    """Options to which the emitted call and the reference give another value: (emitted, meant)."""
    found = {}
    for name, parameter in inspect.signature(function).parameters.items():
        default = ABSENT if parameter.default is parameter.empty else parameter.default
        ours, meant = program.get(name, default), meaning.get(name, default)
        if ours is not ABSENT and name in {*program, *meaning} and not _same(ours, meant):
            found[name] = (ours, meant)
    return found


@pytest.mark.parametrize("kind", BLOCKS)
def test_references_have_the_signatures_of_what_they_give_the_meaning_of(kind: str) -> None:
    called = {
        name: call for fields in declarations(kind) for name, call in functions(kind, emitted(kind, fields)[0]).items()
    }
    assert called, "no function of the block is called"
    for name, function in called.items():
        ref = modules(kind)[function.__module__]
        assert str(inspect.signature(getattr(ref, name))) == str(inspect.signature(function)), name


@pytest.mark.parametrize("kind", BLOCKS)
def test_emitted_options_are_the_references(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """An option that is left out has its default in the reference; one that is passed has the same value there."""
    wrong = {}
    for fields in declarations(kind):
        program, meaning = emitted_calls(kind, fields), interpreted_calls(kind, fields, monkeypatch)
        assert sorted(name for name, _ in program) == sorted(name for name, _ in meaning), fields
        own = functions(kind, emitted(kind, fields)[0])
        pairs = zip(sorted(program, key=lambda one: one[0]), sorted(meaning, key=lambda one: one[0]), strict=True)
        for (name, ours), (_, meant) in pairs:
            if found := _differences(own[name], ours, meant):
                wrong[f"{name} of {fields!r}"] = found
    assert not wrong


def test_declarations_turn_options_on() -> None:
    """The check above means little if few options can stand alone."""
    alone = {kind: len(declarations(kind)) - 2 for kind in BLOCKS}
    assert min(alone.values()) >= 1 and sum(alone.values()) > 40, alone


def kernels() -> list[tuple[str, Variant]]:
    """Every kernel variant of a block or a part."""
    found = [(kind, variant) for kind, block in BLOCKS.items() for variant in block().VARIANTS if variant.kernel]
    return found + [(part, variant) for part, one in PARTS.items() for variant in one().VARIANTS if variant.kernel]


def main_function(kind: str) -> str:
    """The function that has variants."""
    return {"moe": "experts", "router": "route"}.get(kind, kind)


# Decisions of the plan that only kernels of a block know.
KERNEL_OPTIONS = {"row_parts", "sparsecore_rows"}


@pytest.mark.parametrize(("kind", "variant"), kernels(), ids=lambda one: getattr(one, "name", one))
def test_kernels_take_what_their_references_take(kind: str, variant: Variant) -> None:
    """All but tiles, in the same order with the same defaults; besides, the chip and tiles of their own."""
    plain = (BLOCKS.get(kind) or PARTS[kind])().VARIANTS[0]
    name = main_function(kind)
    reference = inspect.signature(getattr(importlib.import_module(plain.module), name)).parameters
    kernel = inspect.signature(getattr(importlib.import_module(variant.module), variant.function(name))).parameters
    tiles = {tile for tile, _ in (*plain.tiles, *variant.tiles)}
    besides = {"chip", *tiles, *KERNEL_OPTIONS}
    assert [str(one) for one in kernel.values() if one.name not in besides] == [
        str(one) for one in reference.values() if one.name not in besides
    ]
    # What the combine of a mixture of experts is tuned by is an argument of the function that returns the sums.
    own = {tile for tile, _ in variant.tiles} - {"return_chunks"}
    assert {"chip", *own} == kernel.keys() & {"chip", *tiles}
    assert all(one.kind == one.KEYWORD_ONLY for one in kernel.values() if one.name in besides)


@pytest.mark.parametrize(("kind", "variant"), kernels(), ids=lambda one: getattr(one, "name", one))
def test_kernels_say_what_they_refuse_and_take(kind: str, variant: Variant) -> None:
    module = cost(kind, variant)
    assert all(callable(getattr(module, name)) for name in ("work", "refuse", "vmem_bytes", "kernels"))
    # What a kernel is judged by is known without jax.
    assert "jax" not in module.__dict__
