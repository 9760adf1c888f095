"""Micro-batches through the stages of a pipeline: the slowest stage sets the pace, the others' time is the bubble.

    step = m * slowest + (all stages - slowest) / interleave + sends

With stages that are all alike this is the usual `(m + (p - 1) / v) * stage`.
"""

from plait.contract.model import ModelContract
from plait.planner.cost import Cost, Kind, build_leaf, join
from plait.planner.laws import estimate_collective, estimate_p2p
from plait.planner.stages import Stage
from plait.planner.step.block import Layers
from plait.planner.step.circumstance import Circumstance, build_cost


def build_pipeline(
    layers: Layers, stages: tuple[Stage, ...], where: Circumstance, num_micro_batches: int
) -> list[Cost]:
    """Everything that happens for micro-batches: compute and communication of the slowest stage, sends, bubble."""
    slowest = max(stages, key=lambda stage: _count_seconds(layers, stage))
    sends = _build_sends(layers, slowest, where)
    busy = join(
        "micro-batches",
        [*_list_parts(layers, slowest), *sends],
        times=num_micro_batches,
        note=f"stage {slowest.index} of {len(stages)}: {slowest.num_layers} blocks",
    )
    return [busy, *_build_bubble(layers, stages, slowest, where)] if len(stages) > 1 else [busy]


def _list_parts(layers: Layers, stage: Stage) -> list[Cost]:
    return [
        *([layers.embedding] if stage.is_first else []),
        join("blocks", [layers.forward, layers.backward], times=stage.num_layers),
        *([layers.head] if stage.is_last else []),
    ]


def _count_seconds(layers: Layers, stage: Stage) -> float:
    return sum(part.seconds for part in _list_parts(layers, stage))


def _build_bubble(layers: Layers, stages: tuple[Stage, ...], slowest: Stage, where: Circumstance) -> list[Cost]:
    interleave = where.plan.interleave
    sends_s = sum(send.seconds for send in _build_sends(layers, slowest, where))
    others = [stage for stage in stages if stage is not slowest]
    idle_s = (sum(_count_seconds(layers, stage) for stage in others) + len(others) * sends_s) / interleave
    block = layers.block
    leaf = Cost(
        "bubble",
        Kind.BUBBLE,
        idle_s,
        idle_s * block.low_s / block.seconds,
        idle_s * block.high_s / block.seconds,
        constants=block.list_constants(),
        note=f"{len(others)} other stages, {interleave} chunks a rank",
    )
    return [leaf]


def _build_sends(layers: Layers, slowest: Stage, where: Circumstance) -> list[Cost]:
    """Of one micro-batch: the stream to the next chunk and its gradient to the one before, for each chunk of a rank.

    Ranks that all hold the same tokens send a part each and gather them behind (scatter/gather, Narayanan et al. 4.1).
    With several chunks a rank has another to compute meanwhile; with one it waits for what is sent.
    """
    plan = where.plan
    if plan.pp == 1:
        return []
    size = _count_stream_bytes(where.contract)
    is_whole = plan.tp > 1 and not plan.sequence_parallel
    is_local = where.place("pp").is_local
    one = estimate_p2p(where.hardware, size / plan.tp if is_whole else size, local=is_local)
    send = build_cost("send", Kind.COMMUNICATION, one)
    if plan.overlaps_sends and plan.interleave > 1:
        chunk_s = _count_seconds(layers, slowest) / (2 * plan.interleave)
        exposed_s = max(0.0, one.seconds - chunk_s)
        send = build_leaf(
            "send", Kind.COMMUNICATION, exposed_s, one.uncertainty, constants=one.constants,
            hidden_s=one.seconds - exposed_s,
        )  # fmt: skip
    parts = [send]
    if is_whole:
        gather = estimate_collective(where.hardware, "all_gather", size, plan.tp, placement=where.place("tp"))
        parts.append(build_cost("gather", Kind.COMMUNICATION, gather))
    return [join("sends", parts, times=2 * plan.interleave)]


def _count_stream_bytes(contract: ModelContract) -> int:
    """The residual stream between two blocks: what the first norm reads."""
    return contract.block[0].saved[0].num_bytes
