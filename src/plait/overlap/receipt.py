"""The receipt: for every collective GEMM what was asked, what runs, why, what it sends, how long it is waited for."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import groupby
from typing import Any

from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.segment import Segment
from rich.table import Table
from rich.text import Text

from plait.contract.collective import Collective
from plait.errors import ConfigError
from plait.overlap.choice import Choice
from plait.overlap.site import Precision, Site
from plait.schedule.step import Method, Program
from plait.schedule.work import Operation, Work
from plait.sharding import Kind
from plait.units import format_bytes, format_seconds

_HEADINGS = ("pass", "tokens", "runs", "sends", "predicted", "waited", "why")

_NOT_WAITED = "waited: empty where a library or one fused operation waits on the device, which its host does not see"


@dataclass
class Line:
    """One pass through one linear or gather group.

    Attributes:
        num_rows: tokens of all ranks.
        num_messages: messages this rank sends, or whole collectives it takes part in.
        sent_bytes: what this rank sends, of a collective what it has to send at least.
        precision: how the linears are quantized, if they are, and what multiplies.
        waited_s: what has been read of `measured_exposed_s`.
        num_measured: in how many runs it was measured.
        unread: how to learn what another device waited.
    """

    label: str
    operation: Operation
    num_rows: int
    choice: Choice
    num_messages: int
    sent_bytes: int
    precision: Precision | None = None
    waited_s: float = 0.0
    num_measured: int = 0
    unread: list[Callable[[], float]] = field(default_factory=list, compare=False)

    def add_measurement(self, exposed_s: float) -> None:
        """Note how long the host waited for others in one run."""
        self.waited_s += exposed_s
        self.num_measured += 1

    def add_stalls(self, read_total_s: Callable[[], float]) -> None:
        """Note a run on another device, which can say how long it waited once it has come so far."""
        self.unread.append(read_total_s)
        self.num_measured += 1

    @property
    def measured_exposed_s(self) -> float:
        """How long this rank waited for others, in all runs together that were measured; the device is waited for."""
        self.read_stalls()
        return self.waited_s

    def read_stalls(self) -> None:
        """Add what another device waited; it is waited for."""
        while self.unread:
            self.waited_s += self.unread.pop()()

    @property
    def what_runs(self) -> tuple[Any, ...]:
        """All that decides how fast it is, apart from the machine."""
        return (self.operation, self.num_rows, self.choice.way, self.precision)

    def to_json(self) -> dict[str, Any]:
        """For files and programs."""
        choice = self.choice
        return {
            "label": self.label,
            "operation": str(self.operation),
            "num_rows": self.num_rows,
            "asked": choice.asked,
            "is_as_asked": choice.is_as_asked,
            "overlaps": choice.overlaps,
            "method": str(choice.method),
            "chunks": choice.chunks,
            "transport": choice.transport,
            "reason": choice.reason,
            "num_messages": self.num_messages,
            "sent_bytes": self.sent_bytes,
            "recipe": "none" if self.precision is None else self.precision.name,
            "kernel": None if self.precision is None else self.precision.kernel,
            "kernel_reason": None if self.precision is None else self.precision.reason,
            "predicted_s": choice.predicted_s,
            "predicted_serial_s": choice.predicted_serial_s,
            "predicted_exposed_s": choice.predicted_exposed_s,
            "measured_exposed_s": self.measured_exposed_s if self.num_measured else None,
            "num_measured": self.num_measured,
        }


@dataclass
class Receipt:
    """What one rank ran, a line for each pass that it came by.

    Attributes:
        asked: what the config asks for.
        note: what there is to say instead of lines.
        num_dropped: lines of passes that were forgotten, of which too many differed.
    """

    lines: list[Line] = field(default_factory=list)
    asked: str = ""
    note: str | None = None
    num_dropped: int = 0

    def add_line(self, operation: Operation, site: Site, work: Work, choice: Choice, program: Program) -> Line:
        """Note what was chosen for a pass; what its runs cost is to be added to the line."""
        num_messages, sent_bytes = _count_sent(site, work, program)
        line = Line(site.label, operation, work.num_rows, choice, num_messages, sent_bytes, site.precision)
        self.lines.append(line)
        self.asked = choice.asked
        return line

    def remove_line(self, line: Line) -> None:
        """Leave out a pass that something else runs now."""
        del self.lines[next(place for place, each in enumerate(self.lines) if each is line)]

    def drop_line(self, line: Line) -> None:
        """Leave out a pass that was forgotten."""
        self.remove_line(line)
        self.num_dropped += 1

    def to_json(self) -> dict[str, Any]:
        """For files and programs."""
        lines = [line.to_json() for line in self.lines]
        return {"asked": self.asked, "note": self.note, "num_dropped": self.num_dropped, "lines": lines}


def build_empty_receipt(asked: str, precision: Precision | None = None) -> Receipt:
    """The receipt of a model on one rank, whose linears may be quantized."""
    note = "there is nothing to overlap on one rank (parallel.tp = 1)"
    return Receipt(asked=asked, note=note if precision is None else f"{note}; {_describe_kernel(precision)}")


def check_strict(receipt: Receipt) -> None:
    """Compare what runs with what was asked for.

    Raises:
        ConfigError: lists every GEMM for which they differ.
    """
    differing = Receipt([line for line in receipt.lines if not line.choice.is_as_asked])
    problems = [
        f'{fold.label}, {fold.first.operation}: asked for "{fold.first.choice.asked}", '
        f"but what can run is {fold.first.choice.way}: {fold.first.choice.reason}"
        for fold in fold_lines(differing)
    ]
    if problems:
        raise ConfigError.from_problems(
            "overlap.strict = true", problems, hint="ask for what can run, or set overlap.strict=false"
        )


def check_comparable(one: Receipt, other: Receipt) -> None:
    """Refuse to compare a run with itself under another name.

    Raises:
        ConfigError: everything ran alike in both.
    """
    runs, other_runs = ({(line.label, *line.what_runs) for line in each.lines} for each in (one, other))
    if runs != other_runs:
        return
    ran = sorted({str(line.choice.way) for line in one.lines}) or ["nothing that could overlap"]
    raise ConfigError(
        f"these two runs cannot be compared, they did the same: {' and '.join(ran)} "
        f"(asked for: {one.asked} and {other.asked})",
        hint="the receipts say why; overlap.strict=true refuses to run what was not asked for",
    )


@dataclass(frozen=True)
class Fold:
    """Lines that differ in the number of their layer only."""

    label: str
    lines: tuple[Line, ...]

    @property
    def first(self) -> Line:
        """One that stands for all."""
        return self.lines[0]

    @property
    def measured_exposed_s(self) -> float | None:
        """Mean over all runs."""
        runs = sum(line.num_measured for line in self.lines)
        return sum(line.measured_exposed_s for line in self.lines) / runs if runs else None


def fold_lines(receipt: Receipt) -> Iterator[Fold]:
    """Lines that are alike as one, `layers.0-31.mlp.w_up`, those of one place together."""
    by_place: dict[str, dict[tuple[Any, ...], list[tuple[int | None, Line]]]] = {}
    for line in receipt.lines:
        pattern, layer = _split_label(line.label)
        key = (*line.what_runs, line.choice.reason, line.choice.is_as_asked, line.sent_bytes)
        by_place.setdefault(pattern, {}).setdefault(key, []).append((layer, line))
    for pattern, alike in by_place.items():
        for members in alike.values():
            layers = sorted({layer for layer, _ in members if layer is not None})
            yield Fold(pattern.replace("*", _format_ranges(layers), 1), tuple(line for _, line in members))


def build_receipt_table(receipt: Receipt) -> RenderableType:
    """The receipt for a reader; layers that are alike are one row."""
    if not receipt.lines:
        return Text(f"overlap = {receipt.asked}: {receipt.note or 'no collective GEMM has run'}")
    if receipt.asked == "disabled":
        said = Text("overlap = disabled: every collective is the library's, and nothing is computed beside it")
        return Group(said, *_list_kernels(receipt))
    folds = list(fold_lines(receipt))
    reasons = list(dict.fromkeys(fold.first.choice.reason for fold in folds))
    table = Table(box=None, pad_edge=False, padding=(0, 1, 0, 0), header_style="bold")
    for heading in _HEADINGS:
        table.add_column(heading, justify="left" if heading in ("pass", "runs") else "right", no_wrap=True)
    for fold in folds:
        line, choice = fold.first, fold.first.choice
        table.add_row(
            line.operation.rpartition(" ")[2], str(line.num_rows), str(choice.way), _format_sent(line),
            _format_time(choice.predicted_exposed_s), _format_time(fold.measured_exposed_s),
            Text(f"({reasons.index(choice.reason) + 1})", style="" if choice.is_as_asked else "bold red"),
        )  # fmt: skip
    notes = [Text(f"({number}) {reason}", style="dim") for number, reason in enumerate(reasons, 1)]
    notes += _list_kernels(receipt)
    if any(fold.measured_exposed_s is None for fold in folds):
        notes.append(Text(_NOT_WAITED, style="dim"))
    if receipt.num_dropped:
        notes.append(Text(f"{receipt.num_dropped} older passes are not listed: too many differ", style="dim"))
    title = Text(f"overlap = {receipt.asked}; each pass waits for others, also for late ones")
    return Group(title, _Grouped(table, tuple(fold.label for fold in folds)), *notes)


@dataclass(frozen=True)
class _Grouped:
    """A table whose rows of one GEMM stand under its name, which no column has to be as wide as."""

    table: Table
    labels: tuple[str, ...]

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        header, *rows = console.render_lines(self.table, options, pad=False)
        above: str | None = None
        for label, row in zip(("", *self.labels), (header, *rows), strict=True):
            if label not in ("", above):
                yield Text(label, style="bold")
            above = label
            yield from (Segment("  "), *row, Segment.line())


def _format_sent(line: Line) -> str:
    """`3 x 1.2 MiB mxfp8`."""
    recipe = "" if line.precision is None else f" {line.precision.name}"
    return f"{line.num_messages} x {format_bytes(line.sent_bytes / max(1, line.num_messages))}{recipe}"


def _list_kernels(receipt: Receipt) -> list[Text]:
    """What multiplies what is quantized, and why."""
    kinds = dict.fromkeys(line.precision for line in receipt.lines)
    return [Text(_describe_kernel(kind), style="dim") for kind in kinds if kind is not None]


def _describe_kernel(precision: Precision) -> str:
    """`mxfp8: emulated, float32 accumulator (cpu has no kernel for e4m3 x e4m3 in blocks of 32)`."""
    return f"{precision.name}: {precision.kernel} ({precision.reason})"


def _format_time(value_s: float | None) -> str:
    return "" if value_s is None else format_seconds(value_s)


def _split_label(label: str) -> tuple[str, int | None]:
    """`layers.3.mlp.w_up` -> `layers.*.mlp.w_up`, 3."""
    parts = label.split(".")
    place = next((place for place, part in enumerate(parts) if part.isdecimal()), None)
    if place is None:
        return label, None
    return ".".join([*parts[:place], "*", *parts[place + 1 :]]), int(parts[place])


def _format_ranges(numbers: list[int]) -> str:
    """`0-3,5`."""
    runs = [[number for _, number in run] for _, run in groupby(enumerate(numbers), key=lambda each: each[1] - each[0])]
    return ",".join(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs)


def _count_sent(site: Site, work: Work, program: Program) -> tuple[int, int]:
    gathered_row_bytes = site.gathered_row_bytes(work)
    if program.method is not Method.NONE:
        gathered = None if work.gather is None else work.gather.tensor
        messages = program.messages_sent
        return len(messages), sum(
            len(each.piece.rows) * (gathered_row_bytes if each.tensor == gathered else site.row_bytes(each.content))
            for each in messages
        )
    collectives = [
        Collective(flow.kind, "tp", flow.split.degree, (work.num_rows, gathered_row_bytes), "uint8")
        if flow.kind is Kind.ALL_GATHER
        else Collective(flow.kind, "tp", flow.split.degree, (work.num_rows, site.width), site.sum_dtype)
        for flow in work.flows
    ]
    return len(collectives), round(sum(each.wire_bytes_per_rank for each in collectives))
