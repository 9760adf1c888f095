import re
from itertools import product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from plait.errors import ShardingError
from plait.sharding import (
    Invariant,
    Kind,
    Partial,
    Placement,
    Replicate,
    Shard,
    build_split,
    derive_gradient_placement,
    derive_transition,
    list_transitions,
)
from tests.support.simulated_ranks import Matrix, Splits, carry_out, spread, true_value

ROWS = [  # the table of docs/concepts/transitions.md
    (Invariant(), Replicate(), Kind.NOTHING, Kind.ALL_REDUCE),
    (Partial(), Invariant(), Kind.ALL_REDUCE, Kind.NOTHING),
    (Shard(0), Replicate(), Kind.ALL_GATHER, Kind.REDUCE_SCATTER),
    (Partial(), Shard(0), Kind.REDUCE_SCATTER, Kind.ALL_GATHER),
    (Shard(0), Invariant(), Kind.ALL_GATHER, Kind.TAKE_OWN),
    (Invariant(), Shard(0), Kind.TAKE_OWN, Kind.ALL_GATHER),
    (Shard(0), Shard(1), Kind.ALL_TO_ALL, Kind.ALL_TO_ALL),
]
KNOWN = {(type(source), type(target)) for source, target, *_ in ROWS}
STATES: list[Placement] = [Invariant(), Replicate(), Partial(), Shard(0), Shard(1)]
PAIRS = list(product(STATES, STATES))
ALLOWED = [(a, b) for a, b in PAIRS if a == b or (type(a), type(b)) in KNOWN]


@st.composite
def matrices(draw: st.DrawFn) -> tuple[Matrix, Splits, list[int]]:
    """A matrix, a split of its rows and of its columns over the same ranks, and addends for a partial state."""
    degree = draw(st.integers(1, 5))
    num_rows, num_columns = draw(st.integers(1, 7)), draw(st.integers(1, 7))
    numbers = st.integers(-9, 9)
    row = st.lists(numbers, min_size=num_columns, max_size=num_columns).map(tuple)
    value = draw(st.lists(row, min_size=num_rows, max_size=num_rows).map(tuple))
    addends = draw(st.lists(numbers, min_size=degree, max_size=degree))
    return value, (build_split(num_rows, degree), build_split(num_columns, degree)), addends


@pytest.mark.parametrize(("source", "target", "forward", "backward"), ROWS, ids=str)
def test_each_row_has_its_forward_and_derived_backward(
    source: Placement, target: Placement, forward: Kind, backward: Kind
) -> None:
    transition = derive_transition(source, target)
    assert (transition.forward, transition.backward) == (forward, backward)


def test_the_listed_table_is_exactly_these_rows() -> None:
    assert [(t.source, t.target, t.forward, t.backward) for t in list_transitions()] == ROWS


@pytest.mark.parametrize(("source", "target"), ALLOWED, ids=str)
@settings(max_examples=25)
@given(case=matrices())
def test_forward_keeps_the_true_value(source: Placement, target: Placement, case: tuple) -> None:
    value, splits, addends = case
    kind = derive_transition(source, target).forward
    moved = carry_out(kind, spread(value, source, splits, addends), source, target, splits)
    assert true_value(moved, target, splits) == value


@pytest.mark.parametrize(("source", "target"), ALLOWED, ids=str)
@settings(max_examples=25)
@given(case=matrices())
def test_backward_keeps_the_true_gradient(source: Placement, target: Placement, case: tuple) -> None:
    """It does not change the value, so it must not change the gradient: FIELD 3.1, 3.6 and 3.8 all break this."""
    gradient, splits, addends = case
    arrives, leaves = derive_gradient_placement(target), derive_gradient_placement(source)
    kind = derive_transition(source, target).backward
    moved = carry_out(kind, spread(gradient, arrives, splits, addends), arrives, leaves, splits)
    assert true_value(moved, leaves, splits) == gradient


@pytest.mark.parametrize(("source", "target"), [pair for pair in ALLOWED if pair[::-1] in ALLOWED], ids=str)
@settings(max_examples=25)
@given(case=matrices())
def test_there_and_back_is_the_identity(source: Placement, target: Placement, case: tuple) -> None:
    value, splits, addends = case
    start = spread(value, source, splits, addends)
    there = carry_out(derive_transition(source, target).forward, start, source, target, splits)
    back = carry_out(derive_transition(target, source).forward, there, target, source, splits)
    assert back == start


@pytest.mark.parametrize(("source", "target"), ALLOWED, ids=str)
def test_the_conjugate_of_the_conjugate_is_the_transition_itself(source: Placement, target: Placement) -> None:
    transition = derive_transition(source, target)
    assert transition.conjugate.forward is transition.backward
    assert transition.conjugate.backward is transition.forward
    assert transition.conjugate.conjugate == transition


@pytest.mark.parametrize(("source", "target"), [pair for pair in PAIRS if pair not in ALLOWED], ids=str)
def test_any_other_transition_is_refused_and_names_both_states(source: Placement, target: Placement) -> None:
    """FIELD 3.7: a replicated value enters a sharded region only through a stated transition."""
    with pytest.raises(ShardingError, match=re.escape(f"from {source} to {target}")) as error:
        derive_transition(source, target)
    assert error.value.hint is not None
    assert "Partial -> Shard" in error.value.hint


@pytest.mark.parametrize("state", STATES, ids=str)
def test_staying_in_a_state_moves_nothing(state: Placement) -> None:
    transition = derive_transition(state, state)
    assert transition.forward is Kind.NOTHING
    assert transition.backward is Kind.NOTHING


def test_only_the_four_collectives_move_bytes() -> None:
    moving = {kind.value for kind in Kind if kind.is_collective}
    assert moving == {"all_reduce", "all_gather", "reduce_scatter", "all_to_all"}
