"""The probe: every rank gets the same rates, they are kept, and no trace has anything of it."""

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch

import plait.overlap.machine.probe as module
from plait.comm import trace
from plait.comm.mesh import build_mesh
from plait.overlap.machine.probe import find_rates
from plait.overlap.machine.rates import Rates
from plait.overlap.transport.base import Transport
from plait.overlap.transport.library import LibraryTransport
from plait.overlap.transport.ring import RingTransport
from plait.overlap.transport.shm import SharedMemoryTransport
from plait.sharding import MeshShape


def probe(
    degree: int, folder: str, *, has_shared_memory: bool = False, ruin: str | None = None, is_busy: bool = False
) -> tuple[Rates, int]:
    """Rates as this rank finds them, and how many collectives and messages were traced."""
    before, limits = os.environ.get("XDG_CACHE_HOME"), (module._QUIET, module._BUDGET_S)
    os.environ["XDG_CACHE_HOME"] = folder
    # Whatever else goes on while this test runs; and once is enough.
    module._QUIET, module._BUDGET_S = 2.0 if is_busy else -1.0, 0.0
    axis = build_mesh(MeshShape(tp=degree), shared_memory=has_shared_memory).tp
    transports: dict[str, Transport] = {"library": LibraryTransport(axis), "ring": RingTransport(axis)}
    if has_shared_memory:
        transports["shm"] = SharedMemoryTransport(axis)
    if ruin is not None and axis.rank == 0:
        for path in (Path(folder) / "plait").iterdir():
            path.write_text(ruin)
    try:
        with trace.record() as recorded:
            rates = find_rates(transports, axis, device=torch.device("cpu"), dtype=torch.float32)
    finally:
        module._QUIET, module._BUDGET_S = limits
        os.environ.pop("XDG_CACHE_HOME")
        if before is not None:
            os.environ["XDG_CACHE_HOME"] = before
    return rates, len(recorded.issued) + len(recorded.moved)


def call(ranks: Any, degree: int, folder: Path, **how: Any) -> Rates:
    """What all ranks found."""
    found = ranks(degree).call(probe, degree=degree, folder=str(folder), **how)
    assert {num_traced for _, num_traced in found} == {0}
    assert len({rates for rates, _ in found}) == 1
    rates: Rates = found[0][0]
    return rates


@pytest.mark.parametrize("degree", [2, 3])
def test_all_ranks_find_the_same_rates_and_keep_them(ranks: Any, degree: int, tmp_path: Path) -> None:
    rates = call(ranks, degree, tmp_path)
    assert [link.transport for link in rates.links] == ["ring"]
    assert Rates.from_json(rates.to_json()) == rates
    (path,) = (tmp_path / "plait").iterdir()
    key = json.loads(path.read_text())["key"]
    assert (key["num_ranks"], key["dtype"], key["transports"]) == (degree, "float32", ["library", "ring"])
    assert call(ranks, degree, tmp_path) == rates


def test_a_damaged_file_is_measured_again(ranks: Any, tmp_path: Path) -> None:
    rates = call(ranks, 2, tmp_path)
    again = call(ranks, 2, tmp_path, ruin="{")
    assert again != rates
    assert call(ranks, 2, tmp_path) == again


def test_what_was_measured_beside_other_work_is_not_kept(ranks: Any, tmp_path: Path) -> None:
    call(ranks, 2, tmp_path, is_busy=True)
    assert not (tmp_path / "plait").exists()


def test_shared_memory_is_measured_beside_messages(ranks: Any, tmp_path: Path) -> None:
    rates = call(ranks, 2, tmp_path, has_shared_memory=True)
    assert [link.transport for link in rates.links] == ["ring", "shm"]
