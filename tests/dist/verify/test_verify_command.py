"""`plait verify`: table or JSON on stdout, progress on stderr, exit status 0 passed, 1 failed, 2 bad input."""

import json
import re
import subprocess
import sys
from contextlib import contextmanager

import pytest

import plait.cli.verify as module
from plait.cli.main import main
from plait.verify.runtime import memory
from tests.support.mutations import MutatedRanks


@pytest.fixture
def run(ranks, monkeypatch, capsys):
    """Run the command on the ranks of the session, which make a mistake if told to."""

    def run(*arguments, mistake="nothing"):
        @contextmanager
        def lend(world_size, **_):
            yield MutatedRanks(ranks(world_size), mistake)

        monkeypatch.setattr(module, "LocalRanks", lend)
        with pytest.raises(SystemExit) as status:
            main(["verify", *arguments])
        captured = capsys.readouterr()
        return status.value.code, captured.out, captured.err

    return run


def test_passing_verification_prints_a_table_and_exits_with_0(run):
    status, out, err = run("llama-tiny", "--tp", "2", "train.seq_len=8", "model.num_layers=1")
    assert status == 0
    assert out.rstrip().endswith(
        "PASS: llama-tiny at tp=2 with sequence parallelism equals its unsharded fp64 twin (22 of 22 checks)"
    )
    assert "gradient of layers.*.attention" in out
    assert "collectives of rank 1" in out
    assert "running the sharded model" in err


def test_failing_verification_exits_with_1_and_says_what_failed(run):
    status, out, _ = run("gpt-tiny", "train.seq_len=8", "model.num_layers=1", mistake="row bias on every rank")
    assert status == 1
    assert "logits: logits is off by" in out
    assert "FAIL: gpt-tiny at tp=2 with sequence parallelism is not its unsharded fp64 twin" in out


def test_json_is_all_of_stdout(run):
    status, out, _ = run("gpt-tiny", "--tp", "3", "--no-sequence-parallel", "--json", "train.seq_len=7")
    data = json.loads(out)
    assert status == 0
    assert data["passed"] is True
    subject = {"model": "gpt-tiny", "tp": 3, "sequence_parallel": False, "batch": 2, "seq_len": 7, "compute": "float32"}
    assert subject.items() <= data["subject"].items()


def test_receipt_stands_above_the_verdict(run):
    _, out, _ = run("gpt-tiny", "--tp", "3", "train.seq_len=7", "overlap=mlp_only", "overlap.chunks=2")
    before, _, receipt = out.partition("overlap = mlp_only chunks=2; each pass waits for")
    assert "collectives of rank 2" in before
    assert re.search(r"layers.0-1.attention.wo\n +forward +14 +none ", receipt)
    assert re.search(r"layers.0-1.mlp.w_down\n +forward +14 +(direct|ring) x2 over \w+ +4 x ", receipt)
    assert "belongs to the attention, not to an MLP" in receipt
    assert receipt.rstrip().endswith("checks)")


def test_receipt_is_in_the_json(run):
    _, out, _ = run("llama-tiny", "--json", "model.num_layers=1", "train.seq_len=8", "overlap=full", "overlap.chunks=1")
    data = json.loads(out)
    assert data["subject"]["overlap"] == data["receipt"]["asked"] == "full chunks=1"
    assert all(line["overlaps"] and line["num_measured"] == 1 for line in data["receipt"]["lines"])
    labels = {line["label"] for line in data["receipt"]["lines"]}
    assert labels == {
        "head",
        *(f"layers.0.{name}" for name in ("attention.qkv", "attention.wo", "mlp.gate_up", "mlp.w_down")),
    }


def test_strict_refuses_what_would_not_be_overlapped_as_asked(run):
    status, out, err = run("gpt-tiny", "train.seq_len=8", "overlap=full", "overlap.method=bulk", "overlap.strict=true")
    assert (status, out) == (2, "")
    assert "overlap.strict = true: 7 problems" in err
    assert 'layers.0-1.mlp.w_down, row forward: asked for "full method=bulk", but what can run is none' in err
    assert "hint: ask for what can run, or set overlap.strict=false" in err


def test_defaults_are_small_and_overrides_win(run):
    _, out, _ = run("llama-tiny", "--json", "model.num_layers=1", "model.max_seq_len=4096")
    assert json.loads(out)["subject"]["seq_len"] == 32
    _, out, _ = run("llama-tiny", "--json", "model.num_layers=1", "train.micro_batch_size=1", "parallel.tp=3", "seed=5")
    subject = json.loads(out)["subject"]
    assert (subject["batch"], subject["tp"], subject["seed"]) == (1, 3, 5)


def test_recipe_is_verified_and_its_error_stated(run):
    small = ("model.num_layers=1", "quantization.keep_first=0", "quantization.keep_last=0", "train.seq_len=16")
    status, out, _ = run("llama-tiny", "--quantization", "fp8_delayedscaling", *small)
    assert status == 0
    assert "linear regions on integers, scales 2**n" in out
    assert "calibrated collectives of rank 1" in out
    assert re.search(r"error of fp8_delayedscaling +tensors +worst tensor +worst +median", out)
    assert "fp8_delayedscaling: emulated, float64 accumulator" in out
    assert "equals its unsharded fp64 twin under fp8_delayedscaling" in " ".join(out.split())


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["llama-tiny", "--quantization", "mxfp8"], "quantization.recipe"),
        (["llama-tiny", "--quantization", "fp6"], "fp6"),
        (["llama-tini"], '"llama-tini" is neither a file nor a preset'),
        (["llama-tiny", "--tp", "9"], "parallel.tp = 9"),
        (["llama-tiny", "--tp", "0"], "parallel.tp = 0"),
        (["llama-tiny", "--tp", "two"], "'two' is not a valid integer"),
        (["llama-tiny", "train.seq_len=65"], "train.seq_len = 65"),
        (["llama-tiny", "model.widht=3"], "model.widht"),
    ],
)
def test_bad_input_is_one_error_and_exits_with_2(run, arguments, message):
    status, out, err = run(*arguments)
    assert status == 2
    assert out == ""
    assert err.startswith("error: ")
    assert message in err
    assert "Traceback" not in err


def test_model_that_does_not_fit_is_refused_before_ranks_are_started(run, monkeypatch):
    monkeypatch.setattr(memory, "_available_bytes", lambda: 400 * 10**9)
    status, _, err = run("llama3-70b")
    assert status == 2
    assert "model.num_layers=1" in err
    assert "starting" not in err


def test_command_starts_its_own_ranks():
    command = [sys.executable, "-m", "plait", "verify", "llama-tiny", "model.num_layers=1", "train.seq_len=7", "--json"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=150, check=False)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["passed"] is True
