"""The simulated clock of `plait.schedule.simulate` for ranks that are all alike: one program stands for all.

Where every rank owns as many rows, all ranks do the same at the same time. What a rank sends in a round is then on its
way exactly as long as what it receives in that round, so one rank's program can be timed alone, in a hundredth of the
time that all take. A test compares the two.
"""

from plait.errors import ScheduleError
from plait.schedule.costs import Costs
from plait.schedule.step import Add, Flush, Multiply, Program, Recv, Send, Wait


def time_symmetric(program: Program, costs: Costs) -> float:
    """How long `program` takes if all ranks run its like, beside a core that nothing disturbs.

    Raises:
        ScheduleError: a program that waits for what it has yet to send, as then all do.
    """
    now_s = link_s = 0.0
    row_s = {tensor: row_bytes / costs.bytes_per_s for tensor, row_bytes in costs.row_bytes.items()}
    gemm_s: dict[tuple[str, int], float] = {}
    left_s: dict[int, float] = {}
    last_s: dict[str, float] = {}
    for step in program.steps:
        match step:
            case Multiply(gemm):
                # Pieces are mostly alike, and a law is asked a hundred times in a program of many ranks.
                key = (gemm, len(step.rows))
                if key not in gemm_s:
                    gemm_s[key] = costs.seconds_of(step)
                now_s += gemm_s[key]
            case Add():
                now_s += costs.seconds_of(step)
            case Recv():
                now_s += costs.step_s
            case Send(message):
                now_s += costs.step_s
                link_s = max(now_s, link_s) + row_s[message.tensor] * len(message.piece.rows)
                left_s[message.round] = last_s[message.tensor] = link_s
            case Wait(message):
                if message.round not in left_s:
                    raise ScheduleError(f"{program.method} schedule waits for {message} before its like is sent")
                now_s = max(now_s, left_s[message.round] + costs.latency_s) + costs.step_s
            case Flush(tensor):
                now_s = max(now_s, last_s.get(tensor, 0.0))
            case _:
                now_s += costs.collect_s[step.tensor]
    return now_s
