"""Stages of a pipeline: every block is somewhere, and as many micro-batches are in flight as the schedule has."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from plait.planner.stages import derive_stages


@given(st.integers(1, 130), st.integers(1, 16), st.integers(1, 8), st.integers(1, 64))
def test_every_block_is_on_one_stage(num_layers: int, pp: int, interleave: int, batches: int) -> None:
    stages = derive_stages(num_layers, pp, interleave, batches)
    assert sum(stage.num_layers for stage in stages) == num_layers
    assert [stage.is_first for stage in stages] == [True] + [False] * (pp - 1)
    assert [stage.is_last for stage in stages] == [False] * (pp - 1) + [True]


def test_llama_405b_counts_embedding_and_head_as_a_block_each() -> None:
    layers = [stage.num_layers for stage in derive_stages(126, 8, 8, 64)]
    assert layers == [15, 16, 16, 16, 16, 16, 16, 15]


def test_first_stage_of_1f1b_holds_as_many_micro_batches_as_there_are_stages() -> None:
    assert [stage.in_flight for stage in derive_stages(8, 4, 1, 16)] == [4, 3, 2, 1]
    assert [stage.in_flight for stage in derive_stages(8, 4, 1, 2)] == [2, 2, 2, 1]


@pytest.mark.parametrize(("pp", "interleave"), [(8, 3), (35, 3), (4, 8)])
def test_interleaving_holds_the_factor_of_korthikanti(pp: int, interleave: int) -> None:
    first = derive_stages(pp * interleave, pp, interleave, 1000)[0]
    assert first.in_flight == pytest.approx(pp * (1 + (pp - 1) / (pp * interleave)))
