"""Input no model has (huge numbers, endless brackets, odd names) gets one clean message, and quickly."""

import os
from pathlib import Path

import pytest

from moec.blocks.core.declare import divisors
from moec.compiler.problems import ProblemsError
from moec.compiler.spec import files
from moec.compiler.spec.load import load

BASE = Path(__file__).parents[1] / "cases" / "spec" / "base.yaml"
BOMB = "a: &a [x, x, x, x, x, x, x, x, x, x]\n" + "".join(
    f"{new}: &{new} [{', '.join([f'*{old}'] * 10)}]\n" for old, new in zip("abcdefgh", "bcdefghi", strict=True)
)


def said(text: str | None, tmp_path: Path, *overrides: str) -> str:
    """All messages of loading base.yaml, or the text, with the overrides."""
    path = tmp_path / "spec.yaml"
    path.write_text(BASE.read_text() if text is None else text)
    with pytest.raises(ProblemsError) as caught:
        load(str(path), overrides=overrides)
    lines = [str(problem) for problem in caught.value.problems]
    assert all(line.isprintable() for line in lines)
    return "\n".join(lines)


def spoiled(old: str, new: str) -> str:
    text = BASE.read_text()
    assert text.count(old) == 1
    return text.replace(old, new)


SPOILED = {
    "prime": ("num_v_heads: 4\n", "num_v_heads: 2147483629\n", "valid: "),
    "digits 5000": ("hidden_size: 64", "hidden_size: " + "9" * 5000, "(5000 digits) is too large"),
    "digits 400": ("vocab_size: 256", "vocab_size: " + "9" * 400, "(400 digits) is too large"),
    "digits 20": ("vocab_size: 256", "vocab_size: 9223372036854775808", "9223372036854775808 is too large"),
    "hex 5000": ("vocab_size: 256", "vocab_size: 0x" + "f" * 5000, "ambiguous"),
    "lists": ("pattern: [gdn, gdn, gdn, gqa]", "pattern: " + "[" * 200 + "]" * 200, "nested too deeply"),
    "mappings": ("pattern: [gdn, gdn, gdn, gqa]", "pattern: " + "{a: " * 90 + "1" + "}" * 90, "nested too deeply"),
    "open lists": ("pattern: [gdn, gdn, gdn, gqa]", "pattern: " + "[" * 200, "YAML syntax"),
    "interpolations": ("name: base", 'name: "' + "${" * 300 + "}" * 300 + '"', "brackets nest too deeply"),
    "version true": ("spec_version: 1", "spec_version: true", "spec_version: got true (valid: 1)"),
    "version 1.0": ("spec_version: 1", "spec_version: 1.0", "spec_version: got 1.0 (valid: 1)"),
    "empty ffn": ("ffn: moe", "ffn: ''", "layers.0.ffn.0: must have at least 1 character, got ''"),
    "raw control": ("name: base", 'name: "a\\n\\e[31mb"', r"got 'a\n\x1b[31mb'"),
    "environment": ("name: base", "name: ${oc.env:HOME}", "calls a resolver"),
    "clock": ("name: base", "name: x${now:%Y}", "calls a resolver"),
    "nested resolver": ("name: base", "name: ${model.${oc.env:HOME}}", "calls a resolver"),
    "flat transposed": (": final_norm", ": {into: final_norm, transpose: true}", "final_norm is [64]"),
    "flat split transposed": (
        '"{prefix}{layer}.norm1": layer.mixer_norm\n    "{prefix}{layer}.norm2": layer.ffn_norm',
        '"{prefix}{layer}.norm": {split: [layer.mixer_norm, layer.ffn_norm], transpose: true}',
        "only a matrix can be transposed",
    ),
    "quote in prefix": ("prefix: [model.]", "prefix: ['a\"b']", "prefix.0: a tensor's name cannot hold \""),
    "placeholder in prefix": ("prefix: [model.]", "prefix: ['{layer}']", "prefix.0: a tensor's name cannot hold { }"),
    "control in prefix": ("prefix: [model.]", 'prefix: ["a\\tb"]', r"cannot hold \t"),
    "quote in pattern": ('"head.weight"', "'he\"ad'", "a tensor's name cannot hold"),
    "brace in pattern": ('"head.weight"', '"head}"', "a tensor's name cannot hold }"),
    "long pattern": ('"head.weight"', '"' + "w" * 300 + '"', "a name of 300 characters is too long"),
    "accents in pattern": ('"head.weight"', '"' + "é" * 200 + '"', "not printable ASCII"),
    "empty pattern": ('"head.weight"', '""', "the tensor's name is empty"),
    "empty suffix": ("  prefix: [model.]", "  prefix: [model.]\n  scales: {suffix: '', block: [8, 8]}", "is empty"),
    "odd ignore": ("  prefix: [model.]", "  prefix: [model.]\n  ignore: ['ü*']", "ignore.0: a tensor's name"),
}


@pytest.mark.parametrize("case", SPOILED)
def test_spoiled_file(case: str, tmp_path: Path) -> None:
    old, new, message = SPOILED[case]
    text = spoiled(old, new)
    if case == "prime":
        text = text.replace("num_qk_heads: 2", "num_qk_heads: 3")
    assert message in said(text, tmp_path)


def test_alias_bomb(tmp_path: Path) -> None:
    assert "too large: more than 100000 values" in said(BOMB, tmp_path)


def test_a_chain_of_references_ends(tmp_path: Path) -> None:
    links = ", ".join(f'"${{model.checkpoint.ignore.{index}}}"' for index in range(1, 600))
    text = spoiled("  prefix: [model.]", f"  prefix: [model.]\n  ignore: [{links}, end]")
    assert "references lead to references too many times" in said(text, tmp_path)


OVERRIDES = {
    "~model.hidden_size=65": "deletes, so it has no value (~model.hidden_size)",
    "~model.hidden_size=64": "deletes, so it has no value (~model.hidden_size)",
    "model.hidden_size=" + "9" * 20: "is too large",
    "model.hidden_size=" + "9" * 310: "is too large",
    "model.hidden_size=" + "9" * 5000: "is too large",
    "model.checkpoint.ignore=[{a: " + "9" * 310 + "}]": "is too large",
    "model.name=${model.layers.².x}": "cannot resolve",
    "model.layers.².x=1": "does not parse",
    "model.layers." + "1" * 5000 + ".x=1": "unknown override",
    "model.layers=" + "[" * 200 + "]" * 200: "brackets nest too deeply",
    "model.layers=" + "[" * 200: "brackets nest too deeply",
    "+model.layers.0.pattern.0.override.mixer" + ".a" * 500 + "=1": "the key has more than 32 parts",
    "model.name=${oc.env:HOME}": "calls a resolver",
    "model.name=${now:%Y}": "calls a resolver",
    "model.name=a\nb": "model.name",
    "model.name=\udcff": "model.name",
}


@pytest.mark.parametrize("override", OVERRIDES, ids=lambda text: ascii(text)[1:31])
def test_spoiled_override(override: str, tmp_path: Path) -> None:
    assert OVERRIDES[override] in said(None, tmp_path, override)


NAMES = {
    "x" * 300: "cannot be looked at: File name too long",
    "a\nb.yaml": r"'a\nb.yaml' has line breaks",
    "": "there is no file",
}


@pytest.mark.parametrize("name", NAMES, ids=["long", "newline", "empty"])
def test_names_that_are_none(name: str) -> None:
    with pytest.raises(ProblemsError, match=NAMES[name].replace("\\", r"\\")):
        load(name)


def test_a_file_whose_name_has_a_newline_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "a\nb.yaml"
    path.write_text(BASE.read_text())
    with pytest.raises(ProblemsError, match="rename the file"):
        load(str(path))


def test_a_folder_that_may_not_be_looked_into(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(name: str, directory: Path) -> Path | None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(files, "_file_of", refuse)
    with pytest.raises(ProblemsError, match="cannot be looked at: Permission denied"):
        load("secret/spec.yaml")


def test_a_working_directory_that_is_gone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    gone = tmp_path / "gone"
    gone.mkdir()
    monkeypatch.chdir(gone)
    os.rmdir(gone)
    for name in ("tiny/mixtral", "spec.yaml"):
        with pytest.raises(ProblemsError, match="the working directory cannot be used: No such file"):
            load(name)


def test_divisors_are_complete_for_what_models_have_and_quick_for_the_rest() -> None:
    assert divisors(36) == (1, 2, 3, 4, 6, 9, 12, 18, 36)
    assert divisors(1_000_000)[-1] == 1_000_000
    assert len(divisors(1_000_000)) == 49
    assert divisors(4000000000000000037) == (1, 4000000000000000037)


def test_plain_references_stay(tmp_path: Path) -> None:
    path = tmp_path / "spec.yaml"
    path.write_text(spoiled("max_context: 512", "max_context: ${model.vocab_size}"))
    assert load(str(path)).model.max_context == 256
