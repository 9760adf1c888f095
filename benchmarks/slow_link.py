"""Overlapped against exposed over a real slow link, at four ratios of communication to computation.

Ranks are in network namespaces of their own (`netlab.py`), so waiting for the link leaves the core idle, as it does
beside an accelerator. For each workload the link is set so that communication alone takes a quarter, half, once and
twice as long as the same local work with nothing moved. Then, in interleaved rounds:

* exposed: the library's collectives, and serial point to point with no more bytes than needed; the faster is the
  opponent;
* overlapped: direct with 2, 4 and 8 chunks, and what `overlap=full` and `overlap=auto` choose by themselves;
* the local work alone and the communication alone, of which the limit is made: the larger, and what the schedule
  exposes at its head and tail (`plait.bench.limit`).

With more ranks than cores GEMMs sleep as long as a device of a given rate would compute: that is measured honestly.
What they choose there is for real GEMMs, as those are what its cost model measures.

Run as root: `python benchmarks/slow_link.py` (writes slow_link.json beside itself).
"""

import argparse
import json
import os
import statistics
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import netlab
import torch
from torch import Tensor, nn

from plait.bench.drawing import save_timeline
from plait.bench.machine import describe_machine
from plait.bench.overlap import Comparison, Run, compare
from plait.bench.recorder import Recorder, build_sleepers
from plait.bench.rounds import Spread, time_rounds, warm_up
from plait.bench.variant import COMPUTE, POINT_TO_POINT, Step, Variant
from plait.bench.workload import What, Workload, build_workload
from plait.comm.environment import detect_launch
from plait.comm.launch import init_from_environment
from plait.comm.mesh import build_mesh
from plait.config.model import LlamaConfig
from plait.config.overlap import MethodName, OverlapConfig
from plait.sharding import MeshShape

RATIOS = (0.25, 0.5, 1.0, 2.0)
CHUNKS = (2, 4, 8)
CHOSEN = ("full transport=ring", "auto transport=ring")
"""The variants that say neither how nor in how many chunks."""
TIMEOUT_S = 600.0
HEAD_WIDTH = 64
_CALIBRATION_ROUNDS = 3


@dataclass(frozen=True)
class Case:
    """One workload on one number of ranks; with `flops_per_s` its GEMMs sleep."""

    name: str
    what: What | Literal["pair"]
    tp: int
    num_tokens: int
    width: int
    mlp_width: int
    flops_per_s: float | None = None
    methods: tuple[MethodName, ...] = ("direct",)


CASES = {
    case.name: case
    for case in (
        Case("mlp-2048", "pair", 2, 2048, 2048, 8192),
        Case("mlp-1024", "pair", 2, 1024, 1024, 4096),
        Case("attention-1024", "attention", 2, 1024, 1024, 2816),
        Case("block-1024", "block", 2, 1024, 1024, 2816),
        Case("mlp-1024-sleep", "pair", 2, 1024, 1024, 4096, flops_per_s=75e9),
        Case("mlp-1024-sleep-3", "pair", 3, 1024, 1024, 4096, flops_per_s=30e9, methods=("direct", "ring")),
        Case("mlp-1024-sleep-4", "pair", 4, 1024, 1024, 4096, flops_per_s=30e9, methods=("direct", "ring")),
    )
}


class Pair(nn.Module):
    """Two linears, `[T, D] -> [T, F] -> [T, D]`."""

    def __init__(self, width: int, mlp_width: int) -> None:
        super().__init__()
        self.up = nn.Linear(width, mlp_width, bias=False)
        self.down = nn.Linear(mlp_width, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Multiply by both, with a ReLU between."""
        return self.down(self.up(x).relu())


def main() -> int:
    """Measure the cases named, or all of them."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("cases", nargs="*", help=f"of {', '.join(CASES)} [default: all]")
    parser.add_argument("--rounds", type=int, default=7, help="interleaved rounds at each ratio")
    parser.add_argument("--ratios", type=float, nargs="*", default=RATIOS, help="communication over computation")
    parser.add_argument("--out", type=Path, default=Path(__file__).with_suffix(".json"))
    parser.add_argument("--nice", type=int, default=0, help="priority of the ranks, where others use the machine")
    parser.add_argument("--timeline", type=Path, help="draw one step at the last ratio")
    parser.add_argument("--scale", type=float, default=1.0, help="of all sizes, for a try")
    arguments = parser.parse_args()
    if "RANK" in os.environ:
        measure_as_rank(CASES[arguments.cases[0]], arguments)
        return 0
    if (problem := netlab.find_problem()) is not None:
        print(f"skipped: {problem}")
        return 0
    machine = describe_machine()
    results = json.loads(arguments.out.read_text())["results"] if arguments.cases and arguments.out.exists() else {}
    for name in arguments.cases or CASES:
        status = start_ranks(name, arguments)
        if status:
            return status
        with partial_path(arguments.out).open() as file:
            results[name] = {"machine": machine, **json.load(file)}
        partial_path(arguments.out).unlink()
        record = {"what": __doc__.partition("\n")[0], "results": results}
        arguments.out.write_text(json.dumps(record, indent=1) + "\n")
        print_result(name, results[name])
    return 0


def partial_path(out: Path) -> Path:
    """Where rank 0 leaves its result."""
    return out.with_suffix(".partial")


def start_ranks(name: str, arguments: argparse.Namespace) -> int:
    """Run this file once in each namespace."""
    with netlab.build_network(CASES[name].tp) as network, tempfile.TemporaryDirectory() as cache:
        os.environ["XDG_CACHE_HOME"] = cache
        options = ["--rounds", str(arguments.rounds), "--out", str(arguments.out), "--scale", str(arguments.scale)]
        options += ["--timeline", str(arguments.timeline)] if arguments.timeline else []
        network.start([sys.executable, __file__, name, *options, "--ratios", *map(str, arguments.ratios)])
        if arguments.nice:
            for process in network.processes:
                netlab.raise_priority(process, arguments.nice)
        return network.wait()


def measure_as_rank(case: Case, arguments: argparse.Namespace) -> None:
    """All ratios of one case; rank 0 writes the result."""
    with init_from_environment(detect_launch(os.environ), TIMEOUT_S):
        torch.set_num_threads(1)
        workload = build_case(case, arguments.scale)
        netlab.set_rate(None)
        compute_s, num_bytes = calibrate(case, workload)
        ratios = {}
        for ratio in arguments.ratios:
            bytes_per_s = num_bytes / (ratio * compute_s)
            netlab.set_rate(bytes_per_s)
            # Rates that were measured over another link are not these.
            os.environ["XDG_CACHE_HOME"] = f"{os.environ['XDG_CACHE_HOME']}/{ratio}"
            comparison = compare(
                workload, list_variants(case), case.tp,
                rounds=arguments.rounds, draws=arguments.timeline is not None, replace=find_replacement(case),
            )  # fmt: skip
            ratios[str(ratio)] = {"link_bytes_per_s": bytes_per_s, **describe(comparison)}
        if os.environ["RANK"] == "0" and arguments.timeline is not None:
            save_timeline(comparison.charts, arguments.timeline)
        if os.environ["RANK"] == "0":
            sizes = {"tp": case.tp, "tokens": workload.num_tokens, "width": workload.width, "mlp_width": case.mlp_width}
            record = {**sizes, "dtype": "float32", "sleeping_gemm_flops_per_s": case.flops_per_s, "ratios": ratios}
            partial_path(arguments.out).write_text(json.dumps(record))


def build_case(case: Case, scale: float) -> Workload:
    """The workload of a case."""
    tokens, width, mlp_width = (int(size * scale) for size in (case.num_tokens, case.width, case.mlp_width))
    if case.what == "pair":

        def build() -> nn.Module:
            torch.manual_seed(0)
            return Pair(width, mlp_width)

        roles = {"up": "column", "down": "row"}
        return Workload(case.name, build, roles, tokens, width, lambda module, x, mesh: module(x))
    heads = width // HEAD_WIDTH
    config = LlamaConfig(
        num_layers=1, width=width, num_heads=heads, num_kv_heads=max(1, heads // 4), mlp_width=mlp_width,
        vocab_size=256, max_seq_len=tokens,
    )  # fmt: skip
    return build_workload(case.what, config, tokens)


def find_replacement(case: Case) -> Any:
    """Sleeping GEMMs, where the case has them."""
    return None if case.flops_per_s is None else build_sleepers(case.flops_per_s)


def list_variants(case: Case) -> list[Variant]:
    """Every method and chunk count, and what is chosen without being told."""
    configs = [
        OverlapConfig(policy="full", method=method, chunks=chunks, transport="ring")
        for method in case.methods
        for chunks in CHUNKS
    ]
    configs += [OverlapConfig(policy="full", transport="ring"), OverlapConfig(policy="auto", transport="ring")]
    return [Variant(config.asked, config) for config in configs]


def calibrate(case: Case, workload: Workload) -> tuple[float, float]:
    """How long the local work takes alone, and the bytes that a rank receives in a step."""
    step, moving = Step(workload, COMPUTE, case.tp), Step(workload, POINT_TO_POINT, case.tp)
    if (replace := find_replacement(case)) is not None:
        step.matmul.instrument = Recorder(replace)
    axis = build_mesh(MeshShape(tp=case.tp)).tp
    moving()
    warm_up({"compute": step}, axis)
    times_s = time_rounds({"compute": step}, _CALIBRATION_ROUNDS, axis)["compute"]
    return statistics.median(times_s), float(sum(line.sent_bytes for line in moving.receipt.lines))


def describe(comparison: Comparison) -> dict[str, Any]:
    """What is kept of a comparison."""
    chosen = [run for run in comparison.overlapped if run.variant.name in CHOSEN]
    return {
        "compute_s": Spread.of(comparison.compute_s).to_json(),
        "communication_s": comparison.limits[0].communication_s,
        "communication_over_compute": comparison.limits[0].communication_s / comparison.limits[0].compute_s,
        "exposed_s": {run.variant.name: Spread.of(run.times_s).to_json() for run in comparison.exposed},
        "best_exposed": comparison.best_exposed.variant.name,
        "overlapped": {run.variant.name: describe_overlapped(comparison, run) for run in comparison.overlapped},
        "best": comparison.best_overlapped.variant.name,
        "chosen_runs": {
            run.variant.name: [f"{line.operation}: {line.choice.way}" for line in run.receipt.lines] for run in chosen
        },
    }


def describe_overlapped(comparison: Comparison, run: Run) -> Mapping[str, Any]:
    """Time, gain and fraction of the limit of one overlapped variant."""
    limit = comparison.limits[comparison.overlapped.index(run)]
    return {
        "time_s": Spread.of(run.times_s).to_json(),
        "gain": comparison.find_gain(run).to_json(),
        "limit": limit.to_json(),
        "fraction_of_schedule": comparison.find_fraction(run).to_json(),
        "exposed_s": run.exposed_s,
    }


def print_result(name: str, result: Mapping[str, Any]) -> None:
    """One line a ratio, and one an overlapped variant."""
    ratios: Mapping[str, Any] = result["ratios"]
    for ratio, entry in ratios.items():
        exposed = ", ".join(f"{key} {value['median']:.3f}" for key, value in entry["exposed_s"].items())
        print(
            f"{name} ratio {ratio} ({entry['communication_over_compute']:.2f}): "
            f"compute {entry['compute_s']['median']:.3f} s, communication {entry['communication_s']:.3f}, {exposed}"
        )
        for variant, each in entry["overlapped"].items():
            print(
                f"  {variant:44} {each['time_s']['median']:.3f} s, gain {each['gain']['median']:.2f}, "
                f"of schedule {each['fraction_of_schedule']['median']:.3f}, of max "
                f"{each['limit']['max_s'] / each['time_s']['median']:.3f}, waits {each['exposed_s']:.3f}"
            )
        for variant, ways in entry["chosen_runs"].items():
            print(f"  {variant}: {'; '.join(ways)}")


if __name__ == "__main__":
    sys.exit(main())
