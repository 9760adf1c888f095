"""What is promised of schedules is what torch's classes do."""

import pytest
from torch.distributed.pipelining.schedules import ScheduleInterleaved1F1B, ScheduleInterleavedZeroBubble

from plait.config.axis.pipeline import find_refusal
from plait.contract.pipeline.order import Pipeline


class NamedStage:
    """As much of a stage as a schedule asks when it is built."""

    def __init__(self, index: int, pp: int, each: int) -> None:
        self.stage_index, self.num_stages = index, pp * each
        self.group_size, self.group_rank = pp, index % pp
        self.submod = None
        self.is_last = index == self.num_stages - 1


@pytest.mark.parametrize("number", range(1, 13))
@pytest.mark.parametrize("each", [1, 2, 3])
@pytest.mark.parametrize("pp", [2, 3, 4])
@pytest.mark.parametrize(
    ("schedule", "torch_class"),
    [("interleaved", ScheduleInterleaved1F1B), ("zero_bubble", ScheduleInterleavedZeroBubble)],
)
def test_order_is_that_of_torch(schedule, torch_class, pp, each, number):
    stages = [NamedStage(turn * pp, pp, each) for turn in range(each)]
    if find_refusal(schedule, pp, number) is not None:
        with pytest.raises(ValueError, match="requires the number of microbatches to be a multiple"):
            torch_class(stages, number)
        return
    pipeline, order = Pipeline(schedule, pp, each, number), torch_class(stages, number).pipeline_order
    for rank in range(pp):
        assert [str(action) for action in pipeline.list_actions(rank)] == [str(a) for a in order[rank] if a is not None]
