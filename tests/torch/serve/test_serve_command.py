"""What `plait serve` refuses before any rank starts, in this process; what it does is in tests/dist/serve."""

from pathlib import Path

import pytest

from plait.cli.main import main
from tests.support.served_model import save_tiny_model


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_model(tmp_path_factory.mktemp("served") / "tiny")


def refuse(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    """The error of the command, which starts nothing and prints nothing else."""
    with pytest.raises(SystemExit) as caught:
        main(["serve", *arguments])
    out, err = capsys.readouterr()
    assert (caught.value.code, out) == (2, "")
    assert err.startswith("error: ")
    return err


def test_an_address_that_others_reach_needs_a_key(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("PLAIT_API_KEY", raising=False)
    error = refuse(capsys, str(folder), "--host", "0.0.0.0", "--port", "0")
    assert "0.0.0.0 can be reached from other machines, and no API key is asked for" in error
    assert "hint: set PLAIT_API_KEY or --api-key" in error


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--tp", "64"), "64"),
        (("--tp", "0"), "--tp"),
        (("--api-key", ""), "the API key is empty"),
        (("--port", "65536"), "--port"),
        (("--grace", "-1"), "--grace"),
        (("--max-batch", "0"), "--max-batch"),
        (("--host", "no.such.host.invalid"), "host 'no.such.host.invalid' is not known"),
    ],
    ids=" ".join,
)
def test_an_option_that_cannot_be_is_named(
    folder: Path, capsys: pytest.CaptureFixture[str], arguments: tuple[str, ...], said: str
) -> None:
    given = arguments if "--port" in arguments else (*arguments, "--port", "0")
    assert said in refuse(capsys, str(folder), *given)


def test_a_directory_that_cannot_be_served_is_named(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert "there is no such directory" in refuse(capsys, str(tmp_path / "none"), "--port", "0")
    assert "has no config.json" in refuse(capsys, str(tmp_path), "--port", "0")
    for name in ("config.json", "generation_config.json"):
        (tmp_path / name).write_bytes((folder / name).read_bytes())
    assert "has no tokenizer" in refuse(capsys, str(tmp_path), "--port", "0")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (tmp_path / name).write_bytes((folder / name).read_bytes())
    assert "weights" in refuse(capsys, str(tmp_path), "--port", "0")


def test_a_world_of_another_size_is_refused(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    launch = {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}
    for name, value in launch.items():
        monkeypatch.setenv(name, value)
    assert "torchrun started 2 ranks" in refuse(capsys, str(folder), "--tp", "3", "--port", "0")
