"""What every rank was doing when a group of ranks failed, put into one error.

The cause comes first: ranks that issued different collectives, that raised, that died, that never came. Ranks that only
noticed (their collective timed out, or a peer closed the connection) come last.
"""

import contextlib
import traceback
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Self

from plait.comm.trace import Noted
from plait.errors import PlaitError, TransportError, TransportTimeout

GRACE_S = 3.0
"""For the other ranks to say what they saw, once one has failed."""

_TORCH_ERRORS = frozenset(("DistBackendError", "DistNetworkError", "DistStoreError"))

_CALLERS = (str(Path(__file__).parent), contextlib.__file__)


class Outcome(StrEnum):
    """How the work of one rank ended."""

    RETURNED = "returned"
    RAISED = "raised"
    DIED = "died"
    ABSENT = "absent"
    WENT_ON = "went on"
    """It noticed nothing of the failure, as it hangs or computes, until it was ended."""


@dataclass(frozen=True)
class RankReport:
    """One rank at the time of the failure."""

    rank: int
    outcome: Outcome
    detail: str = ""
    """The error in one line, how it died, or for how long it was waited for."""
    error: PlaitError | None = None
    trace: str = ""
    """The error's traceback."""
    who: str = ""
    """`rank 1 (dp=0 tp=1)`, as soon as it knew."""
    noted: tuple[Noted, ...] = ()
    """Its latest collectives, oldest first."""

    @classmethod
    def of_error(cls, rank: int, error: BaseException) -> Self:
        """A rank that raised `error`; the frames that only called what failed are left out."""
        error = build_peer_error(error) or error
        frames = error.__traceback__
        while frames is not None and frames.tb_frame.f_code.co_filename.startswith(_CALLERS):
            frames = frames.tb_next
        is_transport = isinstance(error, TransportError)
        lines = traceback.format_exception(type(error), error, frames, chain=not is_transport)
        known = error if isinstance(error, PlaitError) else None
        detail = f"{type(error).__name__}: {error if known is None else known.message}"
        return cls(rank, Outcome.RAISED, detail, known, "".join(lines))

    @property
    def name(self) -> str:
        """The rank and, where known, its coordinates."""
        return self.who or f"rank {self.rank}"

    @property
    def is_transport(self) -> bool:
        """Whether it only noticed that others failed."""
        return isinstance(self.error, TransportError)


def build_peer_error(error: BaseException) -> TransportError | None:
    """What it means where torch raised it by itself, as it lost another rank; None of any other error.

    Parts of torch communicate without our wrapper.
    """
    text = str(error)
    is_ours = isinstance(error, PlaitError) or not isinstance(error, RuntimeError)
    if is_ours or not (type(error).__name__ in _TORCH_ERRORS or "gloo/" in text):
        return None
    kind = TransportTimeout if "timed out" in text.lower() else TransportError
    return kind(text.partition("\n")[0]).with_traceback(error.__traceback__)


def build_failure(reports: Sequence[RankReport]) -> PlaitError:
    """The error to raise for a group of ranks of which not every one returned.

    What ranks raised on purpose (a PlaitError) stays that error, said once. All else is a TransportError that shows the
    error and the last collective of every rank; and the tracebacks of those that caused it, not of those that noticed.
    """
    on_purpose = [report for report in reports if report.error is not None and not report.is_transport]
    has_crashed = any(
        report.outcome is Outcome.DIED or (report.outcome is Outcome.RAISED and report.error is None)
        for report in reports
    )
    if on_purpose and not has_crashed:
        return _merge(on_purpose, len(reports))
    mismatch = describe_mismatch(reports)
    kind, heading, culprits = _name_cause(reports, mismatch)
    rest = [report for report in reports if report not in culprits]
    rows = "".join(f"\n  {_describe(report)}" for report in [*culprits, *rest])
    told = [*culprits, *(report for report in rest if not report.is_transport)]
    tracebacks = "".join(f"\n\n{names}\n{text}" for names, text in _group_tracebacks(told))
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
    if raised:
        return TransportError, f"{_list_names(raised)} raised {raised[0].detail}", raised
    died = [report for report in reports if report.outcome is Outcome.DIED]
    if died:
        return TransportError, f"{_list_names(died)} died: {died[0].detail}", died
    waiting = [report for report in reports if report.outcome is Outcome.RAISED]
    absent = [report for report in reports if report.outcome in (Outcome.ABSENT, Outcome.RETURNED)]
    absent = absent or [report for report in reports if report.outcome is Outcome.WENT_ON]
    is_timeout = all(isinstance(report.error, TransportTimeout) for report in waiting)
    kind = TransportTimeout if is_timeout else TransportError
    if absent:
        happened = "did not come" if is_timeout else "went away"
        return kind, f"{_list_names(absent)} {happened}: {_describe_wait(waiting) or absent[0].detail}", absent
    return kind, f"{_list_names(waiting)} failed", waiting


def _describe_wait(waiting: Sequence[RankReport]) -> str:
    """The collective in which the others waited."""
    noted = [report for report in waiting if report.noted]
    return f"{_list_names(noted)} waited in {noted[0].noted[-1]}" if noted else ""


def _describe(report: RankReport) -> str:
    last = report.noted[-1] if report.noted else "not known"
    detail = f": {report.detail}" if report.detail else ""
    return f"{report.name} {report.outcome}{detail}\n      last collective {last}"


def _list_names(reports: Iterable[RankReport]) -> str:
    return ", ".join(report.name for report in reports)


def _group_tracebacks(reports: Sequence[RankReport]) -> list[tuple[str, str]]:
    """The same traceback once, under the names of all ranks that have it."""
    by_text: dict[str, list[RankReport]] = defaultdict(list)
    for report in reports:
        if report.trace:
            by_text[report.trace.rstrip()].append(report)
    return [(f"--- {_list_names(ranks)}", text) for text, ranks in by_text.items()]
