"""What is chosen within given degrees: micro-batches, chunks of a pipeline, recompute, and who shards the optimizer."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any, get_args

from plait.config.axis.context import ContextMethodName, find_fewest_heads
from plait.config.model import ModelConfig
from plait.config.overlap import OverlapConfig
from plait.config.recipe import RECIPES
from plait.config.train import Recompute
from plait.planner.plan_config import PlanConfig, PlannedSchedule, Sharded
from plait.planner.space.degrees import Degrees, Task, list_divisors
from plait.planner.space.fixed import Fixed
from plait.sharding import ENDS_AS_BLOCKS

_DISABLED = OverlapConfig(policy="disabled")

_TAKEN = (
    "fused_attention", "gradient_dtype", "overlap", "precision", "quantization", "overlaps_gradients", "overlaps_sends",
    "loss",
)  # fmt: skip
"""Fields that are taken as they are fixed, or else stay at their default."""


@dataclass(frozen=True, slots=True)
class Candidate:
    """A plan as far as it decides how long micro-batches take; who shards the optimizer state is open."""

    degrees: Degrees
    sequence_parallel: bool
    micro_batch: int
    recompute: Recompute
    interleave: int
    schedule: PlannedSchedule

    def build_plan(self, fixed: Fixed) -> PlanConfig:
        """The plan, its optimizer state on every rank."""
        fields: dict[str, Any] = {name: fixed[name] for name in _TAKEN if name in fixed}
        degrees = self.degrees
        fields |= {
            "tp": degrees.tp, "cp": degrees.cp, "pp": degrees.pp, "dp_replicate": degrees.dp, "sharded": "nothing",
            "sequence_parallel": self.sequence_parallel, "micro_batch": self.micro_batch, "recompute": self.recompute,
            "interleave": self.interleave, "schedule": self.schedule,
        }  # fmt: skip
        return PlanConfig(**fields)


def list_candidates(degrees: Degrees, task: Task, fixed: Fixed) -> Iterator[Candidate]:
    """All within degrees, in a fixed order."""
    share = task.global_batch // degrees.dp
    micro_batches = list_divisors(share) if "micro_batch" not in fixed else [fixed["micro_batch"]]
    recipe = RECIPES.get(fixed.get("quantization", "none"))
    unit = 1 if recipe is None else recipe.token_unit
    modes = [fixed["sequence_parallel"]] if "sequence_parallel" in fixed else [True, False]
    for sequence_parallel in modes if degrees.tp > 1 else modes[:1]:
        for micro_batch in micro_batches:
            tokens = micro_batch * task.seq_len // degrees.cp
            if share % micro_batch or tokens % unit or (sequence_parallel and tokens // unit < degrees.tp):
                continue
            for schedule, interleave in _list_schedules(degrees, task.model, fixed, share // micro_batch):
                for recompute in _list_recomputes(schedule, fixed):
                    candidate = Candidate(degrees, sequence_parallel, micro_batch, recompute, interleave, schedule)
                    if task.runs is None or task.runs(candidate.build_plan(fixed)):
                        yield candidate


def list_leanest(degrees: Degrees, task: Task, fixed: Fixed) -> Iterator[PlanConfig]:
    """Plans within degrees of which one needs least memory: of the smallest micro-batches, or of one for the step.

    Of a single one no gradients are added up. Each of them in every sharding that `list_strongest` has.
    """
    schedule = fixed.get("schedule", "1f1b")
    interleave = fixed.get("interleave", 2 if schedule == "interleaved" else 1)
    if degrees.pp == 1 and (interleave > 1 or schedule != "1f1b"):
        return
    share = task.global_batch // degrees.dp
    sizes = [fixed["micro_batch"]] if "micro_batch" in fixed else [1, share]
    for micro_batch in dict.fromkeys(size for size in sizes if share % size == 0):
        plans = [
            Candidate(
                degrees, fixed.get("sequence_parallel", True), micro_batch, recompute, interleave, schedule
            ).build_plan(fixed)
            for recompute in reversed(_list_recomputes(schedule, fixed))
        ]
        allowed = next(filter(task.allows, plans), None)
        if allowed is not None:
            for plan in list_methods(allowed, task, fixed):
                yield from list_strongest(plan, task, fixed)


def list_methods(plan: PlanConfig, task: Task, fixed: Fixed) -> list[PlanConfig]:
    """Every way in which queries and keys of context ranks can meet; heads are dealt where there are enough."""
    asked: Sequence[ContextMethodName] = get_args(ContextMethodName)
    asked = [fixed["context_method"]] if "context_method" in fixed else asked
    if plan.cp == 1:
        return [plan if plan.context_method == asked[0] else replace(plan, context_method=asked[0])]
    fewest = find_fewest_heads(task.model, plan.tp) or 0
    return [replace(plan, context_method=each) for each in asked if each != "all_to_all" or fewest >= plan.cp]


def list_shardings(plan: PlanConfig, task: Task, fixed: Fixed) -> Iterator[PlanConfig]:
    """Every way in which the data-parallel ranks of a plan can share out parameters, gradients and optimizer state."""
    for sharded in _list_stages(fixed):
        for shard in _list_shards(plan.dp, plan.cp, sharded, fixed):
            yield from _allow(_share(plan, sharded, shard), task)


def list_strongest(plan: PlanConfig, task: Task, fixed: Fixed) -> Iterator[PlanConfig]:
    """Of each way of sharding the one over most ranks, without overlap: one of them needs least memory of all."""
    plain = free_buffers(plan, fixed) or plan
    for sharded in reversed(_list_stages(fixed)):
        for shard in _list_shards(plan.dp, plan.cp, sharded, fixed)[-1:]:
            found = _allow(_share(plain, sharded, shard), task)
            yield from found
            if sharded == "optimizer" and found:
                return  # With nothing shared out it needs more.


def _share(plan: PlanConfig, sharded: Sharded, shard: int) -> PlanConfig:
    return replace(plan, sharded=sharded, dp_shard=shard, dp_replicate=plan.dp // shard)


def _allow(plan: PlanConfig, task: Task) -> list[PlanConfig]:
    return [plan] if task.allows(plan) else []


def _list_stages(fixed: Fixed) -> tuple[Sharded, ...]:
    return (fixed["sharded"],) if "sharded" in fixed else get_args(Sharded)


def free_buffers(plan: PlanConfig, fixed: Fixed) -> PlanConfig | None:
    """The plan without overlap, which needs less memory but is never faster; none where overlap is fixed."""
    return None if "overlap" in fixed or plan.tp == 1 else replace(plan, overlap=_DISABLED)


@lru_cache(maxsize=4096)
def _list_all_shards(dp: int, cp: int, *, is_asked: bool) -> tuple[int, ...]:
    return tuple(shard for shard in list_divisors(dp) if shard * cp > 1 or (dp * cp == 1 and is_asked))


def _list_shards(dp: int, cp: int, sharded: Sharded, fixed: Fixed) -> Sequence[int]:
    if "dp_shard" in fixed or "dp_replicate" in fixed:
        return [fixed.get("dp_shard") or dp // fixed["dp_replicate"]]
    if sharded == "nothing":
        return [1]
    return _list_all_shards(dp, cp, is_asked="sharded" in fixed)


def _list_schedules(
    degrees: Degrees, model: ModelConfig, fixed: Fixed, num_micro_batches: int
) -> Iterator[tuple[PlannedSchedule, int]]:
    """With how many chunks a rank; zero bubble in rounds of pp micro-batches, too."""
    is_in_rounds = degrees.pp > 1 and num_micro_batches % degrees.pp == 0
    for interleave in _list_interleaves(degrees, model, fixed, num_micro_batches):
        schedules: list[PlannedSchedule] = ["1f1b" if interleave == 1 else "interleaved"]
        if is_in_rounds:
            schedules.append("zero_bubble")
        yield from ((each, interleave) for each in schedules if each == fixed.get("schedule", each))


def _list_recomputes(schedule: PlannedSchedule, fixed: Fixed) -> tuple[Recompute, ...]:
    """From nothing to all; nothing is computed again, nor read in a quantized form, by two halves of a backward."""
    asked: tuple[Recompute, ...] = (fixed["recompute"],) if "recompute" in fixed else get_args(Recompute)
    if schedule == "zero_bubble":
        return ("none",) if "none" in asked and fixed.get("quantization", "none") == "none" else ()
    return asked


def _list_interleaves(degrees: Degrees, model: ModelConfig, fixed: Fixed, num_micro_batches: int) -> Sequence[int]:
    """Chunks that all hold as many blocks, or would if embedding and head were one each; in rounds of pp micro-batches.

    One chunk a rank is always possible.
    """
    pp = degrees.pp
    if "interleave" in fixed:
        return [fixed["interleave"]] if fixed["interleave"] == 1 or pp > 1 else []
    if pp == 1 or num_micro_batches % pp:
        return [1]
    counts = (model.num_layers, model.num_layers + ENDS_AS_BLOCKS)
    most = max(counts) // pp
    return [1, *(v for v in range(2, most + 1) if any(count % (pp * v) == 0 for count in counts))]
