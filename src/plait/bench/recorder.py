"""Looking on while collective GEMMs run."""

from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from time import perf_counter, sleep

from torch import Tensor

from plait.overlap.execute import Rows
from plait.overlap.site import Pass
from plait.schedule.step import Multiply, Step
from plait.sharding import Interval

Replace = Callable[[Pass, Mapping[str, Rows]], Mapping[str, Rows]]


@dataclass(frozen=True)
class Taken:
    """A step that was taken, or, without one, what was computed between two passes. Times are those of the host."""

    step: Step | None
    start_s: float
    end_s: float


class Recorder:
    """Notes every step of every pass; `replace` puts other GEMMs in the place of those of the model.

    Attributes:
        taken: in order.
        gemm_s: by pass and GEMM, how long it took in each run, all its pieces together.
    """

    def __init__(self, replace: Replace | None = None) -> None:
        self._replace = replace
        self._pass: Pass | None = None
        self._last_s: float | None = None
        self.taken: list[Taken] = []
        self.gemm_s: defaultdict[tuple[Pass, str], list[float]] = defaultdict(list)

    def begin(self) -> None:
        """A forward begins here: what is computed before its first pass is part of it."""
        self._last_s = perf_counter()

    def enter(self, what: Pass, gemms: Mapping[str, Rows]) -> Mapping[str, Rows]:
        now_s = perf_counter()
        if self._last_s is not None:
            self.taken.append(Taken(None, self._last_s, now_s))
        self._pass = what
        for gemm in gemms:
            self.gemm_s[what, gemm].append(0.0)
        return gemms if self._replace is None else self._replace(what, gemms)

    def note(self, step: Step, start_s: float, end_s: float) -> None:
        self.taken.append(Taken(step, start_s, end_s))
        if isinstance(step, Multiply):
            assert self._pass is not None, step
            self.gemm_s[self._pass, step.gemm][-1] += end_s - start_s

    def leave(self) -> None:
        self._last_s = perf_counter()

    def end(self) -> None:
        """The backward ends here."""
        if self._last_s is not None:
            self.taken.append(Taken(None, self._last_s, perf_counter()))
        self._last_s = None


def build_sleepers(flops_per_s: float) -> Replace:
    """GEMMs that sleep as long as a device of that rate computes: cores stay free, as beside an accelerator."""

    def replace(what: Pass, gemms: Mapping[str, Rows]) -> Mapping[str, Rows]:
        sleeper = _Sleeper(what.site.flops_per_row / flops_per_s)
        return dict.fromkeys(gemms, sleeper)

    return replace


@dataclass(frozen=True)
class _Sleeper:
    row_s: float

    def __call__(self, rows: Interval, full: Tensor | None, partial: Tensor | None, *, accumulates: bool) -> None:
        sleep(len(rows) * self.row_s)
