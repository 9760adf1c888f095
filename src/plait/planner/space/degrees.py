"""Degrees that multiply to the devices, and those that are refused before anything is timed."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from plait.config.conflicts import list_block_conflicts
from plait.config.model import GptConfig, ModelConfig
from plait.errors import PlaitError
from plait.planner.cluster import Cluster
from plait.planner.plan_config import PlanConfig
from plait.planner.planned import derive_planned_model
from plait.planner.space.fixed import Fixed
from plait.sharding import ENDS_AS_BLOCKS, MAX_TP


@dataclass(frozen=True, slots=True)
class Task:
    """What is to be planned.

    Attributes:
        runs: which plans may be chosen, where not all may.
    """

    model: ModelConfig
    cluster: Cluster
    seq_len: int
    global_batch: int
    runs: Callable[[PlanConfig], bool] | None = None

    def allows(self, plan: PlanConfig) -> bool:
        """Whether a plan may be chosen."""
        return self.runs is None or self.runs(plan)


@dataclass(frozen=True, slots=True, order=True)
class Degrees:
    """How many ranks each axis has; dp is what the others leave."""

    tp: int
    cp: int
    pp: int
    dp: int

    def __str__(self) -> str:
        return f"tp = {self.tp}, cp = {self.cp}, pp = {self.pp}"


@dataclass(frozen=True, slots=True)
class Refusal:
    """Plans that were considered and cannot be.

    Attributes:
        what: what they have in common, as `tp = 3` or `tp = 1, cp = 1, pp = 2`.
        reason: a sentence without a full stop: not divisible, or by how much it does not fit.
        num_plans: how many; 0 where they were refused by what they have in common, without being listed.
        lacking_bytes: where it does not fit, what the worst rank of the leanest of these plans lacks.
        degrees: those of all these plans, where they have the same.
    """

    what: str
    reason: str
    num_plans: int = 0
    lacking_bytes: float = 0.0
    degrees: Degrees | None = None


def list_divisors(number: int) -> list[int]:
    """In ascending order."""
    low = [each for each in range(1, int(number**0.5) + 1) if number % each == 0]
    return sorted({*low, *(number // each for each in low)})


def list_degrees(task: Task, fixed: Fixed) -> tuple[list[Degrees], list[Refusal]]:
    """Every choice of degrees that the model, the sequence and the batch can be cut into; and the others."""
    refused: list[Refusal] = []
    tps = _keep(task, fixed, "tp", _refuse_tp, refused)
    cps = _keep(task, fixed, "cp", _refuse_cp, refused)
    pps = _keep(task, fixed, "pp", _refuse_pp, refused)
    kept = []
    for degrees in _combine(task, fixed, (tps, cps, pps)):
        if task.global_batch % degrees.dp:
            reason = f"leaves dp = {degrees.dp}, into which a global batch of {task.global_batch} cannot be divided"
            refused.append(Refusal(str(degrees), reason, degrees=degrees))
        else:
            kept.append(degrees)
    return kept, refused


def _combine(task: Task, fixed: Fixed, axes: tuple[Sequence[int], Sequence[int], Sequence[int]]) -> Iterator[Degrees]:
    num_devices = task.cluster.num_devices
    tps, cps, pps = axes
    for tp in tps:
        for cp in cps:
            for pp in pps:
                dp, rest = divmod(num_devices, tp * cp * pp)
                if not rest and dp and dp == fixed.get("dp", dp) and not _has_other_shards(fixed, dp):
                    yield Degrees(tp, cp, pp, dp)


def _has_other_shards(fixed: Fixed, dp: int) -> bool:
    """Whether dp cannot be the product of groups as they are fixed."""
    replicate, shard = fixed.get("dp_replicate"), fixed.get("dp_shard")
    if replicate is not None and shard is not None:
        return bool(replicate * shard != dp)
    given = replicate or shard or 1
    return bool(dp % given)


def _keep(
    task: Task, fixed: Fixed, axis: str, refuse: Callable[[Task, Fixed, int], str], refused: list[Refusal]
) -> list[int]:
    """The degrees of one axis that can be; those that cannot are added to `refused`."""
    kept = []
    for degree in [fixed[axis]] if axis in fixed else list_divisors(task.cluster.num_devices):
        reason = "" if degree == 1 else refuse(task, fixed, degree)
        if reason:
            refused.append(Refusal(f"{axis} = {degree}", reason))
        else:
            kept.append(degree)
    return kept


def _refuse_tp(task: Task, fixed: Fixed, degree: int) -> str:
    if degree > MAX_TP:
        return f"tp is at most {MAX_TP}"
    plan = PlanConfig(tp=degree, sequence_parallel=False, quantization=fixed.get("quantization", "none"))
    try:
        derive_planned_model(task.model, plan, task.seq_len)
    except PlaitError as error:
        return error.message
    torn = next(list_block_conflicts(task.model, plan.parallel, plan.section), None)
    return "" if torn is None else f"{plan.quantization}: {torn.text}"


def _refuse_cp(task: Task, _: Fixed, degree: int) -> str:
    if degree > 1 and isinstance(task.model, GptConfig) and task.model.attention_dropout:
        return "dropout of attention probabilities is not defined where no rank ever has them all"
    if task.seq_len % (2 * degree):
        return f"sequences of {task.seq_len} tokens cannot be cut into the {2 * degree} parts of its zigzag order"
    return ""


def _refuse_pp(task: Task, _: Fixed, degree: int) -> str:
    if degree > task.model.num_layers + ENDS_AS_BLOCKS:
        return f"{task.model.num_layers} blocks cannot be shared out over so many stages"
    return ""
