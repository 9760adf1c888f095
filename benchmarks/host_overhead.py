"""Host overhead of a parallel Llama block, against the same block unsharded and against DTensor's parallelize_module.

What is measured: wall time of forward and backward of one block, at sizes at which the arithmetic costs next to
nothing, so that what remains is Python, autograd and dispatch. Two settings:

* `stubbed`: one process that believes to be rank 0 of 2. torch's fake process group completes every collective at once
  and moves nothing, so all host code of both libraries runs and no communication is waited for.
* `gloo`: two processes and real collectives; the same numbers with gloo's latency in them.

Overhead = time of the parallel block - time of the unsharded block of the same sizes, in the same process, the same
round. The three variants run in interleaved rounds, each ratio is taken within a round, and medians over rounds are
reported.

The DTensor block is the same `LlamaBlock`, parallelized as torchtitan does it: ColwiseParallel and RowwiseParallel, and
for sequence parallelism SequenceParallel norms and PrepareModuleInput before attention and MLP.

Run: `python benchmarks/host_overhead.py` (writes host_overhead.json beside itself).
"""

import argparse
import json
import os
import platform
import statistics
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from torch.testing._internal.distributed.fake_pg import FakeStore

from plait.comm.launch import LocalRanks
from plait.comm.mesh import build_mesh
from plait.comm.trace import record
from plait.config.model import LlamaConfig
from plait.contract.model import derive_plan
from plait.contract.plan import Plan
from plait.models.llama import LlamaBlock
from plait.models.rope import build_rope_tables
from plait.parallel.apply import parallelize
from plait.parallel.tokens import enter_tokens
from plait.sharding import MeshShape

TP = 2
BATCH, SEQ_LEN = 2, 8
CONFIG = LlamaConfig(
    num_layers=1, width=64, num_heads=4, num_kv_heads=2, mlp_width=128, vocab_size=64, max_seq_len=SEQ_LEN
)
WARM_UP_STEPS = 50


class BlockStep:
    """Forward and backward of a block on some of the tokens; every variant has the same weights, input and gradient."""

    def __init__(self, block: nn.Module, rows: slice = slice(None)) -> None:
        draw = torch.Generator().manual_seed(1)
        x_full, grad_full = torch.randn(2, BATCH * SEQ_LEN, CONFIG.width, generator=draw)
        self.block = block
        self.x = x_full[rows].clone().requires_grad_()
        self.grad_y = grad_full[rows].clone()
        self.y = self.x.detach()
        self.rope = build_rope_tables(CONFIG, torch.arange(SEQ_LEN), like=self.x)
        self.leaves: list[Tensor] = [self.x, *block.parameters()]

    def __call__(self) -> None:
        """Run once, the gradients of the last time dropped."""
        for leaf in self.leaves:
            leaf.grad = None
        self.y = self.block(self.x, (BATCH, SEQ_LEN), self.rope)
        self.y.backward(self.grad_y)


def main() -> None:
    """Measure both settings, write the result and print it."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=60, help="interleaved rounds")
    parser.add_argument("--steps", type=int, default=20, help="steps of each variant in a round")
    parser.add_argument("--out", type=Path, default=Path(__file__).with_suffix(".json"))
    arguments = parser.parse_args()
    machine = describe_machine()  # first, so that the load average is that of others
    counts = {"rounds": arguments.rounds, "steps_per_round": arguments.steps}
    with LocalRanks(TP, timeout_s=120, device_type="cpu") as ranks:
        gloo = ranks.call(measure_all, rounds=arguments.rounds, steps=arguments.steps)[0]
    results = {"stubbed": measure_stubbed(arguments.rounds, arguments.steps), "gloo": gloo}
    record_ = {"what": __doc__.partition("\n")[0], "machine": machine, "block": describe_block(), **counts}
    arguments.out.write_text(json.dumps({**record_, "results": results}, indent=2) + "\n")
    print_results(results)


def measure_stubbed(rounds: int, steps: int) -> dict[str, Any]:
    """Measure as rank 0 of a world whose collectives do nothing."""
    torch.set_num_threads(1)
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=TP)
    try:
        return measure_all(rounds, steps)
    finally:
        dist.destroy_process_group()


def measure_all(rounds: int, steps: int) -> dict[str, Any]:
    """Measure both modes on this rank."""
    torch.set_flush_denormal(True)  # stubbed collectives leave their outputs unwritten
    return {
        "sequence_parallel": measure_mode(rounds, steps, sequence_parallel=True),
        "all_reduce": measure_mode(rounds, steps, sequence_parallel=False),
    }


def measure_mode(rounds: int, steps: int, *, sequence_parallel: bool) -> dict[str, Any]:
    """Interleave the three variants of one mode."""
    variants = {
        "unsharded": BlockStep(build_block()),
        "plait": build_plait_step(sequence_parallel),
        "dtensor": build_dtensor_step(sequence_parallel),
    }
    with record() as trace:
        variants["plait"]()
    for step in variants.values():
        for _ in range(WARM_UP_STEPS):
            step()
    if dist.get_backend() != "fake":
        check_same_results(variants, derive_rows(sequence_parallel))
    times_s: dict[str, list[float]] = {name: [] for name in variants}
    for _ in range(rounds):
        for name, step in variants.items():
            times_s[name].append(time_steps(step, steps))
    return {"plait_collectives": len(trace.collectives), **summarize(times_s)}


def time_steps(step: BlockStep, steps: int) -> float:
    """Seconds per step."""
    start = time.perf_counter()
    for _ in range(steps):
        step()
    return (time.perf_counter() - start) / steps


def summarize(times_s: dict[str, list[float]]) -> dict[str, Any]:
    """Medians over rounds of times, overheads and their ratio; and the same from the fastest rounds."""
    overhead = {
        name: [own - base for own, base in zip(times_s[name], times_s["unsharded"], strict=True)]
        for name in ("plait", "dtensor")
    }
    ratios = [ours / theirs for ours, theirs in zip(overhead["plait"], overhead["dtensor"], strict=True)]
    fastest = {name: min(values) for name, values in times_s.items()}
    low, middle, high = statistics.quantiles(ratios, n=4)
    return {
        "time_s": {name: statistics.median(values) for name, values in times_s.items()},
        "overhead_s": {name: statistics.median(values) for name, values in overhead.items()},
        "overhead_ratio": {"median": middle, "quartiles": [low, high]},
        "fastest_round": {
            "time_s": fastest,
            "overhead_s": {name: fastest[name] - fastest["unsharded"] for name in overhead},
            "overhead_ratio": (fastest["plait"] - fastest["unsharded"]) / (fastest["dtensor"] - fastest["unsharded"]),
        },
    }


def build_block() -> LlamaBlock:
    """The block as it is."""
    torch.manual_seed(0)
    return LlamaBlock(CONFIG)


def build_plait_step(sequence_parallel: bool) -> BlockStep:
    """The block parallelized by plait."""
    mesh = build_mesh(MeshShape(tp=TP))
    roles = derive_plan(CONFIG).roles
    own = {path.removeprefix("layers.*."): role for path, role in roles.items() if path.startswith("layers.*.")}
    block = parallelize(build_block(), mesh, Plan(own, sequence_parallel))
    enter_tokens(BATCH * SEQ_LEN, mesh)
    return BlockStep(block, derive_rows(sequence_parallel))


def build_dtensor_step(sequence_parallel: bool) -> BlockStep:
    """The block parallelized by torch."""
    mesh = init_device_mesh("cpu", (TP,))
    outside = Shard(0) if sequence_parallel else Replicate()
    plan: dict[str, Any] = {
        **{f"attention.{name}": ColwiseParallel() for name in ("wq", "wk", "wv")},
        **{f"mlp.{name}": ColwiseParallel() for name in ("w_gate", "w_up")},
        "attention.wo": RowwiseParallel(output_layouts=outside),
        "mlp.w_down": RowwiseParallel(output_layouts=outside),
    }
    if sequence_parallel:
        plan |= {
            "attention_norm": SequenceParallel(sequence_dim=0),
            "mlp_norm": SequenceParallel(sequence_dim=0),
            "attention": PrepareModuleInput(
                input_layouts=(Shard(0), None, None), desired_input_layouts=(Replicate(), None, None)
            ),
            "mlp": PrepareModuleInput(input_layouts=(Shard(0),), desired_input_layouts=(Replicate(),)),
        }
    return BlockStep(parallelize_module(build_block(), mesh, plan), derive_rows(sequence_parallel))


def derive_rows(sequence_parallel: bool) -> slice:
    """The tokens of this rank outside the parallel regions."""
    if not sequence_parallel:
        return slice(None)
    num_rows = BATCH * SEQ_LEN // TP
    return slice(num_rows * dist.get_rank(), num_rows * (dist.get_rank() + 1))


def check_same_results(variants: dict[str, BlockStep], rows: slice) -> None:
    """Three variants that compute different things would not be worth comparing."""
    unsharded = variants["unsharded"]
    for name in ("plait", "dtensor"):
        torch.testing.assert_close(variants[name].y, unsharded.y[rows], rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(variants[name].x.grad, unsharded.x.grad[rows], rtol=1e-4, atol=1e-5)


def describe_machine() -> dict[str, Any]:
    """Where and when this was measured."""
    cpu = next((line for line in Path("/proc/cpuinfo").read_text().splitlines() if line.startswith("model name")), "")
    return {
        "cpu": cpu.partition(":")[2].strip() or platform.processor(),
        "cores": os.cpu_count(),
        "threads_per_process": 1,
        "system": platform.platform(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "load_average": os.getloadavg()[0],
        "date": datetime.now(UTC).date().isoformat(),
    }


def describe_block() -> dict[str, Any]:
    """What was measured."""
    fields = ("width", "num_heads", "num_kv_heads", "mlp_width")
    return {**{name: getattr(CONFIG, name) for name in fields}, "tokens": BATCH * SEQ_LEN, "tp": TP, "dtype": "float32"}


def print_results(results: dict[str, Any]) -> None:
    """One line a setting and mode."""
    for setting, modes in results.items():
        for mode, result in modes.items():
            times = ", ".join(f"{name} {1e6 * value:.0f} us" for name, value in result["time_s"].items())
            overhead = ", ".join(f"{name} {1e6 * value:.0f} us" for name, value in result["overhead_s"].items())
            ratio = result["overhead_ratio"]["median"]
            fastest = result["fastest_round"]["overhead_ratio"]
            print(
                f"{setting:8} {mode:18} {times}; overhead: {overhead}; ratio {ratio:.2f}, fastest round {fastest:.2f}"
            )


if __name__ == "__main__":
    main()
