"""What a rank sends in an optimizer step of a run, told apart by what it is for."""

from dataclasses import dataclass

from plait.config.run import RunConfig
from plait.contract.axis.fsdp import count_moves
from plait.contract.collective import Collective
from plait.contract.linear import AMAX
from plait.contract.model import ModelContract
from plait.contract.op import Op
from plait.contract.pipeline.stage import StageContract
from plait.contract.pipeline.step import select_run_parts
from plait.contract.report.precision import derive_wire
from plait.contract.setting import Setting
from plait.contract.step import Messages, Move
from plait.contract.training import derive_closing_collectives, derive_history_collectives


@dataclass(frozen=True)
class Sent:
    """What a rank has to send at least in a step, by what it is: bytes."""

    numbers: float
    scales: float
    magnitudes: float
    others: float

    @property
    def total(self) -> float:
        """All of it."""
        return self.numbers + self.scales + self.magnitudes + self.others


def build_sent(run: RunConfig, contract: ModelContract, pp_rank: int = 0) -> Sent:
    """What a rank sends in collectives and rings in a step of `run`; of a pipeline the one on pp rank `pp_rank`."""
    parts = {"numbers": 0.0, "scales": 0.0, "magnitudes": 0.0, "others": 0.0}
    stages = [StageContract(contract, part) for part in select_run_parts(run, pp_rank)]
    for op in (op for stage in stages for op in stage.ops):
        for step in (*op.forward, *op.again, *op.backward):
            if isinstance(step, Move):
                for name, sent in _share_out(op, step, contract.setting).items():
                    parts[name] += sent * run.train.gradient_accumulation
            elif isinstance(step, Messages):
                parts["others"] += step.sent_bytes * run.train.gradient_accumulation
    histories = _sum_sent(derive_history_collectives(run, pp_rank))
    parts["magnitudes"] += histories
    parts["others"] += _sum_sent(derive_closing_collectives(run, contract, pp_rank)) - histories
    parts["others"] += sum(each.wire_bytes_per_rank * times for each, times in count_moves(run, contract, pp_rank))
    return Sent(**parts)


def _share_out(op: Op, move: Move, setting: Setting) -> dict[str, float]:
    sent, wire = move.collective.wire_bytes_per_rank, derive_wire(op, move, setting.dtype)
    if wire is not None:
        share = wire.scale_bytes / (wire.number_bytes + wire.scale_bytes)
        return {"numbers": sent * (1 - share), "scales": sent * share}
    return {"magnitudes" if move.tensor == AMAX else "others": sent}


def _sum_sent(collectives: tuple[Collective, ...]) -> float:
    return sum(collective.wire_bytes_per_rank for collective in collectives)
