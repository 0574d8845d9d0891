"""What no file may say: paths and hosts of one machine, and model families where only blocks are known."""

import re

THIS_FILE = "tests/architecture/test_text.py"
MACHINE = re.compile(
    r"(?<![\w.])/(?:root|home|work|Users|opt|mnt)/"  # absolute paths of somebody's machine
    r"|\b(?:10\.\d+|192\.168|172\.(?:1[6-9]|2\d|3[01]))\.\d+\.\d+\b"  # private addresses
    r"|://[\w.-]*\.(?:internal|local|lan|corp|intranet)\b"
    r"|--(?:extra-)?index-url|--trusted-host|--hash=",
)
BESIDE = "../shared"  # continuous integration alone may look beside the checkout
FAMILIES = re.compile(
    r"(?<![a-z])(qwen|mixtral|mistral|deepseek|kimi|glm|gpt.?oss|minimax|nemotron|granite|olmo|gemma|llama|ernie|phi.?moe"
    r"|jamba|hunyuan|longcat|grok|dbrx|bamba|falcon|lfm\d|afmoe|exaone|solar.?open|dots1|sarvam|axk\d|laguna|step3"
    r"|mimo.?v2|kolibri|mellum|cohere|bailing|aria(?![a-z])|hy_v3|flint|inkling|zaya)",
    re.IGNORECASE,
)
URL = re.compile(r"https?://\S+")


def test_no_machine_is_named(text_files: dict[str, str]) -> None:
    found = [f"{p}: {m.group()}" for p, t in text_files.items() if p != THIS_FILE for m in MACHINE.finditer(t)]
    assert not found


def test_only_continuous_integration_looks_beside_the_checkout(text_files: dict[str, str]) -> None:
    assert {p for p, t in text_files.items() if BESIDE in t} == {".ci/run", THIS_FILE}


# Families exist as data only: port recipes (specs/families) and specs.
FAMILY_FREE = ("compiler/", "blocks/", "runtime/", "moec/")
BRANCH = re.compile(
    r"""(?:model_type|architectures?)["']?[\])]*(?:\[\d\])?"""  # the field, however it is read
    r"""\s*(?:==|!=|(?:not )?in\b|\.startswith)\s*[\[({"']"""  # compared with text
)


def test_no_branch_on_a_model_type(text_files: dict[str, str]) -> None:
    code = {p: t for p, t in text_files.items() if p.startswith(FAMILY_FREE) and p.endswith((".py", ".j2"))}
    assert BRANCH.search('if config["model_type"] == "x":') and BRANCH.search("if architectures[0] in ('x',):")
    assert not [f"{p}: {m.group()}" for p, t in code.items() for m in BRANCH.finditer(t)]


def test_code_names_no_model_family(text_files: dict[str, str]) -> None:
    code = {p: URL.sub("", t) for p, t in text_files.items() if p.startswith(FAMILY_FREE)}
    found = [f"{p}: {m.group()}" for p, t in code.items() for m in FAMILIES.finditer(t)]
    found += [p for p in code if FAMILIES.search(p)]
    assert not found
