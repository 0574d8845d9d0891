"""docs/spec.md says what the code accepts: its tables against the schema and the blocks' declarations.

A table belongs to the heading above it; a section may hold several, told apart by their first
column. Shapes in the tables are expressions over field names and are evaluated.
"""

import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import UnionType
from typing import Any, Literal, NamedTuple, Union, get_args, get_origin

import pytest
import yaml
from pydantic import BaseModel
from pydantic.fields import FieldInfo

from moec.blocks.core.array_info import PACKED
from moec.blocks.core.declare import ModelDims, NormFields, NormOverride, Weight
from moec.blocks.registry import BLOCKS
from moec.compiler.graph.build import rule_targets
from moec.compiler.graph.ir import TensorMap
from moec.compiler.graph.sources import stored_shape
from moec.compiler.graph.verify import check_table
from moec.compiler.graph.weights import all_residual_weights, model_weights
from moec.compiler.problems import ProblemsError
from moec.compiler.spec.load import load
from moec.compiler.spec.overrides import ROOTS
from moec.compiler.spec.schema import (
    Checkpoint,
    LayerEntry,
    LayerGroup,
    ModelSpec,
    PlanPins,
    Residual,
    TensorRule,
    Workload,
)
from moec.compiler.spec.semantics import RESERVED

DOCS = Path(__file__).parents[2] / "docs"
DOCUMENT, PAGES = DOCS / "spec.md", sorted((DOCS / "blocks").glob("*.md"))
HEADING = re.compile(r"^#+ (.*)$")
FIELD_TABLES: dict[tuple[str, str], type[BaseModel]] = {
    ("The model file", "key"): ModelSpec,
    ("Norms", "field"): NormFields,
    ("Layers", "group key"): LayerGroup,
    ("Layers", "entry key"): LayerEntry,
    ("The checkpoint table", "rule key"): TensorRule,
    ("Workloads", "field"): Workload,
    ("Pins", "pin"): PlanPins,
    **{(kind, "field"): BLOCKS[kind]().Fields for kind in BLOCKS},
}
# Every option of a kind on, every size another prime, so that no shape is right by accident.
FULL: dict[str, dict[str, Any]] = {
    path.stem: yaml.safe_load(path.read_text())
    for path in sorted((Path(__file__).parent / "full_fields").glob("*.yaml"))
}
HIDDEN, VOCAB = 29, 31
Row = dict[str, str]


class Table(NamedTuple):
    section: str
    first: str
    rows: tuple[Row, ...]


def _cells(line: str) -> list[str]:
    return [cell.strip() for cell in line.strip().strip("|").split("|")]


def _tables(text: str) -> Iterator[Table]:
    """Every table of the document with the heading above it."""
    section, block = "", list[str]()
    for line in [*text.splitlines(), ""]:
        if line.startswith("|"):
            block.append(line)
            continue
        if block:
            head = _cells(block[0])
            rows = tuple(dict(zip(head, _cells(row), strict=True)) for row in block[2:])
            yield Table(section, head[0], rows)
            block = []
        if found := HEADING.match(line):
            section = found[1]


TEXT = "\n".join(path.read_text() for path in (DOCUMENT, *PAGES))
TABLES = {(table.section, table.first): table.rows for table in _tables(TEXT)}


def _bare(cell: str) -> str:
    return cell.strip("`")


def _nested(annotation: Any) -> tuple[type[BaseModel] | None, bool]:
    """The mapping a field holds when its keys are documented in the same table, and whether null is another value."""
    options = get_args(annotation) if get_origin(annotation) in (Union, UnionType) else (annotation,)
    found = [one for one in options if isinstance(one, type) and issubclass(one, BaseModel)]
    optional = len(options) > 1
    # Norms, and the residual form of one entry, have tables of their own.
    if not found or issubclass(found[0], NormFields | NormOverride) or (optional and found[0] is Residual):
        return None, False
    return found[0], optional


def _leaves(model: type[BaseModel], prefix: str = "") -> Iterator[tuple[str, FieldInfo]]:
    """Documented paths: leaves, and mappings that may be null."""
    for name, info in model.model_fields.items():
        if name == "like":  # of every block: docs/spec.md, "Blocks"
            continue
        inner, optional = _nested(info.annotation)
        if inner is None or optional:
            yield prefix + name, info
        if inner is not None:
            yield from _leaves(inner, f"{prefix}{name}.")


def _choices(annotation: Any) -> set[str]:
    """The words a field accepts, when it accepts only words."""
    if get_origin(annotation) is Literal:
        return {str(value) for value in get_args(annotation)}
    return {word for part in get_args(annotation) for word in _choices(part)}


def _default(info: FieldInfo) -> Any:
    if isinstance(info.default, NormOverride):  # only what differs from the default norm
        return info.default.model_dump(exclude_none=True)
    if isinstance(info.default, BaseModel):
        return info.default.model_dump()
    return list(info.default) if isinstance(info.default, tuple) else info.default


def test_every_table_is_checked() -> None:
    weights = {(section, "weight") for section in (*BLOCKS, "Outside the blocks")}
    others = {
        ("Overrides", "root"),
        ("Blocks", "kind"),
        ("Residual forms", "form"),
        ("The checkpoint table", "placeholder"),
        ("The checkpoint table", "stored"),
        ("Packed weights", "`packed`"),
    }
    assert TABLES.keys() == FIELD_TABLES.keys() | weights | others


@pytest.mark.parametrize("key", FIELD_TABLES, ids=lambda key: f"{key[0]}: {key[1]}")
def test_fields(key: tuple[str, str]) -> None:
    """Names in the order of the code, defaults by value, every accepted word named."""
    documented = {_bare(row[key[1]]): row for row in TABLES[key]}
    fields = dict(_leaves(FIELD_TABLES[key]))
    assert list(documented) == list(fields)
    for name, info in fields.items():
        row = documented[name]
        if info.is_required():
            assert row["default"] == "required", name
        elif info.default_factory is not None:
            assert (name, _bare(row["default"])) == ("max_context", "isl + osl")
        else:
            assert yaml.safe_load(_bare(row["default"])) == _default(info), name
        assert _choices(info.annotation) <= _words(row), name


def _words(row: Row) -> set[str]:
    """Words of a row, and of the list of names it links to."""
    lists = [(DOCS / "blocks" / path).read_text() for path in re.findall(r"\]\((\S+/names\.py)\)", row["meaning"])]
    return set(re.findall(r"(?<![\w-])-\w+|\w+", " ".join([row["default"], row["meaning"], *lists])))


def test_the_other_names_of_a_norm_are_the_same() -> None:
    assert list(NormOverride.model_fields) == list(NormFields.model_fields)


def _check_weights(rows: tuple[Row, ...], weights: dict[str, Weight], sizes: dict[str, int]) -> None:
    documented = {_bare(row["weight"]): row for row in rows}
    assert list(documented) == list(weights)
    for name, weight in weights.items():
        row = documented[name]
        names = [sizes.get(word, word) for word in re.findall(r"\w+|[^\w ]", _bare(row["shape"]))]
        assert tuple(eval("".join(map(str, names)))) == weight.shape, name
        stored = ("transposed" if weight.linear else "as is") + (", stacked" if weight.stacked else "")
        assert (row["stored"], row["role"]) == (stored, weight.role), name


def _sizes(fields: dict[str, Any]) -> dict[str, int]:
    """The names a shape may use, with the values of FULL."""
    flat = {"hidden_size": HIDDEN, "gates": 2}
    for name, value in fields.items():
        inner = value if isinstance(value, dict) else {name: value}
        flat |= {f"{name}_{key}" if name in ("shared", "decay", "gate") else key: one for key, one in inner.items()}
    return flat


@pytest.mark.parametrize("kind", BLOCKS)
def test_weights_of_blocks(kind: str) -> None:
    """With every option on; what an option adds says so in the last column."""
    block, dims = BLOCKS[kind](), ModelDims(HIDDEN, VOCAB, NormFields())
    fields = block.Fields(kind=kind, **FULL[kind])
    assert not block.check(fields, dims)
    rows = TABLES[kind, "weight"]
    _check_weights(rows, block.weights(fields, dims), _sizes(FULL[kind]))
    required = {name: value for name, value in FULL[kind].items() if block.Fields.model_fields[name].is_required()}
    always = block.weights(block.Fields(kind=kind, **required), dims)
    optional = {_bare(row["weight"]) for row in rows if re.fullmatch(r"`[\w.]+(: \w+)?`", row["when"])}
    assert optional == {_bare(row["weight"]) for row in rows} - always.keys()


@pytest.mark.parametrize("kind", BLOCKS)
def test_slot_of_blocks(kind: str) -> None:
    page = (DOCS / "blocks" / f"{kind}.md").read_text()
    assert page.startswith(f"# {kind}\n") and f"Slot: {BLOCKS[kind]().SLOT}." in page


def test_every_block_has_a_page() -> None:
    assert [path.stem for path in PAGES] == sorted(BLOCKS)
    for kind in BLOCKS:
        assert f"| [{kind}](blocks/{kind}.md) | {BLOCKS[kind]().SLOT} |" in DOCUMENT.read_text()


def test_weights_outside_the_blocks() -> None:
    graph = load("tiny/mixtral").graph
    sizes = {"hidden_size": graph.dims.hidden_size, "vocab_size": graph.dims.vocab_size}
    rows = TABLES["Outside the blocks", "weight"]
    _check_weights(rows, model_weights(graph) | all_residual_weights(graph), sizes)


def test_reserved_block_names() -> None:
    line = next(line for line in TEXT.splitlines() if "names the program needs itself" in line)
    assert re.findall(r"`(\w+)`", line) == sorted(RESERVED)


def test_roots_of_overrides() -> None:
    assert tuple(_bare(row["root"]) for row in TABLES["Overrides", "root"]) == ROOTS


def test_placeholders() -> None:
    """The table accepts the documented placeholders and no other."""
    graph = load("tiny/mixtral").graph
    rows = TABLES["The checkpoint table", "placeholder"]
    names = [_bare(row["placeholder"]) for row in rows]
    pattern = "".join(names)

    def complaints(text: str) -> list[str]:
        table = Checkpoint(prefix=("p",), tensors={text: TensorRule(into="moe.w_gate")})
        return [one.text for one in check_table(table, graph) if "placeholder" in one.text]

    assert names == ["{prefix}", "{layer}", "{expert}"] and not complaints(pattern)
    assert complaints(pattern + "{rank}") == ["unknown placeholder {rank}"]


def test_layouts_of_experts() -> None:
    """The rules beside the stored shapes want just these."""
    num = {"E": 3, "D": 5, "I": 7}
    up = Weight((3, 5, 7), (None,) * 3, "expert", linear=True, stacked=True)
    down, bias = replace(up, shape=(3, 7, 5)), Weight((3, 7), (None,) * 2, "gain", stacked=True)
    weights = {"w_gate": up, "w_up": up, "w_down": down, "b_gate": bias, "b_up": bias}
    rows = TABLES["The checkpoint table", "stored"][1:]  # the first is what lines without a rule are
    assert len(rows) == 6
    for row in rows:
        shapes = [
            re.sub(r"2(?=[A-Z])", "2*", found.replace("·", "*")) for found in re.findall(r"\[[^]]*\]", row["stored"])
        ]
        rules = [TensorRule.model_validate(yaml.safe_load(text)) for text in re.findall(r"`({[^`]+})`", row["rule"])]
        for shape, rule in zip(shapes, rules, strict=True):
            into, op = rule_targets(rule)
            line = TensorMap("t", into, op, rule.transpose, flat=rule.flat)
            held = tuple(weights[name.removeprefix("moe.")] for name in into)
            assert stored_shape(line, held) == tuple(eval(shape, {}, num)), row


def test_packed_formats() -> None:
    """Endings, and the dtypes of the words, as the loader looks for them."""
    rows = TABLES["Packed weights", "`packed`"]
    assert [_bare(row["`packed`"]) for row in rows] == list(PACKED)
    for row, form in zip(rows, PACKED.values(), strict=True):
        assert row["values"].startswith(f"`...{form.values}`, {form.stored} ")
        assert row["scales"].startswith(f"`...{form.scales}`, ")
        assert row["beside them"].startswith(f"`...{form.shape}`" if form.shape else "")
        assert (not form.shape) == (not row["beside them"])


def _yaml_blocks() -> list[str]:
    return re.findall(r"^```yaml\n(.*?)^```", TEXT, re.MULTILINE | re.DOTALL)


def test_the_smallest_model_loads(tmp_path: Path) -> None:
    file = tmp_path / "my-model.yaml"
    file.write_text(_yaml_blocks()[0])
    assert load(str(file), target="cpu", workload="default").graph.num_layers == 32


def test_the_example_of_a_table_is_well_formed(tmp_path: Path) -> None:
    """Its lines name weights that exist; it is no whole table, so only what it leaves out is missing."""
    file = tmp_path / "my-model.yaml"
    file.write_text(_yaml_blocks()[0].replace("attn", "gqa") + _yaml_blocks()[1])
    with pytest.raises(ProblemsError) as caught:
        load(str(file))
    (problem,) = caught.value.problems
    missing = "head.w, final_norm, layer.mixer_norm, layer.ffn_norm, gqa.w_o, moe.router"
    assert problem.text == f"no tensor gives {missing}"


def test_examples_of_overrides_are_accepted() -> None:
    rows = TABLES["Overrides", "root"]
    examples = [text for row in rows for text in re.findall(r"`([^`]+)`", row["example"])]
    assert {example.partition(".")[0] for example in examples} == set(ROOTS)
    assert load("tiny/mixtral", target="cpu", workload="default", overrides=_fitting(examples)).overrides


def _fitting(examples: list[str]) -> list[str]:
    """tiny/mixtral counts its layers; the example that changes them must change that too."""
    assert any(example.startswith("model.layers.0.repeat=") for example in examples)
    return [*examples, "~model.num_layers"]
