"""The stages of a pipeline in `plait explain MODEL`: what each rank holds, sends and waits for."""

from collections.abc import Iterator
from typing import Any

from plait.cli.explain.show import Table
from plait.contract.report.pipeline import PipelineReport, RankStages
from plait.sharding import StagePart
from plait.units import format_bytes, format_flops, format_si


def build_stage_table(report: PipelineReport) -> Table:
    """The ranks of the pipeline, one below the other."""
    numbers = ("parameters", "computed", "kept at most", "sends", "sent", "idle")
    table = Table(("pp rank", "stages", *numbers), right=numbers)
    for index, rank in enumerate(report.ranks):
        table.add_row(
            str(index),
            "; ".join(map(_describe_part, rank.parts)),
            format_si(rank.num_parameters, ""),
            format_flops(rank.flops),
            format_bytes(rank.saved_bytes),
            str(rank.num_sends),
            format_bytes(rank.sent_bytes),
            f"{rank.idle_share:.1%}",
        )
    return table


def list_stage_notes(report: PipelineReport) -> Iterator[str]:
    """What idle means."""
    number = report.pipeline.num_micro_batches
    yield (
        f"{report.pipeline.schedule}: ranks wait {report.bubble:.1%} of a step of {number} micro-batch"
        f"{'es' if number > 1 else ''} (the bubble), if FLOPs take as long on every stage and messages no time"
    )


def build_stage_record(report: PipelineReport) -> dict[str, Any]:
    """For programs."""
    return {
        "schedule": report.pipeline.schedule,
        "stages_per_rank": report.pipeline.stages_per_rank,
        "bubble": report.bubble,
        "busiest": report.busiest,
        "ranks": [_build_rank_record(rank) for rank in report.ranks],
    }


def _build_rank_record(rank: RankStages) -> dict[str, Any]:
    return {
        "stages": [
            {"index": part.index, "blocks": list(part.layers), "has_embedding": part.is_first, "has_head": part.is_last}
            for part in rank.parts
        ],
        "num_parameters": rank.num_parameters,
        "flops": rank.flops,
        "saved_bytes": rank.saved_bytes,
        "num_sends": rank.num_sends,
        "sent_bytes": rank.sent_bytes,
        "idle_share": rank.idle_share,
    }


def _describe_part(part: StagePart) -> str:
    """`0: embedding, blocks 0-3`."""
    holds = ["embedding"] if part.is_first else []
    if len(part.layers) == 1:
        holds.append(f"block {part.layers[0]}")
    elif part.layers:
        holds.append(f"blocks {part.layers[0]}-{part.layers[-1]}")
    if part.is_last:
        holds.append("head")
    return f"{part.index}: {', '.join(holds)}"
