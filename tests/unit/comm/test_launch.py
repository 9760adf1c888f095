import pytest

from plait.comm.launch import MAX_LOCAL_RANKS, LocalRanks
from plait.errors import ConfigError


@pytest.mark.parametrize("world_size", [0, -1, MAX_LOCAL_RANKS + 1])
def test_ranks_that_no_machine_can_take_are_refused_before_any_is_started(world_size):
    with pytest.raises(ConfigError, match=f"{world_size} ranks cannot be started on this machine: it takes 1 to 256"):
        LocalRanks(world_size)
