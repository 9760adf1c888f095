"""Search the whole space of plans, exactly: what is left out is known to be slower than what is kept.

Plans are visited in the order of a bound that no plan beats, first from FLOPs alone, then from the time of its
micro-batches; what data parallelism and optimizer add is only looked at where the bound allows it. Kept is the
fastest plan of each tp, cp and pp that fits.

Left out beside that, exactly: overlap policies other than `auto`, which takes the fastest of all (`disabled` where only
it fits). Left out by decree: number formats and everything else that is not asked for.
"""

import gc
from bisect import bisect_left
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from heapq import heapify, heappop, heappush
from math import inf

from plait.contract.pipeline.order import Pipeline
from plait.contract.step import list_gemms
from plait.planner.laws.gemm import derive_regime_share
from plait.planner.memory.activations import derive_met_bytes
from plait.planner.memory.peak import predict_memory
from plait.planner.memory.static import count_stage_parameters
from plait.planner.plan_config import PlanConfig
from plait.planner.planned import derive_planned_model, is_linear
from plait.planner.prediction import Memory, Verdict
from plait.planner.space.candidates import (
    Candidate,
    free_buffers,
    list_candidates,
    list_leanest,
    list_methods,
    list_shardings,
    list_strongest,
)
from plait.planner.space.degrees import Degrees, Refusal, Task, list_degrees, list_divisors
from plait.planner.space.fixed import Fixed
from plait.planner.stages import list_stages
from plait.planner.step.block import Layers, build_layers
from plait.planner.step.circumstance import Circumstance
from plait.planner.step.data_parallel import build_data_parallel, build_optimizer
from plait.planner.step.pipeline import build_pipeline
from plait.planner.step.zero_bubble import bound_zero_bubble

_ROUNDING = 1e-9
"""By so large a share sums in another order may differ."""


@dataclass(frozen=True, slots=True, order=True)
class Found:
    """The fastest plan of its degrees that fits."""

    seconds: float
    degrees: Degrees
    plan: PlanConfig = field(compare=False)


@dataclass(frozen=True, slots=True)
class Space:
    """What a search went through.

    Attributes:
        found: the fastest of each degrees, the fastest first.
        nearest: where none fits, the plan that lacks least.
        num_considered: plans of degrees that multiply to the devices, those too that were not timed.
    """

    found: tuple[Found, ...]
    nearest: PlanConfig | None
    refused: tuple[Refusal, ...]
    num_considered: int


def search(task: Task, fixed: Fixed, *, limit: int) -> Space:
    """The fastest plan of the `limit` fastest degrees, and of the fastest degrees of each tp."""
    with _collector_paused():
        return _Search(task, fixed, limit).run()


@contextmanager
def _collector_paused() -> Iterator[None]:
    """Costs are many small objects that all stay: looking through them again and again takes longer than the search."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


class _Search:
    def __init__(self, task: Task, fixed: Fixed, limit: int) -> None:
        self.task, self.fixed, self.limit = task, fixed, limit
        self.best: dict[Degrees, Found] = {}
        self.fastest: dict[int, float] = {}
        """Of each tp."""
        self.slowest_s = inf
        """Of the degrees that are kept."""
        self.most: dict[tuple[Degrees, bool, str], int] = {}
        self.ways: dict[tuple[int, int, bool, int], _Ways] = {}

    def run(self) -> Space:
        kept, refused = list_degrees(self.task, self.fixed)
        roomy, nearest = self._refuse_large(kept, refused)
        queue = self._list_bounds(roomy)
        num_considered = sum(map(self._count_plans, kept))
        heapify(queue)
        while queue:
            self._visit(queue)
        found = tuple(sorted(self.best.values()))
        return Space(found, None if found else nearest, tuple(refused), num_considered)

    def _refuse_large(self, kept: Sequence[Degrees], refused: list[Refusal]) -> tuple[list[Degrees], PlanConfig | None]:
        """Degrees of which the leanest plan fits, and the plan that lacks least of all others."""
        roomy: list[Degrees] = []
        nearest: tuple[float, PlanConfig] | None = None
        for degrees in kept:
            most: tuple[float, PlanConfig] | None = None
            for plan in list_leanest(degrees, self.task, self.fixed):
                margin = self.remember(plan).margin_bytes
                if most is None or margin > most[0]:
                    most = (margin, plan)
                if margin >= 0:
                    break
            if most is None:
                refused.append(Refusal(str(degrees), "has no plan of what is asked for", degrees=degrees))
                continue
            margin, leanest = most
            if margin >= 0:
                roomy.append(degrees)
                continue
            reason = f"does not fit: its leanest plan lacks {-margin / 1e9:.1f} GB on the worst rank"
            refused.append(Refusal(str(degrees), reason, self._count_plans(degrees), -margin, degrees))
            if nearest is None or margin > nearest[0]:
                nearest = (margin, leanest)
        return roomy, None if nearest is None else nearest[1]

    def _count_plans(self, degrees: Degrees) -> int:
        plain = PlanConfig(tp=degrees.tp, cp=degrees.cp, pp=degrees.pp, dp_replicate=degrees.dp)
        num_ways = sum(
            1 for way in list_methods(plain, self.task, self.fixed) for _ in list_shardings(way, self.task, self.fixed)
        )
        return num_ways * sum(1 for _ in list_candidates(degrees, self.task, self.fixed))

    def _list_bounds(self, roomy: Sequence[Degrees]) -> list[tuple[float, int, bool, Candidate]]:
        """Every candidate with the first of its bounds; the number decides between equal ones."""
        flops_s = self._bound_step()
        queue: list[tuple[float, int, bool, Candidate]] = []
        for degrees in roomy:
            share = self.task.global_batch // degrees.dp
            for candidate in list_candidates(degrees, self.task, self.fixed):
                rounds = share // candidate.micro_batch * candidate.interleave
                again = 4 / 3 if candidate.recompute == "full" else 1.0
                bound = flops_s["ends"] + flops_s["blocks"] * again
                idle = 0 if candidate.schedule == "zero_bubble" else (degrees.pp - 1) / rounds
                queue.append((bound * (1 + idle), len(queue), False, candidate))
        return queue

    def _bound_step(self) -> dict[str, float]:
        """GEMMs of linears at the rate that none exceeds, shared out evenly: the least that a step takes."""
        given = {name: self.fixed[name] for name in ("precision", "quantization") if name in self.fixed}
        task, plan = self.task, PlanConfig(**given)
        rate = max(_derive_rate(task, dtype) for dtype in {plan.precision.compute, plan.gemm_dtype})
        contract = derive_planned_model(task.model, plan, task.seq_len)
        sums = {
            name: sum(gemm.flops for op in ops if is_linear(op) for gemm in list_gemms((*op.forward, *op.backward)))
            for name, ops in (("blocks", contract.block), ("ends", contract.exit))
        }
        each = task.global_batch / task.cluster.num_devices / rate
        return {"blocks": sums["blocks"] * task.model.num_layers * each, "ends": sums["ends"] * each}

    def _visit(self, queue: list[tuple[float, int, bool, Candidate]]) -> None:
        """Take the candidate of the least bound: tighten the bound, or, where it is tight, look at its shardings."""
        bound, number, is_tight, candidate = heappop(queue)
        if not self._can_count(bound, candidate.degrees):
            return
        if not is_tight:
            if candidate.micro_batch <= self._find_most(candidate):
                heappush(queue, (self._bound_micro_batches(candidate), number, True, candidate))
            return
        if self._could_fit(candidate):
            for plan in list_methods(candidate.build_plan(self.fixed), self.task, self.fixed):
                self._settle(candidate.degrees, plan)

    def _find_most(self, candidate: Candidate) -> int:
        """The largest micro-batch of which one chunk a rank could fit; larger ones need more memory."""
        key = (candidate.degrees, candidate.sequence_parallel, candidate.recompute)
        if key not in self.most:
            plain = replace(candidate, interleave=self.fixed.get("interleave", 1), schedule="1f1b")
            share = self.task.global_batch // candidate.degrees.dp
            sizes = list_divisors(share) if "micro_batch" not in self.fixed else [self.fixed["micro_batch"]]
            count = bisect_left(sizes, True, key=lambda size: not self._could_fit(replace(plain, micro_batch=size)))
            self.most[key] = sizes[count - 1] if count else 0
            # Of a single micro-batch no gradients are added up, which may be what makes room.
            if self._could_fit(replace(plain, micro_batch=sizes[-1])):
                self.most[key] = sizes[-1]
        return self.most[key]

    def _could_fit(self, candidate: Candidate) -> bool:
        """Whether any sharding of it fits, however context ranks meet.

        Those ways differ in what is there while an attention runs; what lacks more than that with one, does with all.
        """
        first, *others = list_methods(candidate.build_plan(self.fixed), self.task, self.fixed)
        margin = self._find_margin(first)
        if margin >= 0 or not others:
            return margin >= 0
        contract = derive_planned_model(self.task.model, first, self.task.seq_len)
        if margin + derive_met_bytes(contract, first) < 0:
            return False
        return any(self._find_margin(plan) >= 0 for plan in others)

    def _find_margin(self, plan: PlanConfig) -> float:
        """What its strongest sharding leaves of the memory, as soon as one leaves any."""
        most = -inf
        for each in list_strongest(plan, self.task, self.fixed):
            most = max(most, self.remember(each).margin_bytes)
            if most >= 0:
                break
        return most

    def _bound_micro_batches(self, candidate: Candidate) -> float:
        """Blocks and ends shared out evenly over the stages; nothing sent, and attention not counted twice."""
        degrees, ways = candidate.degrees, self._list_ways(candidate)
        again_s = ways.forward_s if candidate.recompute == "full" else 0.0
        rounds = self.task.global_batch // (degrees.dp * candidate.micro_batch)
        all_s = self.task.model.num_layers * (ways.block_s + again_s) + ways.ends_s
        if candidate.schedule != "zero_bubble":
            return all_s / degrees.pp * (rounds + (degrees.pp - 1) / candidate.interleave)
        order = Pipeline("zero_bubble", degrees.pp, candidate.interleave, rounds)
        least_s = min(bound_zero_bubble(order, way, self.task.model.num_layers) for way in ways.layers)
        return max(all_s / degrees.pp * rounds, least_s * (1 - _ROUNDING))

    def _list_ways(self, candidate: Candidate) -> "_Ways":
        degrees = candidate.degrees
        key = (degrees.tp, degrees.cp, candidate.sequence_parallel, candidate.micro_batch)
        if key not in self.ways:
            plan = replace(candidate, recompute="none", schedule="1f1b", interleave=1).build_plan(self.fixed)
            plans = list_methods(plan, self.task, self.fixed)
            self.ways[key] = _Ways(
                [build_layers(self.task.model, self.task.cluster, each, self.task.seq_len) for each in plans]
            )
        return self.ways[key]

    def _settle(self, degrees: Degrees, plan: PlanConfig) -> None:
        """Time every sharding, and keep the fastest that fits; without overlap only those that do not fit with it."""
        timed, plain = _Timed(self.task, plan), free_buffers(plan, self.fixed)
        if not self._can_count(timed.pipeline_s, degrees):
            return
        serial: _Timed | None = None
        for sharded in list_shardings(plan, self.task, self.fixed):
            seconds = timed.time_step(sharded)
            if not self._can_count(seconds, degrees):
                continue
            if self._has_room(sharded):
                self._keep(degrees, sharded, seconds)
            elif plain is not None and self._has_room(lean := replace(sharded, overlap=plain.overlap)):
                serial = serial or _Timed(self.task, plain)
                seconds = serial.time_step(lean)
                if self._can_count(seconds, degrees):
                    self._keep(degrees, lean, seconds)

    def _keep(self, degrees: Degrees, plan: PlanConfig, seconds: float) -> None:
        self.best[degrees] = Found(seconds, degrees, plan)
        self.fastest[degrees.tp] = min(seconds, self.fastest.get(degrees.tp, inf))
        if len(self.best) >= self.limit:
            self.slowest_s = sorted(found.seconds for found in self.best.values())[self.limit - 1]

    def _can_count(self, bound: float, degrees: Degrees) -> bool:
        """Whether a plan that takes at least so long could be the best of its degrees, and those be among the kept."""
        if degrees in self.best and bound >= self.best[degrees].seconds:
            return False
        if bound < self.fastest.get(degrees.tp, inf):
            return True
        return bound < self.slowest_s

    def _has_room(self, plan: PlanConfig) -> bool:
        return self.remember(plan).verdict is not Verdict.DOES_NOT_FIT

    def remember(self, plan: PlanConfig) -> Memory:
        """Memory of a plan's worst rank."""
        task = self.task
        capacity_bytes = task.cluster.hardware.memory.capacity_bytes.value
        return predict_memory(task.model, plan, task.seq_len, plan.num_micro_batches(task.global_batch), capacity_bytes)


class _Ways:
    """The layers of a candidate without recompute, for every way in which context ranks can meet, and their least."""

    def __init__(self, layers: list[Layers]) -> None:
        self.layers = layers
        self.forward_s = min(each.forward.seconds for each in layers)
        self.block_s = min(each.forward.seconds + each.backward.seconds for each in layers)
        self.ends_s = layers[0].embedding.seconds + layers[0].head.seconds


class _Timed:
    """A plan's micro-batches, timed once; shardings add to that."""

    def __init__(self, task: Task, plan: PlanConfig) -> None:
        self.task = task
        num_micro_batches = plan.num_micro_batches(task.global_batch)
        self.contract = derive_planned_model(task.model, plan, task.seq_len)
        self.layers = build_layers(task.model, task.cluster, plan, task.seq_len)
        stages = list_stages(task.model.num_layers, plan, num_micro_batches)
        where = Circumstance(task.cluster, plan, self.contract)
        self.pipeline_s = sum(cost.seconds for cost in build_pipeline(self.layers, stages, where))
        self.heaviest = max(stages, key=lambda stage: count_stage_parameters(self.contract, stage))

    def time_step(self, plan: PlanConfig) -> float:
        """Seconds of a step: what `predict` says of it."""
        where = Circumstance(self.task.cluster, plan, self.contract)
        parts = build_data_parallel(self.layers, where, self.heaviest)
        return self.pipeline_s + sum(part.seconds for part in parts) + build_optimizer(where, self.heaviest).seconds


def _derive_rate(task: Task, dtype: str) -> float:
    """FLOP/s that the law of GEMMs approaches."""
    hardware = task.cluster.hardware
    law = hardware.gemm(dtype)
    return (
        hardware.peak(dtype).value * law.efficiency.value * derive_regime_share(hardware.derate, "training", law.regime)
    )
