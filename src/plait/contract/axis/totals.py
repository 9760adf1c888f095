"""What every step adds up over all ranks that see different tokens."""

from plait.config.run import AnyRun
from plait.contract.collective import Collective
from plait.contract.step import REDUCE
from plait.sharding import Invariant, Shard, derive_transition

_GATHER = derive_transition(Shard(0), Invariant()).forward


def derive_totals(run: AnyRun) -> list[Collective]:
    """Loss, number of targets and wish to stop: gathered over dp and cp, summed over pp, and the most over tp."""
    (axis, dp), tp = find_sums(run), run.parallel.tp
    over_dp = [Collective(_GATHER, axis, dp, (dp, 3), "float64")] if dp > 1 else []
    over_pp = [Collective(REDUCE, "pp", run.parallel.pp, (3,), "float64")] if run.parallel.pp > 1 else []
    over_tp = [Collective(REDUCE, "tp", tp, (3,), "float64", op="max")] if tp > 1 else []
    return [*over_dp, *over_pp, *over_tp]


def find_sums(run: AnyRun) -> tuple[str, int]:
    """The axis over which losses and gradients are summed, and how many ranks it has."""
    shape = run.parallel.mesh_shape
    return shape.sums, shape.degree("dp_cp")
