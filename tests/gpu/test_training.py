"""The same runs on CUDA devices over nccl. A machine without CUDA skips them and says so."""

from pathlib import Path

import pytest
import torch

from plait.cli.train import train_rank
from plait.comm.launch import LocalRanks
from tests.support.training import build_run, read_losses

NUM_DEVICES = torch.cuda.device_count()
TOLERANCE = 1e-4
"""Relative, of losses around 4 after six float32 steps: CUDA sums in another order than the CPU."""


def _losses(folder: Path, tp: int, device_type: str | None) -> list[tuple[int, float, float]]:
    run = build_run(folder, name=f"tp{tp}-{device_type}", parallel={"tp": tp})
    with LocalRanks(tp, timeout_s=120, device_type=device_type) as ranks:
        ranks.call(train_rank, run=run)
    return read_losses(run)


@pytest.mark.parametrize("tp", [1, 2, 4])
def test_a_run_on_cuda_has_the_losses_of_the_cpu(tmp_path: Path, tp: int) -> None:
    if tp > NUM_DEVICES:
        pytest.skip(f"needs {tp} CUDA devices, and there are {NUM_DEVICES}")
    on_cpu, on_cuda = _losses(tmp_path, 1, "cpu"), _losses(tmp_path, tp, None)
    assert [step for step, *_ in on_cuda] == [step for step, *_ in on_cpu]
    for (_, loss, norm), (_, cpu_loss, cpu_norm) in zip(on_cuda, on_cpu, strict=True):
        assert loss == pytest.approx(cpu_loss, rel=TOLERANCE)
        assert norm == pytest.approx(cpu_norm, rel=TOLERANCE)
