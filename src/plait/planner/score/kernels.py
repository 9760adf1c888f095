"""Rows that time one GEMM, one collective, or the two together."""

import re
from functools import partial

from plait.config.overlap import OverlapConfig
from plait.planner.hardware import Hardware, Regime
from plait.planner.laws import Estimate, estimate_collective, estimate_gemm
from plait.planner.laws.collective import CollectiveKind, Launch, count_wire_bytes
from plait.planner.score.row import NotCovered, Row
from plait.planner.score.steps import Answer, answer_overlap_speedup, find_shape, read_scale, read_seconds
from plait.planner.score.subject import find_hardware
from plait.planner.step.overlap import Pass, derive_gain, time_pass
from plait.schedule.work import Operation
from plait.sharding import Partial, Replicate, Shard, derive_transition

_OPS: dict[str, CollectiveKind] = {
    "all_gather": "all_gather",
    "reduce_scatter": "reduce_scatter",
    "all_reduce": "all_reduce",
    "all_to_all": "all_to_all",
}


def answer_gemm_time(row: Row) -> Answer:
    """One GEMM."""
    m, n, k = (row.size(name) for name in "mnk")
    hardware, dtype, scale = find_hardware(row), _read_dtype(row), read_seconds(row)
    estimate = _time_gemm(row, hardware, dtype, (m, n, k))
    return Answer(estimate.seconds / scale, 2 * m * n * k / hardware.peak(dtype).value / scale)


def answer_gemm_tflops(row: Row) -> Answer:
    """The rate of one GEMM."""
    sizes = re.findall(r"\d+", str(row.model.get("shape_MNK") or ""))
    m, n, k = (int(size) for size in sizes) if len(sizes) == 3 else (row.size(name) for name in "mnk")
    hardware, dtype, scale = find_hardware(row), _read_dtype(row), read_scale(row, "FLOP/s", "a rate of computing")
    seconds = _time_gemm(row, hardware, dtype, (m, n, k)).seconds
    return Answer(2 * m * n * k / seconds / scale, hardware.peak(dtype).value)


def answer_collective_time(row: Row) -> Answer:
    """One collective."""
    hardware, scale = find_hardware(row), read_seconds(row)
    kind, size, degree = _read_collective(row)
    base_s = count_wire_bytes(kind, size, degree) / hardware.links.p2p_bytes_per_s.value
    return Answer(_time_collective(row, hardware).seconds / scale, base_s / scale)


def answer_collective_busbw(row: Row) -> Answer:
    """Its bandwidth as NCCL's tests count it: bytes that leave each port."""
    hardware, scale = find_hardware(row), read_scale(row, "B/s", "bandwidth")
    kind, size, degree = _read_collective(row)
    return Answer(count_wire_bytes(kind, size, degree) / _time_collective(row, hardware).seconds / scale, 1.0)


def answer_speedup(row: Row) -> Answer:
    """Overlapped against one after the other: of one GEMM and collective if a shape is given, else of a model."""
    if not {"m", "n", "k"} <= find_shape(row).keys():
        return answer_overlap_speedup(row)
    one = _build_pass(row)
    return Answer(one.serial_s / _time_overlapped(row, one), 1.0)


def answer_overlap_kernel_time(row: Row) -> Answer:
    """The GEMM, the collective, both one after the other, or both overlapped."""
    one = _build_pass(row)
    word = f"{row.id} {row.notes}".lower()
    if "gemm_only" in word or "torch_gemm" in word:
        seconds = one.compute_s
    elif "torch_comm" in word:
        seconds = sum(one.move_s.values())
    elif "torch_total" in word:
        seconds = one.serial_s
    else:
        seconds = _time_overlapped(row, one)
    shape = find_shape(row)
    return Answer(seconds / read_seconds(row), shape["m"] * shape["n"] * shape["k"] / row.count("tp"))


def _read_dtype(row: Row) -> str:
    text = row.precision.lower()
    for name, dtype in (("fp8", "float8"), ("fp4", "float4"), ("fp32", "float32"), ("16", "bfloat16")):
        if name in text:
            return dtype
    raise NotCovered(f"precision {row.precision!r} has no law")


def _time_gemm(row: Row, hardware: Hardware, dtype: str, shape: tuple[int, int, int]) -> Estimate:
    """Best rates and tables are of moments; runs with thousands of repetitions are of the steady clock."""
    is_steady = any(word in row.text for word in ("sustained", "warm-up", "warmup", "azure"))
    regime: Regime = "sustained" if is_steady else "burst"
    if not hardware.has_gemm(dtype):
        raise NotCovered(f"{hardware.name} has no law of GEMMs in {dtype}")
    return estimate_gemm(hardware, *shape, dtype=dtype, regime=regime)


def _read_op(row: Row) -> str:
    return str(row.parallel.get("op") or "").lower().replace("-", "_")


def _read_collective(row: Row) -> tuple[CollectiveKind, int, int]:
    op = _read_op(row).removesuffix("_nvls").removesuffix("_ring")
    if op not in _OPS:
        raise NotCovered(f"collective {op!r} has no law")
    if row.num_devices is None or row.num_devices < 2:
        raise NotCovered("hardware.count is not the number of ranks")
    return _OPS[op], row.count("bytes"), row.num_devices


def _time_collective(row: Row, hardware: Hardware) -> Estimate:
    """Tables for inference servers are launched from graphs, tests of NCCL by the host."""
    kind, size, degree = _read_collective(row)
    launch: Launch = "graph" if "aiconfigurator" in row.text or "graph" in row.text else "host"
    multicast = not any(word in row.text for word in ("nvls off", "nonvls", "no nvls")) and not _read_op(row).endswith(
        "_ring"
    )
    return estimate_collective(hardware, kind, size, degree, launch=launch, multicast=multicast)


def _time_overlapped(row: Row, one: Pass) -> float:
    return time_pass(one, OverlapConfig(policy="auto"), derive_gain(find_hardware(row))).seconds


def _build_pass(row: Row) -> Pass:
    """A column linear behind its gather, or a row linear before its scatter; N or K is that of all ranks together."""
    shape, tp, hardware = find_shape(row), row.count("tp"), find_hardware(row)
    if not {"m", "n", "k"} <= shape.keys():
        raise NotCovered("no shape M, N, K is given")
    m, n, k = shape["m"], shape["n"], shape["k"]
    words = f"{row.id} {row.notes} {row.parallel.get('op') or ''}".upper()
    is_row = "GEMM+RS" in words or "REDUCE_SCATTER" in words
    if not is_row and "AG+GEMM" not in words:
        raise NotCovered("neither AG+GEMM nor GEMM+RS")
    kind: CollectiveKind = "reduce_scatter" if is_row else "all_gather"
    n, k = (n, -(-k // tp)) if is_row else (-(-n // tp), k)
    width = n if is_row else k
    move = estimate_collective(hardware, kind, 2 * m * width, tp)
    return Pass(
        Operation.ROW_FORWARD if is_row else Operation.COLUMN_FORWARD,
        derive_transition(Partial(), Shard(0)) if is_row else derive_transition(Shard(0), Replicate()),
        m,
        tp,
        {"forward": partial(_seconds, hardware, n, k)},
        {"y" if is_row else "x": move.seconds},
        estimate_collective(hardware, "all_gather", 1.0, tp).seconds,
        2 * width / hardware.memory.streamed_bytes_per_s,
    )


def _seconds(hardware: Hardware, n: int, k: int, m: int) -> float:
    return estimate_gemm(hardware, m, n, k, regime="burst").seconds
