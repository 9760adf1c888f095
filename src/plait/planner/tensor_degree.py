"""How far tensor parallelism pays: the first degree at which the complete predicted time gets worse.

A larger degree shortens GEMMs less than it should, as they get narrow, and adds collectives that get no shorter. Asked
three ways, from the layer alone to the whole plan:

    layer   the same micro-batch on a larger and larger group of devices
    same    a step of the same devices and the same plan; dp makes up for tp
    best    a step of the same devices; everything else is chosen anew, and has to fit
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from itertools import pairwise
from math import gcd

from plait.errors import ConfigError, PlaitError
from plait.planner.cost import Cost
from plait.planner.plan_config import PlanConfig
from plait.planner.predict import predict
from plait.planner.prediction import Prediction
from plait.planner.space.degrees import Task
from plait.planner.step.block import build_layers


@dataclass(frozen=True, slots=True)
class TensorDegree:
    """What a tensor degree costs.

    Attributes:
        layer: forward and backward of one block for the micro-batch of the best plan, in a group of `tp` devices: the
            same work on more and more devices.
        same: the best plan with this degree in place of its own; dp makes up for it. Whether it fits is in its verdict.
        best: the fastest plan with this degree that fits.
        reason: why something of these is missing; empty where nothing is.
    """

    tp: int
    layer: Cost | None
    same: Prediction | None
    best: Prediction | None
    reason: str = ""


@dataclass(frozen=True, slots=True)
class Worse:
    """A tensor degree at which the complete predicted time is longer than at the degree before.

    Attributes:
        before: the degree before.
        term: what grew most: `gemm`, `communication`, `bubble`, ...
        term_s: by how much.
    """

    tp: int
    before: int
    seconds: float
    before_s: float
    term: str
    term_s: float

    @property
    def factor(self) -> float:
        """How many times as long."""
        return self.seconds / self.before_s


def build_tensor_degree(tp: int, plan: PlanConfig, task: Task, best: Prediction | None, reason: str) -> TensorDegree:
    """A degree beside `plan`, which is the best of all; `reason` says why this degree has no plan, if it has none."""
    reasons = [reason] if reason else []
    layer, same = None, None
    num_devices = task.cluster.num_devices
    try:
        layer = build_layers(task.model, task.cluster, replace(plan, tp=tp), task.seq_len).block
        if num_devices % (tp * plan.cp * plan.pp):
            raise ConfigError(f"tp {tp} * cp {plan.cp} * pp {plan.pp} does not divide {num_devices} devices")
        same = predict(
            task.model, task.cluster, exchange_dp(plan, tp, num_devices),
            seq_len=task.seq_len, global_batch=task.global_batch,
        )  # fmt: skip
    except PlaitError as error:
        reasons.append(f"all else equal: {error.message}")
    return TensorDegree(tp, layer, same, best, "; ".join(reasons))


def exchange_dp(plan: PlanConfig, tp: int, num_devices: int) -> PlanConfig:
    """The same with another tp, and as many data-parallel ranks as it leaves.

    Groups that share the optimizer state out shrink or grow; there are as many of them as before, if they divide.
    """
    dp = num_devices // (tp * plan.cp * plan.pp)
    if plan.sharded == "nothing":
        return replace(plan, tp=tp, dp_replicate=dp, dp_shard=1)
    replicate = gcd(plan.dp_replicate, dp)
    return replace(plan, tp=tp, dp_replicate=replicate, dp_shard=dp // replicate)


def find_worse(costs: Iterable[tuple[int, Cost]]) -> Worse | None:
    """The first degree that takes longer than the one before, in the order given."""
    return find_worse_terms((tp, cost.seconds, name_terms(cost)) for tp, cost in costs)


def find_worse_terms(timed: Iterable[tuple[int, float, Mapping[str, float]]]) -> Worse | None:
    """The same of degrees with their seconds, in all and by term."""
    for (before, before_s, before_terms), (tp, seconds, terms) in pairwise(timed):
        if seconds > before_s:
            grown = _subtract(terms, before_terms)
            term = max(grown, key=lambda name: grown[name])
            return Worse(tp, before, seconds, before_s, term, grown[term])
    return None


def compare_terms(cost: Cost, before: Cost) -> Mapping[str, float]:
    """By how many seconds each term of a cost is longer than that of another, by its name in words."""
    return _subtract(name_terms(cost), name_terms(before))


def _subtract(terms: Mapping[str, float], before: Mapping[str, float]) -> dict[str, float]:
    return {name: terms.get(name, 0.0) - before.get(name, 0.0) for name in dict.fromkeys((*terms, *before))}


def name_terms(cost: Cost) -> Mapping[str, float]:
    """Seconds of a cost by what they are spent on, in words."""
    return {kind.value.replace("_", " "): seconds for kind, seconds in cost.sum_by_kind().items()}
