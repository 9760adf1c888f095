"""Groups of worker processes that live as long as the test session, one for each number of ranks.

Starting four ranks costs ten seconds and more, a call to ranks that are up about ten milliseconds. A test sends a
function of its module with keyword arguments and gets the list of results. Ranks that a failing test has left unusable
are replaced.
"""

from plait.comm.launch import LocalRanks

TIMEOUT_S = 30.0
"""For a collective: generous, as two busy cores may serve a dozen processes."""
CALL_TIMEOUT_S = 120.0
COMPILING_S = 900.0
"""For ranks that compile, and wait for each other: some twenty files of C++, minutes where others have the cores."""


class RankPool:
    """Call it with a number of ranks."""

    def __init__(self, timeout_s: float = TIMEOUT_S, call_timeout_s: float = CALL_TIMEOUT_S) -> None:
        self._timeout_s, self._call_timeout_s = timeout_s, call_timeout_s
        self._started: dict[int, LocalRanks] = {}

    def __call__(self, world_size: int) -> LocalRanks:
        """The ranks of this session, started or replaced where needed."""
        ranks = self._started.get(world_size)
        if ranks is None or ranks.failure is not None:
            ranks = LocalRanks(
                world_size, timeout_s=self._timeout_s, call_timeout_s=self._call_timeout_s, device_type="cpu"
            )
            self._started[world_size] = ranks
        return ranks

    def close(self) -> None:
        """End all ranks."""
        for ranks in self._started.values():
            ranks.close()
