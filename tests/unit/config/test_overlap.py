"""`overlap` in files, on the command line and in code: a plain value or a table, and what cannot work."""

from pathlib import Path
from typing import get_args

import pytest
from pydantic import ValidationError

from plait.config import OverlapConfig, RunConfig, load_run_config
from plait.config.overlap import MethodName
from plait.errors import ConfigError
from plait.schedule.step import Method


def read_error(*overrides: str) -> str:
    with pytest.raises(ConfigError) as caught:
        load_run_config("llama-tiny", ["parallel.tp=2", "train.seq_len=32", *overrides])
    return str(caught.value)


def load(*overrides: str) -> OverlapConfig:
    return load_run_config("llama-tiny", overrides).overlap


@pytest.mark.parametrize(
    "overrides",
    [
        ("overlap=full", "overlap.chunks=4"),
        ("overlap.chunks=4", "overlap=full"),
        ("overlap.policy=full", "overlap.chunks=4"),
        ("overlap=auto", "overlap.chunks=4", "overlap=full"),
    ],
    ids=" ".join,
)
def test_a_plain_value_is_the_policy_whatever_the_order(overrides: tuple[str, ...]) -> None:
    assert load(*overrides) == OverlapConfig(policy="full", chunks=4)


def test_in_a_file_it_is_a_plain_value_or_a_table_and_overrides_lie_over_both(tmp_path: Path) -> None:
    plain, table = tmp_path / "plain.toml", tmp_path / "table.toml"
    plain.write_text('overlap = "full"\n[model]\npreset = "llama-tiny"\n')
    table.write_text('[model]\npreset = "llama-tiny"\n[overlap]\npolicy = "full"\nchunks = 8\n')
    assert load_run_config(str(plain), ["overlap.chunks=2"]).overlap == OverlapConfig(policy="full", chunks=2)
    assert load_run_config(str(table), ["overlap=mlp_only"]).overlap == OverlapConfig(policy="mlp_only", chunks=8)
    assert load_run_config(str(table), ["overlap.chunks=auto"]).overlap == OverlapConfig(policy="full")


def test_in_code_it_is_a_plain_value_too() -> None:
    run = load_run_config("llama-tiny")
    assert RunConfig(model=run.model, overlap="full").overlap == OverlapConfig(policy="full")
    assert OverlapConfig.model_validate("auto") == OverlapConfig(policy="auto")
    assert RunConfig.model_validate(run.model_dump()) == run


def test_what_is_asked_is_told_as_it_is_written() -> None:
    assert OverlapConfig().asked == "disabled"
    assert load("overlap=full", "overlap.chunks=4", "overlap.transport=ring").asked == "full chunks=4 transport=ring"


def test_a_default_is_not_a_wish() -> None:
    assert not OverlapConfig().is_asked_for
    assert not OverlapConfig(policy="disabled").is_asked_for
    assert OverlapConfig(policy="auto").is_asked_for


def test_methods_are_those_of_schedules() -> None:
    assert set(get_args(MethodName)) == {"auto", *Method}


def test_all_problems_are_reported_at_once() -> None:
    error = read_error("overlap=fully", "overlap.chunks=many", "overlap.transport=nvlink", "overlap.method=bulky")
    assert "4 problems" in error
    assert "overlap.policy = \"fully\" (command line): should be 'disabled', 'mlp_only', 'full' or 'auto'" in error
    assert 'overlap.chunks = "many" (command line): should be "auto" or a whole number from 1 to 4096' in error
    assert "overlap.transport = \"nvlink\" (command line): should be 'auto', 'ring', 'symm_mem' or 'shm'" in error
    assert 'overlap.method = "bulky"' in error


@pytest.mark.parametrize("value", ["0", "-1", "true", "1.5", "4097", "[1]"])
def test_chunks_that_are_no_count_are_refused(value: str) -> None:
    assert 'should be "auto" or a whole number' in read_error("overlap=full", f"overlap.chunks={value}")


@pytest.mark.parametrize("value", ["false", "3", "[1]"])
def test_a_policy_that_is_no_name_is_refused(value: str) -> None:
    assert "overlap.policy" in read_error(f"overlap={value}")


def test_more_chunks_than_a_rank_has_tokens_are_refused_with_what_would_do() -> None:
    error = read_error("overlap=full", "overlap.chunks=17")
    assert "a rank has 16 of the 32 tokens of a micro-batch (parallel.tp = 2), which cannot be cut into 17" in error
    assert 'hint: use at most 16, or "auto"' in error
    assert load_run_config("llama-tiny", ["parallel.tp=2", "train.seq_len=32", "overlap=full", "overlap.chunks=16"])


@pytest.mark.parametrize("overrides", [("parallel.tp=1",), ("overlap=disabled",)], ids=" ".join)
def test_chunks_do_not_matter_where_nothing_is_overlapped(overrides: tuple[str, ...]) -> None:
    asked = ["parallel.tp=2", "train.seq_len=32", "overlap=full", "overlap.chunks=17", *overrides]
    assert load_run_config("llama-tiny", asked).overlap.chunks == 17


def test_details_without_a_policy_would_have_no_effect() -> None:
    error = read_error("overlap.chunks=2", "overlap.strict=true")
    assert "2 problems" in error
    assert (
        "overlap.chunks = 2 (command line): nothing is overlapped unless policy says what (add overlap=full)" in error
    )
    assert load("overlap.chunks=2", "overlap=disabled").chunks == 2


def test_chunks_of_a_method_without_pieces_are_refused() -> None:
    assert 'method "bulk" moves whole tensors' in read_error("overlap=full", "overlap.method=bulk", "overlap.chunks=2")
    assert load("overlap=full", "overlap.method=bulk", "overlap.chunks=1").method == "bulk"


def test_unknown_keys_name_the_nearest() -> None:
    assert 'did you mean "overlap.chunks"?' in read_error("chunks=4")
    assert 'did you mean "chunks"?' in read_error("overlap.chunk=4")
    with pytest.raises(ValidationError):
        OverlapConfig(chunk=4)  # type: ignore[call-arg]
