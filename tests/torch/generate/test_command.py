"""`plait generate` in this process, on one rank, and what is refused before any rank starts."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from plait.cli.main import main
from tests.support.generation import save_folder

Run = Callable[..., tuple[int, str, str]]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random Llama of 257 bytes: a token is a byte."""
    return save_folder(tmp_path_factory.mktemp("model") / "llama", "llama")


@pytest.fixture
def run(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Run:
    """Run the command: exit status, stdout, stderr."""
    monkeypatch.chdir(tmp_path)

    def run_command(*arguments: str, model: Path = folder) -> tuple[int, str, str]:
        with pytest.raises(SystemExit) as status:
            main(["generate", str(model), *arguments])
        assert isinstance(status.value.code, int)
        return status.value.code, *capsys.readouterr()

    return run_command


def test_one_prompt_is_continued_on_stdout(run: Run) -> None:
    status, out, err = run("--prompt", "abc", "--max-new-tokens", "5", "--json")
    assert status == 0, err
    record = json.loads(out)
    assert {name: record[name] for name in ("index", "prompt", "num_prompt_tokens", "finish_reason")} == {
        "index": 0, "prompt": "abc", "num_prompt_tokens": 3, "finish_reason": "length",
    }  # fmt: skip
    assert len(record["tokens"]) == len(record["log_probs"]) == 5
    status, out, err = run("--prompt", "abc", "--max-new-tokens", "5")
    assert (status, out) == (0, record["text"] + "\n")
    assert err.startswith("read 3 tokens and generated 5 in ")
    assert "tokens/s on tp=1" in err


def test_several_prompts_are_answered_in_their_order(run: Run) -> None:
    Path("prompts.jsonl").write_text(
        '{"prompt": "xyz", "max_new_tokens": 9}\n\n{"prompt": "q", "temperature": 1.0, "seed": 5, "stop": "never"}\n'
    )
    arguments = ("--prompt", "abc", "--prompts", "prompts.jsonl", "--max-new-tokens", "3")
    status, out, err = run(*arguments, "--json")
    assert status == 0, err
    records = [json.loads(line) for line in out.splitlines()]
    assert [(each["index"], each["prompt"], len(each["tokens"])) for each in records] == [
        (0, "abc", 3), (1, "xyz", 9), (2, "q", 3),
    ]  # fmt: skip
    status, out, err = run(*arguments)
    assert [line for line in out.splitlines() if line.startswith("prompt ")] == [
        "prompt 1: abc", "prompt 2: xyz", "prompt 3: q",
    ]  # fmt: skip


def test_a_chat_template_is_put_around_prompts(run: Run, folder: Path, tmp_path: Path) -> None:
    chatting = shutil.copytree(folder, tmp_path / "chatting")
    (chatting / "chat_template.jinja").write_text("{% for m in messages %}<{{ m.content }}>{% endfor %}")
    status, out, err = run("--chat", "--prompt", "abc", "--max-new-tokens", "2", "--json", model=chatting)
    assert status == 0, err
    assert json.loads(out)["num_prompt_tokens"] == len("<abc>")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "there is no prompt"),
        (["--prompt", "a", "--temperature", "-1", "--top-p", "3"], "sampling: 2 problems"),
        (["--prompt", "a" * 96], "a prompt of 96 tokens and one new token do not fit into the context of 96"),
        (["--prompt", ""], "the prompt has no tokens"),
        (["--prompt", "a", "--chat"], "the tokenizer has no chat template"),
        (["--prompt", "a", "--tp", "7"], "6 query heads in 3 KV groups of 2 cannot"),
        (["--prompts", "none.jsonl"], "cannot be read: No such file"),
    ],
)
def test_what_cannot_be_is_refused_with_status_2(run: Run, arguments: list[str], message: str) -> None:
    status, out, err = run(*arguments)
    assert (status, out) == (2, "")
    assert message in err


def test_bad_lines_are_named_by_their_numbers(run: Run) -> None:
    separators = json.dumps({"prompt": "a\u2028b"}, ensure_ascii=False)
    Path("good.jsonl").write_text(f"\ufeff{separators}\r\n", encoding="utf-8")
    assert run("--prompts", "good.jsonl", "--max-new-tokens", "1")[0] == 0
    Path("bad.jsonl").write_text('{"prompt": "a"}\n{"prompt": 3}\n{"prompt": \n{"prompt": "a", "topk": 3}\n')
    status, _, err = run("--prompts", "bad.jsonl")
    assert status == 2
    assert "bad.jsonl:2: is not an object" in err
    assert "bad.jsonl:3: is not JSON" in err
    assert "bad.jsonl:4: sampling: there is no setting 'topk'" in err
    deep, huge, half = "[" * 100_000, f'{{"prompt": "a", "seed": {"9" * 5000}}}', '{"prompt": "a\\ud800b"}'
    hot = f'{{"prompt": "a", "temperature": 1{"0" * 400}}}'
    Path("odd.jsonl").write_text("\n".join([deep, huge, hot]))
    _, _, err = run("--prompts", "odd.jsonl")
    assert "odd.jsonl:1: is not JSON that can be read" in err
    assert "odd.jsonl:2: is not JSON that can be read" in err
    assert "odd.jsonl:3: sampling: temperature 1000" in err
    Path("half.jsonl").write_text(half)
    assert "half.jsonl:1: the text is not Unicode: character 1" in run("--prompts", "half.jsonl")[2]
    Path("empty.jsonl").write_text("\n")
    assert "has no prompts" in run("--prompts", "empty.jsonl")[2]


@pytest.mark.parametrize(
    ("removed", "message"),
    [
        ("config.json", "has no config.json"),
        ("tokenizer.json", "has no tokenizer"),
        ("model.safetensors", "no weights"),
    ],
)
def test_a_directory_that_lacks_something_is_refused(
    run: Run, folder: Path, tmp_path: Path, removed: str, message: str
) -> None:
    lacking = shutil.copytree(folder, tmp_path / "lacking")
    (lacking / removed).unlink()
    for tp in ("1", "2"):
        status, out, err = run("--prompt", "a", "--tp", tp, model=lacking)
        assert (status, out) == (2, "")
        assert message in err
    assert "there is no such directory" in run("--prompt", "a", model=tmp_path / "none")[2]


def test_a_world_of_another_size_is_refused(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"WORLD_SIZE": "2", "RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29999"}.items():
        monkeypatch.setenv(name, value)
    status, _, err = run("--prompt", "a", "--tp", "3")
    assert status == 2
    assert "torchrun started 2 ranks, but the mesh" in err
