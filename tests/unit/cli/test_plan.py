"""`plait plan`: what it prints in 80 and 100 columns, as JSON and into files, and what it refuses."""

import json
import re
from collections.abc import Callable
from pathlib import Path

import pytest

from plait.cli.main import main
from plait.config.load import load_run_config

Run = Callable[..., tuple[int, str, str]]

SMALL = ("llama3-8b", "--hardware", "h100", "--gpus", "8", "--seq", "4096", "--global-batch", "16")


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Run:
    """Run the command: exit status, stdout, stderr."""
    monkeypatch.delenv("COLUMNS", raising=False)

    def run(*arguments: str) -> tuple[int, str, str]:
        with pytest.raises(SystemExit) as status:
            main(["plan", *arguments])
        assert isinstance(status.value.code, int)
        return status.value.code, *capsys.readouterr()

    return run


def test_the_table_is_ranked_and_says_what_follows(run: Run) -> None:
    status, out, err = run(*SMALL)
    assert (status, err) == (0, "")
    assert "tp  cp     pp  dp  mb" in out
    assert "\nMFU: of the datasheet's dense bfloat16 rate, 989 TFLOP/s\n" in out
    for text in ("Fastest: tp ", "What binds is compute", "First tensor degree", "tp 2:", "per device"):
        assert text in out


TOO_LARGE = ("llama3-405b", *SMALL[1:])


@pytest.mark.parametrize("is_terminal", [True, False])
@pytest.mark.parametrize(("arguments", "how"), [(SMALL, "gradients/8"), (TOO_LARGE, "full recompute")])
def test_nothing_is_cut_in_80_columns(
    run: Run, monkeypatch: pytest.MonkeyPatch, arguments: tuple[str, ...], how: str, *, is_terminal: bool
) -> None:
    monkeypatch.setattr("sys.stdout.isatty", lambda: is_terminal, raising=False)
    monkeypatch.setenv("COLUMNS", "80")
    _, styled, _ = run(*arguments)
    out = re.sub(r"\x1b\[[0-9;]*m", "", styled)
    table = out.split("\n\n")[1]
    assert max(map(len, out.splitlines())) <= 80
    assert "MFU" in table
    assert f"\n    {how}" in table
    assert re.search(r"(fits \+|tight \+|lacks )[0-9.]+ GB$", table, re.MULTILINE)
    assert "\u2026" not in out
    assert is_terminal or all(line == line.rstrip() for line in out.splitlines())


def test_a_pipe_has_120_columns_unless_it_is_told(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    assert re.search(r"memory +how\n", run(*SMALL)[1])
    monkeypatch.setenv("COLUMNS", "60")
    _, out, _ = run(*SMALL)
    assert "interval" not in out
    assert re.search(r"MFU +tokens/s +memory\n", out)


def test_json_has_what_the_table_has_in_si_units(run: Run) -> None:
    status, out, _ = run(*SMALL, "--json", "--why-not", "tp=8", "--top", "3")
    record = json.loads(out)
    assert status == 0
    assert len(record["plans"]) == 3
    best = record["plans"][0]
    assert best["low_s"] < best["step_s"] < best["high_s"]
    assert best["memory"]["verdict"] in ("fits", "tight")
    assert sum(best["terms_s"].values()) == pytest.approx(best["step_s"])
    assert record["step"]["seconds"] == best["step_s"]
    assert record["why_not"][0]["asked"] == "tp = 8"
    assert record["first_worse"]["best_plan"]["tp"] == 2
    assert {each["provenance"] for each in record["constants"]} <= {"datasheet", "measured", "fitted", "assumed"}


def test_fix_predicts_exactly_that_even_if_it_does_not_fit(run: Run) -> None:
    status, out, err = run(
        *SMALL, "--json", "--fix", "tp=1,pp=1,cp=1", "--fix", "micro_batch=2,sharded=nothing,recompute=none"
    )
    (only,) = json.loads(out)["plans"]
    assert status == 2
    assert "nothing with what is fixed fits these devices: the leanest plan lacks " in err
    assert "hint: fix less, or take more devices" in err
    assert {name: only["plan"][name] for name in ("tp", "pp", "dp", "micro_batch")} == {
        "tp": 1, "pp": 1, "dp": 8, "micro_batch": 2,
    }  # fmt: skip
    assert only["memory"]["verdict"] == "does not fit"
    assert only["memory"]["margin_bytes"] < 0


def test_explain_names_the_provenance_of_every_leaf(run: Run) -> None:
    _, out, _ = run(*SMALL, "--explain", "--fix", "tp=2,pp=2")
    for text in (
        "% of peak",
        "bubble",
        "head",
        "optimizer",
        "fitted gemm.bfloat16.efficiency",
        "datasheet peak.bfloat16",
    ):
        assert text in out
    assert "constant" in out


def test_a_recipe_is_asked_for_by_its_name_alone(run: Run) -> None:
    fixed, named = (
        run(*SMALL, "--fix", "quantization=fp8_currentscaling"),
        run(*SMALL, "--quantization", "fp8_currentscaling"),
    )
    assert fixed == named
    assert "fp8_currentscaling" in named[1]


def test_a_written_plan_is_a_run(run: Run, tmp_path: Path) -> None:
    path = tmp_path / "plan.toml"
    data = ("data.kind=tokens", "data.paths=corpus.bin", "train.steps=5")
    status, _, err = run(
        "llama-demo", *data, *SMALL[1:5], "--global-batch", "16", "--write", str(path), "--fix", "tp=2"
    )
    assert status == 0
    assert "has no data" not in err
    written = load_run_config(str(path))
    assert (written.parallel.tp, written.parallel.dp, written.train.steps) == (2, 4, 5)
    assert written.tokens_per_step == 16 * 256


def test_writing_says_what_stands_in_for_a_plan_that_does_not_run(run: Run, tmp_path: Path) -> None:
    path = tmp_path / "plan.toml"
    status, _, err = run(*SMALL, "--write", str(path))
    assert status == 0
    assert "which plait train does not run; the fastest that it runs is tp = " in err
    assert "has no data yet" in err
    assert load_run_config(str(path)).parallel.dp_shard > 1
    with pytest.raises(SystemExit) as explained:
        main(["explain", str(path)])
    assert explained.value.code == 0
    status, _, err = run(*SMALL, "--write", str(path), "--fix", "sharded=optimizer")
    assert status == 2
    assert "optimizer sharded over dp" in err
    assert "sharded is fixed" in err


def test_a_plan_over_context_ranks_is_written(run: Run, tmp_path: Path) -> None:
    path = tmp_path / "plan.toml"
    status, _, err = run(*SMALL, "--write", str(path), "--fix", "cp=2", "--fix", "sharded=nothing")
    assert status == 0, err
    assert load_run_config(str(path)).parallel.cp == 2


def test_a_trace_shows_a_layer_serially_and_overlapped(run: Run, tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    run(*SMALL, "--fix", "tp=4", "--trace", str(path))
    events = json.loads(path.read_text())["traceEvents"]
    names = {each["args"]["name"] for each in events if each["name"] == "process_name"}
    assert len(names) == 2
    assert all(each["dur"] >= 0 for each in events if each["ph"] == "X")


def test_a_server_is_planned_too(run: Run) -> None:
    status, out, _ = run(*SMALL[:5], "--inference", "--batch", "4", "--prompt", "512", "--generate", "64")
    assert status == 0
    assert "per token" in out


def test_all_that_is_wrong_before_planning_is_one_error(run: Run) -> None:
    status, out, err = run("llama3-9b", "--hardware", "h101", "--gpus", "8", "--fix", "tq=2", "--why-not", "pp=x")
    assert (status, out) == (2, "")
    assert "4 problems" in err
    for text in ('did you mean "llama3-8b"', 'did you mean "h100"', "--fix: tq = 2", "--why-not: pp = x"):
        assert text in err


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ((*SMALL, "--fix", "tp=3"), "tp = 3 does not divide 8 devices"),
        ((*SMALL, "--fix", "tp=4,pp=4"), "tp 4 * pp 4 = 16 devices, but there are 8"),
        ((*SMALL[:5], "--seq", "4096"), "--global-batch is required"),
        ((*SMALL[:7], "--global-batch", "3", "--fix", "dp=8"), "a global batch of 3 cannot be divided by dp = 8"),
        ((*SMALL, "--trace", "no/such/folder.json"), "there is no folder no/such"),
        ((*SMALL, "--report", "report.pdf"), "a report is an .html file"),
        (TOO_LARGE, "no plan fits these devices: the leanest plan lacks "),
        (TOO_LARGE, "hint: take more devices\n"),
        ((*TOO_LARGE, "--fix", "sharded=parameters"), "hint: fix less, or take more devices\n"),
    ],
)
def test_what_cannot_be_is_one_clear_error(run: Run, arguments: tuple[str, ...], text: str) -> None:
    status, _, err = run(*arguments)
    assert status == 2
    assert err.startswith("error: ")
    assert text in err
    assert "Traceback" not in err


def test_a_catalog_file_with_a_wrong_unit_names_the_key(run: Run, tmp_path: Path) -> None:
    path = tmp_path / "my.toml"
    path.write_text('title = "mine"\nbased_on = "h100"\n[memory]\ncapacity = "80 GB/s"\n')
    status, _, err = run("llama3-8b", "--hardware", str(path), *SMALL[3:])
    assert status == 2
    assert "memory.capacity" in err


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (("--write", "folder"), "--write folder: is a folder"),
        (("--write", "plan.json"), "--write plan.json: a plan is a .toml file"),
        (("--trace", "one.html", "--report", "one.html"), "--report one.html: --trace writes there"),
        (("--trace", "./a.toml", "--write", "a.toml"), "--trace a.toml: --write writes there"),
        (("--trace", "t" * 300), "cannot be written: File name too long"),
        (("--trace", "no/such.json", "--why-not", ","), '--why-not ",": asks for nothing'),
        (("--report", "no/such.html"), "--report no/such.html: there is no folder no"),
        (("--prompt", "5"), "--prompt 5: is of a server (--inference)"),
        (("--inference",), "--seq 4096: is of a training run"),
        (("--inference", "--why-not", "tp=4", "--explain"), "--why-not tp=4: is of a training run"),
        (("--inference", "--explain", "--top", "3"), "--explain: is of a training run"),
        (("--fix", "tp=8,tp=4"), "--fix: tp is both 4 and 8"),
        (("--fix", "mb=1", "--fix", "micro_batch=2"), "--fix: micro_batch is both 1 and 2"),
        (("--seq", "10000000000"), "seq_len = 10000000000: should be at most 1000000000"),
        (("--global-batch", str(10**24)), f"global_batch = {10**24}: should be at most 10000000"),
        (("--gpus", str(10**24)), f"num_devices = {10**24}: should be at most 1000000000"),
        (("--inference", "--batch", str(10**24)), f"{10**24} is not in the range"),
    ],
)
def test_what_cannot_work_is_one_error_before_the_search(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, arguments: tuple[str, ...], text: str
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "folder").mkdir()
    status, out, err = run(*SMALL, *arguments)
    assert (status, out) == (2, "")
    assert text in err
    assert [path.name for path in tmp_path.iterdir()] == ["folder"]


def test_a_batch_that_nobody_states_is_missed_before_anything_slow(
    run: Run, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    slow: list[object] = []
    monkeypatch.setattr("plait.cli.plan.plan", lambda *given, **_: slow.append(given))
    monkeypatch.setattr("plait.planner.report.write.check_can_write", slow.append)
    status, _, err = run(*SMALL[:5], "--report", f"{tmp_path}/report.html", "--fix", "tq=1")
    assert (status, slow) == (2, [])
    assert "2 problems" in err
    assert "--global-batch is required" in err
    _, out, _ = run("--help")
    assert "required unless the config has train" in " ".join(out.split())


def test_a_name_too_long_is_no_model(run: Run) -> None:
    status, _, err = run("m" * 5000, *SMALL[1:])
    assert status == 2
    assert "cannot be read: File name too long" in err


def test_nothing_is_written_if_there_is_no_plan_to_write(run: Run, tmp_path: Path) -> None:
    status, _, _ = run(
        *SMALL, "--fix", "sharded=optimizer", "--write", f"{tmp_path}/plan.toml", "--trace", f"{tmp_path}/trace.json"
    )
    assert status == 2
    assert not list(tmp_path.iterdir())


def test_what_cannot_be_written_to_the_end_leaves_what_was_there(run: Run, tmp_path: Path) -> None:
    status, _, err = run(*SMALL, "--trace", "/dev/full")
    assert status == 2
    assert "/dev/full: cannot be written: No space left on device" in err
    path = tmp_path / "trace.json"
    path.write_text("{}")
    (tmp_path / ".trace.json.partial").mkdir()
    status, _, err = run(*SMALL, "--trace", str(path))
    assert status == 2
    assert "cannot be written" in err
    assert path.read_text() == "{}"
