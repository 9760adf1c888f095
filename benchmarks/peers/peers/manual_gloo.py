"""Hand-written Megatron-style tensor parallelism on gloo collectives (harness/manual_tp.py).

Not a library: the yardstick for what the libraries add on top of the collectives they call.
"""

from harness import manual_tp
from harness.torch_reference import init_gloo
from harness.workitem import WorkItem


def setup(rank: int, world: int, item: WorkItem, *, mode: str = "tp"):
    init_gloo(rank, world)
    return manual_tp.setup(item, manual_tp.GlooComm(rank, world), sequence_parallel=mode == "sp")
