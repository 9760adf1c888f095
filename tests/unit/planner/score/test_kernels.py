"""Rows of kernels: what is said in words is found, and totals are the sums of their parts."""

from typing import Any

import pytest

from plait.planner.score.report import answer_row
from plait.planner.score.row import parse_row
from plait.planner.score.steps import Answer, find_shape

_ROW: dict[str, Any] = {
    "id": "x", "source": "s", "kind": "overlap_kernel_time", "value": 1.0, "unit": "ms", "precision": "bf16",
    "hardware": {"gpu": "H100", "count": 8}, "model": {"hidden": 8192}, "parallel": {"tp": 8},
}  # fmt: skip


def _answer(**changes: Any) -> Answer:
    answer = answer_row(parse_row({**_ROW, **changes}))
    assert isinstance(answer, Answer), answer
    return answer


@pytest.mark.parametrize("op", ["AG+GEMM", "GEMM+RS"])
def test_gemm_and_collective_add_up_and_overlap_is_between(op: str) -> None:
    shape = f"M=8192 K=8192 N=28672 TP=8 {op}: "
    gemm, comm, total, overlapped = (
        _answer(notes=shape + what).predicted for what in ("torch_gemm", "torch_comm", "torch_total", "flux_total")
    )
    assert gemm + comm == pytest.approx(total)
    assert max(gemm, comm) < overlapped < total
    speedup = _answer(kind="overlap_speedup", unit="x", notes=shape)
    assert speedup.predicted == pytest.approx(total / overlapped)


def test_a_speedup_without_a_shape_is_that_of_a_model() -> None:
    model = {
        "layers": 80, "hidden": 8192, "heads": 64, "kv_heads": 8, "ffn": 28672, "vocab": 128256, "seq": 8192,
        "mlp": "swiglu",
    }  # fmt: skip
    row = {"kind": "overlap_speedup", "model": model, "parallel": {"tp": 8, "sp": True, "dp": 1, "micro_batch": 1}}
    step, forward = (_answer(**row, unit=f"x ({what})").predicted for what in ("end to end", "forward"))
    assert 1 < step < forward


def test_shapes_are_found_in_words() -> None:
    notes = parse_row({**_ROW, "notes": "M=4096 K=12288 N=49152 TP=8 AG+GEMM"})
    assert find_shape(notes) == {"m": 4096, "k": 12288, "n": 49152}
    shape = parse_row({**_ROW, "model": {"shape": "m8192_n14336_k4096b"}})
    assert find_shape(shape) == {"m": 8192, "n": 14336, "k": 4096}


def test_rings_are_timed_without_the_switch_that_adds() -> None:
    busbw = {"kind": "collective_busbw", "unit": "GB/s", "parallel": {"op": "all_reduce", "bytes": 2**34}}
    switch = _answer(**busbw).predicted
    ring = {"op": "all_reduce_ring", "bytes": 2**34}
    assert _answer(**{**busbw, "parallel": ring}).predicted < 0.85 * switch
    assert _answer(**busbw, notes="Ring (NVLS off)").predicted < 0.85 * switch


def test_graphs_launch_sooner_than_hosts() -> None:
    row = {"kind": "collective_time", "unit": "us", "parallel": {"op": "all_gather", "bytes": 2**20}}
    assert _answer(**row, source="ai-dynamo/aiconfigurator").predicted < _answer(**row).predicted


def test_steady_clocks_are_slower_than_bursts() -> None:
    row = {"kind": "gemm_tflops", "unit": "TFLOP/s", "model": {"shape_MNK": "8192x8192x8192"}}
    burst, steady = (
        _answer(**row, notes=notes, hardware={"gpu": "A100"}).predicted for notes in ("", "sustained, 10k warm-up")
    )
    assert steady < burst
