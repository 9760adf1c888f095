import pytest

from plait.sharding import Invariant, Partial, Placement, Replicate, Shard, derive_gradient_placement

STATES: list[Placement] = [Invariant(), Replicate(), Partial(), Shard(0), Shard(3)]


@pytest.mark.parametrize(
    ("placement", "gradient"),
    [
        (Invariant(), Invariant()),
        (Replicate(), Partial()),
        (Shard(2), Shard(2)),
        (Partial(), Replicate()),
    ],
    ids=str,
)
def test_the_state_fixes_the_state_of_the_gradient(placement: Placement, gradient: Placement) -> None:
    assert derive_gradient_placement(placement) == gradient


@pytest.mark.parametrize("placement", STATES, ids=str)
def test_the_gradient_of_the_gradient_is_in_the_state_of_the_value(placement: Placement) -> None:
    assert derive_gradient_placement(derive_gradient_placement(placement)) == placement


def test_states_print_as_they_are_written() -> None:
    assert [str(state) for state in STATES] == ["Invariant", "Replicate", "Partial", "Shard(0)", "Shard(3)"]
