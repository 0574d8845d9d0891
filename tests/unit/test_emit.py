"""The emitter: what emitted text must and must not contain, for several models and meshes."""

import ast
import re
import sys
from collections import Counter
from pathlib import Path

import pytest

from moec.compiler.emit import standalone
from moec.compiler.emit.emit import check, emit, why_not_ours
from moec.compiler.emit.package import legend, plan_digest, program_files
from moec.compiler.emit.view import identifier
from moec.compiler.plan.choose import make_plan
from moec.compiler.spec.load import load

MODELS = ("tiny/qwen3_5_moe", "tiny/qwen3_moe", "tiny/mixtral")
CUTS = {
    "one": ("cpu", ()),
    "dp8_ep8": ("cpu:8", ("plan.attention.dp=8", "plan.experts.ep=8")),
    "dp4tp2_ep8": ("cpu:8", ("plan.attention.dp=4", "plan.attention.tp=2", "plan.experts.ep=8")),
    "dp8_ep4tp2": ("cpu:8", ("plan.attention.dp=8", "plan.experts.ep=4", "plan.experts.tp=2")),
    "dp4tp2_ep4tp2": (
        "cpu:8",
        ("plan.attention.dp=4", "plan.attention.tp=2", "plan.experts.ep=4", "plan.experts.tp=2"),
    ),
}
FAMILIES = ("qwen", "mixtral", "deepseek", "olmoe", "gpt_oss", "kimi", "glm4", "minimax", "granite", "nemotron")


def planned(model: str, cut: str, *pins: str):
    target, overrides = CUTS[cut]
    request = load(model, target=target, workload="tiny", overrides=[*overrides, *pins])
    return request, make_plan(request)


def flagship():
    request = load("qwen3.5-397b-a17b", target="tpu7x-8", workload="decode_512x9216")
    return request, make_plan(request)


@pytest.fixture(scope="module")
def flagship_files():
    request, plan = flagship()
    return plan, program_files(request.graph, plan)


@pytest.mark.parametrize("cut", CUTS)
@pytest.mark.parametrize("model", MODELS)
def test_program_has_no_configuration_branches(model, cut):
    request, plan = planned(model, cut)
    tree = ast.parse(program_files(request.graph, plan)["model.py"])
    branches = [node for node in ast.walk(tree) if isinstance(node, ast.If | ast.IfExp | ast.Match)]
    assert not branches, [ast.unparse(node) for node in branches]
    starred = [f.name for f in ast.walk(tree) if isinstance(f, ast.FunctionDef) and f.args.kwarg]
    assert not starred, starred


def test_flagship_carries_its_plan(flagship_files):
    plan, files = flagship_files
    lines = files["model.py"].splitlines()
    assert max(map(len, lines)) <= 140
    assert f'PLAN_DIGEST = "{plan_digest(plan)}"' in files["model.py"]
    assert "moec compile qwen3.5-397b-a17b --target tpu7x:2x2x1 --workload decode_512x9216" in lines[0]


def test_every_constant_has_a_reason(flagship_files):
    _, files = flagship_files
    tree = ast.parse(files["model.py"])
    lines = files["model.py"].splitlines()
    constants = [
        node
        for node in tree.body
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, int)
    ]
    assert len(constants) > 15
    bare = [lines[node.lineno - 1] for node in constants if "  # " not in lines[node.lineno - 1]]
    assert not bare


def test_constants_are_laid_out_to_be_read(flagship_files):
    """Limits by whole fields with the reason ahead of them; one number where all buckets agree, and no index then."""
    plan, files = flagship_files
    text = files["model.py"]
    chip = re.search(r"^CHIP = ChipLimits\(  # what the kernels .*\n((?:    .*,\n)+)\)$", text, flags=re.MULTILINE)
    assert chip and all(one.count("(") == one.count(")") for one in chip[1].splitlines())
    assert f"smem_bytes={plan.chip['smem_bytes']}," in chip[1] and plan.chip["smem_bytes"] == 1 << 20
    tables = re.findall(r'^(\w+) = \{"decode": (\d+), "mixed": (\d+)\}', text, flags=re.MULTILINE)
    assert tables and all(decode != mixed and f"{name}[bucket]" in text for name, decode, mixed in tables)
    assert re.search(r"^MOE_COMBINE_TOKENS = 64  # ", text, flags=re.MULTILINE)
    assert "combine_tokens=MOE_COMBINE_TOKENS," in text


def test_the_legend_names_the_dims_in_use(flagship_files):
    text = flagship_files[1]["model.py"]
    assert legend("y_TD, kv_A1, MOE_TOP_K") == ("Suffixes: T tokens of this rank, A tokens of all ranks, D hidden.",)
    found = text.partition("Suffixes:")[2].partition('"""')[0]
    dims = set(re.findall(r"\b([A-Z]) ", found))
    assert dims == {dim for name in re.findall(r"\b[a-z]\w*_([A-Z0-9]+)\b", text) for dim in name if dim.isalpha()}
    with pytest.raises(AssertionError, match=r"\['Q'\]"):
        legend("q_TQ")


# Collective of a plan -> what the call that makes it is named after.
CALLED = {
    "all-gather": r"gather_(tokens|routing)",
    "reduce-scatter": r"reduce_scatter|_to_ranks",
    "all-reduce": r"all_reduce",
    "all-to-all": r"all_to_all",
}


def across(functions):
    """Names of the calls in these functions that are handed mesh axes: what communicates."""
    found = []
    for call in (node for function in functions for node in ast.walk(function) if isinstance(node, ast.Call)):
        given = {ast.unparse(one) for one in (*call.args, *(word.value for word in call.keywords))}
        if given & {"DATA", "TENSOR", "EXPERT"} and ast.unparse(call.func) != "lax.axis_index":
            found.append(ast.unparse(call.func))
    return found


@pytest.mark.parametrize("bucket", ["decode", "mixed"])
def test_every_collective_of_the_flagship_is_a_named_call(flagship_files, bucket):
    """In a block, one call per planned collective, named after it; messages of one array, as in chunks, are one call.

    Around the layers, the table and the head that are cut over devices: their names say so.
    """
    plan, files = flagship_files
    functions = {f.name: f for f in ast.parse(files["model.py"]).body if isinstance(f, ast.FunctionDef)}
    arrays = {(one.scope, one.op, one.dtype, one.what) for one in plan.collectives if one.bucket == bucket}
    assert {scope for scope, *_ in arrays} == {"moe", "step"}
    blocks = {name: f for name, f in functions.items() if name.endswith("_block")}
    for name, function in blocks.items():
        called = across([function])
        wanted = Counter(op for scope, op, *_ in arrays if f"{scope}_block" == name)
        found = {op: sum(bool(re.search(word, one)) for one in called) for op, word in CALLED.items()}
        assert found == {op: wanted[op] for op in CALLED}, (name, called)
        assert len(called) == wanted.total(), (name, called)
    ends = {"lookup_sharded": plan.embed == "sharded", "logits_sharded": plan.head == "sharded"}
    assert set(across(f for name, f in functions.items() if name not in blocks)) == {
        n for n, cut in ends.items() if cut
    }


def test_tensor_parallel_adds_a_sum_per_mixer():
    request, plan = planned("tiny/qwen3_5_moe", "dp4tp2_ep8")
    tree = ast.parse(program_files(request.graph, plan)["model.py"])
    functions = {f.name: ast.unparse(f) for f in tree.body if isinstance(f, ast.FunctionDef)}
    assert [name for name, body in functions.items() if "all_reduce(y_TD, TENSOR)" in body] == [
        "gdn_block",
        "moe_block",
        "gqa_block",
    ]


@pytest.mark.parametrize(
    ("model", "target", "pinned"),
    [("gpt-oss-20b", "tpu7x-8", True), ("gpt-oss-20b", "cpu:8", False), ("olmoe-7b", "tpu7x-8", False)],
)
def test_row_major_is_the_embedding_table_where_its_rows_are_no_whole_tiles(model, target, pinned):
    request = load(model, target=target, workload="default", overrides=["target.hbm_gib=90"])
    text = program_files(request.graph, make_plan(request))["weights.py"]
    calls = [n for n in ast.walk(ast.parse(text)) if isinstance(n, ast.Call) and ast.unparse(n.func) == "ArrayInfo"]
    found = [call for call in calls if any(word.arg == "row_major" for word in call.keywords)]
    assert [ast.unparse(call.args[2]) for call in found] == ["('embed_vocab', None)"] * pinned


def test_emission_is_deterministic_and_checks_clean(tmp_path):
    request, plan = planned("tiny/qwen3_5_moe", "dp8_ep8")
    emit(request.graph, plan, tmp_path / "program")
    assert check(request.graph, plan, tmp_path / "program") == []


@pytest.mark.parametrize(
    ("spoil", "expected"),
    [
        (lambda d: (d / "model.py").write_text("x = 1\n"), "model.py: differs"),
        (lambda d: (d / "weights.py").unlink(), "weights.py: missing"),
        (lambda d: (d / "extra.py").write_text(""), "extra.py: not emitted"),
    ],
    ids=["edited", "deleted", "added"],
)
def test_drift_is_found(tmp_path, spoil, expected):
    request, plan = planned("tiny/qwen3_5_moe", "one")
    emit(request.graph, plan, tmp_path / "program")
    spoil(tmp_path / "program")
    (line,) = check(request.graph, plan, tmp_path / "program")
    assert expected in line


def test_nothing_half_written(tmp_path, monkeypatch):
    """A failure while writing leaves the old program whole and no temporary folder."""
    request, plan = planned("tiny/qwen3_5_moe", "one")
    emit(request.graph, plan, tmp_path / "program")
    before = {p.name: p.read_text() for p in (tmp_path / "program").iterdir()}
    monkeypatch.setattr(Path, "write_text", lambda *a, **k: (_ for _ in ()).throw(OSError("disk full")))
    with pytest.raises(OSError, match="disk full"):
        emit(request.graph, plan, tmp_path / "program")
    assert {p.name: p.read_text() for p in (tmp_path / "program").iterdir()} == before
    assert [p.name for p in tmp_path.iterdir()] == ["program"]


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (lambda p: p.write_text("precious"), "is a file"),
        (lambda p: (p.mkdir(), (p / "thesis.tex").write_text("x")), "thesis.tex"),
        (lambda p: (p.mkdir(), (p / "model.py").write_text("x"), (p / "plan.json").write_text("{}")), "no emitted"),
        (lambda p: p.symlink_to(p.parent), "symbolic link"),
    ],
    ids=["file", "foreign file", "foreign program", "link"],
)
def test_what_is_not_ours_is_never_replaced(tmp_path, make, reason):
    _, plan = planned("tiny/qwen3_5_moe", "one")
    make(tmp_path / "program")
    assert reason in why_not_ours(tmp_path / "program", plan)


def test_an_older_program_of_the_same_model_may_be_replaced(tmp_path):
    request, plan = planned("tiny/qwen3_5_moe", "one")
    assert why_not_ours(tmp_path / "program", plan) == ""
    emit(request.graph, plan, tmp_path / "program")
    assert why_not_ours(tmp_path / "program", plan) == ""
    (tmp_path / "program" / "plan.json").write_text('{"model": "other"}')
    assert "another model, other" in why_not_ours(tmp_path / "program", plan)


def test_an_interrupted_swap_keeps_the_old_program(tmp_path, monkeypatch):
    request, plan = planned("tiny/qwen3_5_moe", "one")
    emit(request.graph, plan, tmp_path / "program")
    rename = Path.rename

    def interrupted(self, target):
        if Path(target) == tmp_path / "program" and self.name != "old":
            raise KeyboardInterrupt
        return rename(self, target)

    monkeypatch.setattr(Path, "rename", interrupted)
    with pytest.raises(KeyboardInterrupt):
        emit(request.graph, plan, tmp_path / "program")
    monkeypatch.undo()
    assert [p.name for p in tmp_path.iterdir()] == ["program"]
    assert check(request.graph, plan, tmp_path / "program") == []


def test_standalone_imports_nothing_of_the_library():
    request, plan = planned("tiny/qwen3_5_moe", "dp8_ep8")
    files = standalone.standalone_files(request.graph, plan)
    for name, text in files.items():
        if not name.endswith(".py"):
            continue
        roots = set()
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.Import):
                roots |= {alias.name.split(".")[0] for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and not node.level:
                roots.add((node.module or "").split(".")[0])
        assert "moec" not in roots, name


def test_splice_refuses_a_name_defined_twice():
    with pytest.raises(ValueError, match="helper is defined by a and by b"):
        standalone.splice([], [("a", "def helper(): pass\n"), ("b", "def helper(): pass\n")])


def test_splice_refuses_an_aliased_internal_import():
    with pytest.raises(ValueError, match="as other"):
        standalone.splice([], [("a", "from moec.blocks.core.norm import rms_norm as other\n")])


@pytest.mark.parametrize("model", MODELS)
def test_emitting_a_family_touches_no_family_name(model):
    """What emission has loaded of the compiler and the blocks, templates included, names no model family."""
    request, plan = planned(model, "one")
    program_files(request.graph, plan)
    loaded = [m for name, m in list(sys.modules.items()) if name.startswith(("moec.compiler.", "moec.blocks."))]
    sources = [Path(m.__file__) for m in loaded if getattr(m, "__file__", None)]
    sources += [p for inst in request.graph.blocks().values() for p in block_folder(inst.kind).glob("*.j2")]
    assert len(sources) > 30
    found = [f"{path}: {name}" for path in sources for name in FAMILIES if name in path.read_text().lower()]
    assert not found


def block_folder(kind: str) -> Path:
    return Path(__file__).parents[2] / "blocks" / kind


@pytest.mark.parametrize(("name", "slug"), [("qwen3.5-397b", "qwen3_5_397b"), ("8x7b", "_8x7b"), ("a/b", "a_b")])
def test_folders_are_importable(name, slug):
    assert identifier(name) == slug
    assert slug.isidentifier()
