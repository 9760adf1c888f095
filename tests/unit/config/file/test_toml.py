from pathlib import Path

import pytest

from plait.config.file.toml import load_overrides, load_toml, merge_trees
from plait.errors import ConfigError


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("10", 10),
        ("1e-3", 1e-3),
        ("true", True),
        ('"10"', "10"),
        ("gpt2", "gpt2"),
        ("", ""),
        ('["a", "b"]', ["a", "b"]),
        ("a=b", "a=b"),
        ("1\nother = 2", "1\nother = 2"),
        ("runs/a b.txt", "runs/a b.txt"),
    ],
)
def test_override_is_a_toml_value_or_else_a_string(text: str, value: object) -> None:
    assert load_overrides([f"data.text_key={text}"]) == ({"data": {"text_key": value}}, [])


def test_last_override_of_a_key_counts_and_neighbours_stay() -> None:
    tree, problems = load_overrides(["train.steps=1", "train.seq_len=5", "train.steps=2"])
    assert (tree, problems) == ({"train": {"steps": 2, "seq_len": 5}}, [])


@pytest.mark.parametrize("override", ["foo", "=3", "a..b=3", "a b=3", ".a=3", "--steps=3"])
def test_malformed_override_is_a_problem(override: str) -> None:
    tree, problems = load_overrides([override])
    assert tree == {}
    assert [problem.key for problem in problems] == [override]


def test_tables_merge_and_values_replace() -> None:
    under = {"a": {"b": 1, "c": 2}, "d": {"e": 1}, "f": 1}
    assert merge_trees(under, {"a": {"b": 3}, "d": 4, "f": {"g": 5}}) == {"a": {"b": 3, "c": 2}, "d": 4, "f": {"g": 5}}
    assert under == {"a": {"b": 1, "c": 2}, "d": {"e": 1}, "f": 1}


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"[model\n", r"bad\.toml: not valid TOML: .*line 1"),
        (b"a = 1\na = 2\n", r"bad\.toml: not valid TOML: .*overwrite.*line 2"),
        (b"name = '\xff'", r"bad\.toml: not a text file in UTF-8"),
        (b"seed = " + b"9" * 5000, r"bad\.toml: not valid TOML: .*5000 digits"),
        (b"seed = " + b"[" * 5000, r"bad\.toml: not valid TOML: .*recursion"),
    ],
    ids=["syntax", "twice", "encoding", "long", "deep"],
)
def test_file_that_is_not_toml_says_where(tmp_path: Path, content: bytes, message: str) -> None:
    file = tmp_path / "bad.toml"
    file.write_bytes(content)
    with pytest.raises(ConfigError, match=message):
        load_toml(file)


def test_file_that_cannot_be_read_says_why(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"gone\.toml: cannot be read: No such file"):
        load_toml(tmp_path / "gone.toml")
