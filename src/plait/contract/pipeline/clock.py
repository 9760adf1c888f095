"""A pipeline's schedule on a clock: when each rank works, and for how long it waits."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache

from plait.contract.pipeline.order import Action, Pipeline, Work

Seconds = Callable[[Action], float]
"""How long an action takes."""


@dataclass(frozen=True)
class Times:
    """A step on the clock.

    Attributes:
        total_s: from the first action of any rank to the end of the last.
        busy_s: of each rank.
    """

    total_s: float
    busy_s: tuple[float, ...]

    @property
    def idle_shares(self) -> tuple[float, ...]:
        """Of each rank, the part of the step in which it waits."""
        return tuple(1 - busy_s / self.total_s for busy_s in self.busy_s)

    @property
    def bubble(self) -> float:
        """The part of the time of all ranks in which they wait."""
        return sum(self.idle_shares) / len(self.busy_s)


def simulate(pipeline: Pipeline, seconds: Seconds, *, send_s: float = 0.0) -> Times:
    """Let every rank begin each of its actions as soon as it is free and has what the action needs.

    `send_s` is how long anything is on its way; a rank goes on meanwhile.
    """
    free_s, busy_s, ends_s = [0.0] * pipeline.pp, list[float]([0] * pipeline.pp), list[float]()
    for rank, action, need, hops in _list_due(pipeline):
        begin_s, taken_s = free_s[rank], seconds(action)
        if need >= 0 and (ready_s := ends_s[need] + hops * send_s) > begin_s:
            begin_s = ready_s
        free_s[rank] = end_s = begin_s + taken_s
        busy_s[rank] += taken_s
        ends_s.append(end_s)
    return Times(max(free_s), tuple(busy_s))


@lru_cache(maxsize=128)
def _list_due(pipeline: Pipeline) -> tuple[tuple[int, Action, int, int], ...]:
    """All actions in an order in which they can be done, however long they take.

    Each with its rank, the place here of what has to be over before (-1: nothing), and 1 where that is another rank's.
    """
    waiting = {rank: list(reversed(pipeline.list_actions(rank))) for rank in range(pipeline.pp)}
    places: dict[Action, int] = {}
    due: list[tuple[int, Action, int, int]] = []
    while any(waiting.values()):
        before = len(due)
        for rank, actions in waiting.items():
            while actions:
                need, hops = _find_need(pipeline, actions[-1])
                if need is not None and need not in places:
                    break
                action = actions.pop()
                places[action] = len(due)
                due.append((rank, action, -1 if need is None else places[need], hops))
        assert len(due) > before, f"{pipeline}: ranks wait for each other before {waiting}"
    return tuple(due)


def _find_need(pipeline: Pipeline, action: Action) -> tuple[Action | None, int]:
    """What has to be over before, and whether it comes from another rank."""
    stage, micro_batch = action.stage, action.micro_batch
    match action.work:
        case Work.FORWARD:
            return (Action(stage - 1, Work.FORWARD, micro_batch), 1) if stage else (None, 0)
        case Work.WEIGHT_BACKWARD:
            return Action(stage, Work.INPUT_BACKWARD, micro_batch), 0
        case _ if stage + 1 < pipeline.num_stages:
            return Action(stage + 1, action.work, micro_batch), 1
        case _:
            return Action(stage, Work.FORWARD, micro_batch), 0


def build_even_seconds(pipeline: Pipeline, forward_s: float, backward_s: float) -> Seconds:
    """Stages that are all alike: of a model that takes a rank so long for a micro-batch, each way.

    The gradients of inputs take half of backward, those of weights the other; of the first stage, which has no input to
    send a gradient for, all of it is the second half.
    """
    each = pipeline.stages_per_rank

    def find(action: Action) -> float:
        match action.work:
            case Work.FORWARD:
                return forward_s / each
            case Work.BACKWARD:
                return backward_s / each
            case Work.INPUT_BACKWARD:
                return 0.0 if action.stage == 0 else backward_s / 2 / each
            case Work.WEIGHT_BACKWARD:
                return backward_s / each if action.stage == 0 else backward_s / 2 / each

    return find
