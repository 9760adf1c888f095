"""In which order a rank of a pipeline works: the schedules of torch.distributed.pipelining as data.

torch's classes run them. Some have such lists of their own, which are compared when a pipeline is built.
The trace of a run is compared with what is derived from ours.
"""

from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from enum import StrEnum
from functools import lru_cache

from plait.config.axis.pipeline import Schedule
from plait.sharding import list_rank_stages


class Work(StrEnum):
    """What is done for a micro-batch; the letters are torch's."""

    FORWARD = "F"
    BACKWARD = "B"
    INPUT_BACKWARD = "I"
    WEIGHT_BACKWARD = "W"


@dataclass(frozen=True, slots=True)
class Action:
    """One micro-batch through one stage, one way; as torch writes it, `0F3` is the forward of micro-batch 3."""

    stage: int
    work: Work
    micro_batch: int

    def __str__(self) -> str:
        return f"{self.stage}{self.work}{self.micro_batch}"


@dataclass(frozen=True, slots=True)
class Pipeline:
    """A pipeline's schedule and how large it is: `num_micro_batches` a step through `pp * stages_per_rank` stages."""

    schedule: Schedule
    pp: int
    stages_per_rank: int
    num_micro_batches: int

    @property
    def num_stages(self) -> int:
        """Of all ranks."""
        return self.pp * self.stages_per_rank

    def list_actions(self, rank: int) -> tuple[Action, ...]:
        """What pp rank `rank` does in a step, in order."""
        return _list_actions(self, rank)


@lru_cache(maxsize=512)
def _list_actions(pipeline: Pipeline, rank: int) -> tuple[Action, ...]:
    return tuple(_BUILDERS[pipeline.schedule](pipeline, rank))


def _build_gpipe(pipeline: Pipeline, rank: int) -> Iterator[Action]:
    """All forwards, then all backwards (Huang et al., arXiv:1811.06965)."""
    for work in (Work.FORWARD, Work.BACKWARD):
        yield from (Action(rank, work, index) for index in range(pipeline.num_micro_batches))


def _build_1f1b(pipeline: Pipeline, rank: int) -> Iterator[Action]:
    """Forwards until the last stage is reached, then one backward and one forward in turn (arXiv:2006.09503)."""
    number = pipeline.num_micro_batches
    ahead = min(number, pipeline.pp - rank)
    yield from (Action(rank, Work.FORWARD, index) for index in range(ahead))
    for index in range(number):
        yield Action(rank, Work.BACKWARD, index)
        if index + ahead < number:
            yield Action(rank, Work.FORWARD, index + ahead)


def _build_interleaved(pipeline: Pipeline, rank: int) -> Iterator[Action]:
    """Stages of a rank in turn, for a round of micro-batches each (Narayanan et al., arXiv:2104.04473)."""
    turns = _Turns(pipeline, rank)
    ahead = turns.count_ahead(hops=2)
    for index in range(turns.total + ahead):
        if index < turns.total:
            yield turns.take(Work.FORWARD, index)
        if index >= ahead:
            yield turns.take(Work.BACKWARD, index - ahead)


def _build_zero_bubble(pipeline: Pipeline, rank: int) -> Iterator[Action]:
    """As interleaved; gradients of weights wait, for as many turns as the rank is far back (ZB1P, arXiv:2401.10241)."""
    turns = _Turns(pipeline, rank)
    ahead = turns.count_ahead(hops=1)
    for index in range(turns.total + ahead):
        if index < turns.total:
            yield turns.take(Work.FORWARD, index)
        if index >= ahead:
            yield turns.take(Work.INPUT_BACKWARD, index - ahead)
            if index - ahead >= rank:
                yield turns.take(Work.WEIGHT_BACKWARD, index - ahead - rank)
    for index in range(max(0, turns.total - rank), turns.total):
        yield turns.take(Work.WEIGHT_BACKWARD, index)


class _Turns:
    """Which stage of a rank has its turn, and with which of its micro-batches."""

    def __init__(self, pipeline: Pipeline, rank: int) -> None:
        self._stages = list_rank_stages(pipeline.pp, pipeline.stages_per_rank, rank)
        self._behind = pipeline.pp - 1 - rank
        number = pipeline.num_micro_batches
        self._round = number // max(1, number // pipeline.pp)
        self._done: Counter[tuple[Work, int]] = Counter()
        self.total = number * len(self._stages)

    def count_ahead(self, hops: int) -> int:
        """Forwards before the first backward: a round of all stages but the last, and `hops` for each rank behind."""
        return min((len(self._stages) - 1) * self._round + hops * self._behind, self.total)

    def take(self, work: Work, turn: int) -> Action:
        """The next micro-batch of the stage whose turn number `turn` is; backward the last stage begins."""
        place = turn // self._round % len(self._stages)
        stage = self._stages[place if work is Work.FORWARD else -1 - place]
        micro_batch = self._done[work, stage]
        self._done[work, stage] += 1
        return Action(stage, work, micro_batch)


_BUILDERS: dict[Schedule, Callable[[Pipeline, int], Iterator[Action]]] = {
    "gpipe": _build_gpipe,
    "1f1b": _build_1f1b,
    "interleaved": _build_interleaved,
    "zero_bubble": _build_zero_bubble,
}
