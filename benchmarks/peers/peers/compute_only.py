"""The bound: the local shapes of ``manual_gloo`` with every collective removed.

Results are meaningless (no fingerprint); the time is what ``world`` ranks would take if
communication were free.
"""

from harness import manual_tp
from harness.workitem import WorkItem


def setup(rank: int, world: int, item: WorkItem, *, mode: str = "sp"):
    step, _ = manual_tp.setup(item, manual_tp.NoComm(rank, world), sequence_parallel=mode == "sp")
    return step
