"""What the planner's laws need to know of this machine, measured on its ranks: the terms of `MeasuredRates`."""

import os
from collections.abc import Callable
from datetime import UTC, datetime
from statistics import median
from time import perf_counter
from typing import Any

import torch

from plait.comm.mesh import Axis, build_mesh
from plait.overlap.choice import LIBRARY
from plait.overlap.machine.key import name_processor
from plait.overlap.machine.probe import measure_rates
from plait.overlap.transport.library import LibraryTransport
from plait.planner.hardware.measured import Pieces
from plait.sharding import MeshShape

_GEMM_WIDTH = 512  # bfloat16 may take a hundred times as long as float32
_GEMM_ROWS = 1024
_STREAM_ELEMENTS = 1 << 24
_SMALL = 16
_REPEATS = 5
_DTYPES = ("float32", "bfloat16")


def measure_device(num_ranks: int) -> dict[str, Any]:
    """On every rank at once: GEMMs in each number format, a copy, and calls so small that nothing is computed."""
    small, large = torch.ones(_SMALL, _SMALL), torch.ones(_STREAM_ELEMENTS)
    target = torch.empty_like(large)
    with torch.no_grad():
        rates = {dtype: _measure_gemm(getattr(torch, dtype)) for dtype in _DTYPES}
        gemm_s, kernel_s = _time(lambda: small @ small), _time(lambda: small.add_(1.0))
        copy_s = _time(lambda: target.copy_(large))
    return {
        "title": f"{name_processor()}, {_count_threads()}",
        "date": datetime.now(UTC).date().isoformat(),
        "num_multiprocessors": torch.get_num_threads(),
        "capacity_bytes": _count_memory() // num_ranks,
        "gemm_flops_per_s": rates,
        "gemm_launch_s": gemm_s,
        "bytes_per_s": 2 * large.nbytes / copy_s,
        "kernel_launch_s": kernel_s,
    }


def _count_threads() -> str:
    number = torch.get_num_threads()
    return f"{number} {'thread' if number == 1 else 'threads'} a rank"


def measure_collectives(degree: int) -> dict[str, Pieces]:
    """The library's collectives between the ranks, by the probe that overlap is chosen with, as one line each."""
    axis: Axis = build_mesh(MeshShape(tp=degree), device=torch.device("cpu")).tp
    rates, _ = measure_rates({LIBRARY: LibraryTransport(axis)}, axis, device=torch.device("cpu"), dtype=torch.float32)
    library = rates.library
    share = (degree - 1) / degree
    whole = {
        "all_gather": (share, library.all_gather_bytes_per_s),
        "reduce_scatter": (share, library.reduce_scatter_bytes_per_s),
        "all_reduce": (2 * share, library.all_reduce_bytes_per_s),
    }
    return {kind: ((library.call_s, wire * rate),) for kind, (wire, rate) in whole.items()}


def _measure_gemm(dtype: torch.dtype) -> float:
    x, w = (torch.ones(_GEMM_ROWS, _GEMM_WIDTH, dtype=dtype) for _ in range(2))
    return 2 * _GEMM_ROWS * _GEMM_WIDTH * _GEMM_WIDTH / _time(lambda: x @ w.T)


def _time(act: Callable[[], object]) -> float:
    """A usual run: others on the machine make some longer."""
    act()
    times = []
    for _ in range(_REPEATS):
        start_s = perf_counter()
        act()
        times.append(perf_counter() - start_s)
    return median(times)


def _count_memory() -> int:
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
