"""A one-off measurement of what computing and moving cost between the ranks of one axis.

What is timed is what will run: programs, by `plait.overlap.execute`. All ranks measure at the same time, as they will
compute at the same time, and the slowest counts, so all of them get the same rates.
"""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from statistics import median
from time import perf_counter, process_time

import torch
from torch import Tensor

from plait.comm import collectives, trace
from plait.comm.agree import share_over
from plait.comm.mesh import Axis
from plait.overlap.choice import LIBRARY
from plait.overlap.execute import Addends, Rows, execute
from plait.overlap.machine.cache import cache_folder, load_rates, save_rates
from plait.overlap.machine.key import build_key, count_cores, name_host
from plait.overlap.machine.rates import GemmRates, LibraryRates, LinkRates, Rates
from plait.overlap.transport.base import Transport
from plait.schedule.program import build_program
from plait.schedule.step import Flow, Method
from plait.schedule.work import Work
from plait.sharding import Interval, Kind, build_split

_FEW_ROWS, _NUM_PIECES = 64, 4
_MANY_ROWS = _FEW_ROWS * _NUM_PIECES
_MIN_GEMM_WIDTH, _MAX_GEMM_WIDTH = 256, 4096
_GEMM_S = 2e-3
"""How long a GEMM of many rows is to take at least: shorter ones are measured too coarsely."""

_WIDTH = 1024
"""Features of what is moved."""
_TRANSFER_S = 4e-3
"""How long a transfer is to take at least, unless it has so many bytes."""
_LESS = 4
"""How many times as much a transfer is as the one that it is compared with."""
_SMALLEST_SUM = 0.02
"""Of a transfer, what it takes at least to add what has come."""
_MIN_BYTES, _MAX_BYTES = 1 << 16, 1 << 22
_MAX_ACCELERATOR_BYTES = 1 << 26

_MANY_CALLS = 32
_CALLS_S = 4e-3
"""How long calls are repeated at most, unless one takes longer."""
_MANY_CHUNKS = 8
_REPEATS = 5
_BUDGET_S = 5.0
"""After so long nothing is repeated any more."""
_QUIET = 0.85
"""Of the cores that ranks can have at best, what they must get for their rates to be kept."""

_SMALLEST_PART = 0.25
"""Of a measurement, what is left of it at least when another is taken off: noise may make the smaller one larger."""


def find_rates(transports: Mapping[str, Transport], axis: Axis, *, device: torch.device, dtype: torch.dtype) -> Rates:
    """The rates of these ranks, the same on each: those measured before, as the first rank kept them, or new ones.

    Every rank of the axis has to call it. What was measured beside other work is not kept.
    """
    with trace.aside():
        hosts = share_over(name_host(), axis, device)
        key = build_key(axis, transports, hosts, device=device, dtype=dtype)
        kept = load_rates(cache_folder(), key) if axis.rank == 0 else None
        rates = share_over(kept, axis, device)[0]
        if rates is None:
            rates, share = measure_rates(transports, axis, device=device, dtype=dtype)
            most_on_a_host = max(Counter(hosts).values())
            own_share = min(1.0, count_cores() / (most_on_a_host * torch.get_num_threads()))
            if axis.rank == 0 and share > _QUIET * own_share:
                save_rates(cache_folder(), key, rates)
    return rates


def measure_rates(
    transports: Mapping[str, Transport], axis: Axis, *, device: torch.device, dtype: torch.dtype
) -> tuple[Rates, float]:
    """Measure on every rank of the axis, in a few seconds.

    Beside the rates it says which share of the cores that it computes on a rank got at least.

    `transports` are those that can serve, the library's among them. Nothing of it is in any trace.
    """
    with trace.aside(), torch.no_grad():
        probe = _Probe(axis, device, dtype)
        gemm = probe.measure_gemm()
        library = probe.measure_library(transports[LIBRARY])
        links = [probe.measure_link(name, each) for name, each in transports.items() if name != LIBRARY]
    return Rates(gemm, library, tuple(links)), probe.measure_share()


class _Probe:
    def __init__(self, axis: Axis, device: torch.device, dtype: torch.dtype) -> None:
        self.axis, self.device, self.dtype = axis, device, dtype
        self.busy: Callable[[], object] = lambda: None
        """A GEMM of many rows."""
        self.busy_s = 0.0
        self.row_bytes = _WIDTH * dtype.itemsize
        self._spent_s = 0.0

    def time(self, act: Callable[[], object], *, repeats: int = _REPEATS) -> float:
        """A good run, the best but one: others on the machine make runs longer, never shorter."""
        return _take_good([times[0] for times in self.time_rounds([act], repeats=repeats)])

    def time_each(self, *acts: Callable[[], object]) -> list[list[float]]:
        """As `time_rounds` of short acts, each done many times: that ranks do not begin at one moment is no latency."""
        once_s = self.time_rounds([lambda: [act() for act in acts]], repeats=2)
        times = max(1, min(_MANY_CALLS, int(len(acts) * _CALLS_S / min(row[0] for row in once_s))))
        rounds = self.time_rounds([partial(_repeat, act, times) for act in acts])
        return [[time_s / times for time_s in row] for row in rounds]

    def time_rounds(self, acts: Sequence[Callable[[], object]], *, repeats: int = _REPEATS) -> list[list[float]]:
        """How long each of several things takes the slowest rank, round by round; all ranks start each together."""
        began_s = perf_counter()
        for act in acts:
            act()
        rounds: list[list[float]] = []
        for _ in range(repeats if self._spent_s < _BUDGET_S else 1):
            rounds.append([])
            for act in acts:
                self._agree([0.0])
                start_s = perf_counter()
                act()
                self._finish()
                rounds[-1].append(perf_counter() - start_s)
        *times, spent_s = self._agree([*(time_s for row in rounds for time_s in row), perf_counter() - began_s])
        self._spent_s += spent_s
        return [times[start : start + len(acts)] for start in range(0, len(times), len(acts))]

    def _agree(self, values: list[float]) -> list[float]:
        """The most of any rank, one by one."""
        own = torch.tensor(values, dtype=torch.float64, device=self.device)
        most: list[float] = collectives.all_reduce(own, self.axis, op="max", label="probe").tolist()
        return most

    def _finish(self) -> None:
        """Wait for what the device still does."""
        if self.device.type != "cpu":
            torch.accelerator.synchronize(self.device)

    def measure_gemm(self) -> GemmRates:
        """A GEMM of many rows, and the same in pieces of few: what that takes longer is the price of a piece."""
        small = self._build_gemm(1, 8)
        call_s = self.time(partial(_repeat, small, _MANY_CALLS)) / _MANY_CALLS
        width = _MIN_GEMM_WIDTH
        while True:
            self.busy, few = self._build_gemm(_MANY_ROWS, width), self._build_gemm(_FEW_ROWS, width)
            rounds = self.time_rounds([self.busy, partial(_repeat, few, _NUM_PIECES)])
            self.busy_s = _take_good([row[0] for row in rounds])
            if self.busy_s >= _GEMM_S or width >= _MAX_GEMM_WIDTH:
                break
            width *= 2
        row_s = (self.busy_s - call_s) / _MANY_ROWS
        piece_s = median(row[1] - row[0] for row in rounds) / (_NUM_PIECES - 1) - call_s
        return GemmRates(call_s, 2 * width * width / row_s, min(max(0.0, piece_s / row_s), float(_FEW_ROWS)))

    def measure_share(self) -> float:
        """Which share of its cores the rank gets that gets least, while all of them compute."""
        self._agree([0.0])
        start_s, start_cpu_s = perf_counter(), process_time()
        self._compute(_REPEATS)
        self._finish()
        got = (process_time() - start_cpu_s) / (perf_counter() - start_s) / torch.get_num_threads()
        return 1 - self._agree([1 - got])[0]

    def _build_gemm(self, num_rows: int, width: int) -> Callable[[], Tensor]:
        x, w = (torch.ones(rows, width, dtype=self.dtype, device=self.device) for rows in (num_rows, width))
        y = torch.empty(num_rows, width, dtype=self.dtype, device=self.device)
        return lambda: torch.mm(x, w.T, out=y)

    def measure_library(self, transport: Transport) -> LibraryRates:
        """Whole collectives, of few and of many bytes."""
        kinds = (Kind.ALL_GATHER, Kind.REDUCE_SCATTER, Kind.ALL_REDUCE)
        calls = self.time_each(*(self._build_exchange(transport, kind, 1, 0) for kind in kinds))
        call_s = max(_take_good(times_s) for times_s in zip(*calls, strict=True))
        num_rows = self._find_size(transport, call_s, 0)
        num_bytes = num_rows * self.axis.degree * self.row_bytes
        rates = []
        for kind in kinds:
            sizes = [self._build_exchange(transport, kind, rows, 0) for rows in (num_rows, num_rows // _LESS)]
            rates.append(_fit_rate(num_bytes, self.time_rounds(sizes)))
        return LibraryRates(call_s, *rates)

    def measure_link(self, name: str, transport: Transport) -> LinkRates:
        """Messages of few bytes, as one and as many, and with sums; a transfer of many bytes, with a GEMM or a sum."""
        others = self.axis.degree - 1
        more = _MANY_CHUNKS - 1
        calls = self.time_each(
            *(
                self._build_exchange(transport, kind, _MANY_CHUNKS, chunks)
                for kind in (Kind.ALL_GATHER, Kind.REDUCE_SCATTER)
                for chunks in (1, _MANY_CHUNKS)
            )
        )
        few_s = _take_good([row[0] for row in calls])
        pieces_s = max(0.0, median(row[1] - row[0] for row in calls))
        sums_s = max(0.0, median(row[3] - row[2] for row in calls) - pieces_s)
        step_s = pieces_s / (more * others * 3)
        num_rows = self._find_size(transport, few_s, 1)
        num_bytes = num_rows * others * self.row_bytes
        gather = self._build_exchange(transport, Kind.ALL_GATHER, num_rows, 1)
        less = self._build_exchange(transport, Kind.ALL_GATHER, num_rows // _LESS, 1)
        reduce = self._build_exchange(transport, Kind.REDUCE_SCATTER, num_rows, 1)
        repeats = max(1, round(self.time(gather, repeats=2) / self.busy_s))
        beside = self._build_exchange(transport, Kind.ALL_GATHER, num_rows, 1, repeats=repeats)
        # Either transfer of the two that are compared comes behind another, which leaves a token bucket empty.
        rounds = self.time_rounds([gather, reduce, less, lambda: self._compute(repeats), beside])
        gather_s, reduce_s, *_ = (_take_good(times_s) for times_s in zip(*rounds, strict=True))
        return LinkRates(
            name,
            step_s=step_s,
            latency_s=max(0.0, few_s - others * 3 * step_s),
            bytes_per_s=_fit_rate(num_bytes, [(row[0], row[2]) for row in rounds]),
            add_s=sums_s / more,
            add_bytes_per_s=num_bytes / max(reduce_s - gather_s, _SMALLEST_SUM * gather_s),
            contention=median(_measure_contention(row[0], row[3], row[4]) for row in rounds),
        )

    def _find_size(self, transport: Transport, few_s: float, chunks: int) -> int:
        """Rows of a rank of which a part takes long enough to be measured beside what few rows take."""
        most_bytes = _MAX_BYTES if self.device.type == "cpu" else _MAX_ACCELERATOR_BYTES
        num_rows = _MIN_BYTES // self.row_bytes
        while num_rows * self.row_bytes * _LESS < most_bytes:
            run = self._build_exchange(transport, Kind.ALL_GATHER, num_rows, chunks)
            if self.time(run, repeats=2) >= max(_TRANSFER_S, few_s / _SMALLEST_PART):
                break
            num_rows *= _LESS
        return num_rows * _LESS

    def _build_exchange(
        self, transport: Transport, kind: Kind, num_rows: int, chunks: int, *, repeats: int = 0
    ) -> Callable[[], object]:
        """Move `num_rows` of each rank, beside nothing or so many GEMMs; 0 chunks is the whole collective."""
        degree, rank = self.axis.degree, self.axis.rank
        split = build_split(num_rows * degree, degree)
        flow = Flow("x", kind, split)
        is_gather = kind is Kind.ALL_GATHER
        work = Work(
            split.size,
            gather=flow if is_gather else None,
            reduce=None if is_gather else flow,
            rowwise="forward",
            rowwise_reads_gather=is_gather,
        )
        program = build_program(work, Method.DIRECT if chunks else Method.NONE, max(1, chunks), rank)
        shard = torch.zeros(num_rows, _WIDTH, dtype=self.dtype, device=self.device) if is_gather else None
        addends = None if is_gather else Addends(_WIDTH, self.dtype, self.device)
        gemms: Mapping[str, Rows] = {"forward": _Beside(split.intervals[rank], lambda: self._compute(repeats))}
        return lambda: execute(program, transport, gemms=gemms, shard=shard, addends=addends, label="probe")

    def _compute(self, repeats: int) -> None:
        _repeat(self.busy, repeats)


def _repeat(act: Callable[[], object], times: int) -> None:
    for _ in range(times):
        act()


def _take_good(runs_s: Sequence[float]) -> float:
    """The best but one."""
    return sorted(runs_s)[min(1, len(runs_s) - 1)]


def _measure_contention(transfer_s: float, compute_s: float, both_s: float) -> float:
    """Of the shorter of the two, what is not hidden beside the longer."""
    return min(max(0.0, (both_s - max(transfer_s, compute_s)) / min(transfer_s, compute_s)), 1.0)


def _fit_rate(num_bytes: int, rounds: Sequence[Sequence[float]]) -> float:
    """By how much longer it takes than a part of it: what a link lets through at once, as many do, is no rate."""
    whole_s, part_s = (_take_good([row[place] for row in rounds]) for place in range(2))
    return num_bytes * (1 - 1 / _LESS) / max(whole_s - part_s, _SMALLEST_PART * whole_s)


class _Beside:
    """Stands in for the GEMM of a program: computes once while the rows of others are on their way."""

    def __init__(self, own: Interval, compute: Callable[[], object]) -> None:
        self._own, self._compute = own, compute
        self._is_clean = False

    def __call__(self, rows: Interval, full: Tensor | None, partial: Tensor | None, *, accumulates: bool) -> None:
        if partial is not None and not self._is_clean:
            partial.zero_()  # what memory happens to hold may be numbers that are slow to add
            self._is_clean = rows == self._own
        if rows == self._own:
            self._compute()
