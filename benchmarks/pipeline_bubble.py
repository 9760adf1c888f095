"""How long the ranks of a pipeline wait, against what the schedule says on a clock.

Ranks are processes that send each other real tensors by torch's schedules, through plait's stages; what they compute is
replaced by sleeps of known length, so that more ranks than cores measure honestly. Every stage takes as long; backward
takes twice as long as forward, half of it for the gradients of weights. Of each step is recorded when every rank was at
work. The idle share of a rank is the part of the step, from the first to the last of all ranks, in which it was not;
the bubble is their mean.

Beside it is the bubble of the same order of work on a clock (`plait.contract.pipeline.clock`), on which nothing takes
time but the work: the figure of `plait explain`, and for 1f1b and interleaved that of the planner.

Run: `python benchmarks/pipeline_bubble.py` (writes pipeline_bubble.json beside itself).
"""

import argparse
import json
import statistics
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from plait.bench.machine import describe_machine
from plait.comm.launch import LocalRanks
from plait.comm.mesh import build_mesh
from plait.config.axis.pipeline import Schedule
from plait.contract.pipeline.clock import build_even_seconds, simulate
from plait.contract.pipeline.order import Pipeline
from plait.parallel.pipeline.schedule import build_schedule
from plait.parallel.pipeline.stage import RunningStage, Stream
from plait.parallel.region.half import select_half
from plait.parallel.region.quantizer import Needs
from plait.sharding import MeshShape, derive_parts, list_rank_stages

FORWARD_S = 0.2
"""Of all stages of a rank for one micro-batch; long against what a message takes between processes."""
BACKWARD_S = 2 * FORWARD_S
TOKENS, WIDTH = 64, 64
WARM_UP = 1


@dataclass(frozen=True)
class Case:
    """A pipeline that is measured."""

    pipeline: Pipeline

    @property
    def name(self) -> str:
        """`zero_bubble x2, pp 4, 8 micro-batches`."""
        each = self.pipeline.stages_per_rank
        several = f" x{each}" if each > 1 else ""
        return f"{self.pipeline.schedule}{several}, pp {self.pipeline.pp}, {self.pipeline.num_micro_batches}"


SCHEDULES: tuple[tuple[Schedule, int], ...] = (
    ("gpipe", 1), ("1f1b", 1), ("interleaved", 2), ("zero_bubble", 1), ("zero_bubble", 2),
)  # fmt: skip
"""And how many stages a rank has."""


def list_cases() -> Iterator[Case]:
    """Every schedule, over 4 ranks with as many micro-batches, twice and four times as many, and over 2 with 8."""
    for pp, numbers in ((4, (4, 8, 16)), (2, (8,))):
        for number in numbers:
            for schedule, each in SCHEDULES:
                yield Case(Pipeline(schedule, pp, each, number))


class Diary:
    """When this rank was at work."""

    def __init__(self) -> None:
        self.work: list[tuple[float, float]] = []

    def sleep(self, seconds: float) -> None:
        """Work for so long."""
        start_s = time.perf_counter()
        time.sleep(seconds)
        self.work.append((start_s, time.perf_counter()))


class Sleep(torch.autograd.Function):
    """What a stage computes, but for its results."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, diary: Diary, stages_per_rank: int) -> Tensor:
        ctx.diary, ctx.each_s, ctx.shape = diary, BACKWARD_S / stages_per_rank, x.shape
        diary.sleep(FORWARD_S / stages_per_rank)
        return torch.zeros(TOKENS, WIDTH)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        needs = select_half(Needs(True, (True,), ()))
        ctx.diary.sleep((needs.x + needs.weights[0]) * ctx.each_s / 2)
        return (grad if ctx.needs_input_grad[0] else None, torch.zeros(1), None, None)


class SleepingStage(nn.Module):
    """A stage of sleeps."""

    def __init__(self, diary: Diary, stages_per_rank: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(1))
        self.diary = diary
        self.stages_per_rank = stages_per_rank

    def forward(self, x: Tensor, size_BS: tuple[int, int]) -> Tensor:
        """`[T, D]`, or tokens -> `[T, D]`."""
        y: Tensor = Sleep.apply(x, self.weight, self.diary, self.stages_per_rank)
        return y


def run_rank(pipeline: Pipeline, rounds: int) -> list[tuple[list[tuple[float, float]], float]]:
    """Steps of one rank: when it was at work, and when the step began for all."""
    torch.set_num_threads(1)
    mesh = build_mesh(MeshShape(pp=pipeline.pp))
    diary, parts = Diary(), derive_parts(pipeline.num_stages, pipeline.num_stages)
    stream = Stream((1, TOKENS), (TOKENS, WIDTH), torch.float32, is_sharded=False)
    stages = []
    for index in list_rank_stages(pipeline.pp, pipeline.stages_per_rank, mesh.pp.rank):
        module = SleepingStage(diary, pipeline.stages_per_rank)
        stages.append(RunningStage(module, parts[index], pipeline.num_stages, mesh, stream, enter, run_stage))
    schedule = build_schedule(pipeline, stages, lambda y, _: y.sum())
    number, steps = pipeline.num_micro_batches, []
    tokens = [torch.zeros(number, TOKENS, dtype=torch.int64)] if stages[0].is_first else []
    targets = torch.zeros(number, TOKENS) if stages[-1].is_last else None
    for _ in range(WARM_UP + rounds):
        diary.work = []
        dist.barrier()
        start_s = time.perf_counter()
        schedule.step(*tokens, target=targets, losses=[], return_outputs=False)
        steps.append((diary.work, start_s))
    return steps[WARM_UP:]


def enter(micro_batch: int) -> None:
    """Sleeps are the same for all."""


def run_stage(stage: nn.Module, x: Tensor, size_BS: tuple[int, int]) -> Tensor:
    """Run a stage."""
    y: Tensor = stage(x, size_BS)
    return y


def measure(ranks: LocalRanks, case: Case, rounds: int) -> dict[str, Any]:
    """The bubble of a case, measured and on the clock."""
    pipeline = case.pipeline
    found = ranks.call(run_rank, pipeline=pipeline, rounds=rounds)
    steps = [[of_rank[index] for of_rank in found] for index in range(rounds)]
    totals, shares = [], []
    for step in steps:
        total_s = max(work[-1][1] for work, _ in step) - min(start_s for _, start_s in step)
        totals.append(total_s)
        shares.append([1 - sum(end - start for start, end in work) / total_s for work, _ in step])
    planned = simulate(pipeline, build_even_seconds(pipeline, FORWARD_S, BACKWARD_S))
    return {
        **asdict(pipeline),
        "step_s": statistics.median(totals),
        "planned_step_s": planned.total_s,
        "idle_shares": [statistics.median(of_rank) for of_rank in zip(*shares, strict=True)],
        "planned_idle_shares": planned.idle_shares,
        "bubble": statistics.median(statistics.mean(each) for each in shares),
        "bubble_range": [f(statistics.mean(each) for each in shares) for f in (min, max)],
        "planned_bubble": planned.bubble,
    }


def main() -> None:
    """Measure every case."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--out", type=Path, default=Path(__file__).with_suffix(".json"))
    options = parser.parse_args()
    results = {}
    for pp in (4, 2):
        with LocalRanks(pp, timeout_s=120, call_timeout_s=600, device_type="cpu") as ranks:
            for case in (case for case in list_cases() if case.pipeline.pp == pp):
                results[case.name] = found = measure(ranks, case, options.rounds)
                print(f"{case.name}: bubble {found['bubble']:.3f}, planned {found['planned_bubble']:.3f}", flush=True)
    record = {
        "date": datetime.now(UTC).date().isoformat(),
        "machine": describe_machine(),
        "forward_s": FORWARD_S,
        "backward_s": BACKWARD_S,
        "message_bytes": TOKENS * WIDTH * 4,
        "rounds": options.rounds,
        "results": results,
    }
    options.out.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
