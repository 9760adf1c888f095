"""torch's schedules, told which micro-batches there are; what they raise is made plain."""

from collections.abc import Callable, Sequence
from typing import Protocol

from torch import Tensor
from torch.distributed.pipelining.schedules import (
    Schedule1F1B,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
    ScheduleInterleavedZeroBubble,
)

from plait.comm.collectives import build_transport_error
from plait.comm.failure import build_peer_error
from plait.contract.pipeline.order import Pipeline
from plait.errors import ContractError, PlaitError
from plait.parallel.pipeline.stage import RunningStage

LossFunction = Callable[[Tensor, Tensor], Tensor]
"""Logits `[T, V/tp]` and targets `[T]` of a micro-batch -> the sum of its losses."""

_SINGLE = {"1f1b": Schedule1F1B, "gpipe": ScheduleGPipe}
_SEVERAL = {"interleaved": ScheduleInterleaved1F1B, "zero_bubble": ScheduleInterleavedZeroBubble}


class TorchSchedule(Protocol):
    """What torch's schedules have in common."""

    def step(
        self, *args: Tensor, target: Tensor | None = None, losses: list[Tensor] | None = None, return_outputs: bool
    ) -> object:
        """Send all micro-batches through the stages of this rank, and back."""


def build_schedule(pipeline: Pipeline, stages: Sequence[RunningStage], compute_loss: LossFunction) -> TorchSchedule:
    """The schedule of `pipeline` over the stages of this rank; gradients are summed, as losses are.

    Raises:
        ContractError: this torch would work in another order than `Pipeline.list_actions` says.
    """
    number = pipeline.num_micro_batches
    if pipeline.schedule in _SINGLE:
        (stage,) = stages
        single: TorchSchedule = _SINGLE[pipeline.schedule](stage, number, loss_fn=compute_loss, scale_grads=False)
        return single
    schedule = _SEVERAL[pipeline.schedule](list(stages), number, loss_fn=compute_loss, scale_grads=False)
    for rank, actions in schedule.pipeline_order.items():
        planned = [str(action) for action in pipeline.list_actions(rank)]
        found = [str(action) for action in actions if action is not None]
        if planned != found:
            raise ContractError(
                f"{type(schedule).__name__} of this torch does {' '.join(found)} on pp rank {rank}, and what was "
                f"planned is {' '.join(planned)}",
                hint='use pipeline.schedule = "1f1b"',
            )
    several: TorchSchedule = schedule
    return several


def explain_failure(error: RuntimeError) -> BaseException:
    """What made a schedule fail: what a stage raised, which torch may put into an error of its own, or a lost stage."""
    within: BaseException | None = error
    while within is not None:
        if isinstance(within, PlaitError):
            return within
        within = within.__cause__
    cause = error if error.__cause__ is None else error.__cause__
    if isinstance(cause, RuntimeError) and build_peer_error(cause) is not None:
        return build_transport_error(cause)
    return cause
