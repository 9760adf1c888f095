"""What every rank was doing when a group of ranks failed, put into one error.

The cause comes first: ranks that issued different collectives, ranks that raised, ranks that died, ranks that never came.
Ranks that only noticed (their collective timed out, or a peer closed the connection) come last.
"""

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import StrEnum

from plait.comm.trace import Noted
from plait.errors import PlaitError, TransportError, TransportTimeout


class Outcome(StrEnum):
    """How the work of one rank ended."""

    RETURNED = "returned"
    RAISED = "raised"
    DIED = "died"
    ABSENT = "absent"


@dataclass(frozen=True)
class RankReport:
    """One rank at the time of the failure."""

    rank: int
    outcome: Outcome
    detail: str = ""
    """The error in one line, how it died, or for how long it was waited for."""
    error: PlaitError | None = None
    traceback: str = ""
    who: str = ""
    """`rank 1 (dp=0 tp=1)`, as soon as it knew."""
    noted: tuple[Noted, ...] = ()
    """Its latest collectives, oldest first."""

    @property
    def name(self) -> str:
        """The rank and, where known, its coordinates."""
        return self.who or f"rank {self.rank}"

    @property
    def is_transport(self) -> bool:
        """Whether it only noticed that others failed."""
        return isinstance(self.error, TransportError)


def build_failure(reports: Sequence[RankReport]) -> PlaitError:
    """The error to raise for a group of ranks of which not every one returned.

    What ranks raised on purpose (a PlaitError) stays that error, said once. All else is a TransportError that shows every
    rank's error and last collective.
    """
    on_purpose = [report for report in reports if report.error is not None and not report.is_transport]
    has_crashed = any(
        report.outcome is Outcome.DIED or (report.outcome is Outcome.RAISED and report.error is None) for report in reports
    )
    if on_purpose and not has_crashed:
        return _merge(on_purpose, len(reports))
    mismatch = describe_mismatch(reports)
    kind, heading, culprits = _name_cause(reports, mismatch)
    rest = [report for report in reports if report not in culprits]
    rows = "".join(f"\n  {_describe(report)}" for report in [*culprits, *rest])
    tracebacks = "".join(f"\n\n{names}\n{text}" for names, text in _group_tracebacks([*culprits, *rest]))
    return kind(f"{heading}{rows}{tracebacks}")


def describe_mismatch(reports: Sequence[RankReport]) -> tuple[str, list[RankReport]] | None:
    """The first collective that ranks of one group issued differently, and those ranks; None when they agree."""
    issued: dict[tuple[int, str, int], dict[str, list[RankReport]]] = defaultdict(lambda: defaultdict(list))
    for report in reports:
        for noted in report.noted:
            issued[noted.number, noted.axis, noted.first_rank][noted.text].append(report)
    for (number, axis, _), versions in sorted(issued.items()):
        if len(versions) > 1:
            listed = "; ".join(f"{_list_names(ranks)}: {text}" for text, ranks in versions.items())
            rarest_first = sorted(versions.values(), key=len)
            return (
                f"ranks issued different collectives: #{number} on {axis} is, on {listed}",
                [report for ranks in rarest_first for report in ranks],
            )
    return None


def _merge(reports: Sequence[RankReport], num_ranks: int) -> PlaitError:
    """One error for what one or several ranks raised on purpose."""
    first = reports[0].error
    assert first is not None, reports
    by_message: dict[str, list[RankReport]] = defaultdict(list)
    for report in reports:
        assert report.error is not None, report
        by_message[report.error.message].append(report)
    if len(by_message) == 1 and len(reports) == num_ranks:
        return first
    listed = "\n".join(f"{_list_names(raised)}: {message}" for message, raised in by_message.items())
    return type(first)(listed, hint=first.hint)


def _name_cause(
    reports: Sequence[RankReport], mismatch: tuple[str, list[RankReport]] | None
) -> tuple[type[TransportError], str, list[RankReport]]:
    """The type of the error, its first line, and the ranks that caused it."""
    if mismatch is not None:
        return TransportError, *mismatch
    raised = [report for report in reports if report.outcome is Outcome.RAISED and not report.is_transport]
    died = [report for report in reports if report.outcome is Outcome.DIED]
    absent = [report for report in reports if report.outcome is Outcome.ABSENT]
    if raised:
        return TransportError, f"{_list_names(raised)} raised {raised[0].detail}", raised
    if died:
        return TransportError, f"{_list_names(died)} died: {died[0].detail}", died
    if absent:
        return TransportTimeout, f"{_list_names(absent)} did not come: {_missed(absent, reports)}", absent
    noticed = [report for report in reports if report.outcome is Outcome.RAISED]
    is_timeout = all(isinstance(report.error, TransportTimeout) for report in noticed)
    return TransportTimeout if is_timeout else TransportError, f"{_list_names(noticed)} failed", noticed


def _missed(absent: Sequence[RankReport], reports: Sequence[RankReport]) -> str:
    """The collective in which the others waited for the absent ranks."""
    waiting = [report for report in reports if report.outcome is Outcome.RAISED and report.noted]
    if not waiting:
        return absent[0].detail
    return f"{_list_names(waiting)} waited in {waiting[0].noted[-1]}"


def _describe(report: RankReport) -> str:
    last = report.noted[-1] if report.noted else "none"
    detail = f": {report.detail}" if report.detail else ""
    return f"{report.name} {report.outcome}{detail}\n      last collective {last}"


def _list_names(reports: Iterable[RankReport]) -> str:
    return ", ".join(report.name for report in reports)


def _group_tracebacks(reports: Sequence[RankReport]) -> list[tuple[str, str]]:
    """The same traceback once, under the names of all ranks that have it."""
    by_text: dict[str, list[RankReport]] = defaultdict(list)
    for report in reports:
        if report.traceback:
            by_text[report.traceback.rstrip()].append(report)
    return [(f"--- {_list_names(ranks)}", text) for text, ranks in by_text.items()]
