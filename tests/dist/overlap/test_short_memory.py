"""Where /dev/shm is small, as in many containers, what does not fit takes another way, on all ranks."""

from pathlib import Path

import pytest
import torch

from plait.comm.mesh import build_mesh
from plait.config.overlap import OverlapConfig
from plait.errors import ConfigError
from plait.overlap import chooser
from plait.overlap.collective_matmul import CollectiveMatmul
from plait.overlap.execute import Addends
from plait.overlap.machine.rates import GemmRates, LibraryRates, LinkRates, Rates
from plait.overlap.site import Pass, Site
from plait.schedule.work import Operation
from plait.sharding import Interval, MeshShape, Partial, Shard, derive_transition
from tests.support.file_limit import limited

SMALL, LARGE = 4, 4000

RATES = Rates(
    GemmRates(1e-6, 1e9, 0.0),
    LibraryRates(1e-3, 1e6, 1e6, 1e6),
    (LinkRates("ring", 1e-4, 1e-4, 1e8, 0.0, 1e9, 1.0), LinkRates("shm", 1e-6, 1e-6, 1e9, 0.0, 1e9, 1.0)),
)
"""Shared memory is the best way."""


def run(matmul: CollectiveMatmul, num_rows: int) -> str:
    """Sum ones over the ranks; over which transport."""
    what = Pass(
        Operation.ROW_FORWARD, Site("here", "mlp", 500, 4, "float32"), derive_transition(Partial(), Shard(0)), num_rows
    )

    def fill(rows: Interval, full: object, partial: torch.Tensor | None, *, accumulates: bool) -> None:
        assert partial is not None
        partial[rows.start : rows.stop] = 1.0

    outcome = matmul.run(what, gemms={"forward": fill}, addends=Addends(500, torch.float32, torch.device("cpu")))
    assert outcome.total is not None
    assert outcome.total.shape == (num_rows // 2, 500)
    assert outcome.total.eq(2).all()
    return matmul.chosen[what].transport.capability.name


def run_over_what_there_is(transport: str, num_bytes: int, *, measures_in: Path | None = None) -> list[str]:
    """Over which transport passes of three sizes run, measured rates choosing if they have a cache folder."""
    config = OverlapConfig(policy="full", method="direct", chunks=1, transport=transport)
    matmul = CollectiveMatmul(build_mesh(MeshShape(tp=2)), config)
    with pytest.MonkeyPatch.context() as patch, limited(num_bytes):
        if measures_in is None:
            patch.setattr(chooser, "find_rates", lambda *_, **__: RATES)
        else:
            patch.setenv("XDG_CACHE_HOME", str(measures_in))
        return [run(matmul, rows) for rows in (SMALL, LARGE, 2 * SMALL)]


def test_a_pass_that_does_not_fit_is_moved_by_messages(ranks) -> None:
    done = ranks(2).call(run_over_what_there_is, transport="auto", num_bytes=20_000_000)
    assert done == [["shm", "ring", "shm"]] * 2


def test_too_little_to_measure_is_too_little(ranks, tmp_path: Path) -> None:
    # Rates that another test kept would make measuring needless.
    done = ranks(2).call(run_over_what_there_is, transport="auto", num_bytes=200_000, measures_in=tmp_path)
    assert done == [["ring"] * 3] * 2


def test_memory_that_was_asked_for_by_name_has_to_be_enough(ranks) -> None:
    with pytest.raises(ConfigError, match=r"transport = shm: 33.6 MB of shared memory are needed, but /dev/shm has"):
        ranks(2).call(run_over_what_there_is, transport="shm", num_bytes=20_000_000)
