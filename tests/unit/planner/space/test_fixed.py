"""What a user fixes: every problem at once, with the key as it was written."""

import pytest

from plait.config.overlap import OverlapConfig
from plait.errors import ConfigError
from plait.planner.space.fixed import check_fixed, describe_fixed, parse_fixed


def test_values_are_numbers_words_and_sections() -> None:
    fixed = parse_fixed(["tp=8,pp=4 sp=false", "recompute=full,overlap=full", "overlap.chunks=4"], what="--fix")
    assert fixed == {
        "tp": 8, "pp": 4, "sequence_parallel": False, "recompute": "full",
        "overlap": OverlapConfig(policy="full", chunks=4),
    }  # fmt: skip


def test_everything_wrong_is_said_at_once() -> None:
    with pytest.raises(ConfigError) as caught:
        parse_fixed(["tp=0,tensor=2", "recompute=some", "nonsense", "sp=3"], what="--fix")
    message = caught.value.message
    assert "5 problems" in message
    for text in (
        "tp = 0: should be a whole number from 1",
        "tensor = 2: is nothing that a plan decides",
        "recompute = some: should be one of none, selective, full",
        "nonsense: an override must be of the form key=value",
        "sp = 3: should be true or false",
    ):
        assert text in message


def test_the_nearest_key_is_named() -> None:
    with pytest.raises(ConfigError, match='did you mean "micro_batch"'):
        check_fixed({"micro_batches": 2}, what="fixed")


def test_it_reads_as_it_was_asked_for() -> None:
    assert describe_fixed(parse_fixed(["tp=8,sp=false,overlap=mlp_only"], what="")) == (
        "tp = 8, sequence_parallel = false, overlap = mlp_only"
    )
