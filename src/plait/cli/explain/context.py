"""What `plait explain` says of a context axis: how evenly attention is shared out, and what it moves."""

from collections.abc import Iterator
from dataclasses import asdict
from typing import Any

from plait.cli.explain.show import Part, Table
from plait.config.run import RunConfig
from plait.contract.model import ModelContract
from plait.contract.report.context import build_context_report
from plait.units import format_bytes, format_si


def describe_context(run: RunConfig, contract: ModelContract) -> Iterator[Part]:
    """A row for each rank of the axis; nothing where no sequence is cut."""
    report = build_context_report(contract)
    if report is None:
        return
    numbers = ("tokens", "score elements", "of the mean", "sent forward", "backward")
    table = Table((f"attention of a layer, cp rank ({report.method})", *numbers), right=numbers)
    mean = report.balance.total / len(report.balance.ranks)
    for work, forward, backward in zip(report.balance.ranks, report.forward_bytes, report.backward_bytes, strict=True):
        table.add_row(
            str(work.rank), str(work.tokens * contract.setting.batch), format_si(work.visible, ""),
            f"{work.visible / mean:.3f}", format_bytes(forward), format_bytes(backward),
        )  # fmt: skip
    yield table
    yield (
        f"{run.context.order} order: the busiest rank has {report.balance.imbalance:.3f} times the mean, "
        "which is how much longer attention takes than it could"
    )
    yield ""


def build_context_record(contract: ModelContract) -> dict[str, Any] | None:
    """The same for programs; None where no sequence is cut."""
    report = build_context_report(contract)
    if report is None:
        return None
    return {
        "method": report.method,
        "imbalance": report.balance.imbalance,
        "ranks": [
            {**asdict(work), "forward_sent_bytes": forward, "backward_sent_bytes": backward}
            for work, forward, backward in zip(
                report.balance.ranks, report.forward_bytes, report.backward_bytes, strict=True
            )
        ],
    }
