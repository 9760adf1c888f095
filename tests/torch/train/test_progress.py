import pytest

from plait.train.progress import ProgressDisplay, describe_step

RECORD = {"loss": 4.25, "learning_rate": 0.0003, "tokens_per_s": 12345.0, "mfu": None}


def test_a_step_is_described_with_mfu_only_where_it_is_known() -> None:
    assert describe_step(RECORD) == "loss 4.250  lr 3.0e-04  12.3 ktokens/s"
    assert describe_step({**RECORD, "mfu": 0.4}).endswith("  MFU 40.0%")


def test_a_log_gets_lines_and_they_go_to_stderr(capsys: pytest.CaptureFixture[str]) -> None:
    with ProgressDisplay("run", 3, 0, is_shown=True) as display:
        display.say("hello")
        for step in (1, 2, 3):
            display.show(step, RECORD)
    printed = capsys.readouterr()
    lines = printed.err.splitlines()
    assert lines[0] == "hello"
    assert [line[:8] for line in lines[1:]] == ["step 1/3", "step 3/3"]
    assert printed.out == ""


def test_a_terminal_gets_a_bar_and_stays_readable_without_colour(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("COLUMNS", "120")
    with ProgressDisplay("run", 3, 1, is_shown=True) as display:
        display.show(2, RECORD)
    assert "2/3" in capsys.readouterr().err


def test_other_ranks_print_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    with ProgressDisplay("run", 3, 0, is_shown=False) as display:
        display.say("hello")
        display.show(3, RECORD)
    assert capsys.readouterr() == ("", "")
