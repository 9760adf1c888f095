from collections.abc import Callable
from typing import Any

import pytest

from plait.comm.agree import share, together
from plait.comm.launch import LocalRanks
from plait.comm.mesh import build_mesh
from plait.errors import CheckpointError, ConfigError, PlaitError, TransportError
from plait.sharding import MeshShape

Ranks = Callable[[int], LocalRanks]


def _share(values: list[Any]) -> list[Any]:
    mesh = build_mesh(MeshShape(dp_replicate=2, tp=2))
    return share(values[mesh.rank], mesh)


def test_every_rank_learns_the_values_of_all_in_rank_order(ranks: Ranks) -> None:
    values = [None, "a" * 1000, {"b": [1, 2]}, 3.5]
    assert ranks(4).call(_share, values=values) == [values] * 4


def _fail(errors: dict[int, Exception]) -> list[str]:
    """What each rank raises, and that a collective afterwards still works."""
    mesh = build_mesh(MeshShape(dp_replicate=2, tp=2))
    caught = "nothing"
    try:
        with together(mesh):
            if mesh.rank in errors:
                raise errors[mesh.rank]
    except Exception as error:
        caught = f"{type(error).__name__}: {error}"
    return share(caught, mesh)


def test_an_error_of_one_rank_is_raised_by_all_and_names_it(ranks: Ranks) -> None:
    (seen, *others) = ranks(4).call(_fail, errors={2: CheckpointError("no room", hint="make some")})
    assert set(seen) == {"CheckpointError: rank 2: no room\n\nhint: make some"}
    assert others == [seen] * 3


def test_an_error_that_all_ranks_find_is_raised_as_it_is(ranks: Ranks) -> None:
    error = ConfigError("no such file", hint="look elsewhere")
    seen = ranks(4).call(_fail, errors=dict.fromkeys(range(4), error))[0]
    assert set(seen) == {"ConfigError: no such file\n\nhint: look elsewhere"}


def test_different_errors_are_all_told(ranks: Ranks) -> None:
    seen = ranks(4).call(_fail, errors={1: ConfigError("first"), 3: CheckpointError("second")})[0]
    assert set(seen) == {"ConfigError: rank 1: first\nrank 3: second"}


def test_a_bug_of_one_rank_does_not_leave_the_others_waiting(ranks: Ranks) -> None:
    seen = ranks(4).call(_fail, errors={1: KeyError("oops")})[0]
    assert seen[1] == "KeyError: 'oops'"
    assert {seen[rank] for rank in (0, 2, 3)} == {"TransportError: rank 1: KeyError: 'oops'"}


def test_nothing_is_raised_where_nothing_failed(ranks: Ranks) -> None:
    assert ranks(4).call(_fail, errors={})[0] == ["nothing"] * 4


def test_a_rank_alone_agrees_with_itself() -> None:
    mesh = build_mesh(MeshShape())
    assert share(5, mesh) == [5]
    with pytest.raises(PlaitError, match="alone"), together(mesh):
        raise TransportError("alone")
