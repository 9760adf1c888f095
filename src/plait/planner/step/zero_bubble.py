"""Zero bubble on the clock of `plait.contract.pipeline`: backward in two halves, of which the second can wait.

    forward     of a stage's blocks, on the last with half of the head's
    inputs      backward of the blocks without the GEMMs that give gradients of weights; nothing on the first stage
    weights     those GEMMs, and before them what a row linear gathers a second time; all of backward on the first stage

That collectives of either half hide beneath its GEMMs as they do in a backward that is whole is an assumption; what is
gathered a second time hides beneath nothing.
"""

from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from functools import lru_cache
from typing import NamedTuple

from plait.contract.pipeline.clock import simulate
from plait.contract.pipeline.order import Action, Pipeline, Work
from plait.contract.pipeline.stage import StageContract
from plait.planner.cost import Cost, Kind
from plait.planner.stages import FEW_ROUNDS
from plait.planner.step.block import Layers
from plait.planner.step.circumstance import Circumstance, build_cost
from plait.sharding import StagePart, share_layers

_HALVES = (Work.INPUT_BACKWARD, Work.WEIGHT_BACKWARD)


def build_again(where: Circumstance) -> list[Cost]:
    """What the contract says that two halves of a block's backward move beyond what it moves whole."""
    block = StageContract(where.contract, StagePart(1, range(1), is_first=False, is_last=False))
    moved = Counter(each for half in _HALVES for each in block.list_collectives(half))
    again = moved - Counter(block.list_collectives(Work.BACKWARD))
    return [
        build_cost(str(each), Kind.COMMUNICATION, where.estimate_move(each), collectives=(each,))
        for each in again.elements()
    ]


def time_zero_bubble(pipeline: Pipeline, layers: Layers, num_layers: int, *, again_s: float, send_s: float) -> float:
    """Seconds of a step's micro-batches.

    Once a pipeline is full, a round of as many micro-batches as ranks is like the one before, so of many rounds only
    the first ones are simulated.
    """
    seconds = list_stage_seconds(pipeline, layers, num_layers, again_s)

    def find(action: Action) -> float:
        return seconds[action.stage][action.work]

    few = FEW_ROUNDS * pipeline.pp
    left, rest = divmod(pipeline.num_micro_batches - few, pipeline.pp)
    if left <= 0 or rest:
        return simulate(pipeline, find, send_s=send_s).total_s
    less_s, few_s = (
        simulate(replace(pipeline, num_micro_batches=number), find, send_s=send_s).total_s
        for number in (few - pipeline.pp, few)
    )
    return few_s + left * (few_s - less_s)


def bound_zero_bubble(pipeline: Pipeline, layers: Layers, num_layers: int) -> float:
    """What no simulation is below, and nearly what it says: how long the last rank waits, works, and is waited for.

    Its first forward is behind those of all stages before. When it sends its last gradient on, all is done but the
    weights of as many turns as there are ranks, and the ranks before it have yet to go back.
    """
    share = _count_shares(num_layers, pipeline.pp, pipeline.num_stages)
    forward_s, backward_s, weights_s = layers.forward.seconds, layers.backward.seconds, layers.weights_s
    before_s = share.before * forward_s + layers.embedding.seconds / 2
    busy_s = pipeline.num_micro_batches * (share.own * (forward_s + backward_s) + layers.head.seconds)
    left_s = pipeline.pp * max(share.most * weights_s, share.last * weights_s + layers.head_weights_s)
    behind_s = share.between * (backward_s - weights_s) + share.first * backward_s + layers.embedding.seconds / 2
    return before_s + busy_s - left_s + behind_s


class _Shares(NamedTuple):
    """Blocks of the first turn's stages before the last rank, of them between the ends, and of the last rank."""

    first: int
    before: int
    between: int
    own: int
    most: int
    last: int


@lru_cache(maxsize=4096)
def _count_shares(num_layers: int, pp: int, num_stages: int) -> _Shares:
    counts = [len(part) for part in share_layers(num_layers, num_stages)]
    own = counts[pp - 1 :: pp]
    return _Shares(counts[0], sum(counts[: pp - 1]), sum(counts[1 : pp - 1]), sum(own), max(own), own[-1])


def list_stage_seconds(
    pipeline: Pipeline, layers: Layers, num_layers: int, again_s: float
) -> list[Mapping[Work, float]]:
    """What each stage takes for one micro-batch, by what is done."""
    forward_s, backward_s = layers.forward.seconds, layers.backward.seconds
    weights_s, parts = layers.weights_s, share_layers(num_layers, pipeline.num_stages)
    listed: list[dict[Work, float]] = [
        {
            Work.FORWARD: len(part) * forward_s,
            Work.INPUT_BACKWARD: len(part) * (backward_s - weights_s),
            Work.WEIGHT_BACKWARD: len(part) * (weights_s + again_s),
        }
        for part in parts
    ]
    first, last = listed[0], listed[-1]
    first[Work.INPUT_BACKWARD] = 0.0
    first[Work.WEIGHT_BACKWARD] = len(parts[0]) * backward_s
    for work in (Work.FORWARD, Work.WEIGHT_BACKWARD):
        first[work] += layers.embedding.seconds / 2
    head_weights_s = layers.head_weights_s
    for work in (Work.FORWARD, Work.INPUT_BACKWARD):
        last[work] += (layers.head.seconds - head_weights_s) / 2
    last[Work.WEIGHT_BACKWARD] += head_weights_s
    return list(listed)
