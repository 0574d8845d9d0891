"""The command line: exit codes, streams, words in any order. Stages have their own tests."""

import json
from pathlib import Path

import pytest

from moec.compiler.cli import COMMANDS, main
from moec.compiler.commands.common import split_words
from moec.compiler.commands.programs import DEFAULT_CONTEXT, DEFAULT_WORKLOAD, context_override, find_program
from moec.compiler.plan.plan import Plan
from moec.compiler.spec.load import load

TINY = "tiny/mixtral"


def run(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, str, str]:
    """(exit code, stdout, stderr) of one command line."""
    try:
        code = main(words)
    except SystemExit as stop:  # argparse
        code = stop.code if isinstance(stop.code, int) else 1
    captured = capsys.readouterr()
    return code, captured.out, captured.err


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_explains_itself(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, err = run(capsys, name, "--help")
    assert (code, err) == (0, "")
    assert out.startswith(f"usage: moec {name} ")
    assert "examples:" in out


def test_help_names_every_command(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = run(capsys, "--help")
    assert code == 0
    assert all(f"  {name} " in out for name in COMMANDS)


@pytest.mark.parametrize(
    "words",
    [
        (),
        ("nonsense",),
        ("check",),
        ("check", "no/such/model"),
        ("check", TINY, "--no-such-option"),
        ("plan", TINY),
        ("plan", TINY, "--target", "abacus"),
        ("plan", "--target", "cpu"),
        ("plan", TINY, "tiny/qwen3_moe", "--target", "cpu"),
        ("compile", TINY),
        ("show", "soup", TINY),
        ("show", "program", TINY),
        ("run", TINY, "--ids", "1"),
        ("run", TINY, "--target", "cpu", "--weights", ".", "--ids", "one"),
        ("run", TINY, "--target", "cpu", "--weights", ".", "--ids", "1", "--prompt", "one"),
        ("verify", TINY, "--target", "cpu", "--weights", "."),
        ("verify", TINY, "--target", "cpu", "--reference", "no.npz"),
    ],
)
def test_bad_input_is_a_message_and_exit_code_2(words: tuple[str, ...], capsys: pytest.CaptureFixture[str]) -> None:
    code, out, err = run(capsys, *words)
    assert code == 2
    assert "Traceback" not in err
    assert err or (not words and out)  # without words the help is the message


FLAGSHIP = ("plan", "qwen3.5-397b-a17b", "--target", "tpu7x-8", "--workload", "decode_512x9216")


def test_a_pin_no_block_keeps_is_said_once_for_all_shardings(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, err = run(capsys, *FLAGSHIP, "plan.dtypes.expert_rows=float8_e4m3fn", "plan.variants.moe=xla")
    assert (code, out) == (2, "")
    (line,) = err.splitlines()
    assert line.startswith(
        "<command line>:arg2: error: plan.variants.moe, plan.dtypes.expert_rows: UNSUPPORTED: plan.variants.moe=xla: "
        "rows in float8_e4m3fn: plain XLA multiplies rows in the activations' dtype (for all 16 shardings on tpu7x"
    )
    assert "valid: tpu_grouped; or leave out plan.dtypes.expert_rows=float8_e4m3fn; see <command line>:arg1" in line


def test_every_block_that_refuses_its_pin_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    pins = ("plan.page_size=3", "plan.variants.gqa=tpu_ragged", "plan.variants.gdn=tpu_fused")
    code, _, err = run(capsys, *FLAGSHIP, *pins)
    assert code == 2
    assert "<command line>:arg2: error: plan.variants.gqa, plan.page_size: UNSUPPORTED: " in err
    assert "<command line>:arg3: error: plan.variants.gdn, plan.page_size: UNSUPPORTED: " in err
    assert "INDIVISIBLE" not in err
    windows = [line for line in err.splitlines() if "convolution window" in line]
    assert all("plan.page_size" not in line and "(for TP8 on tpu7x:2x2x1)" in line for line in windows)
    assert len(windows) == 1


def test_large_numbers_of_bytes_are_also_in_mib(capsys: pytest.CaptureFixture[str]) -> None:
    code, _, err = run(capsys, *FLAGSHIP, "plan.variants.moe=tpu_grouped", "target.vmem_mib=2")
    assert code == 2
    assert " MiB) of vector memory" in err and "the chip has 2097152 (2 MiB)" in err


def test_all_problems_of_all_models_in_one_pass(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, err = run(capsys, "check", TINY, "no_such", "tiny/qwen3_moe", "model.blocks.moe.router.topk=3")
    assert (code, out) == (2, "")
    assert len([line for line in err.splitlines() if ": error: " in line or line.startswith("error: ")]) == 2
    assert "did you mean 'model.blocks.moe.router.top_k'" in err


def test_good_models_are_listed(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, err = run(capsys, "check", TINY, "tiny/qwen3_moe")
    assert (code, err) == (0, "")
    assert [line.split(":")[0] for line in out.splitlines()] == [TINY, "tiny/qwen3_moe"]


def test_json_is_one_document_also_for_problems(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, err = run(capsys, "check", TINY, "--json")
    assert code == 0
    assert json.loads(out)["models"][TINY]["num_layers"] == 4
    code, out, err = run(capsys, "check", TINY, "--json", "model.nonsense=1")
    assert code == 2
    assert json.loads(out)["problems"][0]["path"] == "model.nonsense"
    assert "model.nonsense" in err


def test_options_and_overrides_alternate(capsys: pytest.CaptureFixture[str]) -> None:
    words = (
        "plan",
        "plan.page_size=32",
        "--json",
        TINY,
        "--target",
        "cpu",
        "--workload",
        "default",
        "workload.concurrency=2",
    )
    code, out, _ = run(capsys, *words)
    assert code == 0
    plan = Plan.model_validate_json(out)
    assert plan.page_size == 32
    assert plan.overrides == ("plan.page_size=32", "workload.concurrency=2")


def test_words_with_an_equals_sign_are_overrides() -> None:
    assert split_words(["a", "b.c=1", "d", "~e.f"]) == (["a", "d"], ("b.c=1", "~e.f"))


def test_the_default_workload_grows_to_the_prompts() -> None:
    workload = load(TINY, workload=DEFAULT_WORKLOAD).workload
    assert workload is not None
    assert workload.max_context == DEFAULT_CONTEXT
    most = load(TINY).model.max_context
    assert most > 2 * DEFAULT_CONTEXT
    assert context_override((), DEFAULT_CONTEXT, most) == ()
    assert context_override((), DEFAULT_CONTEXT + 1, most) == (f"workload.max_context={2 * DEFAULT_CONTEXT}",)
    assert context_override((), most + 1, most) == (f"workload.max_context={most}",)
    assert context_override(("workload.max_context=4096",), 300, most) == ()


@pytest.mark.parametrize(
    ("right", "wrong", "said"),
    [
        ('PLAN_DIGEST = "', 'PLAN_DIGEST = "0', "PLAN_DIGEST is 0"),
        ("max_q=1,", "max_q=2,", "BUCKETS is {'decode': {"),
        (
            "MESH_AXES = {",
            'MESH_AXES = {"other": 2, ',
            "MESH_AXES is {'other': 2, 'data': 1}, plan.json gives {'data': 1}",
        ),
        ('ACTIVATION = "float32"', 'ACTIVATION = "float16"', "ACTIVATION is float16, plan.json gives float32"),
        ("MOE_BLOCK_ROWS = ", "MOE_ROWS = ", "MOE_BLOCK_ROWS is not defined, plan.json gives {'decode': "),
    ],
)
def test_a_program_that_is_not_its_plans_is_refused(
    right: str, wrong: str, said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "program"
    assert run(capsys, "compile", TINY, "--target", "cpu", "-o", str(folder))[0] == 0
    assert find_program([str(folder)], None, None).folder == folder
    model = folder / "model.py"
    text = model.read_text()
    assert right in text
    model.write_text(text.replace(right, wrong, 1))
    code, _, err = run(capsys, "verify", str(folder), "--numerics")
    assert code == 2
    assert "model.py is not the program of its plan.json" in err
    assert said in err


@pytest.mark.parametrize(
    ("right", "wrong", "said"),
    [
        (' "model": "tiny_mixtral",', ' "model": "tiny_mixtral";', "plan.json:2:25: error: no JSON: Expecting ','"),
        ('"page_size": 32', '"page_size": "many"', "plan.json: error: page_size: must be a valid integer"),
        ('"page_size": 32', '"page_sise": 32', "plan.json: error: page_sise: unknown key 'page_sise' (did you mean"),
        ('"model_source": "tiny/m', '"model_source": "tiny/n', "plan.json: error: model_source: unknown model 'tiny/n"),
        ('"target": "cpu"', '"target": "cpux"', "plan.json: error: target: unknown target 'cpux'"),
        ("plan.page_size=32", "plan.page_sze=32", "plan.json: error: overrides.0: plan.page_sze: unknown override"),
        ("plan.page_size=32", "plan.page_size=4096", "overrides.0: plan.page_size: UNSUPPORTED: pages of 4096 tokens"),
    ],
)  # fmt: skip
def test_a_plan_that_was_changed_says_where(
    right: str, wrong: str, said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "program"
    assert run(capsys, "compile", TINY, "--target", "cpu", "-o", str(folder), "plan.page_size=32")[0] == 0
    plan = folder / "plan.json"
    text = plan.read_text()
    assert right in text
    plan.write_text(text.replace(right, wrong, 1))
    for words in (("compile", "--check", "-o", str(folder)), ("verify", str(folder))):
        code, _, err = run(capsys, *words)
        assert code == 2 and "Traceback" not in err
        assert said in err or (words[0] == "verify" and "PLAN_DIGEST is" in err)


def test_a_folder_below_a_file_names_the_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "notes.txt"
    file.write_text("mine")
    code, _, err = run(capsys, "compile", TINY, "--target", "cpu", "-o", str(file / "sub" / "folder"))
    assert code == 2
    assert f"cannot write {file}/sub/folder: {file} is a file" in err


def test_a_benchmark_is_told_everything_that_is_wrong(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    words = ("bench", "kernels", "--target", "v6e:1x9", "--case", "rs-hierarchical-decod", "--timeout", "nan")
    assert main([*words, "--peers", str(tmp_path / "none")]) == 2
    said = capfd.readouterr().err.splitlines()
    assert [line.split(": ")[2] for line in said] == ["--target", "--case", "--timeout", "--peers"]
    assert "did you mean 'v6e:1x1'?" in said[0] and "did you mean 'rs-hierarchical-decode'?" in said[1]
    assert "expected seconds, got nan (valid: a number above 0)" in said[2]


def test_a_check_that_was_asked_for_and_skipped_is_no_pass(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    words = ("verify", TINY, "--target", "cpu", "plan.dtypes.kv=bfloat16")
    code, out, err = run(capsys, *words, "--numerics")
    assert code == 1
    assert "SKIPPED (0 checks made" in out
    assert "--numerics was asked for and could not be made" in err
    assert run(capsys, *words)[0] == 0  # the check that fits the target; the last line says that it was skipped


def test_dumps_need_aot_and_an_empty_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    words = ("verify", TINY, "--target", "cpu", "--keep-dumps", str(tmp_path))
    code, _, err = run(capsys, *words)
    assert code == 2
    assert "--keep-dumps and --bucket are options of --aot" in err
    (tmp_path / "old.txt").write_text("")
    code, _, err = run(capsys, *words, "--aot")
    assert code == 2
    assert f"--keep-dumps {tmp_path} is not empty" in err


def test_compile_writes_where_it_says_and_finds_drift(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    words = ("compile", TINY, "--target", "cpu", "plan.page_size=32")
    code, out, _ = run(capsys, *words)
    folder = Path(out.strip())
    assert code == 0
    assert folder == Path("generated/tiny_mixtral/cpu/default")
    assert all(part.isidentifier() for part in folder.parts)
    assert run(capsys, *words, "--check")[0] == 0
    assert run(capsys, "compile", "--check")[0] == 0

    model = folder / "model.py"
    model.write_text(model.read_text() + "\n")
    for check in ((*words, "--check"), ("compile", "--check")):
        code, out, _ = run(capsys, *check)
        assert code == 1
        assert f"{model}: differs" in out


def test_regenerate_command_of_an_emitted_file_works(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    _, out, _ = run(capsys, "compile", TINY, "--target", "cpu", "workload.concurrency=2")
    model = Path(out.strip()) / "model.py"
    before = model.read_text()
    command = next(line for line in before.splitlines() if "Regenerate: " in line).partition("Regenerate: ")[2]
    model.unlink()
    program, *again = command.split()
    assert program == "moec"
    assert run(capsys, *again, "-o", str(model.parent))[0] == 2  # a folder without model.py is not ours to replace
    model.write_text(before.replace("MAX_CONTEXT", "MAX_CONTEXT_EDITED"))
    assert run(capsys, *again)[0] == 0
    assert model.read_text() == before


def test_compile_never_replaces_a_foreign_folder(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "notes.txt").write_text("mine")
    code, _, err = run(capsys, "compile", TINY, "--target", "cpu", "-o", str(tmp_path))
    assert code == 2
    assert "no emitted program" in err
    assert (tmp_path / "notes.txt").read_text() == "mine"


@pytest.mark.parametrize("stage", ["spec", "graph", "plan", "program"])
def test_every_stage_can_be_shown(stage: str, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = run(capsys, "show", stage, TINY, "--target", "cpu")
    assert code == 0
    assert "tiny_mixtral" in out


def test_an_unexpected_error_is_a_bug_and_raises(monkeypatch: pytest.MonkeyPatch) -> None:
    from moec.compiler.commands import check

    def broken(args: object) -> int:
        raise RuntimeError("a bug")

    monkeypatch.setattr(check, "run", broken)
    with pytest.raises(RuntimeError, match="a bug"):
        main(["check", TINY])
