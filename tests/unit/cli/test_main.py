import errno
import subprocess
import sys
from collections.abc import Callable
from importlib import import_module
from types import SimpleNamespace

import click
import pytest

from plait import __version__
from plait.cli import main as main_module
from plait.cli.main import main
from plait.errors import ConfigError, PlaitError, ShardingError, TransportTimeout, VerificationError


def run_main(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int | str | None, str, str]:
    with pytest.raises(SystemExit) as caught:
        main(arguments)
    out, err = capsys.readouterr()
    return caught.value.code, out, err


@pytest.fixture
def command_that(monkeypatch: pytest.MonkeyPatch) -> Callable[[Callable[[], object]], None]:
    """Makes `plait models` do something else."""

    def replace(body: Callable[[], object]) -> None:
        module = SimpleNamespace(command=click.command("models")(body))
        monkeypatch.setattr(main_module, "import_module", lambda name: module)

    return replace


def raise_error(error: BaseException) -> Callable[[], object]:
    def body() -> None:
        raise error

    return body


@pytest.mark.parametrize(("error", "status"), [(ConfigError, 2), (ShardingError, 2), (TransportTimeout, 3)])
def test_an_error_is_a_message_and_a_hint_on_stderr_and_its_status(
    error: type[PlaitError],
    status: int,
    command_that: Callable[[Callable[[], object]], None],
    capsys: pytest.CaptureFixture[str],
) -> None:
    command_that(raise_error(error("8 heads over 9 ranks", hint="use 8")))
    assert run_main(capsys, "models") == (status, "", "error: 8 heads over 9 ranks\n\nhint: use 8\n")


def test_a_failed_verification_is_status_1(
    command_that: Callable[[Callable[[], object]], None], capsys: pytest.CaptureFixture[str]
) -> None:
    command_that(raise_error(VerificationError("loss differs")))
    assert run_main(capsys, "models") == (1, "", "error: loss differs\n")


def test_a_full_disk_under_stdout_is_status_2(
    command_that: Callable[[Callable[[], object]], None], capsys: pytest.CaptureFixture[str]
) -> None:
    command_that(raise_error(OSError(errno.ENOSPC, "No space left on device")))
    message = "error: what was to be printed cannot be written: the disk is full\n"
    assert run_main(capsys, "models") == (2, "", message)


def test_an_interrupt_is_status_130(
    command_that: Callable[[Callable[[], object]], None], capsys: pytest.CaptureFixture[str]
) -> None:
    command_that(raise_error(KeyboardInterrupt()))
    status, out, err = run_main(capsys, "models")
    assert (status, out, err.strip()) == (130, "", "interrupted")


def test_a_bug_keeps_its_traceback(command_that: Callable[[Callable[[], object]], None]) -> None:
    command_that(raise_error(ZeroDivisionError("a bug")))
    with pytest.raises(ZeroDivisionError, match="a bug"):
        main(["models"])


def test_a_missing_library_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(name: str) -> None:
        raise ModuleNotFoundError("No module named 'torch'", name="torch")

    monkeypatch.setattr(main_module, "import_module", fail)
    status, out, err = run_main(capsys, "train", "llama-tiny")
    assert (status, out) == (2, "")
    assert err == "error: plait train needs torch, which is not installed\n\nhint: pip install 'plait[torch]'\n"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "error: Missing command\n\nhint: see plait --help\n"),
        (["exlain"], 'error: there is no command "exlain"\n\nhint: did you mean "explain"?\n'),
        (
            ["zzz"],
            'error: there is no command "zzz"\n\n'
            "hint: known are bench, convert, explain, generate, models, plan, serve, train, verify\n",
        ),
        (["models", "x"], "error: Got unexpected extra argument (x)\n\nhint: see plait models --help\n"),
    ],
    ids=" ".join,
)
def test_wrong_usage_is_status_2_and_points_to_help(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_main(capsys, *arguments) == (2, "", message)


def test_unknown_option_is_status_2(capsys: pytest.CaptureFixture[str]) -> None:
    status, out, err = run_main(capsys, "models", "--jsn")
    assert (status, out) == (2, "")
    assert err.startswith("error: No such option")
    assert err.endswith("\n\nhint: see plait models --help\n")


def test_help_lists_every_command_without_importing_one(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(main_module, "import_module", lambda name: pytest.fail(f"imported {name}"))
    status, out, err = run_main(capsys, "--help")
    assert (status, err) == (0, "")
    listed = out.partition("Commands:\n")[2].splitlines()
    assert (
        " ".join(line.split()[0] for line in listed) == "bench convert explain generate models plan serve train verify"
    )


@pytest.mark.parametrize("name", ["explain", "models"])
def test_symbolic_commands_are_click_commands_of_their_file(name: str) -> None:
    command = import_module(f"plait.cli.{name}").command
    assert isinstance(command, click.Command)
    assert command.name == name
    assert command.help


def test_version_is_the_package_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert run_main(capsys, "--version") == (0, f"plait {__version__}\n", "")


def test_python_m_plait_is_the_command() -> None:
    run = subprocess.run([sys.executable, "-m", "plait", "nonsense"], capture_output=True, text=True, check=False)
    assert (run.returncode, run.stdout) == (2, "")
    assert run.stderr.startswith('error: there is no command "nonsense"')


def test_a_closed_stdout_is_nobody_to_print_for() -> None:
    """As of `plait models >&-`."""
    script = "import sys; sys.stdout = None; from plait.cli.main import main; main(['plan', *sys.argv[1:]])"
    arguments = ["llama-tiny", "--hardware", "h100", "--gpus", "2", "--seq", "32", "--global-batch", "8"]
    ended = subprocess.run([sys.executable, "-c", script, *arguments], capture_output=True, text=True, check=False)
    assert (ended.returncode, ended.stdout, ended.stderr) == (0, "", "")
