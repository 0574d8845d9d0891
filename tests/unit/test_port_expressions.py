"""What recipes of moec port are computed with: expressions, and layers into groups."""

import copy
from typing import Any

import pytest

from moec.compiler.port.config import Config, MissingFieldError
from moec.compiler.port.expressions import evaluate, parse
from moec.compiler.port.functions import PLAIN
from moec.compiler.port.layers import compress, rows
from moec.compiler.port.scope import ExpressionError, Scope, WrongValueError

DATA: dict[str, Any] = {
    "size": 64,
    "heads": 4,
    "none": None,
    "kinds": ["window", "full"],
    "rope": {"theta": 1e4, "scaling": None, "deep": {"factor": 8}},
    "act": "silu",
}


def scope(**lets: Any) -> Scope:
    return Scope(Config("config.json", copy.deepcopy(DATA)), lets)


def value(text: str, **lets: Any) -> Any:
    return evaluate(text, scope(**lets)).value


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        ("size // heads", 16),
        ("size / heads + 0.5", 16.5),
        ("2 ** 10 - heads % 3", 1023),
        ("-size", -64),
        ("rope.deep.factor * 2", 16),
        ("rope['theta']", 1e4),
        ("[1, 2] * 2 + [3]", [1, 2, 1, 2, 3]),
        ("kinds[1]", "full"),
        ("kinds[-1][0:2]", "fu"),
        ("{'silu': 'a', 'gelu': 'b'}[act]", "a"),
        ("'x' if heads > 4 else 'y'", "y"),
        ("1 < heads <= 4 and not none", True),
        ("none or size", 64),
        ("'full' in kinds and 'theta' in rope", True),
        ("[k + 1 for k in range(4) if k % 2]", [2, 4]),
        ("get(none, rope.scaling.factor, rope.nothing, heads)", 4),
        ("get(absent, 7)", 7),
        ("has(rope.deep) and not has(none) and not has(absent.deeper)", True),
        ("config.rope.theta", 1e4),
        ("len(kinds) + max(1, 2) + min([4, 3]) + sum([1, 1]) + abs(-1)", 10),
        ("sqrt(16) + log(1) + float(1) + int(2.7) + round(1.2)", 8.0),
        ("str(heads) + '.*'", "4.*"),
        ("count(kinds, 'full')", 1),
        ("finite(1.5)", 1.5),
        ("stored()", False),
        ("shape('x.weight')", None),
    ],
)
def test_expressions_compute(text: str, wanted: Any) -> None:
    assert value(text) == wanted


def test_every_function_is_tried_above() -> None:
    tried = test_expressions_compute.pytestmark[0].args[1]  # type: ignore[attr-defined]
    assert {name for name in PLAIN if not any(f"{name}(" in text for text, _ in tried)} == set()


@pytest.mark.parametrize(
    "text",
    [
        "__import__('os')",
        "open('x')",
        "kinds.append(1)",
        "size.__class__",
        "(lambda: 1)()",
        "f'{size}'",
        "[x for x in kinds for y in kinds]",
        "{**rope}",
        "x := 1",
        "import os",
        "len(obj=kinds)",
        "{k for k in kinds}",
        "b'x'",
        "1j",
        "...",
        "await size",
        "*kinds,",
        "size @ heads",
        "size << 40",
        "yield size",
        "",
    ],
)
def test_what_is_not_of_the_language_is_refused(text: str) -> None:
    with pytest.raises(ExpressionError):
        value(text)


@pytest.mark.parametrize(
    "text",
    [
        "2 ** 9999",
        "10 ** 40",
        "[0] * 10 ** 9",
        "'x' * 10 ** 9",
        "range(10 ** 9)",
        "1 / 0",
        "size + kinds",
        "log(0)",
        "heads(1)",
        "(" * 500 + "1" + ")" * 500,
        "1+" * 5000 + "1",
    ],
)
def test_what_cannot_be_computed_is_an_expression_error(text: str) -> None:
    with pytest.raises(ExpressionError):
        value(text)


def test_missing_and_wrong_fields_name_their_path() -> None:
    with pytest.raises(MissingFieldError) as missing:
        value("rope.deep.other")
    assert missing.value.path == "rope.deep.other"
    with pytest.raises(MissingFieldError) as missing:
        value("rope.scaling.factor")
    assert missing.value.path == "rope.scaling.factor"
    with pytest.raises(WrongValueError, match="'silu' is not known") as wrong:
        value("{'gelu': 1}[act]")
    assert wrong.value.path == "act"
    with pytest.raises(WrongValueError, match="has 2 entries, entry 2 is needed"):
        value("kinds[2]")


def test_every_field_an_expression_reads_is_recorded() -> None:
    found = evaluate("get(none, size) // heads if rope.theta else act", scope())
    assert found.reads == ("rope.theta", "size", "heads")
    assert evaluate("width // 2", scope(width="=size * heads")).reads == ("size", "heads")


def test_a_let_means_the_field_of_its_name_inside_itself() -> None:
    assert value("size", size="=get(other_size, size)") == 64


def test_defaults_stand_in_for_absent_fields_only() -> None:
    config = Config("c", {"a": None}, defaults={"a": 1, "b": 2})
    assert evaluate("b", Scope(config)).value == 2
    assert config.seen.defaulted == {"b"}
    assert evaluate("a", Scope(config)).value is None


def test_parsing_is_all_that_happens_to_text() -> None:
    assert parse("size // heads") is parse("size // heads")


@pytest.mark.parametrize(
    ("layers", "wanted"),
    [
        ("", []),
        ("A", [("A", 1)]),
        ("A" * 48, [("A", 48)]),
        ("GGGA" * 15, [("GGGA", 15)]),
        ("DDD" + "M" * 58, [("D", 3), ("M", 58)]),
        ("WF" * 18, [("WF", 18)]),
        ("GGGA", [("GGGA", 1)]),
        ("LLLG" * 5 + "LL", [("LLLG", 5), ("L", 2)]),
    ],
)
def test_layers_become_the_shortest_groups(layers: str, wanted: list[tuple[str, int]]) -> None:
    assert [(layers[run.start : run.start + run.period], run.repeat) for run in compress(layers)] == wanted


@pytest.mark.parametrize("layers", ["ABBABBAAB", "AABAABAABA", "ABCABDABCABD", "ABAABAAAB", "ABCDEFG"])
def test_groups_cover_the_layers(layers: str) -> None:
    runs = compress(layers)
    assert "".join(layers[run.start : run.start + run.period] * run.repeat for run in runs) == layers
    assert [run.start for run in runs] == [0, *(run.stop for run in runs[:-1])]


def test_equal_neighbours_are_counted() -> None:
    assert rows("aabbba") == [("a", 2), ("b", 3), ("a", 1)]
