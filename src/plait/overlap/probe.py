"""A one-off measurement of what computing and moving cost between the ranks of one axis.

What is timed is what will run: programs, by `plait.overlap.execute`. All ranks measure at the same time, as they will
compute at the same time, and the slowest counts, so all of them get the same rates.
"""

import os
import platform
import socket
from collections.abc import Callable, Mapping
from pathlib import Path
from time import perf_counter

import torch
from torch import Tensor

from plait.comm import collectives, trace
from plait.comm.agree import share_over
from plait.comm.mesh import Axis
from plait.overlap.cache import Key, cache_folder, load_rates, save_rates
from plait.overlap.choice import LIBRARY
from plait.overlap.execute import Addends, Rows, execute
from plait.overlap.rates import GemmRates, LibraryRates, LinkRates, Rates
from plait.overlap.transport.base import Transport
from plait.schedule.program import build_program
from plait.schedule.step import Flow, Method
from plait.schedule.work import Work
from plait.sharding import Interval, Kind, build_split

_FEW_ROWS, _MANY_ROWS = 32, 256
_MAX_GEMM_WIDTH = 4096
_GEMM_S = 2e-3
"""How long a GEMM of many rows is to take at least: shorter ones are measured too coarsely."""

_WIDTH = 1024
"""Features of what is moved."""
_TRANSFER_S = 4e-3
"""How long a transfer is to take at least, unless it has so many bytes."""
_SMALLEST_SUM = 0.02
"""Of a transfer, what it takes at least to add what has come."""
_MIN_BYTES, _MAX_BYTES = 1 << 16, 1 << 22
_MAX_ACCELERATOR_BYTES = 1 << 26

_MANY_CALLS = 32
_MANY_CHUNKS = 8
_REPEATS = 5

_SMALLEST_PART = 0.25
"""Of a measurement, what is left of it at least when another is taken off: noise may make the smaller one larger."""


def find_rates(transports: Mapping[str, Transport], axis: Axis, *, device: torch.device, dtype: torch.dtype) -> Rates:
    """The rates of these ranks, the same on each: those measured before, as the first rank kept them, or new ones.

    Every rank of the axis has to call it.
    """
    with trace.aside():
        hosts = sorted(set(share_over(f"{socket.gethostname()} {_name_network()}", axis, device)))
        key = _build_key(transports, axis, device, dtype, hosts)
        kept = load_rates(cache_folder(), key) if axis.rank == 0 else None
        rates = share_over(kept, axis, device)[0]
        if rates is None:
            rates = measure_rates(transports, axis, device=device, dtype=dtype)
            if axis.rank == 0:
                save_rates(cache_folder(), key, rates)
    return rates


def _build_key(
    transports: Mapping[str, Transport], axis: Axis, device: torch.device, dtype: torch.dtype, hosts: list[str]
) -> Key:
    return {
        "hosts": hosts,
        "processor": _name_processor(),
        "num_cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "device": "cpu" if device.type == "cpu" else torch.cuda.get_device_name(device),
        "torch": torch.__version__,
        "num_threads": torch.get_num_threads(),
        "num_ranks": axis.degree,
        "dtype": str(dtype).removeprefix("torch."),
        "transports": sorted(transports),
    }


def _name_processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor()


def _name_network() -> str:
    """A container or namespace has a network of its own, whatever its host is called."""
    try:
        return str(Path("/proc/self/ns/net").readlink())
    except OSError:
        return ""


def measure_rates(
    transports: Mapping[str, Transport], axis: Axis, *, device: torch.device, dtype: torch.dtype
) -> Rates:
    """Measure on every rank of the axis, in less than two seconds where CPUs are no slower than usual.

    `transports` are those that can serve, the library's among them. Nothing of it is in any trace.
    """
    with trace.aside(), torch.no_grad():
        probe = _Probe(axis, device, dtype)
        gemm = probe.measure_gemm()
        library = probe.measure_library(transports[LIBRARY])
        links = [probe.measure_link(name, each) for name, each in transports.items() if name != LIBRARY]
    return Rates(gemm, library, tuple(links))


class _Probe:
    def __init__(self, axis: Axis, device: torch.device, dtype: torch.dtype) -> None:
        self.axis, self.device, self.dtype = axis, device, dtype
        self.busy: Callable[[], object] = lambda: None
        """A GEMM of many rows."""
        self.busy_s = 0.0
        self.row_bytes = _WIDTH * dtype.itemsize

    def time(self, act: Callable[[], object], *, repeats: int = _REPEATS) -> float:
        """A good run of the slowest rank, the best but one: others on the machine make runs longer, never shorter.

        All ranks start together.
        """
        act()
        runs = []
        for _ in range(repeats):
            self._agree(0.0)
            start_s = perf_counter()
            act()
            self._finish()
            runs.append(perf_counter() - start_s)
        return self._agree(sorted(runs)[min(1, len(runs) - 1)])

    def _agree(self, value: float) -> float:
        """The most of any rank."""
        own = torch.tensor([value], dtype=torch.float64, device=self.device)
        most = float(collectives.all_reduce(own, self.axis, op="max", label="probe"))
        self._finish()
        return most

    def _finish(self) -> None:
        """Wait for what the device still does."""
        if self.device.type != "cpu":
            torch.accelerator.synchronize(self.device)

    def measure_gemm(self) -> GemmRates:
        """A line through GEMMs of few and of many rows; what it has at no rows is the price of a piece."""
        small = self._build_gemm(1, 8)
        call_s = self.time(lambda: [small() for _ in range(_MANY_CALLS)]) / _MANY_CALLS
        width = 256
        while True:
            self.busy = self._build_gemm(_MANY_ROWS, width)
            self.busy_s = self.time(self.busy)
            if self.busy_s >= _GEMM_S or width >= _MAX_GEMM_WIDTH:
                break
            width *= 2
        few_s = self.time(self._build_gemm(_FEW_ROWS, width))
        row_s = _subtract(self.busy_s, few_s) / (_MANY_ROWS - _FEW_ROWS)
        extra_rows = (few_s - call_s) / row_s - _FEW_ROWS
        return GemmRates(call_s, 2 * width * width / row_s, min(max(0.0, extra_rows), float(_FEW_ROWS)))

    def _build_gemm(self, num_rows: int, width: int) -> Callable[[], Tensor]:
        x, w = (torch.ones(rows, width, dtype=self.dtype, device=self.device) for rows in (num_rows, width))
        y = torch.empty(num_rows, width, dtype=self.dtype, device=self.device)
        return lambda: torch.mm(x, w.T, out=y)

    def measure_library(self, transport: Transport) -> LibraryRates:
        """Whole collectives, of few and of many bytes."""
        kinds = (Kind.ALL_GATHER, Kind.REDUCE_SCATTER, Kind.ALL_REDUCE)
        call_s = max(self.time(self._build_exchange(transport, kind, 1, 0)) for kind in kinds)
        num_rows = self._find_size(transport, call_s, 0)
        num_bytes = num_rows * self.axis.degree * self.row_bytes
        times_s = [self.time(self._build_exchange(transport, kind, num_rows, 0)) for kind in kinds]
        return LibraryRates(call_s, *(num_bytes / _subtract(time_s, call_s) for time_s in times_s))

    def measure_link(self, name: str, transport: Transport) -> LinkRates:
        """Messages of few bytes, a transfer of many bytes, the same with a GEMM beside it, and with a sum behind."""
        others = self.axis.degree - 1
        few_s = self.time(self._build_exchange(transport, Kind.ALL_GATHER, _MANY_CHUNKS, 1))
        step_s = self.time(self._build_exchange(transport, Kind.ALL_GATHER, _MANY_CHUNKS, _MANY_CHUNKS)) - few_s
        step_s = max(step_s, 0.0) / ((_MANY_CHUNKS - 1) * others * 3)
        num_rows = self._find_size(transport, few_s, 1)
        num_bytes = num_rows * others * self.row_bytes
        gather_s = self.time(self._build_exchange(transport, Kind.ALL_GATHER, num_rows, 1))
        reduce_s = self.time(self._build_exchange(transport, Kind.REDUCE_SCATTER, num_rows, 1))
        repeats = max(1, round(gather_s / self.busy_s))
        alone_s = self.time(lambda: self._compute(repeats))
        both_s = self.time(self._build_exchange(transport, Kind.ALL_GATHER, num_rows, 1, repeats=repeats))
        contention = (both_s - max(alone_s, gather_s)) / min(alone_s, gather_s)
        return LinkRates(
            name,
            step_s=step_s,
            latency_s=max(0.0, few_s - others * 3 * step_s),
            bytes_per_s=num_bytes / _subtract(gather_s, few_s),
            add_bytes_per_s=num_bytes / max(reduce_s - gather_s, _SMALLEST_SUM * gather_s),
            contention=min(max(0.0, contention), 1.0),
        )

    def _find_size(self, transport: Transport, few_s: float, chunks: int) -> int:
        """Rows of a rank that take long enough to be measured beside what few rows take."""
        most_bytes = _MAX_BYTES if self.device.type == "cpu" else _MAX_ACCELERATOR_BYTES
        num_rows = _MIN_BYTES // self.row_bytes
        while num_rows * self.row_bytes < most_bytes:
            run = self._build_exchange(transport, Kind.ALL_GATHER, num_rows, chunks)
            if self.time(run, repeats=2) >= max(_TRANSFER_S, few_s / _SMALLEST_PART):
                break
            num_rows *= 4
        return num_rows

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
        for _ in range(repeats):
            self.busy()


def _subtract(whole_s: float, part_s: float) -> float:
    return max(whole_s - part_s, _SMALLEST_PART * whole_s)


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
