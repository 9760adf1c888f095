"""How a pipeline's ranks share the blocks out, and how many micro-batches each holds at a time."""

from dataclasses import dataclass, replace
from functools import lru_cache

from plait.contract.pipeline.order import Pipeline, Work
from plait.planner.plan_config import PlanConfig
from plait.sharding import share_layers

FEW_ROUNDS = 3
"""Of micro-batches, as many as ranks each: by then a pipeline is full, and every further round is like the last."""


@dataclass(frozen=True, slots=True)
class Stage:
    """What one rank of the pipeline holds.

    Attributes:
        index: its place; 0 has the embedding.
        num_layers: blocks of all its chunks together.
        is_last: whether it has the final norm, the head and the loss.
        in_flight: micro-batches whose activations it keeps at most, of all its blocks (a fraction with interleaved
            chunks).
        num_micro_batches: of a step.
        halves: of those in flight, how many have only gradients of weights left to compute.
        ends_in_flight: micro-batches of which the last keeps its logits.
    """

    index: int
    num_layers: int
    is_first: bool
    is_last: bool
    in_flight: float
    num_micro_batches: int
    halves: float = 0.0
    ends_in_flight: int = 1


def list_stages(num_layers: int, plan: PlanConfig, num_micro_batches: int) -> tuple[Stage, ...]:
    """The stages of a plan, from first to last."""
    return derive_stages(num_layers, plan.build_order(num_micro_batches))


@lru_cache(maxsize=4096)
def derive_stages(num_layers: int, pipeline: Pipeline) -> tuple[Stage, ...]:
    """The stages of a pipeline.

    Blocks that do not divide are shared out as runs share them out: `plait.sharding.share_layers`.
    """
    pp, number = pipeline.pp, pipeline.num_micro_batches
    shares = _share_layers(num_layers, pp, pipeline.num_stages)
    return tuple(
        Stage(index, layers, index == 0, index == pp - 1, in_flight, number, halves, ends)
        for index, layers in enumerate(shares)
        for in_flight, halves, ends in [_count_in_flight(pipeline, index)]
    )


def _share_layers(num_layers: int, pp: int, num_chunks: int) -> list[int]:
    """The blocks of each rank: those of all its chunks."""
    shares = share_layers(num_layers, num_chunks)
    return [sum(map(len, shares[index::pp])) for index in range(pp)]


def _count_in_flight(pipeline: Pipeline, index: int) -> tuple[float, float, int]:
    """1F1B fills the ranks behind; with chunks a rank first does all but its last one for a round of micro-batches.

    The first rank holds `pp * (1 + (pp - 1) / (pp * interleave))` micro-batches (Korthikanti et al., section 4.2). Of
    other schedules the lists of what is done are gone through.
    """
    pp, each, number = pipeline.pp, pipeline.stages_per_rank, pipeline.num_micro_batches
    match pipeline.schedule:
        case "1f1b":
            return float(min(number, pp - index)), 0.0, 1
        case "interleaved":
            chunks = 2 * (pp - index - 1) + (each - 1) * pp + 1
            return min(number * each, chunks) / each, 0.0, 1
        case _:
            few = FEW_ROUNDS * pp
            is_long = number > few and number % pp == 0
            return count_listed(replace(pipeline, num_micro_batches=few) if is_long else pipeline, index)


@lru_cache(maxsize=1024)
def count_listed(pipeline: Pipeline, index: int) -> tuple[float, float, int]:
    """What a forward keeps is there until the last half of its backward: in flight, halves, and of the last stage."""
    last = pipeline.num_stages - 1
    held = most = halves = most_halves = ends = most_ends = 0
    for action in pipeline.list_actions(index):
        match action.work:
            case Work.FORWARD:
                held += 1
                ends += action.stage == last
            case Work.INPUT_BACKWARD:
                halves += 1
            case Work.BACKWARD | Work.WEIGHT_BACKWARD:
                held -= 1
                halves -= action.work is Work.WEIGHT_BACKWARD
                ends -= action.stage == last
        most, most_halves, most_ends = max(most, held), max(most_halves, halves), max(most_ends, ends)
    each = pipeline.stages_per_rank
    return most / each, most_halves / each, max(1, most_ends)
