"""Precision recipes over a real slow link, overlapped and exposed, at the same compute: what fewer bytes gain.

Ranks are in network namespaces of their own (`netlab.py`). GEMMs sleep as long as a device of a given rate would
compute, the same in every format: an emulation takes longer than float32, an instruction would not, and neither is what
a link is about. Quantizing, and decoding weights, is real work of the CPU and in all times; `compute_s`, with nothing
moved, says how much that is.

The link is set so that what float32 moves takes half as long as float32 computes, as long, and 2 and 4 times; all
then run over the same link, in interleaved rounds, each exposed (serial point to point) and overlapped.

The bytes that a step sends are counted where they are handed to the network, and are those of its schedules and of the
magnitudes it agrees on; what the interface counts beside is the protocol's.

Run as root: `python benchmarks/quantization_link.py` (writes quantization_link.json beside itself).
"""

import argparse
import json
import os
import statistics
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import patch

import netlab
import torch
from slow_link import TIMEOUT_S, Pair, partial_path

from plait.bench.machine import describe_machine
from plait.bench.recorder import Recorder, build_sleepers
from plait.bench.rounds import Spread, find_ratio, meet, time_rounds, warm_up
from plait.bench.variant import COMPUTE, POINT_TO_POINT, Step, Variant
from plait.bench.workload import Workload, quantize
from plait.comm import trace
from plait.comm.environment import detect_launch
from plait.comm.launch import init_from_environment
from plait.config.overlap import OverlapConfig
from plait.config.quantization import QuantizationConfig
from plait.quant.scheme import Scheme

TP = 2
RATIOS = (0.5, 1.0, 2.0, 4.0)
TOKENS, WIDTH, MLP_WIDTH = 1024, 1024, 4096
FLOPS_PER_S = 20e9
FORMATS = ("float32", "bfloat16", "fp8_currentscaling", "mxfp8", "nvfp4")
OVERLAPPED = Variant("direct in 4 chunks", OverlapConfig(policy="full", method="direct", chunks=4, transport="ring"))
_INTERFACE_BYTES = Path("/sys/class/net/eth0/statistics/tx_bytes")


def main() -> int:
    """Measure all formats at all ratios."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=7, help="interleaved rounds at each ratio")
    parser.add_argument("--ratios", type=float, nargs="*", default=RATIOS, help="communication over computation")
    parser.add_argument("--out", type=Path, default=Path(__file__).with_suffix(".json"))
    parser.add_argument("--nice", type=int, default=0, help="priority of the ranks, where others use the machine")
    parser.add_argument("--scale", type=float, default=1.0, help="of all sizes, for a try; blocks of 32 stay whole")
    arguments = parser.parse_args()
    if "RANK" in os.environ:
        with init_from_environment(detect_launch(os.environ), TIMEOUT_S):
            torch.set_num_threads(1)
            record = measure(arguments.scale, arguments.ratios, arguments.rounds, set_rate=netlab.set_rate)
        if os.environ["RANK"] == "0":
            partial_path(arguments.out).write_text(json.dumps(record))
        return 0
    if (problem := netlab.find_problem()) is not None:
        print(f"skipped: {problem}")
        return 0
    machine = describe_machine()
    if status := start_ranks(arguments):
        return status
    record = {
        "what": __doc__.partition("\n")[0],
        "machine": machine,
        **json.loads(partial_path(arguments.out).read_text()),
    }
    partial_path(arguments.out).unlink()
    arguments.out.write_text(json.dumps(record, indent=1) + "\n")
    print_record(record)
    return 0


def start_ranks(arguments: argparse.Namespace) -> int:
    """Run this file once in each namespace."""
    with netlab.build_network(TP) as network, tempfile.TemporaryDirectory() as cache:
        os.environ["XDG_CACHE_HOME"] = cache
        options = ["--rounds", str(arguments.rounds), "--out", str(arguments.out), "--scale", str(arguments.scale)]
        network.start([sys.executable, __file__, *options, "--ratios", *map(str, arguments.ratios)])
        if arguments.nice:
            for process in network.processes:
                netlab.raise_priority(process, arguments.nice)
        return network.wait()


def measure(
    scale: float, ratios: list[float], rounds: int, *, set_rate: Callable[[float | None], None]
) -> dict[str, Any]:
    """On every rank: all formats at all ratios; `set_rate` makes the link as fast as it is told."""
    torch.set_flush_denormal(True)
    try:
        # A GEMM that sleeps leaves whatever is in memory, which need not be a number.
        with patch.object(Scheme, "check_finite", lambda *_: None):
            return _measure(scale, ratios, rounds, set_rate)
    finally:
        torch.set_flush_denormal(False)


def _measure(
    scale: float, ratios: list[float], rounds: int, set_rate: Callable[[float | None], None]
) -> dict[str, Any]:
    replace = build_sleepers(FLOPS_PER_S)
    workloads = {name: build_workload(name, scale) for name in FORMATS}
    exposed = {name: Step(workload, POINT_TO_POINT, TP) for name, workload in workloads.items()}
    overlapped = {name: Step(workload, OVERLAPPED, TP) for name, workload in workloads.items()}
    alone = {name: Step(workload, COMPUTE, TP) for name, workload in workloads.items()}
    for step in (*exposed.values(), *overlapped.values(), *alone.values()):
        step.matmul.instrument = Recorder(replace)
    axis = exposed["float32"].mesh.tp
    set_rate(None)
    steps: dict[str, Callable[[], None]] = {
        f"{kind} {name}": step
        for kind, each in (("exposed", exposed), ("overlapped", overlapped), ("alone", alone))
        for name, step in each.items()
    }
    warm_up(steps, axis)
    sent = {name: count_bytes(step) for name, step in overlapped.items()}
    compute_s = statistics.median(time_rounds({"alone": alone["float32"]}, 3, axis)["alone"])
    result: dict[str, Any] = {}
    for ratio in ratios:
        bytes_per_s = sent["float32"]["measured"] / (ratio * compute_s)
        set_rate(bytes_per_s)
        times_s = time_rounds(steps, rounds, axis)
        result[str(ratio)] = {"link_bytes_per_s": bytes_per_s, "formats": describe(times_s)}
    workload = workloads["float32"]
    return {
        "tp": TP, "tokens": workload.num_tokens, "width": workload.width, "mlp_width": int(MLP_WIDTH * scale),
        "sleeping_gemm_flops_per_s": FLOPS_PER_S, "rounds": rounds, "way": OVERLAPPED.overlap.asked,
        "sent_bytes": sent, "ratios": result,
    }  # fmt: skip


def build_workload(name: str, scale: float) -> Workload:
    """The two linears of an MLP in one format, under the names that they have in a model."""
    tokens, width, mlp_width = (int(size * scale) for size in (TOKENS, WIDTH, MLP_WIDTH))
    dtype = torch.bfloat16 if name == "bfloat16" else torch.float32

    def build() -> Pair:
        torch.manual_seed(0)
        return Pair(width, mlp_width).to(dtype)

    roles = {"up": "column", "down": "row"}
    plain = Workload("mlp", build, roles, tokens, width, lambda module, x, mesh: module(x), dtype=dtype)
    # Sums over ranks are carried in bfloat16 in all but float32, as they are in training.
    if name == "float32":
        return plain
    plain = Workload(
        "mlp", build, roles, tokens, width, lambda module, x, mesh: module(x), dtype=dtype, reduce_dtype=torch.bfloat16
    )
    return plain if name == "bfloat16" else quantize(plain, QuantizationConfig.model_validate(name))


def count_bytes(step: Step) -> dict[str, int]:
    """What this rank hands to the network in a step, by its messages, and what its receipt and contract predict."""
    meet(step.mesh.tp)
    before = read_interface_bytes()
    with trace.record() as recorded:
        step()
    interface = read_interface_bytes() - before
    moved = sum(each.num_bytes for each in recorded.moved if each.direction == "sent")
    agreed = sum(each.wire_bytes_per_rank for each in recorded.collectives if each.op == "max")
    predicted = sum(line.sent_bytes for line in step.receipt.lines)
    return {"measured": moved, "predicted": predicted, "magnitudes": int(agreed), "interface": interface}


def read_interface_bytes() -> int:
    """What has left this rank's interface so far; 0 where there is none of its own."""
    return int(_INTERFACE_BYTES.read_text()) if _INTERFACE_BYTES.exists() else 0


def describe(times_s: dict[str, list[float]]) -> dict[str, Any]:
    """Each format: its times, and how many times as fast it is as float32 and as bfloat16 overlapped."""
    return {
        name: {
            "compute_s": Spread.of(times_s[f"alone {name}"]).to_json(),
            "exposed_s": Spread.of(times_s[f"exposed {name}"]).to_json(),
            "overlapped_s": Spread.of(times_s[f"overlapped {name}"]).to_json(),
            "gain_over": {
                other: find_ratio(times_s[f"overlapped {other}"], times_s[f"overlapped {name}"]).to_json()
                for other in ("float32", "bfloat16")
            },
        }
        for name in FORMATS
    }


def print_record(record: dict[str, Any]) -> None:
    """A line for each format at each ratio."""
    for name, sent in record["sent_bytes"].items():
        counted = ", ".join(f"{number:,} {what}" for what, number in sent.items())
        print(f"{name}, bytes a step sends: {counted}")
    for ratio, entry in record["ratios"].items():
        for name, each in entry["formats"].items():
            print(
                f"ratio {ratio} {name:20} computing {each['compute_s']['median']:.3f} s, "
                f"exposed {each['exposed_s']['median']:.3f}, overlapped {each['overlapped_s']['median']:.3f}, "
                f"{each['gain_over']['float32']['median']:.2f} x float32, "
                f"{each['gain_over']['bfloat16']['median']:.2f} x bfloat16"
            )


if __name__ == "__main__":
    sys.exit(main())
