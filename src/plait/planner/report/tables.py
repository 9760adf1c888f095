"""Tables of the page: ranked plans, refused ones, and where the constants come from. All text in them is escaped."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from html import escape

from plait.planner.hardware import Constant
from plait.planner.plan import PlanReport, Refusal
from plait.planner.prediction import Prediction
from plait.planner.report.words import describe_range, format_constant
from plait.units import format_bytes, format_seconds

_Cell = tuple[str, float | str]
"""What is read, and what it is sorted by."""

_NUMBER, _PROSE = ' class="number"', ' class="prose"'
_LONG = 45
"""Letters of a cell that is broken into lines."""

_MOST_ROWS = 200
"""Of ranked plans; a page with all of thousands would open slowly on a phone."""


@dataclass(frozen=True, slots=True)
class _Column:
    """A heading, what is read in a cell, and by what it is sorted."""

    heading: str
    tell: Callable[[Prediction], str]
    sort_by: Callable[[Prediction], float | str]


def _setting(heading: str, read: Callable[[Prediction], float | str]) -> _Column:
    return _Column(heading, lambda each: str(read(each)), read)


_DEGREES = (
    _setting("tp", lambda each: each.plan.tp),
    _setting("pp", lambda each: each.plan.pp),
    _setting("dp", lambda each: each.plan.dp),
)

_RESULTS = (
    _Column("step", lambda each: format_seconds(each.step_s), lambda each: each.step_s),
    _Column("between", lambda each: " - ".join(map(format_seconds, each.interval_s)), lambda each: each.interval_s[1]),
    _Column("MFU", lambda each: f"{each.mfu:.1%}", lambda each: each.mfu),
    _Column("memory", lambda each: format_bytes(each.memory.total_bytes), lambda each: each.memory.total_bytes),
    _Column("verdict", lambda each: str(each.memory.verdict), lambda each: str(each.memory.verdict)),
)

_MORE = (
    _Column("tokens/s", lambda each: f"{each.tokens_per_s:,.0f}", lambda each: each.tokens_per_s),
    _Column("binds", lambda each: f"{each.binding.term} ({each.binding.share:.0%})", lambda each: each.binding.term),
    _Column(
        "tokens/s a device", lambda each: f"{each.tokens_per_s_per_device:,.0f}",
        lambda each: each.tokens_per_s_per_device,
    ),
)  # fmt: skip

_SETTINGS = (
    _setting("cp", lambda each: each.plan.cp),
    _setting("cp by", lambda each: each.plan.context_method.replace("_", " ") if each.plan.cp > 1 else "-"),
    _setting("chunks a rank", lambda each: each.plan.interleave),
    _setting("schedule", lambda each: each.plan.schedule.replace("_", " ")),
    _setting("dp shards", lambda each: each.plan.dp_shard),
    _setting("sharded", lambda each: each.plan.sharded),
    _setting("micro-batch", lambda each: each.plan.micro_batch),
    _setting("recompute", lambda each: each.plan.recompute),
    _setting("overlap", lambda each: each.plan.overlap.policy),
    _setting("sequence parallel", lambda each: "yes" if each.plan.sequence_parallel else "no"),
    _setting("quantization", lambda each: each.plan.quantization),
    _setting("loss", lambda each: each.plan.loss.replace("_", " ")),
    _setting("compute dtype", lambda each: each.plan.precision.compute),
)


def build_ranked_table(report: PlanReport) -> str:
    """The fastest plans; what is the same in all of them is said once, above."""
    plans = report.ranked or (report.best,)
    shown = plans[:_MOST_ROWS]
    varying = [column for column in _SETTINGS if len({column.sort_by(each) for each in shown}) > 1]
    same = [f"{column.heading} {column.tell(shown[0])}" for column in _SETTINGS if column not in varying]
    columns = [*_DEGREES, *_RESULTS, *varying, *_MORE]
    heads = ["#", *(column.heading for column in columns)]
    rows: list[list[_Cell]] = [
        [(str(place), place), *((column.tell(each), column.sort_by(each)) for column in columns)]
        for place, each in enumerate(shown, 1)
    ]
    count = f"The first {len(shown)} of {len(plans)} plans. " if len(plans) > len(shown) else ""
    words = f"{count}The same in all: {', '.join(same)}." if same else count
    return f"<p>{escape(words)} Press a heading to sort.</p>{_build_table(heads, rows)}"


def build_refused_table(refused: Sequence[Refusal]) -> str:
    """What cannot be, and why."""
    rows: list[list[_Cell]] = [
        [(each.what, each.what), (each.reason, each.reason), _count(each.num_plans)] for each in refused
    ]
    return _build_table(["what", "why not", "plans"], rows)


def _count(number: int) -> _Cell:
    return (f"{number:,}" if number else "not listed", number)


def build_constants_table(constants: Iterable[Constant]) -> str:
    """What a prediction depends on, each once."""
    rows: list[list[_Cell]] = [
        [
            (each.name, each.name),
            (format_constant(each.value, each.unit), each.value),
            (describe_range(each), each.low or 0.0),
            (f"{each.uncertainty:.0%}", each.uncertainty),
            (str(each.provenance), str(each.provenance)),
            (each.confidence, each.confidence),
            (each.source + (f" ({each.note})" if each.note else ""), each.source),
            (each.date, each.date),
        ]
        for each in {constant.name: constant for constant in constants}.values()
    ]
    heads = ["constant", "value", "seen", "uncertainty", "provenance", "confidence", "source", "date"]
    return _build_table(heads, rows)


def _build_table(heads: Sequence[str], rows: Sequence[Sequence[_Cell]]) -> str:
    """Cells as words and what they are sorted by; numbers to the right."""
    numbers = [rows != [] and not isinstance(key, str) for _, key in (rows[0] if rows else ())]
    head = "".join(
        f'<th scope="col" aria-sort="none"{_NUMBER * is_number}><button type="button">{escape(name)}</button></th>'
        for name, is_number in zip(heads, numbers, strict=True)
    )
    body = "".join(f"<tr>{''.join(map(_build_cell, row))}</tr>" for row in rows)
    return (
        f'<div class="wide"><table class="sortable"><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>'
    )


def _build_cell(cell: _Cell) -> str:
    words, key = cell
    kind = _NUMBER if not isinstance(key, str) else _PROSE if len(words) > _LONG else ""
    return f'<td{kind} data-sort="{escape(str(key))}">{escape(words)}</td>'
