"""Micro-batches through the stages of a pipeline: the slowest stage sets the pace, the others' time is the bubble.

    step = m * slowest + (all stages - slowest) / interleave + sends

With stages that are all alike this is the usual `(m + (p - 1) / v) * stage`, which is what the clock of
`plait.contract.pipeline` says of 1f1b and of interleaved stages. Of zero bubble that clock is asked: `zero_bubble.py`.
"""

from collections.abc import Sequence

from plait.contract.model import ModelContract
from plait.planner.cost import Cost, Kind, build_leaf, join
from plait.planner.laws import Estimate, estimate_collective, estimate_p2p
from plait.planner.stages import Stage
from plait.planner.step.block import Layers
from plait.planner.step.circumstance import Circumstance, build_cost
from plait.planner.step.zero_bubble import build_again, time_zero_bubble
from plait.sharding import share_layers


def build_pipeline(layers: Layers, stages: tuple[Stage, ...], where: Circumstance) -> list[Cost]:
    """Everything that happens for micro-batches: compute and communication of the slowest stage, sends, bubble."""
    if where.plan.schedule == "zero_bubble":
        return _build_zero_bubble(layers, stages, where)
    slowest = max(stages, key=lambda stage: _count_seconds(layers, stage))
    busy = _build_busy([*_list_parts(layers, slowest), *_build_sends(layers, slowest, where)], slowest, stages)
    return [busy, _build_bubble(layers, stages, slowest, where)] if len(stages) > 1 else [busy]


def _build_zero_bubble(layers: Layers, stages: tuple[Stage, ...], where: Circumstance) -> list[Cost]:
    """What a block gathers twice is waited for; what is sent is only as far as a rank has nothing else to do."""
    again, num_layers = build_again(where), sum(stage.num_layers for stage in stages)
    first = len(share_layers(num_layers, len(stages) * where.plan.interleave)[0])
    listed = {
        stage: [
            *_list_parts(layers, stage),
            join("gathered twice", again, times=stage.num_layers - first * stage.is_first),
        ]
        for stage in stages
    }
    slowest = max(stages, key=lambda stage: sum(part.seconds for part in listed[stage]))
    busy = _build_busy(listed[slowest], slowest, stages)
    pipeline = where.plan.build_order(slowest.num_micro_batches)
    send_s = _estimate_send(where).seconds + sum(part.seconds for part in _build_gathers(where))
    again_s = sum(part.seconds for part in again)
    total_s = time_zero_bubble(pipeline, layers, num_layers, again_s=again_s, send_s=send_s)
    note = f"zero bubble, {where.plan.interleave} chunks a rank: gradients of weights are computed where a rank waits"
    return [busy, _build_idle(layers, max(0.0, total_s - busy.seconds), note)]


def _build_busy(parts: list[Cost], slowest: Stage, stages: Sequence[Stage]) -> Cost:
    note = f"stage {slowest.index} of {len(stages)}: {slowest.num_layers} blocks"
    return join("micro-batches", parts, times=slowest.num_micro_batches, note=note)


def _list_parts(layers: Layers, stage: Stage) -> list[Cost]:
    return [
        *([layers.embedding] if stage.is_first else []),
        join("blocks", [layers.forward, layers.backward], times=stage.num_layers),
        *([layers.head] if stage.is_last else []),
    ]


def _count_seconds(layers: Layers, stage: Stage) -> float:
    return sum(part.seconds for part in _list_parts(layers, stage))


def _build_bubble(layers: Layers, stages: tuple[Stage, ...], slowest: Stage, where: Circumstance) -> Cost:
    interleave = where.plan.interleave
    sends_s = sum(send.seconds for send in _build_sends(layers, slowest, where))
    others = [stage for stage in stages if stage is not slowest]
    idle_s = (sum(_count_seconds(layers, stage) for stage in others) + len(others) * sends_s) / interleave
    return _build_idle(layers, idle_s, f"{len(others)} other stages, {interleave} chunks a rank")


def _build_idle(layers: Layers, idle_s: float, note: str) -> Cost:
    """As uncertain as a block is."""
    block = layers.block
    return Cost(
        "bubble",
        Kind.BUBBLE,
        idle_s,
        idle_s * block.low_s / block.seconds,
        idle_s * block.high_s / block.seconds,
        constants=block.list_constants(),
        note=note,
    )


def _build_sends(layers: Layers, slowest: Stage, where: Circumstance) -> list[Cost]:
    """Of one micro-batch: the stream to the next chunk and its gradient to the one before, for each chunk of a rank.

    With several chunks a rank has another to compute meanwhile; with one it waits for what is sent.
    """
    plan = where.plan
    if plan.pp == 1:
        return []
    one = _estimate_send(where)
    send = build_cost("send", Kind.COMMUNICATION, one)
    if plan.overlaps_sends and plan.interleave > 1:
        chunk_s = _count_seconds(layers, slowest) / (2 * plan.interleave)
        exposed_s = max(0.0, one.seconds - chunk_s)
        send = build_leaf(
            "send", Kind.COMMUNICATION, exposed_s, one.uncertainty, constants=one.constants,
            hidden_s=one.seconds - exposed_s,
        )  # fmt: skip
    return [join("sends", [send, *_build_gathers(where)], times=2 * plan.interleave)]


def _estimate_send(where: Circumstance) -> Estimate:
    """Ranks that all hold the same tokens send a part each and gather them behind (Narayanan et al., section 4.1)."""
    size = _count_stream_bytes(where.contract)
    part = size / where.plan.tp if _sends_parts(where) else size
    return estimate_p2p(where.hardware, part, local=where.place("pp").is_local)


def _build_gathers(where: Circumstance) -> list[Cost]:
    if not _sends_parts(where):
        return []
    size, tp = _count_stream_bytes(where.contract), where.plan.tp
    gather = estimate_collective(where.hardware, "all_gather", size, tp, placement=where.place("tp"))
    return [build_cost("gather", Kind.COMMUNICATION, gather)]


def _sends_parts(where: Circumstance) -> bool:
    return where.plan.tp > 1 and not where.plan.sequence_parallel


def _count_stream_bytes(contract: ModelContract) -> int:
    """The residual stream between two blocks: what the first norm reads."""
    return contract.block[0].saved[0].num_bytes
